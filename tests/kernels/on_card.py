"""The comparison of Hopper's kernels with XLA on the card, which needs no GPU to be imported."""

from __future__ import annotations

import functools

import jax

from benchmarks.calls.compare import Compared, error, errors_of, expected, program, same_bits


def assert_alike(call: Compared, output: float, gradient: float) -> None:
    """Assert that the results and gradients of a call by Hopper's kernel are those of XLA in float32 within two tolerances, that a
    second run has the same bits, and that states that no token updates have theirs.
    """
    fused = program(call, "mosaic_gpu")
    found = fused(call.cotangents, call.arrays)
    assert same_bits(found, fused(call.cotangents, call.arrays))
    assert call.unchanged(*found)
    for name, found_error in errors_of(call, found).items():
        assert found_error < (gradient if name.startswith("d_") else output), (name, found_error)


def assert_alike_without_a_derivative(call: Compared, tolerance: float) -> None:
    """Assert the same of the results alone, computed by a program that has no derivative, for which other kernels may be chosen."""
    run = jax.jit(functools.partial(call.run, "mosaic_gpu"))
    found = run(call.arrays)
    assert same_bits(found, run(call.arrays))
    wanted = expected(call)[0]
    assert len(found) == len(wanted)
    for name, a, b in zip(("output", "final", "final 2"), found, wanted, strict=False):
        assert error(a, b) < tolerance, name
