"""Fixtures for the tests of linearizing: a Llama of two layers on disk, and configs of runs that start from
it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from lsm_jax.data import DataConfig
from lsm_jax.linearize import Pretrained, liger_model
from lsm_jax.mixers import LoRAConfig, OpConfig
from lsm_jax.training import OptimizerConfig, TrainConfig
from tests.training.conftest import keep_compiled  # noqa: F401

WIDTH, LAYERS, HEADS, KV_HEADS, INNER, VOCAB = 16, 2, 4, 2, 24, 257


def write_llama(folder: Path, layers: int = LAYERS) -> Path:
    """Write a Hugging Face folder with a small Llama of random weights, and return the folder."""
    folder.mkdir(parents=True)
    config = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=VOCAB, hidden_size=WIDTH,
        intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, torch_dtype="float32", hidden_act="silu",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    kv = KV_HEADS * WIDTH // HEADS

    def draw(*shape):
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, WIDTH), "model.norm.weight": 1 + draw(WIDTH)}  # fmt: skip
    for i in range(layers):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": 1 + draw(WIDTH),
            f"{at}post_attention_layernorm.weight": 1 + draw(WIDTH),
            f"{at}self_attn.q_proj.weight": draw(WIDTH, WIDTH),
            f"{at}self_attn.k_proj.weight": draw(kv, WIDTH),
            f"{at}self_attn.v_proj.weight": draw(kv, WIDTH),
            f"{at}self_attn.o_proj.weight": draw(WIDTH, WIDTH),
            f"{at}mlp.gate_proj.weight": draw(INNER, WIDTH),
            f"{at}mlp.up_proj.weight": draw(INNER, WIDTH),
            f"{at}mlp.down_proj.weight": draw(WIDTH, INNER),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture
def instructions(tmp_path) -> Path:
    """Fixture: the path of a JSONL file with 16 instructions, every other one with an input."""
    path = tmp_path / "alpaca.jsonl"
    rows = [
        dict(instruction=f"Say {i}", input=f"thing {i}" if i % 2 else "", output=f"It is {i}. " * 3)
        for i in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(llama: Path, text: Path, **changes) -> TrainConfig:
    """Return the training config of a Liger run that tunes adapters of the pretrained Llama in six steps of
    four rows of 256 bytes.

    The gate is Mamba2's, since one decay per head compiles fastest.
    """
    base = Pretrained(path=str(llama))
    model = dataclasses.replace(base.config(), dtype="float32", remat="none")
    fields = dict(
        name="tiny",
        model=liger_model(model, lora=LoRAConfig(rank=2), gate="mamba2", window=8, op=OpConfig(chunk_size=16)),
        data=DataConfig(
            path=str(text), heldout_fraction=0.2, sequence_length=256, num_threads=0, prefetch=0, format="alpaca",
            packing="first_fit",
        ),
        optimizer=OptimizerConfig(peak_lr=1e-2, end_lr_ratio=1.0, b2=0.999, weight_decay=0.01),
        base=base,
        trainable=("lora",),
        batch_size=4,
        total_tokens=6 * 1024,
        log_every=1,
        eval_every=0,
        checkpoint_every=3,
    )  # fmt: skip
    return TrainConfig(**fields | changes)


def assert_same_bits(a, b) -> None:
    """Assert that all arrays of two trees have the same bits."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
