"""The training runs that are killed: `--config=tests/faults/configs.py:KIND,FOLDER`, with the inputs in FOLDER
(`tests.faults.inputs`).

All have 24 steps of 8 rows of 32 tokens, a checkpoint after every third step, and a held-out loss after every
eighth.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lsm_jax.data import DataConfig
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.linearize import Pretrained, liger_model
from lsm_jax.mixers import LinearAttentionConfig, LoRAConfig, OpConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.parallel import MeshConfig
from lsm_jax.training import OptimizerConfig, TrainConfig

STEPS, ROWS, LENGTH = 24, 8, 32
KINDS = ("plain", "store", "lora", "init_from", "pipeline", "hosts")


def get_config(variant: str) -> TrainConfig:
    """Return the training config of a run of one of the `KINDS`; the variant is KIND,FOLDER."""
    kind, _, name = variant.partition(",")
    folder = Path(name)
    if kind not in KINDS:
        raise ValueError(f"variant {variant!r}: accepted are {', '.join(KINDS)}")
    config = TrainConfig(
        name=kind,
        model=_model(),
        data=DataConfig(
            path=str(folder / "text"),
            heldout_fraction=0.2,
            sequence_length=LENGTH,
            num_threads=1,
            prefetch=1,
        ),
        optimizer=OptimizerConfig(peak_lr=1e-2, warmup_tokens=512),
        batch_size=ROWS,
        total_tokens=STEPS * ROWS * LENGTH,
        log_every=1,
        eval_every=8,
        eval_batches=2,
        checkpoint_every=3,
    )
    if kind == "store":
        config.data.path = str(folder / "stores")
        config.data.separate_documents = True
    elif kind == "lora":
        base = Pretrained(path=str(folder / "llama"))
        config.base, config.trainable = base, ("lora",)
        model = dataclasses.replace(base.config(), dtype="float32", remat="none")
        config.model = liger_model(
            model, lora=LoRAConfig(rank=2), gate="mamba2", window=8, op=OpConfig(chunk_size=16)
        )
    elif kind == "init_from":
        config.seed = 7  # `--init_from` names the finished plain run
    elif kind == "pipeline":
        config.mesh = MeshConfig(pipeline=2, data=1)
        config.model = _model(pattern="L")
    elif kind == "hosts":
        config.model = _model(pattern="L")
    return config


def _model(pattern: str = "LN") -> ModelConfig:
    """Return a model of two layers of width 16: linear attention, and in the pattern LN softmax attention
    with a feedforward."""
    memory = LinearAttentionConfig(num_heads=2, op=OpConfig(chunk_size=16))
    attention = SoftmaxConfig(num_heads=2, head_dim=8)
    layers = {
        "L": LayerConfig(mixer=memory, feedforward=None),
        "N": LayerConfig(mixer=attention, feedforward=SwiGLUConfig(multiple_of=16)),
    }
    return ModelConfig(
        vocab_size=257,
        hidden_size=16,
        num_layers=2,
        pattern=pattern,
        layers={letter: layers[letter] for letter in pattern},
        dtype="float32",
    )
