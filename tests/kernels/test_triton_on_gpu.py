"""Tests of the Triton kernels on an NVIDIA card: `make test-gpu`."""

import jax
import pytest

from benchmarks.cases import triton_kernels
from pallas_kernels.triton import launch
from tests.kernels.marks import requires_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
    requires_triton,
]


@pytest.mark.parametrize("oldest", [False, True], ids=["this card's code", "8.0's code"])
@pytest.mark.parametrize("name", triton_kernels.CHECKS)
def test_equals_xla_in_float32(name, oldest):
    """The values, final states and every gradient of the Triton kernels are those of XLA in float32; no output depends on a later token,
    and a second run has the same bits. Code for compute capability 8.0 runs on every later card.
    """
    card = jax.local_devices(backend="cuda")[0].compute_capability
    with launch.code_for("8.0" if oldest else card):
        result = triton_kernels.check(name)
    assert result["good"], result
