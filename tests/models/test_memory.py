"""What a training step without rematerialisation takes of a card that is not here: `make test-aot`."""

from __future__ import annotations

import pytest

from configs import lm
from tests.step_memory import of_a_step

pytestmark = pytest.mark.aot


# GB temporary: 80.7, 98.4, 153.4 and 251.5 before layers kept their arguments alone, 34.2, 42.1, 59.9 and 74.0 since.
@pytest.mark.parametrize(
    ("variant", "most"),
    [("gla-340m", 38), ("gated_deltanet-340m", 46), ("mamba2-340m", 66), ("rwkv7-340m", 82)],
)
def test_a_step_of_32768_tokens(variant, most):
    config = lm.get_config(variant)
    config.model.vocab_size, config.model.remat = 32_000, "none"
    gigabytes = of_a_step(config, 16, 2048, packed=False).temp_size_in_bytes / 1e9
    print(f"{variant}: {gigabytes:.1f} GB temporary")
    assert 10 < gigabytes < most
