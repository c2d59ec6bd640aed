"""The comparison of Hopper's kernels with XLA on the card, which needs no GPU to be imported."""

from __future__ import annotations

from benchmarks.calls.compare import Compared, errors_of, program, same_bits


def assert_alike(call: Compared, output: float, gradient: float) -> None:
    """Assert that the results and gradients of a call by Hopper's kernel are those of XLA in float32 within two tolerances, that a
    second run has the same bits, and that states that no token updates have theirs.
    """
    fused = program(call, "mosaic_gpu")
    found = fused(call.cotangents, call.arrays)
    assert same_bits(found, fused(call.cotangents, call.arrays))
    assert call.unchanged(*found)
    for name, error in errors_of(call, found).items():
        assert error < (gradient if name.startswith("d_") else output), (name, error)
