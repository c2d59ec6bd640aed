"""Time decoding with A0.3B-2B from 1K to 128K tokens.

    python -m benchmarks linear_moe_decode [--models softmax:N,linear_attention:LLLN] [--tokens 131072]

A row for each model and power of two, with time and memory of 16 rows (Linear-MoE, arXiv 2503.05447, Figure
5): softmax attention (N), a linear mixer (L) and the hybrid (LLLN), all with the same experts and random
weights in bfloat16. A step is timed at each power of two with caches of exactly that many tokens, updated in
place. The seconds of a row are the sum over all steps up to there, since a step's time grows linearly between
those lengths. A linear layer's step is one program at any length. Out of memory is a result.

Each step reads the next token of each row's text (`inputs`: text), since the experts whose weights a step loads are
those that its tokens choose; `experts` is the mean number of experts that the embeddings of a step's tokens choose in the
first layer. Caches and memories begin with zeros. In rows without `inputs` all 16 sequences were alike: each decoded
the tokens that the random model chose after token 0, so that a step loaded the weights of `top_k` experts per layer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import options, text
from benchmarks.decoding import gib_in_use, layer_step, random_params, softmax_step, split_layers
from benchmarks.registry import Benchmark, UsageError
from benchmarks.timing import alone
from configs import linear_moe
from lsm_jax import ops
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.step import params_of

BENCHMARK = Benchmark(
    name="linear_moe_decode",
    summary="decoding from 1K to 128K tokens with experts: softmax, linear, hybrid",
    key=("mixer", "pattern", "batch_size", "size", "tokens"),
    optional_key={"inputs": None},
    output="docs/linear_moe_decode.jsonl",
)

MODELS = "softmax:N,linear_attention:L,linear_attention:LLLN"
_STEPS, _CALLS = 16, 4


def letters_of(config: ModelConfig) -> list[str]:
    """Return the letter of each layer of a hybrid model in order: "N" for softmax attention, "L" for the
    linear mixer.
    """
    return list(config.letters())


def decoder(config: ModelConfig) -> Any:
    """Return the jitted program that reads `_STEPS` given tokens one after another with a hybrid model, and updates the
    layers' states in place.

    The function `benchmarks.decoding.decoder` is for models all of whose layers have one mixer and decodes greedily; here
    mixers may differ, and each step computes the most probable next token but reads that of the text.

    Returns:
        A function (parameters without the layers', list of each layer's parameters, tokens [_STEPS, B, 1], list of each
        layer's state, position of the first token) -> (the most probable tokens [_STEPS, B, 1], states, position) after
        `_STEPS` tokens.
    """
    model = abstract(config)
    graph, graphs = nnx.graphdef(model), [nnx.graphdef(b) for b in model.periods.blocks]
    stacked, letters = params_of(model)["periods"], letters_of(config)

    def step(rest, layers, token, states, position):
        model = nnx.merge(graph, {**rest, "periods": stacked})
        x, after = model.embedding[...][token].astype(model.dtype), []
        for i, (params, state) in enumerate(zip(layers, states, strict=True)):
            block = nnx.merge(graphs[i % len(graphs)], params)
            mix = softmax_step if letters[i] == "N" else layer_step
            y, state = mix(block.mixer, block.mixer_norm(x), state, position)
            x = x + y
            x = x + block.feedforward(block.feedforward_norm(x))[0]
            after.append(state)
        logits = model.logits(model.norm(x))
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), after

    def decode(rest, layers, tokens, states, position):
        def body(carry, token):
            states, position = carry
            best, states = step(rest, layers, token, states, position)
            return (states, position + 1), best

        (states, position), best = jax.lax.scan(body, (states, position), tokens)
        return best, states, position

    return jax.jit(decode, donate_argnums=3)


def states_of(config: ModelConfig, batch: int, length: int) -> list:
    """Return the empty decode state of each layer: for softmax attention keys and values with room for
    `length` tokens, for a linear mixer its memory.
    """
    blocks, dtype = abstract(config).periods.blocks, jnp.dtype(config.dtype)
    softmax = config.layers["N"].mixer

    def state_of(i, letter):
        if letter != "N":
            return blocks[i % len(blocks)].mixer.init_state(batch, length, dtype)
        shape = batch, softmax.kv_heads(), length, softmax.dim(config.hidden_size)
        return tuple(jnp.zeros(shape, dtype) for _ in "kv")

    return [state_of(i, letter) for i, letter in enumerate(letters_of(config))]


def text_tokens(config: ModelConfig, batch: int) -> np.ndarray:
    """Return int32 [_CALLS, _STEPS, batch, 1]: consecutive tokens of text for each row, which all calls read."""
    rows = text.stream(batch, _CALLS * _STEPS, config.vocab_size)["tokens"]
    return rows.T.reshape(_CALLS, _STEPS, batch, 1)


def experts_of(config: ModelConfig, params: tuple, tokens: np.ndarray) -> float:
    """Return the mean number of experts that the embeddings of a step's tokens choose in the first layer; its mixer is
    left out.
    """
    rest, layers = params
    block = nnx.merge(nnx.graphdef(abstract(config).periods.blocks[0]), layers[0])

    @jax.jit
    def used(token):
        x = rest["embedding"][token].astype(config.dtype)
        _, _, statistics = block.feedforward(block.feedforward_norm(x))
        return jnp.sum(statistics["moe/load"] > 0)

    return float(np.mean([used(token) for token in tokens.reshape(-1, *tokens.shape[2:])]))


def measure_steps(
    config: ModelConfig,
    tokens: np.ndarray,
    lengths: list[int],
    programs: list,
    params: tuple,
) -> dict[int, dict[str, Any]]:
    """Return, for each context length, the seconds of one decoding step and the device memory in use, or an
    error such as out of memory.

    `programs` has one compiled decoding program for each length, or a single one for all. The longest length
    is measured first, since the allocator would find no contiguous memory for its caches later.
    """
    measured: dict[int, dict[str, Any]] = {}
    batch = tokens.shape[2]
    for i, length in reversed(list(enumerate(lengths))):
        carry = None
        try:
            decode = programs[i if len(programs) > 1 else 0]
            states = jax.jit(lambda length=length: states_of(config, batch, length))()
            carry = states, jnp.int32(length - _CALLS * _STEPS)
            del states
            times = []
            for given in jax.device_put(list(tokens)):  # the first is a warm-up
                began = time.perf_counter()
                _, *carry = jax.block_until_ready(decode(*params, given, *carry))
                times.append((time.perf_counter() - began) / _STEPS)
            size = sum(x.nbytes for x in jax.tree.leaves(carry[0]))
            more = dict(state_gib=round(size / 2**30, 3), in_use_gib=gib_in_use())
            measured[length] = dict(step=min(times[1:])) | more
        except Exception as error:  # out of memory is a result
            measured[length] = dict(error=str(error).splitlines()[0][:200])
    return measured


def rows_of(
    config: ModelConfig, batch: int, tokens: int, lock: Callable[[], Any]
) -> Iterator[dict[str, Any]]:
    """Time decoding steps of one model at each context length (a power of two of tokens), and yield a row of
    results for each, with the estimated seconds of decoding from the first token up to that length.

    `lock` is a function that is called after all programs are compiled, before anything is timed.
    """
    rest, layers = split_layers(random_params(config))
    given = text_tokens(config, batch)
    lengths = powers_of_two(tokens)
    grows = "N" in letters_of(config)

    def build(length):
        states = jax.eval_shape(lambda: states_of(config, batch, length))
        position = jax.ShapeDtypeStruct((), jnp.int32)
        return decoder(config).lower(rest, layers, given[0], states, position).compile()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        built = list(pool.map(build, lengths if grows else lengths[:1]))
    lock()
    about = dict(inputs="text", experts=round(experts_of(config, (rest, layers), given), 2))
    measured = measure_steps(config, given, lengths, built, (rest, layers))
    last, total = None, 0.0
    for length in lengths:
        row = measured[length]
        if "error" in row:
            yield dict(tokens=length, **about, **row)
            return
        step = row.pop("step")
        before, step_before = last or (0, step)
        total += (length - before) * (step + step_before) / 2
        last = (length, step)
        times = dict(seconds=round(total, 3), ms_a_token=round(1e3 * step, 3))
        yield dict(tokens=length, **about, **times, **row)


def powers_of_two(tokens: int) -> list[int]:
    """Return the context lengths to measure: the powers of two from 1,024 to `tokens`."""
    return [1024 << i for i in range(32) if 1024 << i <= tokens]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="a0.3b-2b", help="of configs/linear_moe.py")
    parser.add_argument("--models", type=options.words, default=MODELS, help="MIXER:PATTERN,...")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--batch_size", type=int, default=16)
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if wrong := [model for model in args.models if model.count(":") != 1]:
        raise UsageError(f"--models {wrong[0]}: accepted is MIXER:PATTERN, as gla:LLLN")
    models = [model.split(":") for model in args.models]
    setting = dict(batch_size=args.batch_size, size=args.size, inputs="text")
    return [
        dict(mixer=mixer, pattern=pattern, **setting, tokens=tokens)
        for mixer, pattern in models
        for tokens in powers_of_two(args.tokens)
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        lock = functools.cache(lambda: stack.enter_context(alone(args.lock)))
        for mixer, pattern in dict.fromkeys((case["mixer"], case["pattern"]) for case in cases):
            config = linear_moe.get_config(f"{args.size},mixer={mixer},pattern={pattern}").model
            about = dict(mixer=mixer, pattern=pattern, batch_size=args.batch_size, size=args.size)
            for row in rows_of(config, args.batch_size, args.tokens, lock):
                yield about | row | dict(implementations=ops.choices())
