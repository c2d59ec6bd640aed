"""The mark of tests that require the optional packages of the Triton kernels."""

from __future__ import annotations

import pytest

from pallas_kernels.triton import launch

requires_triton = pytest.mark.skipif(
    not launch.installed(), reason="needs jax-triton and triton: pip install 'lsm_jax[triton]'"
)
