"""Multi-query associative recall of every method: `--config=configs/mqar.py:<method>[,width=64][,suite=64x4][,steps=2]`.

Reproduces: zoology's suite (github.com/HazyResearch/zoology at d88d6f5, `original_mqar_configs.py`), on which delta-rule and gated
methods are compared. `suite=published` is the complete suite: lengths 64 to 256 in training, up to 1,024 with 256 pairs in the
test, widths 64, 128 and 256. `suite=64x4`, the default, is its easiest part; `suite=tiny` runs for seconds on a CPU.
`steps` are the steps a token of Gated DeltaProduct.
Command: python train.py --config=configs/mqar.py:gated_deltanet,width=64,suite=published --workdir=runs/mqar_gdn
Hardware: one GPU for minutes, for 64x4 less than one. `python -m benchmarks recall_table` runs many methods and widths in one process.
Expected: see docs/results/recall.md.

The method `mom` is a Mixture-of-Memories with the config of `gated_deltanet` inside. Its ablations are flags such as
`--config.model.mixer.num_memories=8`; `gated_deltanet --config.model.mixer.expand_v=10` is a single memory with as large a state.
`python -m benchmarks mom_recall` trains all of them at a size that is difficult for a single small memory.

Settings as published: two layers, [a gated convolution of 3 tokens, the method], no feedforward and no positions, tied
embeddings, a vocabulary of 8,192, AdamW with weight decay 0.1, no warm-up or clipping, a cosine over 32 epochs, batches of 256,
the best of four learning rates, two heads.

Different from the published settings: RMS norms instead of layer norms; no dropout (theirs: 0.1 on embeddings and in
attention); no weight decay of norms, biases and convolutions; rotary positions in softmax attention, TTT and the retentions, of
which they are a fixed part here; an output gate in Gated DeltaNet; the cosine falls in each step, not each epoch; up to six
consecutive batches have the same length. All arrays are float32, and products have full precision except for the head's, which
are TF32 on NVIDIA.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from configs.variants import Option, parse_variant
from lsm_jax import mixers
from lsm_jax.data import RecallTask
from lsm_jax.models import RecallModelConfig
from lsm_jax.training import RecallConfig


def _tasks(text: str) -> tuple[RecallTask, ...]:
    """Parse the tasks of a recall suite: words "<length in tokens>x<key-value pairs>:<number of examples>",
    separated by spaces.
    """
    parts = [[int(x) for x in item.replace("x", ":").split(":")] for item in text.split()]
    return tuple(RecallTask(length=t, num_pairs=p, num_examples=n) for t, p, n in parts)


# Fields of each suite; other fields have the defaults of `RecallConfig`.
SUITES: dict[str, dict[str, Any]] = {
    "64x4": dict(
        train=_tasks("64x4:100000"),
        test=_tasks("64x4:1000"),
        epochs=16,
        steps_per_call=78,
    ),
    "published": dict(
        train=_tasks("64x4:100000 128x8:20000 256x16:20000 256x32:20000 256x64:20000"),
        test=_tasks(
            "64x4:1000 64x8:1000 64x16:1000 128x32:1000 256x64:1000 512x128:1000 1024x256:1000"
        ),
    ),
    "tiny": dict(
        train=_tasks("32x2:8192"),
        test=_tasks("32x2:512"),
        epochs=20,
        batch_size=64,
        learning_rates=(10**-2.5, 1e-2),
        steps_per_call=64,
    ),
}


def published(method: str, width: int) -> dict[str, Any]:
    """Return the fields of the config of the mixer `method` in which zoology's settings differ from our
    presets; empty if zoology does not have the method.

    At width 64, zoology's RWKV7 has one head of 64 channels. Its Mamba2 has heads of 64 and 8, 16 or 24 state
    channels; here 16.
    """
    return {
        "gla": dict(num_heads=2),
        "mamba2": dict(head_dim=64, state_size=16),
        "deltanet": dict(num_heads=2, output_gate=False),
        "gated_deltanet": dict(num_heads=2, head_dim=width // 2, expand_v=2.0),
        "rwkv7": dict(head_dim=64, norm_eps=64e-5, decay_rank=16, rate_rank=16, value_rank=16, gate_rank=64),
        "softmax": dict(num_heads=1, implementation="xla"),
    }.get(method, {})  # fmt: skip


def mixer_config(method: str, width: int) -> Any:
    """Return the config of the mixer `method` for associative recall: zoology's, or our preset with two
    heads if the width allows them.
    """
    if method == "mom":
        return mixers.MoMConfig(mixer=mixer_config("gated_deltanet", width))
    config = mixers.get_method(method).config.for_width(width)
    fields = published(method, width)
    if not fields:
        names = {field.name for field in dataclasses.fields(config)}
        if "num_heads" in names:
            fields = dict(num_heads=2)
        elif "head_dim" in names:
            fields = dict(head_dim=width // 2)
        if {"num_heads", "head_dim"} <= names:
            fields["head_dim"] = width // 2
    try:
        changed = dataclasses.replace(config, **fields)
        changed.validate(width)
    except ValueError:  # the width does not allow two heads
        return config
    return changed


OPTIONS = dict(
    width=Option(kind=int, least=8),
    suite=Option(choices=SUITES),
    pattern=Option(),
    steps=Option(kind=int, least=1),
)


def get_config(variant: str = "gla") -> RecallConfig:
    """Return the config of the recall sweep `<method>[,width=64][,suite=64x4][,pattern=CL][,steps=2]`; Mamba2's
    pattern is LL, as published.

    Raises:
        ValueError: the method, suite or option does not exist; the message lists those that do.
    """
    method, given = parse_variant(variant, OPTIONS)
    width, suite = given.get("width", 64), given.get("suite", "64x4")
    mixer = mixer_config(method, width)
    if "steps" in given:
        if not hasattr(mixer, "num_steps"):
            raise ValueError(
                f"variant {variant!r}: steps; accepted is gated_deltaproduct, not {method}"
            )
        mixer.num_steps = given["steps"]
    model = RecallModelConfig(
        mixer=mixer,
        hidden_size=width,
        vocab_size=64 if suite == "tiny" else 8192,
        pattern=given.get("pattern", "LL" if method == "mamba2" else "CL"),
    )
    config = RecallConfig(name=variant, model=model, **SUITES[suite])
    config.validate()
    return config
