"""Tests of the kernels of ops on single tokens (short convolution, norms, RWKV7's gates and mixes) that run on an NVIDIA Hopper
GPU: `make test-gpu`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.calls import tokens
from lsm_jax import feedforward, ops
from lsm_jax.models.periods import rematerialized
from lsm_jax.ops.normalization import branches
from pallas_kernels.gated_norm import cases as gated_norm_cases
from pallas_kernels.gated_norm import gated_rms_norm_gradients
from pallas_kernels.residual_norm import cases as residual_norm_cases
from pallas_kernels.residual_norm import residual_norm_forward, residual_norm_gradients
from pallas_kernels.rwkv7 import cases as rwkv7_cases
from pallas_kernels.short_convolution import cases as short_convolution_cases
from tests.kernels import test_gated_norm_gpu as gated_norm
from tests.kernels import test_residual_norm_gpu as residual_norm
from tests.kernels import test_rwkv7_gpu as rwkv7
from tests.kernels.marks import on_hopper
from tests.kernels.on_card import assert_alike
from tests.kernels.test_linear_attention_gpu import error

pytestmark = on_hopper


@pytest.mark.parametrize("case", short_convolution_cases.HOPPER, ids=lambda case: case.id)
def test_convolution_equals_xla(case):
    """On the card, the value and every gradient of the short convolution's kernel are those of XLA in
    float32; a second run gives the same bits.
    """
    tolerance = short_convolution_cases.TOLERANCES["card"]
    assert_alike(tokens.convolution(case), tolerance, tolerance)


@pytest.mark.parametrize("case", gated_norm_cases.COMPILED, ids=lambda case: case.id)
def test_gated_norm_equals_xla(case):
    """On the card, the value and every gradient of the gated norm's kernel are those of XLA in float32; a second run gives the same
    bits.
    """
    arrays, options, dy = gated_norm.make(case)
    kernel = functools.partial(ops.gated_rms_norm, **options, implementation="mosaic_gpu")
    run = jax.jit(lambda *a: gated_norm.both(kernel, *a))
    got = run(arrays, dy)
    for a, b in zip(*map(jax.tree.leaves, (got, run(arrays, dy))), strict=True):
        np.testing.assert_array_equal(a, b)
    plain = functools.partial(ops.gated_rms_norm, **options, implementation="xla")
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (arrays, dy))
    wanted = jax.jit(lambda *a: gated_norm.both(plain, *a))(*wide)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert error(a, b) < gated_norm_cases.TOLERANCES["card"]


@pytest.mark.parametrize(
    "case",
    [c for c in gated_norm_cases.COMPILED if c.group > 1 and not c.skip],
    ids=lambda case: case.id,
)
def test_gated_norm_stored_by_its_gradient_equals_the_forward_pass(case):
    """On the card, the output that the backward kernel stores has the bits of the forward kernel's, and the gradients those of the
    backward kernel that stores none.
    """
    arrays, options, dy = gated_norm.make(case)
    kernel = functools.partial(ops.gated_rms_norm, **options, implementation="mosaic_gpu")
    y, wanted = jax.jit(lambda a, dy: gated_norm.both(kernel, a, dy))(arrays, dy)
    gradients = functools.partial(gated_rms_norm_gradients, **options)
    *got, stored = jax.jit(lambda a, dy: gradients(**a, dy=dy))(arrays, dy)
    for a, b in zip((stored, *got), (y, wanted["x"], wanted["gate"], wanted["scale"]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", residual_norm_cases.COMPILED, ids=lambda case: case.id)
def test_gradient_of_a_residual_norm_equals_xla(case):
    """On the card, the gradients of the residual stream and of the scale are those of XLA in float32; a second run gives the same
    bits.
    """
    arrays = residual_norm.make(case)
    run = jax.jit(lambda a: residual_norm_gradients(**a, eps=1e-5))
    got = run(arrays)
    for a, b in zip(got, run(arrays), strict=True):
        np.testing.assert_array_equal(a, b)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    for a, b in zip(got, jax.jit(lambda a: branches.gradients(1e-5, **a))(wide), strict=True):
        assert error(a, b) < residual_norm_cases.TOLERANCES["card"]


@pytest.mark.parametrize("case", residual_norm_cases.FORWARD_COMPILED, ids=lambda case: case.id)
def test_a_sum_with_its_norm_equals_the_plain_form(case):
    """On the card, the sum is XLA's to the bit, and its norm is that of the rounded sum; a second run gives the same bits."""
    arrays = residual_norm.make_sum(case)
    run = jax.jit(lambda *a: residual_norm_forward(*a, eps=1e-5))
    got = run(*arrays)
    for a, b in zip(got, run(*arrays), strict=True):
        np.testing.assert_array_equal(a, b)
    residual_norm.check_sum(got, *arrays)


@pytest.mark.parametrize("op", rwkv7.OPS)
@pytest.mark.parametrize("case", rwkv7_cases.COMPILED, ids=lambda case: case.id)
def test_gradients_of_rwkv7_equal_the_definition(op, case):
    """On the card, every gradient of RWKV7's kernels is that of the definition in float32; a second run gives the same bits."""
    arguments, gradients = rwkv7.make(op, case)
    kernel = functools.partial(rwkv7.by_op, op, "mosaic_gpu")
    run = jax.jit(lambda *a: rwkv7.both(kernel, *a)[1])
    got = run(arguments, gradients)
    for a, b in zip(*map(jax.tree.leaves, (got, run(arguments, gradients))), strict=True):
        np.testing.assert_array_equal(a, b)
    wide = rwkv7.widened(arguments)
    if rwkv7.is_mixes(op):  # the weights that multiply are rounded
        wide["shares"] = rwkv7.widened(arguments["shares"].astype(jnp.bfloat16))
    defined = functools.partial(rwkv7.definition, op)
    wanted = jax.jit(lambda *a: rwkv7.both(defined, *a)[1])(wide, rwkv7.widened(gradients))
    for name, x in got.items():
        assert error(x, wanted[name]) < rwkv7_cases.TOLERANCES["card"], name


@pytest.mark.parametrize(("batch", "length", "width"), [(4, 1024, 1024), (1, 1030, 768)])
def test_swiglu_by_one_product_with_gate_and_up_equals_two(batch, length, width):
    """On the card, the value and every gradient of a layer with both matrices side by side are those of two products in float32; a second
    run gives the same bits.
    """
    layer = feedforward.build(feedforward.SwiGLUConfig(), width, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
    draw = np.random.default_rng(0).normal
    x, dy = (jnp.asarray(draw(size=(batch, length, width)), jnp.bfloat16) for _ in range(2))

    def both(joins, params, x, dy):
        def apply(params, x):
            layer = nnx.merge(graphdef, params)
            if joins:
                layer.join()
            return layer.transform(x)

        apply = rematerialized(apply, "dots_and_states", in_loop=False)
        y, pull = jax.vjp(apply, params, x)
        return y, pull(dy)

    run = jax.jit(functools.partial(both, True))
    got = run(params, x, dy)
    for a, b in zip(*map(jax.tree.leaves, (got, run(params, x, dy))), strict=True):
        np.testing.assert_array_equal(a, b)
    two = jax.jit(functools.partial(both, False))
    wide = (a.astype(jnp.float32) for a in (x, dy))
    others = two(params, x, dy), two(params, *wide)
    for a, b, exact in zip(*map(jax.tree.leaves, (got, *others)), strict=True):
        assert error(a, exact) < 1e-2
        assert error(a, exact) < 1.2 * error(b, exact) + 1e-3
