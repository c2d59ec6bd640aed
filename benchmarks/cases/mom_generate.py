"""Time generation after long contexts, by a Mixture-of-Memories and by softmax attention.

    python -m benchmarks mom_generate [--contexts 4096,131072] [--models MoM]

A row for each model and context: a model of `configs/mom.py` and the same with softmax attention, with random
weights in bfloat16, generate 1,024 tokens after contexts of 4,096 to 131,072 tokens. MoM reads its context
first, in pieces. The cache of softmax attention has exactly the size of the context and the generated tokens
and is updated in place; it contains zeros, since values do not change its time. Rows have the seconds of the
1,024 tokens alone, the bytes of the state, and all bytes that the compiled program needs, parameters
included.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import options, text
from benchmarks.decoding import decoder, layer_step, random_params, softmax_step, split_layers
from benchmarks.registry import Benchmark, UsageError
from benchmarks.timing import alone, program_bytes
from configs import mom
from lsm_jax import mixers
from lsm_jax.models import ModelConfig, abstract

BENCHMARK = Benchmark(
    name="mom_generate",
    summary="generation after long contexts, Mixture-of-Memories beside softmax attention",
    key=("model", "context", "generated", "size", "layers", "batch_size"),
    output="docs/mom_generate.jsonl",
)

_COUNT = 256  # tokens of one call


def model_configs(size: str, layers: int | None) -> dict[str, ModelConfig]:
    """Return the configs of the two models that the benchmark compares, by name: "MoM", and "softmax", the
    same model with softmax attention in place of the Mixtures-of-Memories.
    """
    config = mom.get_config(size).model
    if layers:
        config.num_layers = layers
    layer = config.layers["L"]
    plain = mixers.SoftmaxConfig.for_width(config.hidden_size)
    softmax = dataclasses.replace(
        config, layers={"L": dataclasses.replace(layer, mixer=plain)}, pattern="L"
    )
    return {"MoM": dataclasses.replace(config, layers={"L": layer}), "softmax": softmax}


def generate(compiled: Any, rest: Any, layers: list, states: list, begin: int, new: int) -> float:
    """Return the seconds that a compiled decoding program takes to generate `new` tokens from the layers'
    `states`, whose buffers are donated.
    """
    carry = jnp.zeros((len(jax.tree.leaves(states)[0]), 1), jnp.int32), states, jnp.int32(begin)
    jax.block_until_ready(carry)
    began = time.perf_counter()
    for _ in range(new // _COUNT):
        carry = compiled(rest, layers, *carry)
    jax.block_until_ready(carry)
    return time.perf_counter() - began


def make_row(
    model: str, context: int, seconds: float, states: Any, compiled: Any, new: int
) -> dict:
    """Return the benchmark's row of generating `new` tokens after a context of `context` tokens; `states`
    is the size of the layers' states in bytes.
    """
    return dict(
        model=model,
        context=context,
        generated=new,
        seconds=round(seconds, 4),
        ms_a_token=round(1e3 * seconds / new, 4),
        state_bytes=states,
        program_bytes=program_bytes(compiled),
    )


def mom_rows(
    config: ModelConfig, batch: int, contexts: list[int], piece: int, new: int, lock: Path | None
):
    """Time generation by a Mixture-of-Memories: read text up to each of the context lengths in turn, generate
    `new` tokens from a copy of the state at that length, and yield a row of results for it.
    """
    params = random_params(config)
    rest, layers = split_layers(params)
    graph = nnx.graphdef(abstract(config))

    def read(params, state, tokens):
        return nnx.merge(graph, params).hidden(tokens, state=state)[1]

    @jax.jit
    def split(state):
        ((stacked, _),) = state.layers
        return [jax.tree.map(lambda s, i=i: s[i], stacked) for i in range(config.num_layers)]

    state = nnx.merge(graph, params).init_state(batch, contexts[-1])
    tokens = jax.ShapeDtypeStruct((batch, piece), jnp.int32)
    read = jax.jit(read, donate_argnums=1).lower(params, state, tokens).compile()
    token = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    position = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = jax.eval_shape(split, state)
    compiled = decoder(config, _COUNT, layer_step).lower(rest, layers, token, shapes, position)
    compiled = compiled.compile()
    generate(compiled, rest, layers, split(state), 0, new)  # warm-up
    done, spent = 0, 0.0
    for context in contexts:
        tokens = jnp.asarray(text.stream(batch, piece, config.vocab_size)["tokens"])
        with alone(lock):
            began = time.perf_counter()
            while done < context:
                state = read(params, state, tokens)
                done += piece
            jax.block_until_ready(state)
            spent += time.perf_counter() - began
            states = split(state)
            size = sum(x.nbytes for x in jax.tree.leaves(states))
            seconds = generate(compiled, rest, layers, states, context, new)
        yield make_row("MoM", context, seconds, size, compiled, new) | dict(
            reading_seconds=round(spent, 2)
        )


def softmax_rows(config: ModelConfig, batch: int, contexts: list[int], new: int, lock: Path | None):
    """Generate `new` tokens by softmax attention with a cache for each context length, by a program
    compiled for its size, and yield a row.
    """
    rest, layers = split_layers(random_params(config))
    mixer = config.layers["L"].mixer
    decode = decoder(config, _COUNT, softmax_step)

    def cache(context, make):
        shape = (batch, mixer.kv_heads(), context + new, mixer.dim(config.hidden_size))
        return [(make(shape, config.dtype), make(shape, config.dtype)) for _ in layers]

    def build(context):
        token = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
        position = jax.ShapeDtypeStruct((), jnp.int32)
        shapes = cache(context, lambda s, d: jax.ShapeDtypeStruct(s, jnp.dtype(d)))
        return decode.lower(rest, layers, token, shapes, position)

    lowered = [build(context) for context in contexts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        built = list(pool.map(lambda low: low.compile(), lowered))  # all before any is timed
    for context, compiled in zip(contexts, built, strict=True):
        size = 0
        try:
            with alone(lock):
                for _ in range(2):  # the first is a warm-up
                    states = cache(context, jnp.zeros)
                    size = sum(x.nbytes for x in jax.tree.leaves(states))
                    seconds = generate(compiled, rest, layers, states, context, new)
        except Exception as error:  # out of memory is a result
            yield dict(model="softmax", context=context, error=str(error).splitlines()[0][:200])
            return
        yield make_row("softmax", context, seconds, size, compiled, new)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="340m", help="of configs/mom.py")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument(
        "--contexts", type=options.integers, default="4096,8192,16384,32768,65536,131072"
    )
    parser.add_argument("--piece_length", type=int, default=4096, help="a divisor of all contexts")
    parser.add_argument(
        "--tokens", type=int, default=1024, help=f"tokens to generate, a multiple of {_COUNT}"
    )
    parser.add_argument("--models", type=options.names(("MoM", "softmax")), default="MoM,softmax")
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if wrong := [n for n in args.contexts if n % args.piece_length]:
        raise UsageError(f"--contexts {wrong[0]}: accepted are multiples of {args.piece_length}")
    if args.tokens % _COUNT:
        raise UsageError(f"--tokens {args.tokens}: accepted are multiples of {_COUNT}")
    configs = model_configs(args.size, args.layers)
    return [
        dict(
            model=name, context=context, generated=args.tokens, size=args.size,
            layers=configs[name].num_layers, batch_size=args.batch_size,
        )
        for name in args.models
        for context in sorted(args.contexts)
    ]  # fmt: skip


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    configs, contexts = model_configs(args.size, args.layers), sorted(args.contexts)
    for name in dict.fromkeys(case["model"] for case in cases):
        config = configs[name]
        about = dict(size=args.size, layers=config.num_layers, batch_size=args.batch_size)
        if name == "MoM":
            measured = mom_rows(
                config, args.batch_size, contexts, args.piece_length, args.tokens, args.lock
            )
        else:
            measured = softmax_rows(config, args.batch_size, contexts, args.tokens, args.lock)
        for row in measured:
            yield row | about
