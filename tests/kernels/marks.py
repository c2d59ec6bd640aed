"""Marks of tests that require a device or optional packages."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels.triton import launch

requires_triton = pytest.mark.skipif(
    not launch.installed(), reason="needs jax-triton and triton: pip install 'lsm_jax[triton]'"
)
on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA Hopper GPU"),
]
