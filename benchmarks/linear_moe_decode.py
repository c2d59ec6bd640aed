"""Decoding A0.3B-2B from 1K to 128K tokens: `python -m benchmarks.linear_moe_decode --output docs/linear_moe_decode.jsonl`.

Time and memory of 16 rows (Linear-MoE, arXiv 2503.05447, Figure 5): softmax attention (N), a linear mixer (L) and the hybrid
(LLLN), all with the same experts, random weights, bfloat16. A step is timed at each power of two, with caches that hold so many
tokens and are read no further, updated in place; what decoding needs in all is the sum over its steps, which grow linearly between
those lengths. A linear layer's step is one program at any length. Out of memory is a result. `--report` prints the rows of
`--output` as markdown and draws both.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure

from benchmarks.liger_decode import cut, in_liger, in_softmax, in_use, random_params
from benchmarks.timing import alone, append_row, provenance
from configs import linear_moe
from lsm_jax import ops
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.metrics import read_rows
from lsm_jax.training.step import params_of

MODELS = "softmax:N,linear_attention:L,linear_attention:LLLN"
_STEPS, _CALLS = 16, 4


def letters_of(config: ModelConfig) -> list[str]:
    """The letter of each layer."""
    return list(config.letters())


def decoder(config: ModelConfig) -> Any:
    """(rest, layers, token, states, position) -> the last three after `_STEPS` greedy tokens; states are updated in place."""
    model = abstract(config)
    whole, graphs = nnx.graphdef(model), [nnx.graphdef(b) for b in model.periods.blocks]
    stacked, letters = params_of(model)["periods"], letters_of(config)

    def step(rest, layers, carry):
        token, states, position = carry
        model = nnx.merge(whole, {**rest, "periods": stacked})
        x, after = model.embedding[...][token].astype(model.dtype), []
        for i, (params, state) in enumerate(zip(layers, states, strict=True)):
            block = nnx.merge(graphs[i % len(graphs)], params)
            mix = in_softmax if letters[i] == "N" else in_liger
            y, state = mix(block.mixer, block.mixer_norm(x), state, position)
            x = x + y
            x = x + block.feedforward(block.feedforward_norm(x))[0]
            after.append(state)
        logits = model.logits(model.norm(x))
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), after, position + 1

    def decode(rest, layers, token, states, position):
        def body(carry, _):
            return step(rest, layers, carry), None

        return jax.lax.scan(body, (token, states, position), length=_STEPS)[0]

    return jax.jit(decode, donate_argnums=3)


def states_of(config: ModelConfig, batch: int, length: int) -> list:
    """What each layer remembers at the start: keys and values of `length` tokens, or a memory."""
    blocks, dtype = abstract(config).periods.blocks, jnp.dtype(config.dtype)
    softmax = config.layers["N"].mixer

    def of(i, letter):
        if letter != "N":
            return blocks[i % len(blocks)].mixer.init_state(batch, length, dtype)
        shape = batch, softmax.kv_heads(), length, softmax.dim(config.hidden_size)
        return tuple(jnp.zeros(shape, dtype) for _ in "kv")

    return [of(i, letter) for i, letter in enumerate(letters_of(config))]


def rows_of(config: ModelConfig, batch: int, tokens: int, take: Any):
    """Time steps at each power of two; a row each, with the sum of all steps up to there."""
    rest, layers = cut(random_params(config))
    lengths = [1024 << i for i in range(32) if 1024 << i <= tokens]
    grows = "N" in letters_of(config)

    def build(length):
        states = jax.eval_shape(lambda: states_of(config, batch, length))
        token = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
        position = jax.ShapeDtypeStruct((), jnp.int32)
        return decoder(config).lower(rest, layers, token, states, position).compile()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # all before any is timed
        built = list(pool.map(build, lengths if grows else lengths[:1]))
    take()
    found: dict[int, dict[str, Any]] = {}
    # The longest first, whose caches the allocator would else find no whole room for.
    for i, length in reversed(list(enumerate(lengths))):
        carry = None
        try:
            decode = built[i if grows else 0]
            made = jax.jit(lambda length=length: states_of(config, batch, length))()
            carry = jnp.zeros((batch, 1), jnp.int32), made, jnp.int32(length - _CALLS * _STEPS)
            del made
            times = []
            for _ in range(_CALLS):  # the first warms up
                began = time.perf_counter()
                carry = jax.block_until_ready(decode(rest, layers, *carry))
                times.append((time.perf_counter() - began) / _STEPS)
            size = sum(x.nbytes for x in jax.tree.leaves(carry[1]))
            more = dict(state_gib=round(size / 2**30, 3), in_use_gib=in_use())
            found[length] = dict(step=min(times[1:])) | more
        except Exception as error:  # out of memory is a result
            found[length] = dict(error=str(error).splitlines()[0][:200])
    last, total = None, 0.0
    for length in lengths:
        row = found[length]
        if "error" in row:
            yield dict(tokens=length, **row)
            return
        step = row.pop("step")
        before, step_before = last or (0, step)
        total += (length - before) * (step + step_before) / 2
        last = (length, step)
        times = dict(seconds=round(total, 3), ms_a_token=round(1e3 * step, 3))
        yield dict(tokens=length, **times, **row)


def report(path: Path) -> str:
    """The rows as markdown, and time and memory by length beside them as a picture."""
    made: dict[str, dict[int, dict]] = {}
    for r in read_rows(path):
        made.setdefault(_name(r), {})[r["tokens"]] = r
    lengths = sorted({n for rows in made.values() for n in rows})
    lines = ["| model | " + " | ".join(f"{n // 1024}K" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]  # fmt: skip
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, rows in made.items():
        cells = []
        for n in lengths:
            r = rows.get(n, {})
            cells.append("out of memory" if "error" in r else f"{r['seconds']:.1f} s, {r['ms_a_token']:.2f} ms, {r['in_use_gib']:.1f} GiB" if r else "")  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        good = [r for _, r in sorted(rows.items()) if "error" not in r]
        for axes, key in zip(panels, ("seconds", "in_use_gib"), strict=True):
            axes.plot([r["tokens"] for r in good], [r[key] for r in good], "o-", label=name)
    for axes, label in zip(panels, ("seconds in all", "GiB on the card"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens decoded, 16 rows", ylabel=label, yscale="log")
    panels[0].legend()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    return "\n".join(lines)


def _name(row: dict) -> str:
    if row["pattern"] == "N":
        return "softmax attention"
    return row["mixer"] + (", hybrid" if "N" in row["pattern"] else ", pure")


def main() -> None:
    """Print a row a model and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="a0.3b-2b", help="of configs/linear_moe.py")
    parser.add_argument("--models", default=MODELS, help="mixer:pattern, ...")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("docs/linear_moe_decode.jsonl"))
    parser.add_argument(
        "--lock", type=Path, help="a file, for processes that compile side by side and time in turn"
    )
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        print(report(args.output))
        return
    held = contextlib.ExitStack()  # until this process ends
    take = functools.cache(lambda: held.enter_context(alone(args.lock)))
    for model in args.models.split(","):
        mixer, pattern = model.split(":")
        config = linear_moe.get_config(f"{args.size},mixer={mixer},pattern={pattern}").model
        about = dict(mixer=mixer, pattern=pattern, batch_size=args.batch_size, size=args.size)
        for row in rows_of(config, args.batch_size, args.tokens, take):
            row = about | row | dict(implementations=ops.choices()) | provenance()
            print(json.dumps(row), flush=True)
            append_row(args.output, row)


if __name__ == "__main__":
    main()
