"""Products of grouped rows in 8-bit floats: XLA's form against the definition by numpy, and the kernels against XLA's form."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.ops.backends.registry import backends_of
from lsm_jax.ops.core import narrow as rounding
from lsm_jax.ops.experts.narrow import grouped_product_fp8, grouped_swiglu_fp8
from pallas_kernels.grouped_product import gated, hopper
from pallas_kernels.grouped_product.cases import GATED, GATED_ON_HOPPER, TOLERANCES, Case
from tests.ops import test_grouped_product as products
from tests.ops import test_grouped_swiglu as swiglu
from tests.ops.test_grouped_product import relative_error

SMALL = Case((3, 0, 4), 9, 16, 32)
FLIPPED = 2.5e-2
"""Tolerance where numbers differ by bfloat16's rounding before they are rounded to 8-bit floats, half of whose steps are up to 6 % of a number."""


def rounded(x, dtype):
    """Return x as the numbers that its 8-bit floats stand for, by numpy in float64, with a power of two as the scale of all."""
    x, largest = np.asarray(x, np.float64), float(jnp.finfo(dtype).max)
    most = np.abs(x).max()
    scale = 2.0 ** np.ceil(np.log2(most / largest)) if most else 1.0
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def product_by_loop(x, kernels, dy, sizes):
    """Return the output of the product of grouped rows in 8-bit floats and the gradients of x and of the matrices, in float64."""
    y, (dx, _) = products.by_loop(
        rounded(x, jnp.float8_e4m3fn), rounded(kernels, jnp.float8_e4m3fn), rounded(dy, jnp.float8_e5m2), sizes
    )  # fmt: skip
    return y, (dx, products.by_loop(x, kernels, dy, sizes)[1][1])


def swiglu_by_loop(x, gate_up, down, sizes, row_weight, dy):
    """Return the output of the groups' SwiGLU layers and all gradients, in float64, with products in 8-bit floats."""
    used = np.arange(len(x)) < np.sum(sizes)
    x, dy = (np.where(used[:, None], np.asarray(a, np.float64), 0) for a in (x, dy))
    weight = 1.0 if row_weight is None else np.asarray(row_weight, np.float64)
    gate, up = np.split(product_by_loop(x, gate_up, np.zeros((len(x), gate_up.shape[2])), sizes)[0], 2, axis=-1)  # fmt: skip
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    inner = weight * silu * up
    y, (d_inner, d_down) = product_by_loop(inner, down, dy, sizes)
    d_weight = None if row_weight is None else np.sum(d_inner * silu * up, axis=-1, keepdims=True)
    d_inner = d_inner * weight
    both = d_inner * up * (sigmoid + silu * (1 - sigmoid)), d_inner * silu
    d_products = np.concatenate(both, axis=-1)
    _, (dx, d_gate_up) = product_by_loop(x, gate_up, d_products, sizes)
    return y, (dx, d_gate_up, d_down, d_weight)


def differentiated(arguments, dy, **options):
    x, gate_up, down, sizes, row_weight = arguments

    def run(x, gate_up, down, row_weight):
        return grouped_swiglu_fp8(x, gate_up, down, sizes, row_weight, **options)

    y, pull = jax.vjp(run, x, gate_up, down, row_weight)
    return y, pull(dy)


@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_products_are_those_of_rounded_numbers(outlier):
    """Values and gradients; an outlier changes the scale, and with it the rounding of all other numbers."""
    x, kernels, dy, sizes = products.make_arrays(*SMALL, dtype=jnp.float32)
    x, dy = (a.at[0, 0].mul(outlier).at[sum(SMALL.sizes) :].set(0) for a in (x, dy))
    y, pull = jax.vjp(jax.jit(lambda x, w: grouped_product_fp8(x, w, sizes)), x, kernels)
    wanted = product_by_loop(x, kernels, dy, sizes)
    for a, b in zip(jax.tree.leaves((y, pull(dy))), jax.tree.leaves(wanted), strict=True):
        assert relative_error(a, b) < 1e-6
    exact, _ = products.by_loop(x, kernels, dy, sizes)
    assert 1e-2 < relative_error(y, exact) < 5e-2  # it is FP8, and no worse


@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_is_that_of_rounded_numbers(weighted):
    arguments, dy = swiglu.make_arrays(SMALL, jnp.float32, weighted)
    found = jax.jit(differentiated)(arguments, dy)
    # Numbers beside the middle of two 8-bit floats may be rounded to either, by float32's rounding before.
    swiglu.check(found, swiglu_by_loop(*arguments, dy), sum(SMALL.sizes), 1e-3)
    exact = swiglu.by_loop(*arguments, dy)
    assert 1e-2 < relative_error(found[0], exact[0]) < 0.1


def test_rows_after_the_last_group_change_no_scale():
    arguments, dy = swiglu.make_arrays(SMALL, jnp.float32)
    used = sum(SMALL.sizes)
    x, *others = arguments
    wanted = jax.jit(differentiated)(arguments, dy)
    found = jax.jit(differentiated)((x.at[used:].set(jnp.nan), *others), dy.at[used:].set(1e9))
    np.testing.assert_array_equal(found[0][:used], wanted[0][:used])
    np.testing.assert_array_equal(found[1][0][:used], wanted[1][0][:used])


def test_zeros_and_numbers_that_are_not_finite():
    x, kernels, _, sizes = products.make_arrays(*SMALL, dtype=jnp.float32)
    assert (grouped_product_fp8(0 * x, kernels, sizes) == 0).all()
    assert (grouped_product_fp8(x, 0 * kernels, sizes) == 0).all()
    for bad in (jnp.nan, jnp.inf):
        y = grouped_product_fp8(x.at[0, 0].set(bad), kernels, sizes)
        assert not jnp.isfinite(y[: sum(SMALL.sizes)]).any()


def test_errors():
    (x, gate_up, down, *rest), _ = swiglu.make_arrays(GATED)
    with pytest.raises(ValueError, match="grouped_swiglu_fp8: gate_up is float32 and down bfl"):
        grouped_swiglu_fp8(x, gate_up.astype(jnp.float32), down, *rest)
    with pytest.raises(ValueError, match="grouped_swiglu_fp8: x has 511 rows; accepted are mult"):
        grouped_swiglu_fp8(x[:511], gate_up, down, rest[0], None, multiple=128)
    with pytest.raises(
        NotImplementedError, match="requires widths of multiples of 128, not 256 and 192"
    ):
        arrays, _ = swiglu.make_arrays(Case((128, 256), 384, 192, 256))
        with jax.sharding.use_abstract_mesh(hopper_mesh()):
            grouped_swiglu_fp8(*arrays, multiple=128, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="implementation='triton'; accepted are None, 'xla'"):
        grouped_product_fp8(x, down, rest[0], implementation="triton")


def hopper_mesh():
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, platform="gpu")
    return jax.sharding.AbstractMesh((), (), abstract_device=device)


def test_lowers_for_hopper_by_the_kernels():
    """The products of values and gradients in a program for an H200 are the kernels': four of 8-bit floats, two sums of rows."""
    arguments, dy = swiglu.make_arrays(GATED)
    with jax.sharding.use_abstract_mesh(hopper_mesh()):
        run = jax.jit(functools.partial(differentiated, multiple=128))
        text = run.trace(arguments, dy).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 6 and "ragged_dot" not in text
    assert "f8E4M3FN" in text and "f8E5M2" in text


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
def test_the_kernels_equal_xla_in_the_interpreter(monkeypatch, weighted):
    """Values and all gradients of SwiGLU layers, with an empty group and rows after the last group. The kernels compute inner values from
    float32 and XLA from bfloat16, so that one of twenty or so is rounded to another 8-bit float; `test_kernels_of_swiglu` compares each kernel.
    """
    interpret(monkeypatch)
    fused, xla = backends_of("grouped_swiglu_fp8")
    arguments, dy = swiglu.make_arrays(GATED, weighted=weighted)
    x, _, _, sizes, weight = arguments
    results = []
    for backend, unwrap in ((fused, lambda f: f.__wrapped__), (xla, jax.jit)):
        y, *residuals = unwrap(backend.forward)(*arguments)
        results.append((y, unwrap(backend.gradients)(x, sizes, weight, *residuals, dy)))
    swiglu.check(*results, sum(GATED.sizes), FLIPPED)
    swiglu.check(results[0], swiglu_by_loop(*arguments, dy), sum(GATED.sizes), FLIPPED)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
def test_kernels_of_swiglu(monkeypatch, weighted):
    """Each of the two kernels with SwiGLU, from the same 8-bit floats as a loop over groups in float64, and the largest values exactly."""
    interpret(monkeypatch)
    (x, gate_up, down, sizes, weight), dy = swiglu.make_arrays(GATED, weighted=weighted)
    narrow = [rounding.quantize(*a) for a in ((x, rounding.FORWARD), (gate_up, rounding.FORWARD), (down, rounding.FORWARD), (dy, rounding.BACKWARD))]  # fmt: skip
    (x8, x_scale), (gate_up8, gate_up_scale), (down8, down_scale), (dy8, dy_scale) = narrow
    wide = [np.asarray(a, np.float64) * float(scale) for a, scale in narrow]
    groups, count = jnp.array([0, 2, 2, 2], jnp.int32), jnp.array([3], jnp.int32)
    row_weight = None if weight is None else weight[:, 0]
    inner, pair, most = gated.gated_product(
        x8, jnp.swapaxes(gate_up8, 1, 2), groups, count, row_weight, scale=(x_scale * gate_up_scale)[None]
    )  # fmt: skip
    back = gated.gated_gradients(
        dy8, down8, groups, count, pair, row_weight, scale=(dy_scale * down_scale)[None]
    )
    used, factor = sum(GATED.sizes), 1.0 if weight is None else np.asarray(weight, np.float64)
    products_, _ = products.by_loop(wide[0], wide[1], np.zeros((len(x), 512)), sizes)
    gate, up = np.split(products_, 2, axis=-1)
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    d_inner = products.by_loop(np.zeros((len(x), 256)), wide[2], wide[3], sizes)[1][0]
    both = factor * d_inner * up * (sigmoid + silu * (1 - sigmoid)), factor * d_inner * silu
    wanted = (factor * silu * up, products_, factor * silu * up, np.concatenate(both, axis=-1))
    for found, exact in zip((inner, pair, back[0], back[1]), wanted, strict=True):
        assert relative_error(found[:used], exact[:used]) < TOLERANCES["card"]
    if weight is not None:
        d_weight = np.sum(d_inner * silu * up, axis=-1)
        assert relative_error(jnp.sum(back[2], 0)[:used], d_weight[:used]) < TOLERANCES["card"]
    for rows, stored in ((most, inner), (back[3], back[1])):
        np.testing.assert_array_equal(
            jnp.max(rows[:, :used], axis=0), jnp.max(jnp.abs(stored[:used]), axis=1)
        )


@pytest.mark.slow
def test_the_product_equals_xla_in_the_interpreter(monkeypatch):
    interpret(monkeypatch)
    fused, xla = backends_of("grouped_product_fp8")
    x, kernels, dy, sizes = products.make_arrays(GATED.sizes, GATED.rows, GATED.width, GATED.out)
    used, results = sum(GATED.sizes), []
    for backend, unwrap in ((fused, lambda f: f.__wrapped__), (xla, jax.jit)):
        y, *residuals = unwrap(backend.forward)(x, kernels, sizes)
        dx, dw = unwrap(backend.gradients)(x, sizes, *residuals, dy)
        results.append((y[:used], dx[:used], dw))
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, np.asarray(wanted, np.float64)) < TOLERANCES["interpreted"]


def interpret(monkeypatch):
    """Let Hopper's kernels run in the interpreter, each alone; their callers are called without `jax.jit`."""
    from lsm_jax.ops.experts import narrow

    for module, *names in ((gated, "gated_product", "gated_gradients"), (hopper, "product", "sums")):  # fmt: skip
        monkeypatch.setattr(module, "PROCESSORS", 2)
        for name in names:
            monkeypatch.setattr(module, name, swiglu._interpreted(getattr(module, name)))
    for name in ("_kernel_product", "kernel_sums"):
        monkeypatch.setattr(narrow, name, getattr(narrow, name).__wrapped__)
    monkeypatch.setattr(narrow, "blocks_of_rows", jax.jit(narrow.blocks_of_rows, static_argnums=0))


@pytest.mark.parametrize("most", [0.0, 1e-30, 448.0, 449.0, 3e38])
def test_scales_are_the_smallest_powers_of_two_that_fit(most):
    for dtype in (rounding.FORWARD, rounding.BACKWARD):
        scale = float(rounding.scale_for(jnp.float32(most), dtype))
        largest = float(jnp.finfo(dtype).max)
        assert np.frexp(scale)[0] == 0.5 and most <= scale * largest
        assert most == 0 or most > scale / 2 * largest or scale <= 2e-38


def test_xla_may_not_drop_the_rounding():
    """Compiled for a GPU, a conversion to 8 bits and back is dropped unless a barrier is between both."""
    x, kernels, _, sizes = products.make_arrays(*GATED_ON_HOPPER)
    run = jax.jit(functools.partial(grouped_product_fp8, sizes=sizes, implementation="xla"))
    text = run.trace(x, kernels).lower(lowering_platforms=("cuda",)).as_text()
    (barrier,) = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert barrier.count("f8E4M3FN") == 2, barrier


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [True, False])
def test_the_kernels_equal_xla(weighted):
    arguments, dy = swiglu.make_arrays(GATED_ON_HOPPER, weighted=weighted)
    run = jax.jit(functools.partial(differentiated, multiple=128, implementation="mosaic_gpu"))
    wanted = jax.jit(functools.partial(differentiated, implementation="xla"))(arguments, dy)
    found, again = run(arguments, dy), run(arguments, dy)
    used = sum(GATED_ON_HOPPER.sizes)
    swiglu.check(found, wanted, used, FLIPPED)
    assert jnp.array_equal(found[0][:used], again[0][:used])
    assert jnp.array_equal(found[1][1], again[1][1])


@pytest.mark.gpu
def test_the_product_equals_xla():
    """Hopper's tensor cores add with fewer bits than float32 has."""
    x, kernels, dy, sizes = products.make_arrays(*GATED_ON_HOPPER)

    def run(implementation):
        options = dict(multiple=128, implementation=implementation)
        call = functools.partial(grouped_product_fp8, sizes=sizes, **options)
        y, pull = jax.vjp(jax.jit(call), x, kernels)
        dx, dw = pull(dy)
        used = sum(GATED_ON_HOPPER.sizes)
        return y[:used], dx[:used], dw

    for found, wanted in zip(run("mosaic_gpu"), run("xla"), strict=True):
        assert relative_error(found, np.asarray(wanted, np.float64)) < TOLERANCES["card"]
