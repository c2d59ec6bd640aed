"""Decoding at Llama-3-8B's shapes, random weights: `python -m benchmarks.liger_decode [--tokens=32768] [--output=decode.jsonl]`.

Liger-GLA decodes `--tokens` tokens of 16 rows one by one in one run, stamped at each power of two: seconds since the start, and the
memory in use. Softmax attention's step is timed at each power of two with a cache that holds so many tokens and is read no
further, updated in place; what it would need in all is the sum over its steps, which grow linearly between those lengths. Both
run the same projections and feedforwards in bfloat16.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.timing import append_row, provenance
from configs import liger
from lsm_jax.mixers import Context
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.step import params_of

_STEPS = 16  # of softmax attention, timed at each length


def random_params(config: ModelConfig) -> dict[str, Any]:
    """Bfloat16 numbers of a model's usual size, drawn one parameter at a time."""

    @functools.partial(jax.jit, static_argnums=0)
    def draw(shape, key):
        # Rows of a stack are drawn alike: their values change nothing in how long a step takes.
        own = 0.02 * jax.random.normal(key, shape[-2:], jnp.bfloat16)
        return jnp.broadcast_to(own, shape)

    shapes = params_of(abstract(config))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        tree, [draw(leaf.shape, key) for leaf, key in zip(leaves, keys, strict=True)]
    )


def in_use() -> float:
    """GiB on the device now; 0 where it does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return round(stats.get("bytes_in_use", 0) / 2**30, 3)


def peak() -> float:
    """The most GiB that were ever on the device."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return round(stats.get("peak_bytes_in_use", 0) / 2**30, 3)


def cut(params: dict[str, Any]) -> tuple[dict[str, Any], list]:
    """A model's parameters without its layers, and each layer's by itself, in order, so that a step copies none."""
    blocks = params["periods"]["blocks"]
    periods = len(jax.tree.leaves(blocks)[0])
    layers = [
        jax.tree.map(lambda p, i=i: p[i], blocks[j]) for i in range(periods) for j in sorted(blocks)
    ]
    return {k: v for k, v in params.items() if k != "periods"}, layers


def decoder(config: ModelConfig, count: int, mix: Any):
    """(rest, layers, token, states, position) -> the last three after `count` greedy tokens; states are updated in place."""
    model = abstract(config)
    whole, block_graph = nnx.graphdef(model), nnx.graphdef(model.periods.blocks[0])
    stacked = params_of(model)["periods"]

    def step(rest, layers, carry):
        token, states, position = carry
        model = nnx.merge(whole, {**rest, "periods": stacked})
        x, after = model.embedding[...][token].astype(model.dtype), []
        for params, state in zip(layers, states, strict=True):
            block = nnx.merge(block_graph, params)
            y, state = mix(block.mixer, block.mixer_norm(x), state, position)
            x = x + y
            x = x + block.feedforward(block.feedforward_norm(x))[0]
            after.append(state)
        logits = model.logits(model.norm(x))
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), after, position + 1

    def decode(rest, layers, token, states, position):
        def body(carry, _):
            return step(rest, layers, carry), None

        return jax.lax.scan(body, (token, states, position), length=count)[0]

    return jax.jit(decode, donate_argnums=3)


def in_liger(mixer: Any, x: jax.Array, state: Any, position: jax.Array):
    """The library's own layer."""
    y, state, _ = mixer(x, state=state)
    return y, state


def in_softmax(mixer: Any, x: jax.Array, cache: tuple, position: jax.Array):
    """One token against a cache of keys and values [B, G, N, K] each, which it is written into."""
    context = Context(None, {}, None, jnp.broadcast_to(position, x.shape[:2]), None, {})
    q, new = mixer.read(x, context), mixer.write(x, context)
    cache = tuple(
        jax.lax.dynamic_update_slice_in_dim(held, jnp.moveaxis(new[name], 1, 2), position, axis=2)
        for name, held in zip("kv", cache, strict=True)
    )
    keys, values = cache
    grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("bgrk,bgsk->bgrs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.arange(keys.shape[2]) <= position, scores, -jnp.inf)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(values.dtype)
    o = jnp.einsum("bgrs,bgsv->bgrv", weights, values)
    return mixer.finish(o.reshape(q.shape), x, context), cache


def liger_rows(config: ModelConfig, batch: int, tokens: int, seconds: float):
    """Decode; a row at each power of two."""
    rest, layers = cut(random_params(config))
    mixer, count = abstract(config).periods.blocks[0].mixer, min(256, tokens)
    decode = decoder(config, count, in_liger)

    def fresh():
        make = jax.jit(lambda: mixer.init_state(batch, tokens, jnp.dtype(config.dtype)))
        return jnp.zeros((batch, 1), jnp.int32), [make() for _ in layers], jnp.int32(0)

    began = time.perf_counter()
    jax.block_until_ready(decode(rest, layers, *fresh()))
    compiled, carry = time.perf_counter() - began, fresh()
    size = sum(x.nbytes for x in jax.tree.leaves(carry[1]))
    done, stamp, began = 0, max(count, 1024), time.perf_counter()
    while done < tokens:
        carry = jax.block_until_ready(decode(rest, layers, *carry))
        done, spent = done + count, time.perf_counter() - began
        if done == stamp or done >= tokens or spent > seconds:
            stamp *= 2
            yield dict(
                model="Liger-GLA", tokens=done, seconds=round(spent, 3), ms_a_token=round(1e3 * spent / done, 3),
                state_gib=round(size / 2**30, 3), in_use_gib=in_use(), peak_gib=peak(), first_call_seconds=round(compiled, 1),
            )  # fmt: skip
            if spent > seconds:
                return


def softmax_rows(config: ModelConfig, batch: int, tokens: int):
    """Time steps at each power of two; a row each, with the sum of all steps up to there."""
    rest, layers = cut(random_params(config))
    mixer = config.layers["L"].mixer
    lengths = [1024 << i for i in range(32) if 1024 << i <= tokens]

    def shape(length):
        return (batch, mixer.kv_heads(), length, mixer.dim(config.hidden_size))

    def build(length):
        cache = jax.ShapeDtypeStruct(shape(length), jnp.dtype(config.dtype))
        carry = jax.ShapeDtypeStruct((batch, 1), jnp.int32), [(cache, cache)] * len(layers)
        position = jax.ShapeDtypeStruct((), jnp.int32)
        decode = decoder(config, _STEPS, in_softmax)
        return decode.lower(rest, layers, *carry, position).compile()

    last, total = None, 0.0
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        built = list(pool.map(build, lengths))  # all before any is timed
    for length, decode in zip(lengths, built, strict=True):
        carry = None
        try:
            zeros = [tuple(jnp.zeros(shape(length), config.dtype) for _ in "kv") for _ in layers]  # fmt: skip
            carry = jnp.zeros((batch, 1), jnp.int32), zeros, jnp.int32(length - 3 * _STEPS)
            del zeros
            spent = 0.0
            for _ in range(3):  # the first warms up
                began = time.perf_counter()
                carry = jax.block_until_ready(decode(rest, layers, *carry))
                spent = (time.perf_counter() - began) / _STEPS
        except Exception as error:  # out of memory is a result
            yield dict(model="softmax", tokens=length, error=str(error).splitlines()[0][:200])
            return
        before, step_before = (0, spent) if last is None else last
        total += (length - before) * (spent + step_before) / 2
        last = (length, spent)
        size = sum(x.nbytes for x in jax.tree.leaves(carry[1]))
        yield dict(
            model="softmax", tokens=length, seconds=round(total, 3), ms_a_token=round(1e3 * spent, 3),
            state_gib=round(size / 2**30, 3), in_use_gib=in_use(), peak_gib=peak(),
        )  # fmt: skip


def main() -> None:
    """Print a row a power of two, Liger's and then softmax attention's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-8b", help="of configs/liger.py")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--seconds", type=float, default=300, help="the most Liger decodes")
    parser.add_argument("--models", default="softmax,liger")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    for name in args.models.split(","):
        method = "method=softmax" if name == "softmax" else "gate=gla"
        config = dataclasses.replace(liger.get_config(f"{args.model},{method}").model, lora=None)
        if args.layers:
            config.num_layers = args.layers
        about = dict(batch_size=args.batch_size, layers=config.num_layers) | provenance()
        if name == "softmax":
            rows = softmax_rows(config, args.batch_size, args.tokens)
        else:
            rows = liger_rows(config, args.batch_size, args.tokens, args.seconds)
        for row in rows:
            print(json.dumps(row | about), flush=True)
            if args.output:
                append_row(args.output, row | about)


if __name__ == "__main__":
    main()
