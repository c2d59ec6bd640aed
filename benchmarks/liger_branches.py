"""What a Liger layer's two branches give before tuning: `python -m benchmarks.liger_branches --source=SmolLM2.gguf --store=STORE`.

Every layer is given what the original model gives it, on held-out rows of 1,024 tokens, so that no layer's error reaches
another. A line a gate has, by position and over layers and rows: the root mean square of the memory's output over that of the
window's, each by itself through the output projection; the sum of the weights with which the memory reads values (the
window's is 1); and the mean age in tokens of what it reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.liger import EDGES, Base, config_of
from benchmarks.liger_decode import cut
from benchmarks.timing import append_row, provenance
from configs import liger
from lsm_jax import ops
from lsm_jax.data import make_eval_iterator
from lsm_jax.mixers import Context, build
from lsm_jax.models import abstract


def measure(options: str, tokens: np.ndarray, base: Base, args: argparse.Namespace) -> dict:
    """A line for options of configs/liger.py, of rows of tokens [B, T]."""
    config = liger.get_config(f"{args.model},source={args.source},{options}").model
    softmax = liger.get_config(f"{args.model},source={args.source},method=softmax").model
    graph = nnx.graphdef(abstract(dataclasses.replace(softmax, lora=None)).periods.blocks[0])
    (layer,) = config.layers.values()
    alone = {
        name: nnx.graphdef(nnx.eval_shape(lambda m=m, w=w: build(
            dataclasses.replace(layer.mixer, memory_weight=m, window_weight=w), config.hidden_size, rngs=nnx.Rngs(0)
        )))
        for name, m, w in (("memory", 1.0, 0.0), ("window", 0.0, 1.0))
    }  # fmt: skip
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))

    @jax.jit
    def through(params: Any, x: jax.Array):
        block = nnx.merge(graph, params)
        normed = block.mixer_norm(x)
        found = {}
        for name, kind in alone.items():
            y = nnx.merge(kind, params["mixer"])(normed)[0].astype(jnp.float32)
            found[name] = jnp.sqrt(jnp.mean(jnp.square(y), axis=-1))  # [B, T]
        mixer = nnx.merge(alone["memory"], params["mixer"])
        context = Context(positions=positions)
        query, context = mixer.read(normed, context)
        written, context = mixer.write(normed, context)
        ones = jnp.ones(written["v"].shape, jnp.float32)
        age = ones.at[..., 1].set(positions[..., None] / length)
        wide = {name: x.astype(jnp.float32) for name, x in (written | dict(v=age)).items()}
        o, _ = ops.linear_memory(query.astype(jnp.float32), **wide, scale=1.0, form="chunk")
        found["mass"] = o[..., 0].mean(-1)
        found["age"] = (positions - length * (o[..., 1] / o[..., 0]).mean(-1)).astype(jnp.float32)
        x = x + block.mixer(normed)[0]
        return x + block.feedforward(block.feedforward_norm(x))[0], found

    x = base.params["embedding"].astype(config.dtype)[tokens]
    every = []
    for params in cut(base.params)[1]:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x, found = through(params, x)
        every.append(jax.device_get(found))
    by = {name: np.stack([layer[name] for layer in every]) for name in every[0]}  # [L, B, T]

    def bins(values: np.ndarray) -> dict[str, float]:
        return {
            f"{a}-{b}": float(f"{values[..., a:b].mean():.4g}")
            for a, b in zip(EDGES, EDGES[1:], strict=False)
            if a < length
        }

    ratio = by["memory"] / by["window"]
    largest = int(ratio[..., length // 2 :].mean((1, 2)).argmax())
    return dict(
        options=options,
        memory_over_window=bins(ratio),
        median_layer=bins(np.median(ratio.mean(1), axis=0)),
        largest_layer=largest,
        of_largest_layer=bins(ratio[largest]),
        mass=bins(by["mass"]),
        age=bins(by["age"]),
        rows=batch,
    )


def main() -> None:
    """Print a line for each set of options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="a Hugging Face folder or .gguf file")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--options", nargs="+", default=["gate=gla", "gate=gla,temperature=64", "gate=hgrn2"])  # fmt: skip
    parser.add_argument("--output", type=Path, help="append the lines as JSON")
    args = parser.parse_args()
    config = config_of("method=softmax", args)
    rows = make_eval_iterator(
        config.data,
        global_batch_size=args.batch_size,
        vocab_size=config.model.vocab_size,
        remainder="pad",
    )
    tokens, base = next(iter(rows))["tokens"], Base(args)
    for options in args.options:
        line = measure(options, tokens, base, args) | provenance()
        print(json.dumps(line), flush=True)
        if args.output:
            append_row(args.output, line)


if __name__ == "__main__":
    main()
