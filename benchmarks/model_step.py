"""A whole model's forward and backward: `python -m benchmarks.model_step [--variants gla-340m,...] [--lengths 2048,4096,8192,16384]`.

Tokens/s at equal tokens a step (`--tokens`), whatever the length of a row: first the gradient of the loss alone, the work that
peers are timed at, then the training step with its optimizer, donated state and checks. bfloat16 activations over float32 parameters, no
rematerialisation by default. Processes of one variant each may compile side by side and use the card in turn (`--lock FILE`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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


def measure(variant: str, args: argparse.Namespace) -> None:
    """A row a length, printed and appended as soon as it is known."""
    config = lm.get_config(variant)
    config.model.vocab_size, config.model.remat = args.vocab_size, args.remat
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    place = token_sharding(mesh)
    with jax.set_mesh(mesh):
        program, gradient = make_program(config, mesh), gradient_of(config)
        state = jax.eval_shape(program.init)
        lowered = [program.init.lower()]
        for length in args.lengths:
            shape = (args.tokens // length, length)
            tokens, mask = (
                jax.ShapeDtypeStruct(shape, kind, sharding=place) for kind in (np.int32, np.float32)
            )
            batch = dict(tokens=tokens, labels=tokens, loss_mask=mask)
            lowered += [gradient.lower(state.params, batch), program.train_step.lower(state, batch)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            init, *compiled = pool.map(lambda stage: stage.compile(), lowered)
        with alone(args.lock):
            state = init()
            for i, length in enumerate(args.lengths):
                shape = (args.tokens // length, length)
                tokens = np.random.default_rng(0).integers(
                    0, args.vocab_size, shape, dtype=np.int32
                )
                batch = dict(tokens=tokens, labels=tokens, loss_mask=np.ones(shape, np.float32))
                batch = jax.device_put(batch, place)
                row: dict = {"variant": variant, "rows": shape[0], "length": length}
                try:
                    grads, step = compiled[2 * i : 2 * i + 2]
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
                row |= dict(remat=args.remat, implementations=ops.choices(), **provenance())
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
    parser.add_argument("--remat", default="none")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lock", type=Path, help="a file whose holder alone uses the card")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    if wrong := [n for n in args.lengths if n < 1 or args.tokens % n]:
        parser.error(f"--lengths={wrong}: accepted are divisors of --tokens={args.tokens}")
    for variant in args.variants:
        measure(variant, args)


if __name__ == "__main__":
    main()
