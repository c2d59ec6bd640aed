"""Training steps compiled for several H200 cards, which need not be present (`make test-aot`).

XLA's compiler has crashed on some of these meshes.
"""

from __future__ import annotations

import dataclasses

import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from configs import lm
from lsm_jax.ops.attention import cudnn as attention_cudnn
from lsm_jax.parallel import MeshConfig
from tests.step_memory import compiled_memory

pytestmark = pytest.mark.aot

CASES = [
    ("softmax-tiny", dict(fsdp=2)),
    ("softmax-tiny", dict(fsdp=2, pipeline=2)),
    ("softmax-tiny", dict(sequence=2, tensor=2)),
    ("fox-tiny", dict(sequence=2)),
    ("gated_deltanet-tiny", dict(fsdp=2, sequence=2)),
    ("gla-tiny,pattern=LLLN,feedforward=moe", dict(expert=2)),
    ("mamba-tiny", dict(sequence=2, tensor=2)),
    ("gateloop-tiny", dict(fsdp=2, sequence=2)),
]


@pytest.mark.parametrize(("variant", "axes"), CASES, ids=str)
def test_compiles_for_several_cards(variant, axes, monkeypatch):
    monkeypatch.setattr(attention_cudnn, "has_cudnn", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_, **__: True)
    config = lm.get_config(variant)
    config.model.vocab_size, config.model.hidden_size, config.model.dtype = 512, 256, "bfloat16"
    for layer in config.model.layers.values():
        if getattr(layer.mixer, "num_heads", None):
            layer.mixer.num_heads = 4  # of 64 channels, as kernels require
    config = dataclasses.replace(config, mesh=MeshConfig(data=1, **axes))
    memory = compiled_memory(config, 8, 2048, packed=False)
    assert 0 < memory.temp_size_in_bytes < 1 << 31
