"""Decoding at Llama-3-8B's shapes, random weights: `python -m benchmarks.liger_decode [--tokens=32768] [--output=decode.jsonl]`.

Liger-GLA decodes `--tokens` tokens of 16 rows one by one in one run, stamped at each power of two: seconds since the start, and the
memory in use. Softmax attention's step is timed at each power of two with a cache that holds so many tokens and is read no
further, updated in place; what it would need in all is the sum over its steps, which grow linearly between those lengths. Both
run the same projections and feedforwards in bfloat16, by the same loop on the device, all compiled before any is timed. In use is
what the device holds between calls; temporary, what the compiled step needs beside.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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

    @jax.jit  # traced and lowered once for all layers
    def layer(params, x, state, position):
        block = nnx.merge(block_graph, params)
        y, state = mix(block.mixer, block.mixer_norm(x), state, position)
        x = x + y
        return x + block.feedforward(block.feedforward_norm(x))[0], state

    def step(rest, layers, carry):
        token, states, position = carry
        model = nnx.merge(whole, {**rest, "periods": stacked})
        x, after = model.embedding[...][token].astype(model.dtype), []
        for params, state in zip(layers, states, strict=True):
            x, state = layer(params, x, state, position)
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
    context = Context(positions=jnp.broadcast_to(position, x.shape[:2]))
    q, context = mixer.read(x, context)
    new, context = mixer.write(x, context)
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
    return mixer.finish(o.reshape(q.shape), x, context)[0], cache


class Built(NamedTuple):
    """`count` steps, compiled, and an empty state for each layer."""

    decode: Any
    count: int
    states: Callable[[], list]
    position: int
    seconds: float
    temporary_gib: float


def built(config: ModelConfig, batch: int, length: int, count: int, softmax: bool) -> Built:
    """Decoding with states for `length` tokens; takes no device memory."""
    began, mixer = time.perf_counter(), abstract(config).periods.blocks[0].mixer
    shape = (batch, mixer.config.kv_heads(), length, mixer.head_dim)
    dtype = jnp.dtype(config.dtype)

    def state():
        if softmax:
            return tuple(jnp.zeros(shape, dtype) for _ in "kv")
        return mixer.init_state(batch, length, dtype)

    rest, layers = jax.eval_shape(lambda: cut(random_params(config)))
    token, position = jax.ShapeDtypeStruct((batch, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)  # fmt: skip
    states = [jax.eval_shape(state)] * len(layers)
    decode = decoder(config, count, in_softmax if softmax else in_liger)
    decode = decode.lower(rest, layers, token, states, position).compile()
    memory = decode.memory_analysis()
    temporary = 0 if memory is None else round(memory.temp_size_in_bytes / 2**30, 3)
    make, at = jax.jit(state), length - 3 * count if softmax else 0
    return Built(
        decode, count, lambda: [make() for _ in layers], at, time.perf_counter() - began, temporary
    )


def about(name: str, model: Built, tokens: int, seconds: float, step: float, size: int) -> dict:
    """A row."""
    return dict(
        model=name, tokens=tokens, seconds=round(seconds, 3), ms_a_token=round(1e3 * step, 3),
        state_gib=round(size / 2**30, 3), in_use_gib=in_use(), temporary_gib=model.temporary_gib,
        compile_seconds=round(model.seconds, 1),
    )  # fmt: skip


def liger_rows(model: Built, params: tuple, batch: int, tokens: int, most: float):
    """Decode; a row at each power of two, with the seconds of a token since the row before."""

    def fresh():
        return jnp.zeros((batch, 1), jnp.int32), model.states(), jnp.int32(0)

    jax.block_until_ready(model.decode(*params, *fresh()))
    carry = jax.block_until_ready(fresh())
    size = sum(x.nbytes for x in jax.tree.leaves(carry[1]))
    done, stamp, last, began = 0, max(model.count, 1024), (0, 0.0), time.perf_counter()
    while done < tokens:
        carry = jax.block_until_ready(model.decode(*params, *carry))
        done, spent = done + model.count, time.perf_counter() - began
        if done == stamp or done >= tokens or spent > most:
            stamp *= 2
            yield about("Liger-GLA", model, done, spent, (spent - last[1]) / (done - last[0]), size)
            last = (done, spent)
            if spent > most:
                return


def softmax_rows(models: dict[int, Built], params: tuple, batch: int):
    """Time steps at each power of two; a row each, with the sum of all steps up to there."""
    last, total = None, 0.0
    for length, model in models.items():
        carry = None
        try:
            carry = jnp.zeros((batch, 1), jnp.int32), model.states(), jnp.int32(model.position)
            spent = 0.0
            for _ in range(3):  # the first warms up
                jax.block_until_ready(carry)
                began = time.perf_counter()
                carry = jax.block_until_ready(model.decode(*params, *carry))
                spent = (time.perf_counter() - began) / model.count
        except Exception as error:  # out of memory is a result
            yield dict(model="softmax", tokens=length, error=str(error).splitlines()[0][:200])
            return
        before, step_before = (0, spent) if last is None else last
        total += (length - before) * (spent + step_before) / 2
        last = (length, spent)
        size = sum(x.nbytes for x in jax.tree.leaves(carry[1]))
        yield about("softmax", model, length, total, spent, size)


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
    configs, jobs, done = {}, {}, {}
    lengths = [1024 << i for i in range(32) if 1024 << i <= args.tokens]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # all compiled before any is timed
        for name in args.models.split(","):
            method = "method=softmax" if name == "softmax" else "gate=gla"
            config = liger.get_config(f"{args.model},{method}").model
            config = dataclasses.replace(config, lora=None)
            config.num_layers = args.layers or config.num_layers
            if name != "softmax":  # one token at a time: a chunk of 64 would be padding but for one
                config.layers["L"].mixer.op.form = "recurrent"
            sizes = [(n, _STEPS) for n in lengths]
            if name != "softmax":
                sizes = [(args.tokens, min(256, args.tokens))]
            configs[name] = config
            jobs[name] = {
                length: pool.submit(
                    built, config, args.batch_size, length, count, name == "softmax"
                )
                for length, count in sizes
            }
        for name, of in jobs.items():
            done[name] = {length: job.result() for length, job in of.items()}
    for name, models in done.items():
        config, params = configs[name], None
        params = cut(random_params(config))
        if name == "softmax":
            rows = softmax_rows(models, params, args.batch_size)
        else:
            (model,) = models.values()
            rows = liger_rows(model, params, args.batch_size, args.tokens, args.seconds)
        for row in rows:
            row |= dict(batch_size=args.batch_size, layers=config.num_layers) | provenance()
            print(json.dumps(row), flush=True)
            if args.output:
                append_row(args.output, row)
        rows = None  # and with it what it holds on the device


if __name__ == "__main__":
    main()
