"""Models: a decoder built from its config alone, its loss, its sampling, and presets."""

from __future__ import annotations

from lsm_jax.models.config import LayerConfig, ModelConfig
from lsm_jax.models.counts import (
    abstract,
    count_parameters,
    decay_mask,
    flops_per_token,
    logical_axes,
)
from lsm_jax.models.decoder import Decoder, DecoderState
from lsm_jax.models.griffin import GRIFFIN_MODELS, gemma_scale, griffin
from lsm_jax.models.loss import mean_next_token_loss, next_token_loss, training_losses
from lsm_jax.models.presets import (
    FOX_FIGURE_7,
    FOX_MODELS,
    FOX_SIZES,
    FOX_TABLE_3,
    SIZES,
    fox,
    lm,
)
from lsm_jax.models.recall_model import RecallModel, RecallModelConfig, recall_state_size
from lsm_jax.models.sampling import sample

__all__ = [
    "FOX_FIGURE_7",
    "FOX_MODELS",
    "FOX_SIZES",
    "FOX_TABLE_3",
    "GRIFFIN_MODELS",
    "SIZES",
    "Decoder",
    "DecoderState",
    "LayerConfig",
    "ModelConfig",
    "RecallModel",
    "RecallModelConfig",
    "abstract",
    "count_parameters",
    "decay_mask",
    "flops_per_token",
    "fox",
    "gemma_scale",
    "griffin",
    "lm",
    "logical_axes",
    "mean_next_token_loss",
    "next_token_loss",
    "recall_state_size",
    "sample",
    "training_losses",
]
