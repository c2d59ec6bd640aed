"""A pattern without a period, that of Kimi-Linear's 27 layers, compiles in time: all layers are compiled, one after the other."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lsm_jax import models
from lsm_jax.feedforward import MoEConfig, SwiGLUConfig
from lsm_jax.mixers import KDAConfig, MLAConfig
from lsm_jax.training.step import params_of

SECONDS = 120  # of the processor: at most so long on two quiet cores


def kimi() -> models.ModelConfig:
    """Return the layers of Kimi-Linear-48B-A3B at small widths, with 8 experts in place of 256."""
    linear = KDAConfig(num_heads=4, head_dim=16, output_gate_bias=False)
    full = MLAConfig(num_heads=4, key_dim=16, rope_dim=8, value_dim=16, latent_dim=32, rope_base=None)  # fmt: skip
    experts = MoEConfig(
        num_experts=8, top_k=2, expert_size=16, shared_size=16, shared_gate=False, router="sigmoid", renormalize=True,
        router_bias=True, weight_scale=2.446,
    )  # fmt: skip
    dense = SwiGLUConfig(intermediate_size=64)
    return models.ModelConfig(
        vocab_size=128, hidden_size=64, num_layers=27, pattern="D" + 6 * "LLNL" + "LN", tie_embeddings=False, dtype="float32",
        layers={
            "D": models.LayerConfig(mixer=linear, feedforward=dense),
            "L": models.LayerConfig(mixer=linear, feedforward=experts),
            "N": models.LayerConfig(mixer=full, feedforward=experts),
        },
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", ["read", "decode"])
def test_27_layers_without_a_period_compile_in_two_minutes(what):
    config = kimi()
    assert len(config.period()) == 27
    begin = time.process_time()
    model = models.abstract(config)
    graph, params = nnx.graphdef(model), params_of(model)
    tokens = jax.ShapeDtypeStruct((1, 128 if what == "read" else 1), jnp.int32)
    state = None
    if what == "decode":
        state = jax.eval_shape(lambda p: nnx.merge(graph, p).init_state(1, 64), params)
    jax.jit(lambda p, t, s: nnx.merge(graph, p)(t, state=s)[:2]).lower(params, tokens, state).compile()  # fmt: skip
    seconds = time.process_time() - begin
    print(f"{what}: {seconds:.1f} s of the processor")
    assert seconds < SECONDS
