"""A fixture of the kernels' tests: kernels in Mosaic GPU's interpreter run one after another."""

import jax
import pytest

from pallas_kernels.compat import plgpu


@pytest.fixture(autouse=True)
def kernels_apart(monkeypatch):
    """Make each kernel that Mosaic GPU's interpreter runs outside of `jax.jit` finish before the next one
    starts.

    The interpreter computes with JAX. JAX allows 32 computations in flight; if all of them wait for the
    interpreter, there is a deadlock.
    """
    kernel = plgpu.kernel

    def waiting(*args, **options):
        run = kernel(*args, **options)
        return lambda *x: jax.block_until_ready(run(*x)) if options.get("interpret") else run(*x)

    monkeypatch.setattr(plgpu, "kernel", waiting)
