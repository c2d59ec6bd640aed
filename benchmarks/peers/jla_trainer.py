"""The trainer of jax-linear-attention: its speed at 1.3B, on random tokens, measured by its own log.

The package is `jax-linear-attention==0.1.0`, installed without its dependencies, with equinox, jaxtyping, wadler-lindig and
safetensors.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from configs import lm
from lsm_jax.models import ModelConfig

HEADS_OF_128 = "num_heads=16,head_dim=128,expand_v=1.0"
"""The fields of Gated DeltaNet's config with the peer's other shape of heads, as of `model_step --mixer`."""

PRESETS = {
    "softmax-1.3b": "transformer-1p3b",
    "gla-1.3b": "kda-1p3b",
    "gated_deltanet-1.3b": "gdn-1p3b",
    f"gated_deltanet-1.3b {HEADS_OF_128}": "gdn-hd128-1p3b",
    "kda-1.3b": "kda-1p3b",
    "mamba2-1.3b": "mamba2-1p3b",
    "rwkv7-1.3b": "rwkv7-1p3b",
}
"""The peer's model of the same method and size, by the variant of `configs/lm.py` and the fields of its mixers that `model_step --mixer` sets
(`name_of`). It has no preset of GLA: that is `TABLES` on one of its presets."""

_LAYERS = ", ".join(['"gla"'] * 24)
TABLES = {
    "gla-1.3b": f"""layer_types = [{_LAYERS}]
[model.linear_attention]
num_k_heads = 4
num_v_heads = 4
head_k_dim = 256
head_v_dim = 512
conv_size = 0
qk_l2norm = false
gate_low_rank_dim = 16
"""
}
"""The text of the peer's config of a model besides its preset: its GLA of 125M (`gla-125m`) with heads of our sizes, on the widths and all other
fields of its preset of KDA."""

SIZES: dict[str, dict[str, Any]] = {
    "softmax-1.3b": dict(num_heads=32, num_kv_heads=8),
    "gla-1.3b": {},
    "gated_deltanet-1.3b": dict(num_layers=21),
    f"gated_deltanet-1.3b {HEADS_OF_128}": dict(num_heads=16, head_dim=128, expand_v=1.0),
    "kda-1.3b": {},
    "mamba2-1.3b": {},
    "rwkv7-1.3b": dict(decay_rank=64, rate_rank=64, value_rank=16, gate_rank=128),
}
"""The sizes of the peer's models that differ from ours: of the model or of its mixer, by the fields of our configs."""

STEPS, WINDOW = 24, 4  # steps of a run; the log has one speed for each window

_CONFIG = """
[model]
preset = "{preset}"
vocab_size = {vocab_size}
remat = "{remat}"
{lines}
[train]
max_steps = {steps}
seq_len = {length}
micro_batch_per_replica = {rows}
log_every = {window}
eval_every = 0
final_eval = false
save_final = false
resume = "never"
output_dir = "{folder}/run"
ce_impl = "auto"
ce_grad_in_forward = true
dispatch_ahead = true
update_guard = "select"
[data]
source = "synthetic"
synthetic_samples = 512
"""


def name_of(case: dict[str, Any]) -> str:
    """Return the key of a case's model in `PRESETS`: its variant, and the fields of its mixers if it sets some."""
    return f"{case['variant']} {case.get('mixer', '')}".strip()


def model_config(name: str) -> ModelConfig:
    """Return our config of a model with the sizes of the peer's model that `name_of` names, of which `counts` can count the operations."""
    config = lm.get_config(name.partition(" ")[0]).model
    mixer = config.layers["L"].mixer
    for field, size in SIZES[name].items():
        owner = config if hasattr(config, field) else mixer
        if not hasattr(owner, field):
            raise AttributeError(f"{name}: neither the model nor its mixer has a field {field}")
        setattr(owner, field, size)
    config.validate()
    return config


def missing() -> str | None:
    """Return the name of a module that the peer requires and that is not installed, or None."""
    found = importlib.util.find_spec
    return next((name for name in ("jla", "equinox") if found(name) is None), None)


def config_text(case: dict[str, Any], *, remat: str, fp8: bool, folder: str) -> str:
    """Return the text of the peer's config, in TOML, for a run with the arguments of `train_speed`, whose files are in `folder`."""
    policy, *fields = remat.split("+")
    lines = ['fp8 = "delayed"'] * fp8 + [f"{field} = true" for field in fields]
    lines.append(TABLES.get(name_of(case), ""))
    return _CONFIG.format(
        preset=PRESETS[name_of(case)], vocab_size=case["vocab_size"], remat=policy, lines="\n".join(lines), folder=folder,
        steps=STEPS, window=WINDOW, length=case["length"], rows=case["rows"],
    )  # fmt: skip


def train_speed(case: dict[str, Any], *, remat: str, fp8: bool, patience: float) -> dict[str, Any]:
    """Train the peer's model of a case for a few steps, and return the fields of its row: tokens/s and the time of a step (the median
    over windows of steps after the first two), its own count of MFU in percent, or `error`.

    Args:
        case: variant, rows, length and vocab_size, and mixer if its mixers have other fields.
        remat: the peer's word for what its backward pass computes again, such as "dots", and after each + a field of its model's config
            that is set, such as lean_vjp in "none+lean_vjp".
        fp8: whether its products are in FP8.
        patience: seconds after which the run is ended.
    """
    if name := missing():
        return {"error": f"ModuleNotFoundError: {name}"}
    with tempfile.TemporaryDirectory() as folder:
        text = config_text(case, remat=remat, fp8=fp8, folder=folder)
        path = Path(folder) / "config.toml"
        path.write_text(text)
        command = [sys.executable, "-m", "jla.cli", "train", "--config", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {patience:g} s"}
        lines = [x for file in Path(folder).rglob("*.jsonl") for x in file.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    logged = [row.get("metrics", row) for row in rows]
    windows = [row for row in logged if "tokens_per_sec" in row][2:]
    if done.returncode or not windows:
        return {"error": (done.stderr or done.stdout)[-300:]}
    speed, seconds, mfu = (
        float(np.median([row[name] for row in windows]))
        for name in ("tokens_per_sec", "step_time", "mfu_percent")
    )
    return {
        "tokens_per_second": round(speed),
        "milliseconds": round(1e3 * seconds, 2),
        "own_mfu_percent": round(mfu, 2),
        "loss": round(windows[-1]["loss"], 4),
    }
