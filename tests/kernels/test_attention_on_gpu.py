"""Tests of attention's kernel that run on an NVIDIA Hopper GPU: `make test-gpu`."""

import pytest

from benchmarks.calls import attention
from pallas_kernels.forgetting_attention import cases as attention_cases
from tests.kernels import test_attention_state_gpu as attention_state
from tests.kernels.marks import on_hopper
from tests.kernels.on_card import assert_alike

pytestmark = on_hopper


@pytest.mark.parametrize("case", attention_cases.HOPPER, ids=lambda case: case.id)
def test_attention_equals_xla(case):
    """On the card, the value and every gradient of attention's kernel are those of XLA's attention in float32
    at full precision; a second run gives the same bits.
    """
    check(attention.attention(case))


@pytest.mark.parametrize("where", [0, 1, 3])
@pytest.mark.parametrize("case", attention_cases.HOPPER_PARTS, ids=lambda case: case.id)
def test_attention_of_two_parts_equals_xla(case, where):
    """On the card, attention's kernel has the value and every gradient of XLA's for the queries of one of
    four devices that share a row: parts `where` and 7 - `where` of eight. A second run gives the same bits.
    """
    check(attention.parts(case, where))


def check(call):
    """Assert that a call by Hopper's kernel has the results and gradients of XLA in float32, and the same bits twice."""
    assert_alike(call, attention_cases.OUTPUT_TOLERANCE, attention_cases.GRADIENT_TOLERANCE)


@pytest.mark.parametrize("name", attention_cases.SPLITS)
def test_attention_from_a_state_equals_xla(name):
    attention_state.check_pieces(name)


def test_gradients_of_attention_from_a_state_equal_xla():
    attention_state.check_gradients()
