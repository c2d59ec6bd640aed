"""What a Liger step at 8 B takes of a card that is not here: `make test-aot`."""

from __future__ import annotations

import pytest

from configs import liger
from tests.step_memory import compiled_memory

pytestmark = pytest.mark.aot


def test_eight_billion_parameters_fit_one_card_of_80_gb():
    config = liger.get_config("llama3-8b")
    memory = compiled_memory(config, config.batch_size, config.data.sequence_length, packed=True)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = (held + memory.temp_size_in_bytes) / 1e9
    print(f"{total:.1f} GB, of which {memory.temp_size_in_bytes / 1e9:.1f} temporary")
    assert 16 < total < 40  # 8.0 B parameters in bfloat16 alone are 16
