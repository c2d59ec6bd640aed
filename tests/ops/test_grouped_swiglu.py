"""SwiGLU layers of groups of rows: errors, and each backend against the definition in float64, in values and all gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.ops.backends.registry import backends_of
from lsm_jax.ops.experts.grouped_swiglu import grouped_swiglu
from pallas_kernels import compat
from pallas_kernels.grouped_product import gated, hopper
from pallas_kernels.grouped_product.cases import GATED, GATED_ON_HOPPER, TOLERANCES, Case
from tests.ops.test_grouped_product import relative_error


def make_arrays(case, dtype=jnp.bfloat16, weighted=True):
    """Return random arguments of `grouped_swiglu` with groups of the case's sizes, and the output's gradient; of rows that
    belong to no group the gradient is 0.
    """
    rng, count = np.random.default_rng(0), len(case.sizes)
    x, dy = rng.normal(size=(2, case.rows, case.width))
    dy[sum(case.sizes) :] = 0
    gate_up = rng.normal(size=(count, case.width, 2 * case.out)) / case.width**0.5
    down = rng.normal(size=(count, case.out, case.width)) / case.out**0.5
    weight = jnp.asarray(rng.uniform(size=(case.rows, 1)), jnp.float32) if weighted else None
    x, gate_up, down, dy = (jnp.asarray(a, dtype) for a in (x, gate_up, down, dy))
    return (x, gate_up, down, jnp.asarray(case.sizes, jnp.int32), weight), dy


def by_loop(x, gate_up, down, sizes, row_weight, dy):
    """Return the output of the groups' SwiGLU layers and the gradients of x, gate_up, down and row_weight (None without
    weights), computed group by group in float64.
    """
    row_weight = None if row_weight is None else np.asarray(row_weight, np.float64)
    x, gate_up, down, dy = (np.asarray(a, np.float64) for a in (x, gate_up, down, dy))
    y, dx, d_weight = np.zeros_like(dy), np.zeros_like(x), np.zeros((len(x), 1))
    d_gate_up, d_down, start = np.zeros_like(gate_up), np.zeros_like(down), 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        weight = 1.0 if row_weight is None else row_weight[rows]
        gate, up = np.split(x[rows] @ gate_up[group], 2, axis=-1)
        sigmoid = 1 / (1 + np.exp(-gate))
        silu = gate * sigmoid
        y[rows] = weight * silu * up @ down[group]
        d_inner = dy[rows] @ down[group].T
        d_down[group] = (weight * silu * up).T @ dy[rows]
        d_weight[rows] = np.sum(d_inner * silu * up, axis=-1, keepdims=True)
        d_inner = d_inner * weight
        both = d_inner * up * (sigmoid + silu * (1 - sigmoid)), d_inner * silu
        d_products = np.concatenate(both, axis=-1)
        dx[rows] = d_products @ gate_up[group].T
        d_gate_up[group], start = x[rows].T @ d_products, start + size
    return y, (dx, d_gate_up, d_down, None if row_weight is None else d_weight)


def check(found, wanted, used, tolerance):
    """Compare outputs and gradients in the first `used` rows, those of groups, and in the matrices."""
    (y, (dx, *matrices, d_weight)), (y_, (dx_, *matrices_, d_weight_)) = found, wanted
    pairs = [(y[:used], y_[:used]), (dx[:used], dx_[:used]), *zip(matrices, matrices_, strict=True)]
    if d_weight_ is not None:
        pairs.append((d_weight[:used], d_weight_[:used]))
    for got, want in pairs:
        assert relative_error(got, want) < tolerance


def differentiated(arguments, dy, **options):
    x, gate_up, down, sizes, row_weight = arguments

    def run(x, gate_up, down, row_weight):
        return grouped_swiglu(x, gate_up, down, sizes, row_weight, **options)

    y, pull = jax.vjp(run, x, gate_up, down, row_weight)
    return y, pull(dy)


def test_errors():
    (x, gate_up, down, *rest), _ = make_arrays(GATED, jnp.float32)
    sizes, weight = rest
    with pytest.raises(ValueError, match=r"accepted are \[E, D, 2 F\] and \[E, F, D\] with x's D="):
        grouped_swiglu(x[:, 1:], gate_up, down, *rest)
    with pytest.raises(
        ValueError, match="gate_up is bfloat16 and down float32; accepted is x's float32"
    ):
        grouped_swiglu(x, gate_up.astype(jnp.bfloat16), down, *rest)
    with pytest.raises(ValueError, match=r"row_weight \(512,\); accepted is \(512, 1\)"):
        grouped_swiglu(x, gate_up, down, sizes, weight[:, 0])
    with pytest.raises(ValueError, match="x has 511 rows; accepted are multiples of multiple=128"):
        grouped_swiglu(x[:511], gate_up, down, *rest, multiple=128)
    with pytest.raises(ValueError, match="gate_up has 256 columns; accepted are 512, twice"):
        grouped_swiglu(x, gate_up[..., :256], down, *rest)
    with pytest.raises(
        NotImplementedError, match="requires x and kernels in bfloat16, not float32"
    ):
        grouped_swiglu(x, gate_up, down, *rest, implementation="mosaic_gpu")


@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_products_apart_equal_a_loop(weighted):
    """SwiGLU by XLA between two grouped products, differentiated by JAX, and the functions of the backend "xla", which has
    gradients of its own, for programs that may be lowered for a GPU.
    """
    case = Case((3, 0, 4), 9, 8, 8)
    arguments, dy = make_arrays(case, jnp.float32, weighted)
    wanted, used = by_loop(*arguments, dy), sum(case.sizes)
    check(jax.jit(differentiated)(arguments, dy), wanted, used, 1e-5)
    (xla,) = (b for b in backends_of("grouped_swiglu") if b.name == "xla")
    y, products = jax.jit(xla.forward)(*arguments)
    gradients = jax.jit(xla.gradients)(*arguments, products, dy)
    check((y, gradients), wanted, used, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
def test_the_kernels_equal_a_loop_in_the_interpreter(monkeypatch, weighted):
    """The kernels of grouped SwiGLU layers, in values and all gradients, with an empty group and rows after the last group; the
    interpreter detects races.
    """
    for module, *names in (
        (gated, "gated_product", "gated_gradients"),
        (hopper, "product", "sums"),
    ):
        monkeypatch.setattr(module, "PROCESSORS", 2)
        for name in names:
            monkeypatch.setattr(module, name, _interpreted(getattr(module, name)))
    fused = next(b for b in backends_of("grouped_swiglu") if b.name == "mosaic_gpu")
    arguments, dy = make_arrays(GATED, weighted=weighted)
    # Without `jax.jit`, so that `_interpreted` runs each kernel alone.
    y, products = fused.forward.__wrapped__(*arguments)
    found = y, fused.gradients.__wrapped__(*arguments, products, dy)
    check(found, by_loop(*arguments, dy), sum(GATED.sizes), TOLERANCES["card"])


def _interpreted(kernel):
    def run(*args, **options):
        options |= dict(interpret=compat.gpu_interpreter())
        result = jax.block_until_ready(jax.jit(functools.partial(kernel, **options))(*args))
        assert not compat.races_found()
        return result

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [True, False])
def test_the_kernels_equal_a_loop(weighted):
    arguments, dy = make_arrays(GATED_ON_HOPPER, weighted=weighted)
    run = jax.jit(functools.partial(differentiated, multiple=128, implementation="mosaic_gpu"))
    found, again = run(arguments, dy), run(arguments, dy)
    used = sum(GATED_ON_HOPPER.sizes)
    check(found, by_loop(*arguments, dy), used, TOLERANCES["card"])
    assert jnp.array_equal(found[0][:used], again[0][:used])
    assert jnp.array_equal(found[1][1], again[1][1])
