"""Tests of `lsm_jax.models.unstack`: slices of a stack, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from lsm_jax.models import unstack as module
from lsm_jax.models.unstack import slices_by_one_kernel, unstack

COUNT = 3


@pytest.fixture(params=["in place", "concatenated"])
def stack(request, monkeypatch):
    """Return a stack whose gradient is written in place, and one whose slices are smaller than that."""
    monkeypatch.setattr(module, "LEAST_SIZE", 1 if request.param == "in place" else 100)
    return jnp.asarray(np.random.default_rng(0).normal(size=(COUNT, 4, 5)), jnp.float32)


def sliced(stacks, count):
    return [jax.tree.map(lambda x, i=i: x[i], stacks) for i in range(count)]


def total(slices):
    """Return a number that depends on all slices but the second, differently."""
    first, _, last = slices
    return jnp.sum(jnp.sin(first["a"]) * last["a"]) + jnp.sum(last["b"] ** 3)


def both(stack, transform):
    """Return the results of a transformation of `total` by `unstack` and by slices."""
    stacks = dict(a=stack, b=2 * stack[..., 0])
    return tuple(
        jax.jit(transform(lambda x, f=f: total(f(x, COUNT))))(stacks) for f in (unstack, sliced)
    )


def hessian_times_ones(f):
    gradient = jax.grad(f)
    return lambda x: jax.jvp(gradient, (x,), (jax.tree.map(jnp.ones_like, x),))


TRANSFORMS = {
    "value": lambda f: f,
    "gradient": jax.grad,
    "forward": lambda f: lambda x: jax.jvp(f, (x,), (jax.tree.map(jnp.cos, x),)),
    "hessian": hessian_times_ones,
    "gradient of a gradient": lambda f: jax.grad(
        lambda x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(x)))
    ),
    "mapped": lambda f: (
        lambda x: jax.vmap(jax.grad(f))(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x))
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_and_derivatives_are_those_of_slices(stack, name):
    got, expected = both(stack, TRANSFORMS[name])
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_slice_without_a_gradient_has_zeros_in_that_of_the_stack(stack):
    got, _ = both(stack, jax.grad)
    assert not np.any(got["a"][1]) and np.all(np.any(np.asarray(got["a"])[[0, 2]], axis=(1, 2)))


def test_gradients_of_large_slices_are_written_in_place_and_of_small_ones_concatenated(stack):
    text = str(
        jax.make_jaxpr(jax.grad(lambda x: total(unstack(x, COUNT))))(dict(a=stack, b=stack[..., 0]))
    )
    in_place = module.LEAST_SIZE == 1
    assert ("dynamic_update_slice" in text) == in_place
    assert ("stack[axis=0]" in text) == (not in_place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_slices_by_one_kernel_have_the_bits_of_the_stack(dtype):
    """Also of numbers that a product with one would change: NaN with its payload, -0, and subnormal numbers, which a CPU flushes."""
    kind = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    bits = np.random.default_rng(0).integers(0, 2, (COUNT, 8 * kind.itemsize, 50), np.uint8)
    if dtype == "bool":
        bits[:, :7] = 0
    x = np.packbits(bits, axis=1).swapaxes(1, 2).copy().view(kind)[..., 0].view(jnp.dtype(dtype))
    if jnp.issubdtype(dtype, jnp.floating):
        small = jnp.finfo(dtype).smallest_subnormal
        x[:, :4] = np.array([np.nan, -0.0, small, -small], x.dtype)
    got = jax.jit(lambda x: slices_by_one_kernel(x, count=COUNT))(x)
    for each, expected in zip(got, x, strict=True):
        np.testing.assert_array_equal(np.asarray(each).view(kind), expected.view(kind))


@pytest.mark.parametrize(
    ("platform", "dtype", "size", "joined"),
    [
        ("cuda", jnp.float32, 20, True),
        ("cuda", jnp.bfloat16, 20, True),
        ("cuda", jnp.int32, 20, False),
        ("cuda", jnp.float32, module.LEAST_SIZE, False),
        ("cpu", jnp.float32, 20, False),
    ],
)
def test_small_floats_are_cut_by_one_kernel_on_a_gpu_only(platform, dtype, size, joined):
    x = jax.ShapeDtypeStruct((COUNT, size), dtype)
    lowered = jax.jit(lambda x: unstack(x, COUNT)).trace(x).lower(lowering_platforms=(platform,))
    assert ("optimization_barrier" in lowered.as_text()) == joined


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gpu_copies_all_small_slices_at_once(dtype):
    """Compiled for an H200, where each slice is an operand that no fusion can cut out of the stack itself."""
    from tests.kernels.test_aot import H200

    topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1")
    x = jax.ShapeDtypeStruct((24, 1024), dtype, sharding=SingleDeviceSharding(topology.devices[0]))

    def kernels(cut) -> int:
        def behind_barriers(x):
            return [jnp.sin(jax.lax.optimization_barrier(y)) for y in cut(x)]

        traced = jax.jit(behind_barriers).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
        entry = text[text.index("ENTRY") :].splitlines()
        return sum("slice" in line and " fusion(" in line for line in entry)

    assert kernels(lambda x: unstack(x, 24)) == 1
    assert kernels(lambda x: list(x)) == 24  # otherwise nothing needs to join them


def test_another_number_of_slices_is_refused(stack):
    with pytest.raises(ValueError, match="count=2: a stack has 3 slices"):
        unstack(stack, 2)
