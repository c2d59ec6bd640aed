"""JAX settings that make tests compile faster, since they run on the CPU and spend most of their time in the compiler.

Most optimisations are off, since the arrays are small, and so is the newer of XLA's two code generators for fusions, which
compiles 2 to 5 times longer. Processes that tests start inherit both settings.
"""

import itertools
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.setdefault(
    "NPROC", "8"
)  # number of XLA's threads: the warpgroups of an interpreted kernel run at the same time and wait for each other
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
elif int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    # Processes that share a card return the memory that they no longer need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax
import pytest

jax.config.update("jax_disable_most_optimizations", True)  # if a plugin has imported jax before

# Options of `jax.jit` that undo these settings, for tests whose result can depend on the compiler's fusions.
AS_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_backend_extra_options": "",
    "xla_cpu_parallel_codegen_split_count": 32,
}

SLOW = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items):
    """Mark the tests of `SLOW`."""
    names = set(SLOW.read_text().splitlines())
    for item in items:
        if item.nodeid in names:
            item.add_marker(pytest.mark.slow)


_tests = itertools.count(1)
_MAPS = Path("/proc/self/maps")  # one line per memory map; Linux allows a process 65,530


@pytest.fixture(autouse=True)
def forget_programs():
    """Clear JAX's caches of compiled programs before the process has as many memory maps as the system
    permits; XLA aborts there.
    """
    yield
    number = next(_tests)
    maps = _MAPS.read_bytes().count(b"\n") if number % 10 == 0 and _MAPS.exists() else 0
    if number % 500 == 0 or maps > 25_000:
        jax.clear_caches()
