"""Measure the outputs of a Liger layer's two branches before tuning.

    python -m benchmarks liger_branches --source SmolLM2.gguf --store STORE --tokenizer tokenizer.json

A row for each set of options of `configs/liger.py`. Every layer gets the input that it has in the original
model, on held-out rows of 1,024 tokens, so that no layer's error reaches another. The row has, by position,
as means over layers and rows: the root mean square of the memory's output over that of the window's, each
alone through the output projection; the sum of the weights with which the memory reads values (`mass`; the
window's is 1); and the mean age in tokens of what it reads (`age`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.cases.liger import EDGES, Base, config_of
from benchmarks.decoding import split_layers
from benchmarks.registry import Benchmark
from benchmarks.run import one_by_one
from configs import liger
from lsm_jax import ops
from lsm_jax.data import make_eval_iterator
from lsm_jax.mixers import Context, build
from lsm_jax.models import abstract

BENCHMARK = Benchmark(
    name="liger_branches",
    summary="the outputs of a Liger layer's memory and window before tuning",
    key=("options", "rows"),
    output="docs/liger_branches.jsonl",
)


def measure(options: str, tokens: np.ndarray, base: Base, args: argparse.Namespace) -> dict:
    """Return the benchmark's row for a Liger model with these options of `configs/liger.py`: the ratio of
    the memory's to the window's output, by position, measured on tokens [B, T].
    """
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
        values = {}
        for name, kind in alone.items():
            y = nnx.merge(kind, params["mixer"])(normed)[0].astype(jnp.float32)
            values[name] = jnp.sqrt(jnp.mean(jnp.square(y), axis=-1))  # [B, T]
        mixer = nnx.merge(alone["memory"], params["mixer"])
        context = Context(positions=positions)
        query, context = mixer.read(normed, context)
        written, context = mixer.write(normed, context)
        ones = jnp.ones(written["v"].shape, jnp.float32)
        age = ones.at[..., 1].set(positions[..., None] / length)
        wide = {name: x.astype(jnp.float32) for name, x in (written | dict(v=age)).items()}
        o, _ = ops.linear_memory(query.astype(jnp.float32), **wide, scale=1.0, form="chunk")
        values["mass"] = o[..., 0].mean(-1)
        values["age"] = (positions - length * (o[..., 1] / o[..., 0]).mean(-1)).astype(jnp.float32)
        x = x + block.mixer(normed)[0]
        return x + block.feedforward(block.feedforward_norm(x))[0], values

    x = base.params["embedding"].astype(config.dtype)[tokens]
    values_of_layers = []
    for params in split_layers(base.params)[1]:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x, values = through(params, x)
        values_of_layers.append(jax.device_get(values))
    by = {
        name: np.stack([layer[name] for layer in values_of_layers]) for name in values_of_layers[0]
    }  # each [L, B, T]

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, help="a Hugging Face folder or .gguf file")
    parser.add_argument("--store", type=Path, required=True, help="as for `liger`")
    parser.add_argument("--tokenizer", required=True, help="the tokenizer.json of the store")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument(
        "--options", nargs="+", default=["gate=gla", "gate=gla,temperature=64", "gate=hgrn2"],
        help="of configs/liger.py; a row for each",
    )  # fmt: skip


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(options=options, rows=args.batch_size) for options in args.options]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    config = config_of("method=softmax", args)
    batches = make_eval_iterator(
        config.data,
        global_batch_size=args.batch_size,
        vocab_size=config.model.vocab_size,
        remainder="pad",
    )
    tokens, base = next(iter(batches))["tokens"], Base(args)
    return one_by_one(cases, lambda case: measure(case["options"], tokens, base, args))
