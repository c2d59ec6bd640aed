"""Tests that compile versions of the Hopper kernels that a switch chooses for an H200 that need not be here: `make test-aot`."""

from __future__ import annotations

import re

import jax
import pytest

from pallas_kernels.delta_rule.hopper import scan as delta_scan
from pallas_kernels.hopper import unit_inverse
from pallas_kernels.linear_attention.hopper import (
    scalar_decay,
    scalar_plan,
    scalar_scan,
)
from tests.kernels.test_aot import all_optimizations as all_optimizations
from tests.kernels.test_aot import assert_spills_no_more, case_id

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
    "heads, key_dim, value_dim, given",
    [((4, 4, 4), 128, 128, "log_decay"), ((4, 2, 2), 128, 128, "log_decay segment_ids"),
     ((4, 2, 2), 64, 64, "log_decay"), ((2, 1, 2), 256, 512, "log_decay"), ((4, 4, 4), 128, 128, ""),
     ((4, 4, 4), 128, 64, "log_decay rank"), ((1, 1, 4), 128, 64, "log_decay writes"),
     ((1, 1, 4), 128, 64, "log_decay writes segment_ids"), ((1, 1, 3), 128, 64, "log_decay writes")],
)  # fmt: skip
@pytest.mark.parametrize("wide", [False, True])
def test_the_scan_by_roles_spills_nothing(
    heads, key_dim, value_dim, given, wide, capfd, monkeypatch
):
    """With one block of value channels in a thread block, and, if `wide`, with two if there are two, and with sums of decays by products."""
    monkeypatch.setattr(scalar_scan, "ROLES", True)
    monkeypatch.setattr(scalar_decay, "SUMS_BY_PRODUCTS", wide)
    monkeypatch.setattr(scalar_plan, "PROCESSORS", 1 if wide else 132)
    jax.clear_caches()  # of the same shapes with the other scan
    case = "linear_memory", heads, key_dim, value_dim, given, 0
    try:
        assembly = assert_spills_no_more(case, capfd, monkeypatch, backward=True)
        assert "linear_attention_scalar_roles" in assembly
        sums = wide and "log_decay" in given
        assert ("linear_attention_decay_sums" in assembly) == sums
    finally:
        jax.clear_caches()


@pytest.mark.parametrize("dim", [64, 128])
def test_few_launches_of_short_rows_spill_nothing(dim, capfd, monkeypatch):
    """The gradients of q and v have one launch."""
    monkeypatch.setattr(scalar_decay, "FEW_LAUNCHES", "short")
    jax.clear_caches()  # of the default
    try:
        case = "linear_memory", (8, 8, 8), dim, dim, "log_decay", 0
        assembly = assert_spills_no_more(case, capfd, monkeypatch, backward=True)
        assert "linear_attention_decay_gradient" in assembly
        assert "linear_attention_decay_sums" not in assembly
    finally:
        jax.clear_caches()


def test_gradients_of_all_chunks_at_once_spill_nothing(capfd, monkeypatch):
    """A processor has registers for three thread blocks of the kernel of all chunks."""
    monkeypatch.setattr(scalar_decay, "FEW_LAUNCHES", "chunks")
    jax.clear_caches()  # of the default
    try:
        case = "linear_memory", (8, 8, 8), 64, 64, "log_decay", 0
        assembly = assert_spills_no_more(case, capfd, monkeypatch, backward=True)
        _, chunks = assembly.split("entry function 'linear_attention_scalar_chunks")
        registers = re.search(r"Used (\d+) registers", chunks)
        assert registers is not None and int(registers[1]) <= 65536 // (3 * 128)
        assert "linear_attention_decay" not in assembly
    finally:
        jax.clear_caches()


FORWARD_OF_DELTA_RULES = (
    ("delta_memory", (4, 4, 4), 128, 128, "log_decay"),
    ("delta_memory", (4, 2, 4), 64, 128, "undecayed log_decay segment_ids"),
    ("delta_memory", (80, 80, 80), 128, 128, "log_decay"),  # two warpgroups of a thread block carry memories
    ("delta_memory", (80, 80, 80), 128, 128, "undecayed log_decay segment_ids"),
    ("delta_memory", (4, 4, 4), 64, 64, ""),
    ("delta_memory", (4, 4, 4), 64, 64, "segment_ids"),
    ("delta_memory", (6, 6, 6), 128, 128, "segment_ids"),
)  # fmt: skip


@pytest.mark.parametrize("case", FORWARD_OF_DELTA_RULES, ids=case_id)
@pytest.mark.parametrize("forward, known", [("split", 0), ("scored", 8)])
def test_versions_of_the_delta_rules_forward_pass_spill_little(
    case, forward, known, capfd, monkeypatch
):
    """The inverse by blocks, with at most 128 registers, so that a processor has four thread blocks; and the scan with another warpgroup for
    the outputs, which may also compute the scores.
    """
    monkeypatch.setattr(unit_inverse, "METHOD", "blocks")
    monkeypatch.setattr(delta_scan, "FORWARD", forward)
    jax.clear_caches()  # of the default
    try:
        output = assert_spills_no_more((*case, known), capfd, monkeypatch, backward=False)
    finally:
        jax.clear_caches()
    kernels = re.findall(r"entry function '(\w+)_mosaic_gpu_kernel'.*?Used (\d+) registers", output, re.DOTALL)  # fmt: skip
    registers = {name: int(count) for name, count in kernels}
    assert set(registers) == {"delta_chunk_forward", "delta_split_scan"}
    assert registers["delta_chunk_forward"] <= 128
    assert output.count("HMMA.1688.F32.TF32") > 0
