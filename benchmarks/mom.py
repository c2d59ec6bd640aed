"""A Mixture-of-Memories layer beside its inner mixer at as many tokens: `python -m benchmarks.mom [--lengths 2048,16384]`.

At the shapes of `configs/mom.py:340m` (width 1,024, four heads of 256, four memories, two a token and a shared one), bfloat16,
prints milliseconds of a forward and of a forward with its backward: MoM in each form at T tokens a row, the inner mixer at
(k + 1) T, and the one over the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.timing import milliseconds, provenance
from lsm_jax import mixers, ops


def measure(config, x: jax.Array, calls: int) -> dict[str, float]:
    """Milliseconds of one layer over x."""
    mixer = jax.jit(lambda: mixers.build(config, x.shape[-1], rngs=nnx.Rngs(0)))()

    def loss(mixer, x):
        return jnp.sum(mixer(x)[0].astype(jnp.float32) ** 2)

    forward = jax.jit(lambda mixer, x: mixer(x)[0])
    both = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return dict(
        forward_ms=milliseconds(forward, mixer, x, repeats=calls),
        training_ms=milliseconds(both, mixer, x, repeats=calls),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="2048,16384")
    parser.add_argument("--tokens", type=int, default=16384, help="of all rows together")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", default="gated_deltanet")
    parser.add_argument("--forms", default="packed,masked")
    parser.add_argument("--calls", type=int, default=10)
    args = parser.parse_args()
    config = mixers.MoMConfig.for_width(args.width)
    if args.inner != "gated_deltanet":
        inner = mixers.get_method(args.inner).config.for_width(args.width)
        config = dataclasses.replace(config, mixer=inner)
    more = config.top_k + config.shared_memory
    print(json.dumps(provenance()), flush=True)
    for length in map(int, args.lengths.split(",")):
        rows = max(1, args.tokens // length)

        def tokens(length, rows=rows):
            draw = jax.random.normal(jax.random.key(0), (rows, length, args.width))
            return draw.astype(jnp.bfloat16)

        found = dict(inner=args.inner, rows=rows, length=length)
        found["inner_mixer"] = measure(config.mixer, tokens(more * length), args.calls)
        for form in args.forms.split(","):
            own = dataclasses.replace(config, execution=form)
            found[form] = measure(own, tokens(length), args.calls)
            found[form] |= {
                f"{name[:-3]}_over_inner": round(found[form][name] / value, 3)
                for name, value in found["inner_mixer"].items()
            }
        print(json.dumps(found), flush=True)
    print(json.dumps(ops.choices()), flush=True)


if __name__ == "__main__":
    main()
