"""Rows cut over devices: every op and every method as on one device, and what is sent for it."""

from __future__ import annotations

import pytest

from lsm_jax.mixers import METHODS
from tests.ops.cases import CASES
from tests.parallel.test_parallel import run_with_devices

# One of each class of update, with documents, masked tokens and a state to go on from.
CLASSES = (
    "linear_memory-key_decay-heads112:chunk:state",
    "delta_memory-decay-heads112:chunk:state",
    "selective_memory-decay-complex-D-zoh:chunk:state",
    "short_convolution-bias:None:state",
)
MODELS = (*METHODS, "mom-gated_deltanet", "mom-rwkv6", "gla/gla/gla/softmax")


def ran(module: str, *arguments: str) -> None:
    """Raise unless the module says of each argument behind the first that it is as it should be."""
    lines = run_with_devices(8, "-m", f"tests.parallel.{module}", *arguments).splitlines()
    assert len(lines) >= len(arguments[1:]) and all(line.endswith("ok") for line in lines), lines


def test_what_is_sent_for_a_layer():
    """One all-gather forward, one backward, of as many bytes at any length; kept under remat; halos by one permutation."""
    ran("sequence_traffic")


@pytest.mark.slow
def test_what_is_sent_for_a_model():
    """As much at any length: no array of tokens travels."""
    ran("sequence_traffic", "gla", "gated_deltanet", "mom-gla")


@pytest.mark.parametrize("cases", [CLASSES])
def test_rows_in_parts(cases):
    ran("sequence", "4", *cases)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["2", "8", "2x2"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_op(case, devices):
    """All forms on two devices, the first on others; every kind of call."""
    forms = case.forms if devices == "2" else case.forms[-2:-1] or case.forms
    ran("sequence", devices, *(f"{case.name}:{form}" for form in forms))


@pytest.mark.slow
def test_phase_and_time_invariant_rows():
    """What stands in no case: see `settings`."""
    ran("sequence_extras")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_method(name):
    """A model of two layers, on rows of one document and of several."""
    for devices in ("2", "4", "8", "2x2"):
        ran("sequence_models", devices, name, f"{name}:packed")
