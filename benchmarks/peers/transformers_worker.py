"""Time a released model's shapes in Hugging Face's transformers, with random weights in bfloat16: `python -m
benchmarks.peers.transformers_worker JSON`, started by the benchmark `released_models` as a process of its own.

JSON has `fields` (of config.json), `rows`, `lengths` (of prompts), `piece` (tokens of a prompt that one call reads) and `tokens` (to
decode). A line with a JSON object is printed for each length, or an object with `error`. transformers calls the kernels of
flash-linear-attention and causal-conv1d where these packages are installed. Decoding is a loop in Python, as `generate` has it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

import torch
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(fields: dict[str, Any]) -> Any:
    """Return a model of random weights on the device, given the fields of its config.json."""
    given = {name: value for name, value in fields.items() if name not in ("model_type", "dtype")}
    config = transformers.AutoConfig.for_model(fields["model_type"], **given)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def synchronize() -> None:
    """Wait until the device has computed everything."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Return the largest device memory since the last reset, in GiB; 0 on a CPU."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if DEVICE == "cuda" else 0.0


@torch.inference_mode()
def measure(model: Any, rows: int, length: int, piece: int, count: int) -> dict[str, Any]:
    """Return the times of reading prompts of `length` tokens in pieces, and of decoding `count` tokens after them."""
    prompt = torch.randint(0, model.config.vocab_size, (rows, length), device=DEVICE)

    def read(tokens: Any, past: Any, first: int) -> tuple[Any, Any]:
        places = torch.arange(first, first + tokens.shape[1], device=DEVICE)[None]
        output = model(
            tokens, past_key_values=past, use_cache=True, logits_to_keep=1, position_ids=places.expand(rows, -1)
        )  # fmt: skip
        return output.logits[:, -1:].argmax(-1), output.past_key_values

    def prefill() -> tuple[float, Any, Any]:
        synchronize()
        began, past, token = time.perf_counter(), None, None
        for first in range(0, length, piece):
            token, past = read(prompt[:, first : first + piece], past, first)
        synchronize()
        return time.perf_counter() - began, token, past

    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prefill()  # a warm-up, in which kernels are compiled
    seconds, token, past = prefill()
    place, decoding = length, 0.0
    for calls in (min(count, 8), count):  # the first is a warm-up
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            token, past = read(token, past, place)
            place += 1
        synchronize()
        decoding = (time.perf_counter() - began) / calls
    return dict(
        prefill_ms=round(1e3 * seconds, 2),
        prefill_tokens_per_second=round(rows * length / seconds),
        decode_ms=round(1e3 * decoding, 3),
        decode_tokens_per_second=round(rows / decoding, 1),
        gib=peak_gib(),
        piece=piece,
    )


def main(text: str) -> None:
    """Measure what the JSON object `text` describes."""
    asked = json.loads(text)
    model = build(asked["fields"])
    packages = {
        name: importlib.util.find_spec(name) is not None for name in ("fla", "causal_conv1d", "mamba_ssm")
    }  # fmt: skip
    about = dict(
        parameters=sum(p.numel() for p in model.parameters()), transformers=transformers.__version__, torch=torch.__version__,
        packages=[name for name, found in packages.items() if found],
    )  # fmt: skip
    for length in asked["lengths"]:
        try:
            piece = min(length, asked["piece"])
            row = measure(model, asked["rows"], length, piece, asked["tokens"])
        except Exception as error:  # out of memory is a result
            row = dict(error=f"{type(error).__name__}: {str(error)[:200]}")
        print(json.dumps(dict(tokens=length) | about | row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
