"""The demo: a small hybrid of Gated DeltaNet and softmax attention on bytes, for a laptop's CPU.

Reproduces: no published result; it shows all steps from text to a sample.
Command: make demo
Hardware: 2 CPU cores, about 2 minutes of training.
Expected: held-out bits per byte below those of an order-2 byte model.
"""

from __future__ import annotations

from lsm_jax.data import DataConfig
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import GatedDeltaNetConfig, OpConfig, SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.training import OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    """Return the training config of the demo's run: a small hybrid of Gated DeltaNet and softmax attention
    on bytes.
    """
    inner = SwiGLUConfig(multiple_of=64)
    recurrent = GatedDeltaNetConfig(
        num_heads=4, head_dim=32, expand_v=1.0, op=OpConfig(chunk_size=32)
    )
    return TrainConfig(
        name="demo",
        model=ModelConfig(
            vocab_size=257,
            hidden_size=128,
            num_layers=4,
            pattern="LLLN",
            layers={
                "L": LayerConfig(mixer=recurrent, feedforward=inner),
                "N": LayerConfig(mixer=SoftmaxConfig(num_heads=4, head_dim=32), feedforward=inner),
            },
            dtype="float32",
            remat="none",
        ),
        data=DataConfig(sequence_length=256),
        optimizer=OptimizerConfig(peak_lr=4e-3, warmup_tokens=40_000, weight_decay=0.1),
        batch_size=16,
        total_tokens=655_360,
        log_every=10,
        eval_every=80,
        eval_batches=4,
        checkpoint_every=80,
    )
