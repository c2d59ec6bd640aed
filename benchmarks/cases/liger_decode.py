"""Time decoding at the shapes of Llama-3-8B with random weights, by a Liger model and by softmax attention.

    python -m benchmarks liger_decode [--tokens 32768] [--models liger]

A row for each model and power of two. Liger-GLA decodes `--tokens` tokens of 16 rows one by one in one run,
and the rows have the seconds since the start and the memory in use at each power of two. Softmax attention's
step is timed at each power of two, with a cache of exactly that many tokens, which is updated in place. The
seconds of its rows are the sum over all steps up to there, since a step's time grows linearly between those
lengths. Both run the same projections and feedforwards in bfloat16 by the same loop on the device, and all
programs are compiled before any is timed. The rows "through sample" time one call of `lsm_jax.models.sample`, as
a user makes it, that continues 16 prompts of one token greedily by so many tokens; each call is made twice, and
the second is timed. `in_use_gib` is the memory in use between calls, `temporary_gib`
the compiled step's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import options
from benchmarks.decoding import (
    decoder,
    gib_in_use,
    layer_step,
    random_params,
    softmax_step,
    split_layers,
)
from benchmarks.registry import Benchmark
from configs import liger
from lsm_jax.models import ModelConfig, abstract, sample

BENCHMARK = Benchmark(
    name="liger_decode",
    summary="decoding at the shapes of Llama-3-8B, Liger beside softmax attention",
    key=("model", "tokens", "batch_size", "layers"),
    output="docs/liger_decode.jsonl",
)

# The models by their names in --models; the values are their names in rows.
NAMES = {
    "softmax": "softmax",
    "liger": "Liger-GLA",
    "softmax-sample": "softmax, through sample",
    "liger-sample": "Liger-GLA, through sample",
}
_STEPS = 16  # steps of softmax attention that are timed at each length


class Built(NamedTuple):
    """A compiled program that decodes `count` tokens one by one, and the function that returns an empty
    decode state for each layer.
    """

    decode: Any
    count: int
    states: Callable[[], list]
    position: int
    seconds: float
    temporary_gib: float


def build(config: ModelConfig, batch: int, length: int, count: int, softmax: bool) -> Built:
    """Compile a program that decodes `count` tokens one by one with a Liger model (or with softmax attention,
    if `softmax`) whose decode states have space for `length` tokens. No device memory is allocated.
    """
    began, mixer = time.perf_counter(), abstract(config).periods.blocks[0].mixer
    shape = (batch, mixer.config.kv_heads(), length, mixer.head_dim)
    dtype = jnp.dtype(config.dtype)

    def state():
        if softmax:
            return tuple(jnp.zeros(shape, dtype) for _ in "kv")
        return mixer.init_state(batch, length, dtype)

    rest, layers = jax.eval_shape(lambda: split_layers(random_params(config)))
    token, position = jax.ShapeDtypeStruct((batch, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)  # fmt: skip
    states = [jax.eval_shape(state)] * len(layers)
    decode = decoder(config, count, softmax_step if softmax else layer_step)
    decode = decode.lower(rest, layers, token, states, position).compile()
    memory = decode.memory_analysis()
    temporary = 0 if memory is None else round(memory.temp_size_in_bytes / 2**30, 3)
    make, at = jax.jit(state), length - 3 * count if softmax else 0
    return Built(
        decode, count, lambda: [make() for _ in layers], at, time.perf_counter() - began, temporary
    )


def make_row(name: str, model: Built, tokens: int, seconds: float, step: float, size: int) -> dict:
    """Return a benchmark row about decoding up to `tokens` tokens: `seconds` in all, `step` the seconds of
    one token, `size` the bytes of all layers' states.
    """
    return dict(
        model=name, tokens=tokens, seconds=round(seconds, 3), ms_a_token=round(1e3 * step, 3),
        state_gib=round(size / 2**30, 3), in_use_gib=gib_in_use(), temporary_gib=model.temporary_gib,
        compile_seconds=round(model.seconds, 1),
    )  # fmt: skip


def liger_rows(model: Built, params: tuple, batch: int, tokens: int, most: float):
    """Decode token by token with the Liger model, and yield a row at each power of two of tokens, with the
    seconds per token since the row before.
    """

    def start():
        return jnp.zeros((batch, 1), jnp.int32), model.states(), jnp.int32(0)

    jax.block_until_ready(model.decode(*params, *start()))
    carry = jax.block_until_ready(start())
    size = sum(x.nbytes for x in jax.tree.leaves(carry[1]))
    done, stamp, last, began = 0, max(model.count, 1024), (0, 0.0), time.perf_counter()
    while done < tokens:
        carry = jax.block_until_ready(model.decode(*params, *carry))
        done, spent = done + model.count, time.perf_counter() - began
        if done == stamp or done >= tokens or spent > most:
            stamp *= 2
            yield make_row(
                "Liger-GLA", model, done, spent, (spent - last[1]) / (done - last[0]), size
            )
            last = (done, spent)
            if spent > most:
                return


def softmax_rows(models: dict[int, Built], params: tuple, batch: int):
    """Time a decoding step of softmax attention with a full cache of each context length (a power of two of
    tokens), and yield a row of results for each, with the estimated seconds of decoding from the first
    token up to that length.
    """
    last, total = None, 0.0
    for length, model in models.items():
        carry = None
        try:
            carry = jnp.zeros((batch, 1), jnp.int32), model.states(), jnp.int32(model.position)
            spent = 0.0
            for _ in range(3):  # the first is a warm-up
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
        yield make_row("softmax", model, length, total, spent, size)


def sample_rows(name: str, config: ModelConfig, args: argparse.Namespace):
    """Time calls of `sample` that continue prompts of one token; yield a row for each number of tokens."""
    model = nnx.merge(nnx.graphdef(abstract(config)), random_params(config))
    prompt = jnp.zeros((args.batch_size, 1), jnp.int32)
    for length in lengths_of(args.sample_tokens):
        times = []
        for _ in range(2):
            began = time.perf_counter()
            drawn = sample(model, prompt, num_tokens=length, key=jax.random.key(0), temperature=0)
            jax.block_until_ready(drawn)
            times.append(time.perf_counter() - began)
        yield dict(
            model=NAMES[name], tokens=length, seconds=round(times[1], 3),
            ms_a_token=round(1e3 * times[1] / length, 3), in_use_gib=gib_in_use(),
            compile_seconds=round(times[0] - times[1], 1),
        )  # fmt: skip


def model_config(name: str, args: argparse.Namespace) -> ModelConfig:
    """Return the config of the model called `name`: the pretrained model's softmax attention, or Liger with
    GLA's gate.
    """
    method = "method=softmax" if name.startswith("softmax") else "gate=gla"
    config = liger.get_config(f"{args.model},{method}").model
    config = dataclasses.replace(config, lora=None)
    config.num_layers = args.layers or config.num_layers
    if name == "liger":  # a chunk of 64 tokens would have 63 tokens of padding
        config.layers["L"].mixer.op.form = "recurrent"
    return config


def build_all(
    configs: dict[str, ModelConfig], args: argparse.Namespace
) -> dict[str, dict[int, Built]]:
    """Compile in parallel the decoding programs of all models at all context lengths; return them by model
    and length.
    """
    jobs = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name, config in configs.items():
            sizes = [(length, _STEPS) for length in lengths_of(args.tokens)]
            if name != "softmax":
                sizes = [(args.tokens, min(256, args.tokens))]
            jobs[name] = {
                length: pool.submit(
                    build, config, args.batch_size, length, count, name == "softmax"
                )
                for length, count in sizes
            }
        return {n: {length: job.result() for length, job in of.items()} for n, of in jobs.items()}


def lengths_of(most: int) -> list[int]:
    """Return the numbers of tokens to measure at: the powers of two from 1,024 to `most`."""
    return [1024 << i for i in range(32) if 1024 << i <= most]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama3-8b", help="of configs/liger.py")
    parser.add_argument("--models", type=options.names(NAMES), default=",".join(NAMES))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument(
        "--sample_tokens", type=int, default=4096, help="most tokens of a call of `sample`"
    )
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    options.add_seconds(parser, 300, "seconds after which Liger stops decoding")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        dict(
            model=NAMES[name], tokens=length, batch_size=args.batch_size,
            layers=model_config(name, args).num_layers,
        )
        for name in args.models
        for length in lengths_of(args.sample_tokens if "sample" in name else args.tokens)
    ]  # fmt: skip


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    wanted = {case["model"] for case in cases}
    configs = {name: model_config(name, args) for name in args.models if NAMES[name] in wanted}
    for name in [name for name in configs if "sample" in name]:
        config = configs.pop(name)
        for row in sample_rows(name, config, args):
            yield row | dict(batch_size=args.batch_size, layers=config.num_layers)
    for name, models in build_all(configs, args).items():
        config, params = configs[name], None
        params = split_layers(random_params(config))
        if name == "softmax":
            measured = softmax_rows(models, params, args.batch_size)
        else:
            (model,) = models.values()
            measured = liger_rows(model, params, args.batch_size, args.tokens, args.seconds)
        for row in measured:
            yield row | dict(batch_size=args.batch_size, layers=config.num_layers)
        measured = None  # frees its arrays on the device
