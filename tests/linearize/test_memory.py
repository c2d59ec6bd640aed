"""Tests of the memory that a training step of Liger with 8 B parameters requires on a GPU of 80 GB, computed
by XLA's compiler on a machine without that GPU (`make test-aot`).
"""

from __future__ import annotations

import pytest

from configs import liger
from tests.step_memory import compiled_memory

pytestmark = pytest.mark.aot


def test_eight_billion_parameters_fit_into_80_gb():
    config = liger.get_config("llama3-8b")
    memory = compiled_memory(config, config.batch_size, config.data.sequence_length, packed=True)
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total = (arrays - memory.alias_size_in_bytes + memory.temp_size_in_bytes) / 1e9
    print(f"{total:.1f} GB, of which {memory.temp_size_in_bytes / 1e9:.1f} temporary")
    assert 16 < total < 40  # the 8.0 B parameters in bfloat16 are 16 GB
