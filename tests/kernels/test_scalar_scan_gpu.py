"""Tests of Hopper's scan with a scalar decay or none in Mosaic GPU's interpreter: what it leaves out, and how thread blocks divide it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import races_found
from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.cases import HOPPER_INTERPRETED
from pallas_kernels.linear_attention.hopper import scalar_plan
from tests.kernels.test_linear_attention_gpu import fused, make, make_case


def results_and_gradients(function, inputs, zeros: tuple[Any, ...] = ()):
    """Return the results of a function of `inputs`, and its gradients by random cotangents, followed by the given ones of the last results."""
    results, pull = jax.vjp(function, inputs)
    rng, drawn = np.random.default_rng(1), results[: len(results) - len(zeros)]
    cotangents = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in drawn]
    return results, pull((*cotangents, *zeros))[0]


SCALAR = "decay", "plain-queries-share", "documents", "memories-share-wide-keys", "deep"


@pytest.mark.parametrize(
    "name", [*SCALAR[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in (*SCALAR[2:], "parts", "channels"))]
)  # fmt: skip
@pytest.mark.parametrize("final", [False, True])
def test_an_empty_memory_is_no_array(name, final, monkeypatch):
    """Without an initial memory, and without a gradient of the final one, results and gradients are to the bit those of zeros."""
    if name.endswith("parts"):
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    inputs = make_case(HOPPER_INTERPRETED[name])
    run, zeros = inputs.pop("run"), jnp.zeros_like(inputs.pop("initial"))
    wanted, gradients = results_and_gradients(
        lambda x: fused(**x, run=run, initial=zeros), inputs, () if final else (zeros,)
    )
    count = 1 + final
    got = results_and_gradients(lambda x: fused(**x, run=run)[:count], inputs)
    jax.tree.map(np.testing.assert_array_equal, got, (wanted[:count], gradients))
    assert not races_found()


@pytest.mark.parametrize("documents", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_warpgroups_of_a_thread_block_have_the_bits_of_two_thread_blocks(
    documents, monkeypatch
):
    inputs = make(65, 1, 1, 2, 64, 128, documents=documents, decay="token")
    run, found = inputs.pop("run"), []
    for processors, groups in ((132, 1), (1, 2)):
        monkeypatch.setattr(scalar_plan, "PROCESSORS", processors)
        assert scalar_plan.count_groups(2, 2) == groups
        found.append(results_and_gradients(lambda x: fused(**x, run=run), inputs))
        assert not races_found()
    jax.tree.map(np.testing.assert_array_equal, *found)
