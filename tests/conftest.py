"""Tests run on the CPU and spend their time in the compiler: leave out what small arrays don't need.

That is most optimisations, and of XLA's two generators of code for fusions the newer, which takes 2 to 5 times longer.
The processes that tests start inherit both.
"""

import itertools
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.setdefault(
    "NPROC", "8"
)  # XLA's threads: an interpreted kernel's warpgroups wait for each other
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
) * (os.environ["JAX_PLATFORMS"] == "cpu")

import jax
import pytest

jax.config.update("jax_disable_most_optimizations", True)  # where a plugin imported jax before

# Options of `jax.jit` that undo this, for tests of what may depend on how the compiler fuses.
AS_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_backend_extra_options": "",
    "xla_cpu_parallel_codegen_split_count": 32,
}

_tests = itertools.count(1)
_MAPS = Path("/proc/self/maps")  # Linux grants a process 65,530


@pytest.fixture(autouse=True)
def forget_programs():
    """Give memory and its maps back: every compiled program takes some, and XLA aborts at the last."""
    yield
    number = next(_tests)
    maps = _MAPS.read_bytes().count(b"\n") if number % 10 == 0 and _MAPS.exists() else 0
    if number % 500 == 0 or maps > 25_000:
        jax.clear_caches()
