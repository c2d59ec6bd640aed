"""A backend and a method, each from one file outside the package, pass the tests of the op and of the mixers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lsm_jax import ops
from lsm_jax.ops.backends import registry
from tests.toys.toy_backend import TOY

ROOT = Path(__file__).resolve().parents[2]


def run_suite(plugin: str, *arguments: str) -> str:
    """Run pytest with these arguments in a separate process that loads the plugin `plugin`; assert that all
    tests passed, and return what it printed.
    """
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marker", "least"),
    [("not slow", 5), pytest.param("slow or not slow", 50, marks=pytest.mark.slow)],
)
def test_the_ops_own_tests_pass_on_a_backend_from_outside(marker, least):
    tests = ("tests/ops/test_ops.py", "-k", "linear_memory and chunk", "-m", marker)
    told = run_suite("tests.toys.toy_backend", *tests)
    traced = re.search(r"toy backend was traced (\d+) times", told)
    assert traced and int(traced[1]) >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        ("tests/mixers/test_mixers.py",),
        pytest.param(("tests/mixers", "tests/models"), marks=pytest.mark.slow),
    ],
)
def test_the_mixers_own_tests_pass_on_a_method_from_outside(tests):
    told = run_suite("tests.toys.toy_method", *tests, "-k", "toy", "-m", "slow or not slow")
    passed = re.search(r"(\d+) passed|\[100%\]", told)
    assert passed and "no tests ran" not in told


@pytest.fixture
def toy():
    registry.register("linear_memory", TOY)
    yield
    registry.unregister("linear_memory", TOY)


def test_a_backend_from_outside_by_name_in_order_and_by_itself(toy):
    q = jnp.ones((1, 8, 1, 4))
    expected, _ = ops.linear_memory(q, q, q, implementation="xla")
    for implementation in (None, "toy", ("toy", "xla")):
        output, _ = ops.linear_memory(q, q, q, implementation=implementation)
        assert jnp.allclose(output, expected)
    assert "toy on CPU, xla, chunk form elsewhere" in ops.choices()["linear_memory"]
    with pytest.raises(NotImplementedError, match="implementation='toy' requires no normalize"):
        ops.linear_memory(q, q, q, normalize=1e-3, implementation="toy")
    output, _ = ops.linear_memory(q, q, q, normalize=1e-3, implementation=("toy", "xla"))
    assert output.shape == q.shape
    with pytest.raises(
        ValueError, match="accepted are None, 'xla', 'toy', 'mosaic_gpu', 'triton', 'mosaic_tpu'"
    ):
        ops.linear_memory(q, q, q, implementation="cutile")


def test_several_automatic_kernels_of_one_platform(monkeypatch):
    """The card's compute capability determines which of several automatic backends for one platform is selected."""
    from lsm_jax.ops.backends import select

    def kernel(name, *capabilities):
        return registry.Backend(
            name=name, run=lambda call: name, platforms=("cuda",), compute_capabilities=capabilities
        )

    op = "an op of this test"
    registry.register(
        op, kernel("hopper", "9.0"), kernel("triton", "8.0", "8.9", "9.0"), kernel("xla")
    )
    call = registry.Call(op, None, dict(q=jax.ShapeDtypeStruct((1, 8, 1, 4), jnp.float32)))
    for card, expected in (("9.0", "hopper"), ("8.9", "triton"), ("12.0", "xla")):
        monkeypatch.setattr(select, "compute_capabilities", lambda card=card: frozenset([card]))
        assert select.select(call).backends[0].name == expected
    with pytest.raises(NotImplementedError, match="compute capability 9.0, not 12.0"):
        select.select(call._replace(implementation="hopper"))
    registry.unregister(op, *registry.backends_of(op))
