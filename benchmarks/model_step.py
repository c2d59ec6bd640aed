"""A whole model's forward and backward: `python -m benchmarks.model_step [--variants gla-340m,...] [--lengths 2048,4096,8192,16384]`.

Tokens/s at equal tokens a step (`--tokens`), whatever the length of a row: first the gradient of the loss alone, the work that
peers are timed at, then the training step with its optimizer, donated state and checks, and the seconds that its tracing and its
compiling took beside the others'. bfloat16 activations over float32 parameters. `--remat dots` by default: without, a layer's
float32 elementwise steps are kept for the backward, 202 GiB for Mamba2 and 113 for Gated DeltaNet at 32,768 tokens.
Processes of one variant each may compile side by side and use the card in turn (`--lock FILE`). `--peers fla` times the gradient of
flash-linear-attention's model of the same proportions after all is compiled (see `benchmarks.fla`), at the size it is written for: 340m, a vocabulary of 32,000.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants room

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.fla import Fla
from benchmarks.timing import alone, append_row, program_bytes, provenance
from configs import lm
from lsm_jax import ops
from lsm_jax.models import abstract, next_token_loss
from lsm_jax.parallel import make_mesh, token_sharding
from lsm_jax.training import make_program


def gradient_of(config):
    """The mean loss of a batch and its gradient by every parameter."""
    graph = nnx.graphdef(abstract(config.model))

    def loss(params, batch):
        model = nnx.merge(graph, params)
        hidden, _, _ = model.hidden(batch["tokens"])
        nll = next_token_loss(
            hidden,
            model.head(),
            batch["labels"],
            batch["loss_mask"],
            chunk_size=config.model.loss_chunk_size,
        )
        return jnp.sum(nll) / batch["tokens"].size

    return jax.jit(jax.value_and_grad(loss))


def median_seconds(call, steps: int) -> float:
    times = []
    for _ in range(2 + steps):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return float(np.median(times[2:]))


def _compiled(stage):
    """The program, and the seconds of its tracing, as given, and of its compiling."""
    lowered, traced = stage
    began = time.perf_counter()
    return lowered.compile(), (traced, time.perf_counter() - began)


def _ask(peer: Fla, cases: list[tuple[str, str]], args: argparse.Namespace) -> list[dict]:
    """The peer's rows."""
    peer.wait(args.patience)
    with alone(args.lock):
        rows = [peer.times(*case) for case in cases]
    peer.close()
    return rows


def measure(variant: str, args: argparse.Namespace) -> None:
    """A row a length, printed and appended as soon as it is known."""
    shapes = [(args.tokens // length, length) for length in args.lengths]
    cases = [(f"model {variant.rpartition('-')[0]}", f"{b}x{t}") for b, t in shapes]
    peer = Fla(cases, args.workers) if "fla" in args.peers else None
    config = lm.get_config(variant)
    config.model.vocab_size, config.model.remat = args.vocab_size, args.remat
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    place = token_sharding(mesh)
    with jax.set_mesh(mesh):
        program, gradient = make_program(config, mesh), gradient_of(config)
        state = jax.eval_shape(program.init)
        stages = [(program.init.lower(), 0.0)]
        for shape in shapes:
            tokens, mask = (
                jax.ShapeDtypeStruct(shape, kind, sharding=place) for kind in (np.int32, np.float32)
            )
            batch = dict(tokens=tokens, labels=tokens, loss_mask=mask)
            for call, first in (gradient, state.params), (program.train_step, state):
                began = time.perf_counter()
                stages.append((call.lower(first, batch), time.perf_counter() - began))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            (init, _), *compiled = pool.map(_compiled, stages)
        if args.compile_only:
            found = [[round(s, 1) for s in seconds] for _, seconds in compiled]
            print(json.dumps(dict(variant=variant, trace_and_compile_seconds=found)), flush=True)
            if peer is not None:
                peer.wait(args.patience)
                peer.close()
            return
        theirs = _ask(peer, cases, args) if peer else [{}] * len(cases)
        with alone(args.lock):
            state = init()
            for i, shape in enumerate(shapes):
                tokens = np.random.default_rng(0).integers(
                    0, args.vocab_size, shape, dtype=np.int32
                )
                batch = dict(tokens=tokens, labels=tokens, loss_mask=np.ones(shape, np.float32))
                batch = jax.device_put(batch, place)
                row: dict = {"variant": variant, "rows": shape[0], "length": shape[1]}
                try:
                    (grads, _), (step, seconds) = compiled[2 * i : 2 * i + 2]
                    row["trace_and_compile_seconds"] = [round(s, 1) for s in seconds]
                    seconds = median_seconds(
                        functools.partial(grads, state.params, batch), args.steps
                    )
                    row["gradient_tokens_per_second"] = round(args.tokens / seconds)

                    def train():
                        nonlocal state
                        state, metrics = step(state, batch)  # noqa: B023
                        return metrics

                    seconds = median_seconds(train, args.steps)
                    row["step_tokens_per_second"] = round(args.tokens / seconds)
                    row["gib"] = round(program_bytes(step) / 2**30, 1)
                except jax.errors.JaxRuntimeError as error:  # the other lengths may fit
                    row["error"] = str(error)[:200]
                    state = init()
                row |= theirs[i] | dict(
                    remat=args.remat, implementations=ops.choices(), **provenance()
                )
                print(json.dumps(row), flush=True)
                if args.output:
                    append_row(args.output, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--variants",
        default="gla-340m,gated_deltanet-340m,mamba2-340m",
        type=lambda text: text.split(","),
    )
    parser.add_argument(
        "--lengths",
        default=[2048, 4096, 8192, 16384],
        type=lambda text: [int(length) for length in text.split(",")],
    )
    parser.add_argument("--tokens", type=int, default=32768, help="a step")
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--remat", default="dots", help="none, dots or full")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peers", default="", help="fla")
    parser.add_argument(
        "--workers", type=int, default=6, help="processes that compile FLA's kernels"
    )
    parser.add_argument("--patience", type=float, default=300, help="seconds that they may take")
    parser.add_argument("--compile_only", action="store_true", help="fill the caches, time nothing")
    parser.add_argument("--lock", type=Path, help="a file whose holder alone uses the card")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    others = [v for v in args.variants if not v.endswith("-340m")]
    if args.peers and (others or args.vocab_size != 32000):
        parser.error(
            f"--peers has models of 340m and a vocabulary of 32000, not {others or args.vocab_size}"
        )
    if wrong := [n for n in args.lengths if n < 1 or args.tokens % n]:
        parser.error(f"--lengths={wrong}: accepted are divisors of --tokens={args.tokens}")
    for variant in args.variants:
        measure(variant, args)


if __name__ == "__main__":
    main()
