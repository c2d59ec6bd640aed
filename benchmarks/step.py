"""What a training step costs beside its arithmetic: `python -m benchmarks.step [--variant gated_deltanet-10m] [--long]`.

Prints the host's time to dispatch the step's arguments (`dispatch_ms`), to hand the whole step to an idle device, transfer
and kernel launches included (`host_ms`), the time of the step, and peak memory. `--long` takes one document of 65,536 tokens and a vocabulary of 50,257, whose logits alone
would be 13.2 GB in float32.
"""

from __future__ import annotations

import argparse
import json
import time

import jax
import numpy as np

from benchmarks.timing import provenance
from configs import lm
from lsm_jax.parallel import batch_sharding, make_mesh
from lsm_jax.training import make_program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="gated_deltanet-10m")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", help="write the figures as JSON")
    args = parser.parse_args()
    config = lm.get_config(args.variant)
    if args.long:
        config.model.vocab_size, config.batch_size, config.data.sequence_length = 50257, 1, 65536
    else:
        config.model.remat = "none"
    mesh = make_mesh(config.mesh)
    rng = np.random.default_rng(0)
    shape = (config.batch_size, config.data.sequence_length)
    tokens = rng.integers(0, config.model.vocab_size, size=shape, dtype=np.int32)
    batch = dict(tokens=tokens, labels=tokens, loss_mask=np.ones(shape, np.float32))
    rows = batch_sharding(mesh)
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        state = program.init()
        began = time.perf_counter()
        compiled = program.train_step.lower(state, jax.device_put(batch, rows)).compile()
        compile_seconds = time.perf_counter() - began
        memory = compiled.memory_analysis()
        # Flattening, checking and donating the arguments of a step, with nothing to compute.
        nothing = jax.jit(lambda state, batch: (state, batch), donate_argnums=(0, 1))
        placed, dispatch = jax.device_put(batch, rows), []
        for _ in range(args.steps):
            began = time.perf_counter()
            state, placed = nothing(state, placed)
            dispatch.append(time.perf_counter() - began)
            jax.block_until_ready((state, placed))
        host, whole = [], []
        for _ in range(args.steps):
            began = time.perf_counter()
            state, metrics = program.train_step(state, jax.device_put(batch, rows))
            host.append(time.perf_counter() - began)
            jax.block_until_ready((state, metrics))
            whole.append(time.perf_counter() - began)
    stats = jax.devices()[0].memory_stats() or {}
    found = {
        **provenance(),
        "variant": args.variant,
        "tokens": int(np.prod(shape)),
        "vocab_size": config.model.vocab_size,
        "compile_s": round(compile_seconds, 1),
        "dispatch_ms": round(1e3 * float(np.median(dispatch[2:])), 3),
        "host_ms": round(1e3 * float(np.median(host[2:])), 3),
        "step_ms": round(1e3 * float(np.median(whole[2:])), 3),
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 3),
        "peak_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 3) or None,
        "whole_logits_gib": round(4 * np.prod(shape) * config.model.vocab_size / 2**30, 3),
    }
    print(json.dumps(found, indent=1))
    if args.output:
        with open(args.output, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
