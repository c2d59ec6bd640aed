"""Decoding keeps its pace and its memory: `python -m benchmarks.decode [--methods gla,softmax] [--output decode.jsonl]`.

Two layers of each method decode 4,096 tokens one by one. A row a method: the median time of a token among the first 512 and
among the last 512, and the state's bytes before and after. Softmax attention's state has room for all 4,096 from the start.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.timing import append_row, provenance
from lsm_jax import mixers, models

TOKENS, WINDOW = 4096, 512


def decode(method: str, tokens: int = TOKENS, window: int = WINDOW) -> dict:
    """Decode `tokens` greedily from a fresh state with a small model of two layers of `method`."""
    config = models.lm(method, "tiny", vocab_size=256)
    config.num_layers, config.dtype = 2, "float32"
    model = models.Decoder(config, rngs=nnx.Rngs(0))

    @jax.jit
    def step(model, token, state):
        logits, state, _ = model(token, state=state)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), state

    def size(state):
        return sum(x.nbytes for x in jax.tree.leaves(state))

    state = model.init_state(1, tokens)
    token, before, times = jnp.zeros((1, 1), jnp.int32), size(state), []
    for _ in range(tokens):
        began = time.perf_counter()
        token, state = jax.block_until_ready(step(model, token, state))
        times.append(time.perf_counter() - began)
    first, last = np.median(times[1 : window + 1]), np.median(times[-window:])
    return dict(
        method=method,
        first_ms=round(1e3 * float(first), 4),
        last_ms=round(1e3 * float(last), 4),
        state_bytes_before=before,
        state_bytes_after=size(state),
        programs=step._cache_size(),
        tokens=tokens,
    )


def main() -> None:
    """Print a row a method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(mixers.METHODS))
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    for method in args.methods.split(","):
        row = decode(method) | provenance()
        print(json.dumps(row), flush=True)
        if args.output:
            append_row(args.output, row)


if __name__ == "__main__":
    main()
