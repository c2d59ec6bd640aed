"""Tests of Hopper's exact scan with a scalar decay, whose products have operands of two terms, in Mosaic GPU's interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.hopper import warpgroups
from pallas_kernels.linear_attention.hopper import scalar_decay, scalar_plan
from pallas_kernels.linear_attention.hopper.scalar_scan import scalar_scan


def by_definition(x, y, z, log_decay, log_write, reverse: bool):
    """Return what the scan defines, and its last memory, of one head of one row, in float64."""
    x, y, z, decay, write = (
        np.asarray(a, np.float64)[0, :, 0] for a in (x, y, z, log_decay, log_write)
    )
    count, sums = len(x), np.cumsum(decay)
    weights = np.exp(np.where(np.tri(count), sums[:, None] - sums + write, -np.inf))
    out = (x @ y.T * (weights.T if reverse else weights)) @ z
    if reverse:
        return out, (y * np.exp(sums)[:, None]).T @ z
    return out, (y * weights[-1][:, None]).T @ z


@pytest.mark.parametrize(
    "sizes, groups, reverse",
    [((64, 128), 2, False), ((64, 64), 1, True),
     *(pytest.param(*x, marks=pytest.mark.slow) for x in (
         ((128, 64), 1, False), ((128, 128), 2, True), ((256, 64), 1, False), ((64, 128), 2, True)))],
)  # fmt: skip
def test_an_exact_scan_has_nearly_the_precision_of_float32(sizes, groups, reverse, monkeypatch):
    """Output, last memory, saved memories and inner products are within 2e-5 of the definition, where the scan in bfloat16 is 1e-3 off."""
    monkeypatch.setattr(scalar_plan, "PROCESSORS", 132 if groups == 1 else 1)
    rng, length, (depth, width) = np.random.default_rng(0), 320, sizes
    x, y, z, partner = (
        jnp.asarray(rng.normal(size=(1, length, 1, n)), jnp.bfloat16)
        for n in (depth, depth, width, width)
    )
    log_decay, log_write = (rng.normal(size=(1, length, 1)).astype(np.float32) for _ in range(2))
    log_decay = -np.abs(log_decay) / 8
    interpret = gpu_interpreter()
    decays = scalar_decay.chunk_decays(
        jnp.asarray(log_decay), None, z.shape, 1, jnp.asarray(log_write), interpret
    )
    wanted, last_wanted = by_definition(x, y, z, log_decay, log_write, reverse)
    dots_wanted = (wanted * np.asarray(partner, np.float64)[0, :, 0]).sum(-1)
    errors = []
    for exact in (False, True):
        out, last, dots, saved = scalar_scan(
            x, y, z, decays, heads=1, partner=partner, save_states=True, reverse=reverse, exact=exact,
            interpret=interpret,
        )  # fmt: skip
        assert not races_found()
        assert out.dtype == (jnp.float32 if exact else jnp.bfloat16)
        if exact:
            products = scalar_scan(
                x,
                y,
                z,
                decays,
                heads=1,
                states=saved,
                reverse=True,
                exact=True,
                interpret=interpret,
            )[-1]
            first = sum(s.astype(jnp.float32) for s in saved)[0, 0, 0]
            if not reverse:  # the first memory is empty
                assert not first.any() and not products[0, 0, :, 0].any()
            assert saved[1].any() and products[:, :, :, 1:].any()
        pairs = (out[0, :, 0], wanted), (last[0, 0], last_wanted), (dots[0, 0].sum(0), dots_wanted)
        errors.append([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])
    assert min(errors[0]) > 5e-4 and max(errors[1]) < 2e-5, errors


def test_two_terms_add_up():
    """The sum of both terms is within 2^-16 of each number, small and large; the second is not 0."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=4096) * 10.0 ** rng.integers(-20, 20, 4096), jnp.float32)
    high, low = warpgroups.two_terms(x)
    assert high.dtype == low.dtype == jnp.bfloat16 and low.any()
    np.testing.assert_array_equal(np.abs(high - x.astype(jnp.bfloat16)) <= jnp.abs(x) * 2**-7, True)
    total = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    assert np.max(np.abs(total - x) / np.abs(x)) <= 2**-16
