"""What tests of the kernels share."""

import jax
import pytest

from pallas_kernels.compat import plgpu


@pytest.fixture(autouse=True)
def kernels_apart(monkeypatch):
    """Wait for each kernel that Mosaic GPU's interpreter runs outside of `jax.jit`.

    It computes with JAX itself, and waits for ever once all of the 32 computations that JAX lets be on their way wait for it.
    """
    kernel = plgpu.kernel

    def waiting(*args, **options):
        run = kernel(*args, **options)
        return lambda *x: jax.block_until_ready(run(*x)) if options.get("interpret") else run(*x)

    monkeypatch.setattr(plgpu, "kernel", waiting)
