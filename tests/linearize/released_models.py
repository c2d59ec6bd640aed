"""Small released models for the tests of fine-tuning: folders as flash-linear-attention and transformers write them, with RWKV's
vocabulary as tokenizer."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from flax import nnx

from lsm_jax import mixers
from lsm_jax.convert import export_released
from lsm_jax.feedforward import RWKV7ChannelMixConfig, SwiGLUConfig
from lsm_jax.models import Decoder, LayerConfig, ModelConfig
from lsm_jax.training.step import params_of
from tests.data.world import tokens, write_vocabulary

WIDTH, VOCAB = 16, 272
SMALL = mixers.OpConfig(chunk_size=16)


def model(kind: str) -> ModelConfig:
    """Return the config of a model of two layers: "rwkv7" (token shift), "mamba2" and "gated_deltanet" (convolutions), or "hybrid"
    (GLA, then softmax attention)."""
    inner = SwiGLUConfig(intermediate_size=32)
    softmax = mixers.SoftmaxConfig(num_heads=2, norm_eps=1e-5)
    layers = {
        "rwkv7": [LayerConfig(mixer=mixers.RWKV7Config(head_dim=8, decay_rank=4, rate_rank=4, value_rank=4, gate_rank=4, norm_eps=8e-5, op=SMALL), feedforward=RWKV7ChannelMixConfig(intermediate_size=32))],
        "mamba2": [LayerConfig(mixer=mixers.Mamba2Config(head_dim=8, state_size=8, op=SMALL), feedforward=None)],
        "gated_deltanet": [LayerConfig(mixer=mixers.GatedDeltaNetConfig(num_heads=2, head_dim=8, expand_v=1.0, op=SMALL), feedforward=inner)],
        "hybrid": [LayerConfig(mixer=mixers.GLAConfig(num_heads=2, op=SMALL), feedforward=inner), LayerConfig(mixer=softmax, feedforward=inner)],
    }[kind]  # fmt: skip
    named = dict(zip("LN", layers, strict=False))
    norm = dict(norm="layer", embedding_norm=True) if kind == "rwkv7" else {}
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_layers=2, pattern="".join(named), layers=named, tie_embeddings=False,
        norm_eps=1e-5, dtype="float32", remat="none", **norm,
    )  # fmt: skip


def write_model(folder: Path, kind: str, dtype: str = "float32") -> Path:
    """Write the released checkpoint of a small model of random weights, and RWKV's vocabulary; return the folder."""
    assert len(tokens()) < VOCAB
    config = model(kind)
    params = params_of(Decoder(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape, np.float32), params)
    vocabulary = write_vocabulary(folder.parent / "vocabulary")
    return export_released(params, config, folder, dtype=dtype, tokenizer=vocabulary)
