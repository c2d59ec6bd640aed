"""Tests of Hopper's exact scan with a scalar decay, whose products have operands of two or three terms, in Mosaic GPU's interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.hopper import warpgroups
from pallas_kernels.linear_attention.hopper import scalar_decay, scalar_plan
from pallas_kernels.linear_attention.hopper.exact_decays import exact_decays
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
    """Output, last memory, saved memories and inner products are within 2e-5 of the definition with two terms and 1e-6 with three, where the
    scan in bfloat16 is 1e-3 off.
    """
    monkeypatch.setattr(scalar_plan, "PROCESSORS", 132 if groups == 1 else 1)
    rng, length, (depth, width) = np.random.default_rng(0), 320, sizes
    x, y, z, partner = (
        jnp.asarray(rng.normal(size=(1, length, 1, n)), jnp.bfloat16)
        for n in (depth, depth, width, width)
    )
    log_decay, log_write = (rng.normal(size=(1, length, 1)).astype(np.float32) for _ in range(2))
    log_decay = np.where(rng.random(log_decay.shape) < 0.1, -30, -np.abs(log_decay) / 8)
    log_decay, log_write = (jnp.asarray(x, jnp.float32) for x in (log_decay, log_write))
    interpret = gpu_interpreter()
    wanted, last_wanted = by_definition(x, y, z, log_decay, log_write, reverse)
    dots_wanted = (wanted * np.asarray(partner, np.float64)[0, :, 0]).sum(-1)
    errors = []
    for terms in (1, 2, 3):
        decays = scalar_decay.chunk_decays(log_decay, None, z.shape, 1, log_write, interpret)
        if terms > 1:
            decays = exact_decays(log_decay, log_write, None)
        out, last, dots, saved = scalar_scan(
            x, y, z, decays, heads=1, partner=partner, save_states=True, reverse=reverse, terms=terms,
            interpret=interpret,
        )  # fmt: skip
        assert not races_found()
        assert out.dtype == (jnp.float32 if terms > 1 else jnp.bfloat16)
        if terms > 1:
            products = scalar_scan(
                x,
                y,
                z,
                decays,
                heads=1,
                states=saved,
                reverse=True,
                terms=2,
                interpret=interpret,
            )[-1]
            first = sum(s.astype(jnp.float32) for s in saved)[0, 0, 0]
            if not reverse:  # the first memory is empty
                assert not first.any() and not products[0, 0, :, 0].any()
            assert saved[1].any() and products[:, :, :, 1:].any()
        pairs = (out[0, :, 0], wanted), (last[0, 0], last_wanted), (dots[0, 0].sum(0), dots_wanted)
        errors.append([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])
    assert min(errors[0]) > 5e-4 and max(errors[1]) < 2e-5 and max(errors[2]) < 1e-6, errors


@pytest.mark.parametrize("count", [1, 2, 3])
def test_terms_add_up(count):
    """The sum of the terms is within 2^(-8 count) of each number, small and large; the last term is not 0."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=4096) * 10.0 ** rng.integers(-20, 20, 4096), jnp.float32)
    terms = warpgroups.split_terms(x, count)
    high, low = terms[0], terms[-1]
    assert len(terms) == count and low.any()
    assert all(term.dtype == jnp.bfloat16 for term in terms)
    np.testing.assert_array_equal(np.abs(high - x.astype(jnp.bfloat16)) <= jnp.abs(x) * 2**-7, True)
    total = sum(np.asarray(term, np.float64) for term in terms)
    assert np.max(np.abs(total - x) / np.abs(x)) <= 2.0 ** (-8 * count)


def test_sums_of_decays_have_two_terms():
    """Sums in the hundreds have the differences of float64, also where documents begin and where tokens write nothing."""
    rng = np.random.default_rng(0)
    shape = 1, 128, 1
    decay = -np.abs(rng.normal(size=shape)) * rng.choice([1e-4, 1, 30], size=shape)
    write = np.where(rng.random(shape) < 0.2, -1e30, -np.abs(rng.normal(size=shape)))
    decay, write = (x.astype(np.float32) for x in (decay, write))
    run = jnp.asarray(np.arange(128) >= 100, jnp.int32)[None]
    found = exact_decays(jnp.asarray(decay), jnp.asarray(write), run)
    cum, low, write_cum, write_low = (
        np.asarray(x, np.float64).reshape(2, 64)
        for x in (found.cum, found.cum_low, found.write_cum, found.write_cum_low)
    )
    sums = np.cumsum(decay.astype(np.float64).reshape(2, 64), axis=1)
    assert np.abs(sums).max() > 200 and np.abs(low).max() < 0.25
    np.testing.assert_allclose(cum + low, sums, atol=1e-7)
    writes = write.reshape(2, 64) > -1e29
    wanted = np.where(writes, sums - write.reshape(2, 64), 0)
    np.testing.assert_allclose(np.where(writes, write_cum + write_low, 0), wanted, atol=1e-7)
    assert (write_cum[~writes] > 1e29).all()
    read, after = (np.asarray(x).reshape(2, 64) for x in (found.read_decay, found.write_decay))
    enters, stays = np.asarray(run).reshape(2, 64) == 0, np.arange(128).reshape(2, 64) >= 100
    stays[0] = True
    np.testing.assert_allclose(read, np.where(enters, np.exp(sums), 0), rtol=1e-6, atol=1e-37)
    ends = np.where(writes & stays, np.exp(sums[:, -1:] - sums + np.where(writes, write.reshape(2, 64), 0)), 0)  # fmt: skip
    np.testing.assert_allclose(after, ends, rtol=1e-6, atol=1e-37)
    np.testing.assert_array_equal(np.asarray(found.chunk_decay)[0, 0], [read[0, -1], 0])
