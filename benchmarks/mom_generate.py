"""Generating after long contexts: `python -m benchmarks.mom_generate --output docs/mom_generate.jsonl`.

A model of `configs/mom.py` and the same with softmax attention, random weights in bfloat16, generate 1,024 tokens after contexts of
4,096 to 131,072. MoM reads its context first, in pieces; softmax attention's cache has room for the context and what is generated,
no more, is updated in place and read no further (what it holds does not change its time, so it holds zeros). A row a model and
context: seconds of the 1,024 tokens alone, bytes of the state, and all bytes the compiled program needs, parameters included.
`--report` prints the rows as markdown and draws time and memory by context.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.liger_decode import cut, decoder, in_liger, in_softmax, random_params
from benchmarks.timing import alone, append_row, program_bytes, provenance
from configs import mom
from lsm_jax import mixers
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.metrics import read_rows

_COUNT = 256  # tokens a call


def model_configs(size: str, layers: int | None) -> dict[str, ModelConfig]:
    """Both models."""
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
    """Seconds to generate `new` tokens from `states`, which are used up."""
    carry = jnp.zeros((len(jax.tree.leaves(states)[0]), 1), jnp.int32), states, jnp.int32(begin)
    jax.block_until_ready(carry)
    began = time.perf_counter()
    for _ in range(new // _COUNT):
        carry = compiled(rest, layers, *carry)
    jax.block_until_ready(carry)
    return time.perf_counter() - began


def row(model: str, context: int, seconds: float, states: Any, compiled: Any, new: int) -> dict:
    """What is written of one measurement."""
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
    """Read on to each context, and generate from a copy of the state there."""
    params = random_params(config)
    rest, layers = cut(params)
    graph = nnx.graphdef(abstract(config))

    def read(params, state, tokens):
        return nnx.merge(graph, params).hidden(tokens, state=state)[1]

    @jax.jit
    def split(state):
        ((own, _),) = state.layers
        return [jax.tree.map(lambda s, i=i: s[i], own) for i in range(config.num_layers)]

    state = nnx.merge(graph, params).init_state(batch, contexts[-1])
    tokens = jax.ShapeDtypeStruct((batch, piece), jnp.int32)
    read = jax.jit(read, donate_argnums=1).lower(params, state, tokens).compile()
    token = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    position = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = jax.eval_shape(split, state)
    compiled = decoder(config, _COUNT, in_liger).lower(rest, layers, token, shapes, position)
    compiled = compiled.compile()
    generate(compiled, rest, layers, split(state), 0, new)  # warm
    done, spent = 0, 0.0
    for context in contexts:
        tokens = jax.random.randint(jax.random.key(context), (batch, piece), 0, config.vocab_size)
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
        yield row("MoM", context, seconds, size, compiled, new) | dict(
            reading_seconds=round(spent, 2)
        )


def softmax_rows(config: ModelConfig, batch: int, contexts: list[int], new: int, lock: Path | None):
    """A program for each context, since its cache has that size."""
    rest, layers = cut(random_params(config))
    mixer = config.layers["L"].mixer
    decode = decoder(config, _COUNT, in_softmax)

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
                for _ in range(2):  # the first warms up
                    states = cache(context, jnp.zeros)
                    size = sum(x.nbytes for x in jax.tree.leaves(states))
                    seconds = generate(compiled, rest, layers, states, context, new)
        except Exception as error:  # out of memory is a result
            yield dict(model="softmax", context=context, error=str(error).splitlines()[0][:200])
            return
        yield row("softmax", context, seconds, size, compiled, new)


def report(path: Path) -> str:
    """The rows as markdown, and beside them time and memory by context as a picture."""
    from matplotlib.figure import Figure

    from lsm_jax.evaluation.plots import COLOURS

    rows = read_rows(path)
    lines = [
        "| model | rows | context | seconds for 1,024 tokens | ms a token | state, MiB | all memory, GiB | date, commit |",
        "|---" * 8 + "|",
    ]
    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['model']} | {r['batch_size']} | {r['context']:,} | {r['error']} |" + " |" * 4)  # fmt: skip
            continue
        lines.append(
            f"| {r['model']} | {r['batch_size']} | {r['context']:,} | {r['seconds']:.2f} | {r['ms_a_token']:.2f} | "
            f"{r['state_bytes'] / 2**20:,.0f} | {r['program_bytes'] / 2**30:.2f} | {r['date']}, {r['commit']} |"
        )
    kinds = list(dict.fromkeys((r["model"], r["batch_size"]) for r in rows))
    names = list(dict.fromkeys(model for model, _ in kinds))
    batches = list(dict.fromkeys(batch for _, batch in kinds))
    for model, batch in kinds:
        own = [r for r in rows if (r["model"], r["batch_size"]) == (model, batch) and "seconds" in r]  # fmt: skip
        style = dict(
            color=COLOURS[names.index(model)], marker="o", label=f"{model}, {batch} rows",
            linestyle=("-", "--", ":")[batches.index(batch) % 3],
        )  # fmt: skip
        places = [r["context"] for r in own]
        left.plot(places, [r["seconds"] for r in own], **style)
        right.plot(places, [r["program_bytes"] / 2**30 for r in own], **style)
    for axes, label in ((left, "seconds for 1,024 tokens"), (right, "memory, GiB")):
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="context, tokens", ylabel=label)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path.with_suffix(".png"))
    return "\n".join(lines)


def main() -> None:
    """Print a row a model and context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="340m", help="of configs/mom.py")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--contexts", default="4096,8192,16384,32768,65536,131072")
    parser.add_argument("--piece_length", type=int, default=4096, help="a divisor of all contexts")
    parser.add_argument("--tokens", type=int, default=1024, help="to generate; a multiple of 256")
    parser.add_argument("--models", default="MoM,softmax")
    parser.add_argument("--lock", type=Path, help="a file, for processes on one device")
    parser.add_argument("--output", type=Path, default=Path("docs/mom_generate.jsonl"))
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        print(report(args.output))
        return
    contexts = sorted(int(n) for n in args.contexts.split(","))
    if any(n % args.piece_length for n in contexts) or args.tokens % _COUNT:
        parser.error(
            f"contexts {contexts} must be multiples of {args.piece_length}, tokens={args.tokens} of {_COUNT}"
        )
    configs = model_configs(args.size, args.layers)
    for name in args.models.split(","):
        config = configs[name]
        about = dict(size=args.size, layers=config.num_layers, batch_size=args.batch_size)
        about |= provenance()
        if name == "MoM":
            found = mom_rows(
                config, args.batch_size, contexts, args.piece_length, args.tokens, args.lock
            )
        else:
            found = softmax_rows(config, args.batch_size, contexts, args.tokens, args.lock)
        for r in found:
            print(json.dumps(r | about), flush=True)
            append_row(args.output, r | about)


if __name__ == "__main__":
    main()
