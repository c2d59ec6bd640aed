"""Tests of the memory that a training step without rematerialisation requires on a GPU, computed by XLA's
compiler on a machine without that GPU (`make test-aot`).
"""

from __future__ import annotations

import pytest

from configs import lm
from lsm_jax.training.memory_plan import plan
from tests.step_memory import compiled_memory

pytestmark = pytest.mark.aot


# GB of temporary arrays: 80.7, 98.4, 153.4 and 251.5 before layers saved only their arguments for the
# backward pass; 34.2, 42.3, 60.2 and 77.8 since then.
@pytest.mark.parametrize(
    ("variant", "most"),
    [("gla-340m", 38), ("gated_deltanet-340m", 46), ("mamba2-340m", 66), ("rwkv7-340m", 82)],
)
def test_a_step_of_32768_tokens(variant, most):
    config = lm.get_config(variant)
    config.model.vocab_size, config.model.remat = 32_000, "none"
    config.batch_size, config.data.sequence_length = 16, 2048
    memory = compiled_memory(config, 16, 2048, packed=True)
    gigabytes = memory.temp_size_in_bytes / 1e9
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    share = plan(config, 1).total / (held + memory.temp_size_in_bytes)
    print(f"{variant}: {gigabytes:.1f} GB temporary; planned {share:.3f} of all")
    assert 10 < gigabytes < most and 0.9 < share < 1.1


# Mamba-3's sums for the gradients of its ranks' weights were made at the end of the step: 59.0 GB, a loop 24.2.
@pytest.mark.parametrize(("variant", "ratio"), [("gla-340m", 1.02), ("mamba3_mimo-340m", 1.1)])
def test_unrolled_layers_need_no_more_memory_than_a_loop(variant, ratio):
    """Rematerialised layers that are compiled one after the other store no more than those of a loop: XLA does not
    find that the backward pass computes what the forward pass has computed."""
    config = lm.get_config(variant)
    config.model.vocab_size, config.model.remat, config.model.num_layers = 32_000, "dots", 8
    config.batch_size, config.data.sequence_length = 16, 2048
    sizes = []
    for config.model.unroll_layers in (False, True):
        sizes.append(compiled_memory(config, 16, 2048, packed=True).temp_size_in_bytes)
    print(f"temporary arrays: {sizes[0] / 1e9:.1f} GB in a loop, {sizes[1] / 1e9:.1f} unrolled")
    assert sizes[1] < ratio * sizes[0]
