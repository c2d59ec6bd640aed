"""Tests of experts that are sharded over devices: values and gradients equal those of one device for every
routing, and choices that do not fit into the buffers are reported.
"""

from __future__ import annotations

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lsm_jax import feedforward
from lsm_jax.feedforward import MoEConfig
from lsm_jax.parallel import MeshConfig, exchange_options, make_mesh, token_sharding
from tests.parallel.test_parallel import run_with_devices

WIDTH, ROWS, LENGTH, EXPERTS = 8, 8, 6, 4
ROUTES = ("random", "one expert", "one device", "few tokens", "few rows")


def made(route: str, **fields):
    """Return a mixture of experts with large parameters, for a kind of routing (`route`); "one expert" and
    "one device" send every token to one of them.
    """
    config = MoEConfig(num_experts=EXPERTS, top_k=2, expert_size=6, shared_size=4, **fields)
    moe = feedforward.build(config, WIDTH, rngs=nnx.Rngs(0), init_std=0.5)
    if route in ("one expert", "one device"):
        favoured = [0] if route == "one expert" else [2, 3]
        bias = jnp.zeros((WIDTH, EXPERTS)).at[:, jnp.array(favoured)].set(5.0)
        moe.router.kernel[...] = moe.router.kernel[...] + bias
    return moe


@functools.cache
def program(graph, mesh):
    """Return the compiled loss and gradient of a mixture of experts on a mesh, one program for all kinds of
    routing, which differ only in parameters.
    """

    def loss(params, x, ids):
        y, _, aux = nnx.merge(graph, params)(x, segment_ids=ids)
        weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
        return jnp.sum(y * weights) + aux["moe/balance_loss"], aux

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def gradient(moe, x, ids):
    """Return ((loss, statistics), gradients of the parameters and of x) of a mixture of experts. x is
    positive, so that large weights of the router determine the experts.
    """
    graph, params = nnx.split(moe, nnx.Param)
    return program(graph, jax.sharding.get_abstract_mesh())(params, x, ids)


def compare(axes: dict[str, int], route: str, **fields) -> None:
    """Assert that the values, statistics and gradients of a mixture of experts on the mesh equal those on
    one device. In FP8 they are compared with those of unrounded numbers, within the steps of 8-bit floats, since
    devices have scales of their own, and rows that were sent are weighted behind the experts.
    """
    x = np.abs(jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH)))
    ids = np.ones((ROWS, LENGTH), np.int32)
    ids[:, -1] = 0
    if route == "few tokens":
        ids[1:] = 0  # most devices have none
    if route == "few rows":
        # Not divisible: every device has all rows, and computes the results of its experts.
        x, ids = x[:3], ids[:3]
    expected = gradient(made(route), x, ids)
    config = MeshConfig(**axes)
    mesh = make_mesh(config, jax.devices()[: np.prod(list(axes.values()))])
    with jax.set_mesh(mesh):
        rows = token_sharding(mesh) if len(x) == ROWS else NamedSharding(mesh, PartitionSpec())
        placed = jax.device_put((x, ids), rows)
        (value, aux), grads = gradient(made(route, **fields), *placed)
    assert int(aux.pop("moe/overflow_count")) == 0
    rounded = 0.0
    for a, b in zip(jax.tree.leaves(((value, aux), grads)), jax.tree.leaves(expected), strict=True):
        if fields.get("matmul") == "fp8":
            error, size = np.linalg.norm(np.subtract(a, b)), np.linalg.norm(b)
            assert error <= 0.2 * size, (axes, route, np.shape(a), error, size)
            rounded = max(rounded, error / max(size, 1e-30))
            continue
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=f"{axes} {route}")
    assert (rounded > 1e-4) == (fields.get("matmul") == "fp8"), (axes, route, rounded)
    print(axes, route, "ok", flush=True)


def overflows() -> None:
    """Check that with expert buffers of half the even load the loss is NaN, and that the choices that do
    not fit are counted.
    """
    x = jnp.ones((ROWS, LENGTH, WIDTH))
    mesh = make_mesh(MeshConfig(data=1, expert=4), jax.devices()[:4])
    with jax.set_mesh(mesh):
        (value, aux), _ = gradient(made("one device", expert_buffer=0.5), x, None)
    # All tokens choose experts 2 and 3: each device sends 12 rows to each of two devices, in buffers of 3.
    assert np.isnan(value) and int(aux["moe/overflow_count"]) == 2 * ROWS * LENGTH - 4 * 2 * 3
    # Tokens that are NaN do not count, so that a diverged model stops as a diverged model.
    with jax.set_mesh(mesh):
        (value, aux), _ = gradient(made("one device", expert_buffer=0.5), jnp.nan * x, None)
    assert np.isnan(value) and int(aux["moe/overflow_count"]) == 0
    print("overflow ok", flush=True)


def main(which: str) -> None:
    if which == "fast":
        compare(dict(data=1, expert=2, tensor=2), "random")
        compare(dict(data=1, expert=4), "one expert", expert_buffer=4.0)
        for route in ("random", "few rows"):
            compare(dict(data=1, expert=2, tensor=2), route, matmul="fp8", expert_buffer=4.0)
        overflows()
        return
    for route in ROUTES:
        for axes in (dict(data=1, expert=4), dict(data=2, expert=2), dict(data=1, expert=2, sequence=2, tensor=2)):  # fmt: skip
            compare(axes, route, expert_buffer=4.0)
    compare(dict(data=1, fsdp=2, expert=4), "random", expert_buffer=4.0)


def test_a_ragged_exchange_on_gpus_is_compiled_for_nccl():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert not exchange_options(mesh, {"padded", "ragged"})
    gpus: object = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="gpu")]))
    options = exchange_options(gpus, {"padded", "ragged"})
    assert options["xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel"] is False
    assert not exchange_options(gpus, {"padded"})
    jax.jit(jnp.sin, compiler_options=options)(1.0)  # XLA knows these names


def test_four_devices_equal_one():
    assert "overflow ok" in run_with_devices(4, "-m", "tests.parallel.test_experts", "fast")


@pytest.mark.slow
def test_every_route_on_every_mesh():
    lines = run_with_devices(8, "-m", "tests.parallel.test_experts", "all").splitlines()
    assert sum(line.endswith(" ok") for line in lines) == 3 * len(ROUTES) + 1


if __name__ == "__main__":
    main(sys.argv[1])
