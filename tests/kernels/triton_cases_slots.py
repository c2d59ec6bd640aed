"""Run `slot_memory` by the Triton kernels of linear attention in Triton's interpreter, and compare it with the recurrence.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_cases_slots [CASE ...]

Prints a line of JSON for each case of `CASES`: its name, the relative RMS error of the output, of both final memories and of every
gradient, and the number of outputs before a token that change when the token and later ones change.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Case(NamedTuple):
    """Sizes and options of one call of `slot_memory`.

    Attributes:
        heads: numbers of heads of q and of v.
        sizes: numbers of key channels, slots and value channels.
        length: number of tokens of the row, T.
        dtype: dtype of q, k and v.
        strengths: dtype of s, or None for that of q, k and v.
        segments: number of states of the row, or None for documents that share one.
        scale: the factor of the queries, or None.
    """

    heads: tuple[int, int] = (1, 1)
    sizes: tuple[int, int, int] = (64, 64, 64)
    length: int = 130
    dtype: str = "bfloat16"
    segments: int | None = None
    scale: float | None = None
    strengths: str | None = None


CASES = {
    "float32": Case((2, 1), dtype="float32"),
    "bfloat16": Case(),
    "queries": Case((2, 1), (128, 64, 128), 150),
    "float16": Case((1, 2), dtype="float16", length=100),
    "segments": Case(segments=2),
    "sharp": Case(scale=2.0),
    "sharp, exact": Case(scale=2.0, strengths="float32"),
}


def inputs_of(case: Case, batch: int = 1) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Return the arrays that are differentiated, and the other arguments, of one call of `slot_memory`."""
    from lsm_jax import ops

    rng = np.random.default_rng(0)
    (heads, memories), (keys, slots, values) = case.heads, case.sizes

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(batch, case.length, *shape)), jnp.float32)

    gate = jax.nn.log_sigmoid(normal(memories, slots)) / 8
    x = dict(
        q=normal(heads, keys), k=normal(min(heads, memories), keys), v=normal(memories, values), s=-jnp.expm1(gate)
    )  # fmt: skip
    strengths = x["s"].astype(case.strengths or case.dtype)
    x = {n: a.astype(case.dtype) for n, a in x.items()} | dict(s=strengths, log_decay=gate)
    ids = np.repeat([1, 2, 1], [40, 30, case.length - 70])
    if case.segments is None:
        ids = np.repeat([1, 0, 2, 3], [40, 3, 27, case.length - 70])
    ids = jnp.asarray(np.broadcast_to(ids, (batch, case.length)), jnp.int32)
    state = None
    if case.segments is not None:
        state = ops.slot_state(batch, memories, slots, keys, values, num_segments=case.segments)
    return x, dict(initial_state=state, segment_ids=ids)


def trace(case: Case) -> None:
    """Trace a call of `slot_memory` by the Triton kernels, and the gradients of all its inputs."""
    from lsm_jax import ops

    x, _ = inputs_of(case)

    def both(x):
        output, pull = jax.vjp(lambda x: ops.slot_memory(**x, implementation="triton")[0], x)
        return pull(output)

    with jax.default_matmul_precision("tensorfloat32"):
        jax.eval_shape(both, x)


def _compiled(channels: int, dtype: str = "bfloat16") -> functools.partial:
    return functools.partial(trace, Case((4, 4), (channels, 64, channels), 256, dtype))


COMPILED = {
    "slots, 64": _compiled(64),
    **{f"slots, bfloat16 {n}": _compiled(n) for n in (128, 256)},
    **{f"slots, float32 {n}": _compiled(n, "float32") for n in (64, 128, 256)},
}
"""Calls of `slot_memory` whose kernels `triton_compiled` compiles, by name."""


def compare(case: Case) -> dict[str, float]:
    """Return the errors of one case, and the number of its outputs that are not causal."""
    from lsm_jax import ops
    from tests.kernels.triton_interpreted import error

    x, marks = inputs_of(case)

    def run(x, **options):
        output, final = ops.slot_memory(**x, **marks, scale=case.scale, **options)
        return output, final.keys, final.values

    fused = functools.partial(run, implementation="triton")
    actual, pull = jax.vjp(fused, x)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), x)
    recurrent = functools.partial(run, implementation="xla", form="recurrent")
    expected, wanted_pull = jax.vjp(recurrent, wide)
    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in actual)
    (gradients,) = pull(cotangents)
    (wanted,) = wanted_pull(tuple(a.astype(jnp.float32) for a in cotangents))
    errors = {n: error(a, b) for n, a, b in zip(("output", "keys", "values"), actual, expected, strict=True)}  # fmt: skip
    errors |= {f"d_{n}": error(a, wanted[n]) for n, a in gradients.items()}
    place = case.length * 2 // 3
    later = fused({n: a.at[:, place:].multiply(2) for n, a in x.items()})[0][:, :place]
    return errors | dict(
        not_causal=int(np.sum(np.asarray(later) != np.asarray(actual[0])[:, :place]))
    )


def main() -> None:
    """Compare the cases that the command line names, or all."""
    from pallas_kernels.linear_attention.triton import channel_decay, value_decay
    from pallas_kernels.triton.host import compute_bfloat16_exactly

    # Without jit: a compiled program waits for its callbacks in the threads that they need.
    module = importlib.import_module("lsm_jax.ops.slots.slot_memory")
    module.run = module.run.__wrapped__
    compute_bfloat16_exactly()
    for module in (channel_decay, value_decay):
        module.REQUIREMENTS = ()  # float32 too, whose products are exact here
    for name in sys.argv[1:] or CASES:
        print(json.dumps(dict(case=name, **compare(CASES[name]))), flush=True)


if __name__ == "__main__":
    main()
