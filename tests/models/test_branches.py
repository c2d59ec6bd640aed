"""Tests of layers whose gradient and that of the residual stream are computed together: the same function, with all its derivatives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import feedforward, mixers, models
from lsm_jax.mixers import joined
from lsm_jax.models import block
from lsm_jax.models.branches import by_product
from lsm_jax.ops.normalization import branches
from tests.marks import slow_after
from tests.models.conftest import small_config

TOKENS = jnp.arange(20).reshape(2, 10)
SEGMENTS = jnp.array([[1] * 4 + [2] * 6, [1] * 7 + [0] * 3])


def number_of_copies(layer, most: int = branches.most_norms()) -> int:
    x = jnp.ones((2, 10, 32), jnp.bfloat16)
    return by_product(layer, x, most)[0]


def test_each_product_reads_a_copy_of_its_own():
    """GLA multiplies its input by five matrices, and the channel mix of RWKV7 shifts and mixes it, which XLA adds in one pass."""
    gla = mixers.build("gla", 32, rngs=nnx.Rngs(0))
    swiglu = feedforward.build(feedforward.SwiGLUConfig(), 32, rngs=nnx.Rngs(0))
    shifted = feedforward.build(
        feedforward.RWKV7ChannelMixConfig(), 32, rngs=nnx.Rngs(0), layer=0, num_layers=2
    )
    assert number_of_copies(lambda x: gla(x).y) == 5
    assert number_of_copies(lambda x: gla(x).y, 2) == 2
    assert number_of_copies(swiglu) == 2
    assert number_of_copies(lambda x: shifted(x)[0]) == 1
    assert number_of_copies(lambda x: (x + 1, x @ x[0].T)) == 2
    assert number_of_copies(lambda x: jnp.zeros(3)) == 1


@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
def test_products_to_queries_and_keys_are_behind_barriers_of_their_own(name):
    """Enough tokens in 16 bits are. XLA takes equal barriers for one, so that the keys have two; each product still reads a copy."""
    layer = mixers.build(name, 32, rngs=nnx.Rngs(0))

    def products(dtype, tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 32), dtype)
        jaxpr = jax.make_jaxpr(lambda x: layer(x).y)(x).jaxpr
        source = {v: e for e in jaxpr.eqns for v in e.outvars}
        numbers = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                variable, count = eqn.invars[0], 0
                while (
                    variable in source and source[variable].primitive.name == "optimization_barrier"
                ):
                    variable, count = source[variable].invars[0], count + 1
                numbers += [count] * (variable is jaxpr.invars[0])
        return sorted(numbers), by_product(lambda x: layer(x).y, x, 8)[0]

    numbers, copies = products(jnp.bfloat16, joined.LEAST_TOKENS)
    assert numbers == [0] * (len(numbers) - 2) + [1, 2]
    assert copies >= len(numbers)  # and functions with a backward pass of their own
    for dtype, tokens in ((jnp.float32, joined.LEAST_TOKENS), (jnp.bfloat16, 8)):
        assert set(products(dtype, tokens)[0]) == {0}


def test_copies_are_read_once():
    """The function of the copies computes each product from the copy of its own, and the rest from the last."""
    count, split = by_product(
        lambda x: (x @ jnp.eye(3), {"b": 2 * x, "c": x}, x @ jnp.ones((3, 1))),
        jnp.ones((2, 4, 3)),
        8,
    )
    assert count == 3
    one, two, rest = (jnp.full((2, 4, 3), value) for value in (1.0, 2.0, 3.0))
    y, others, z = split(one, two, rest)
    np.testing.assert_array_equal(y, one)
    np.testing.assert_array_equal(others["b"], 2 * rest)
    np.testing.assert_array_equal(others["c"], rest)
    np.testing.assert_array_equal(z, jnp.full((2, 4, 1), 6.0))


def gradients_of(config: models.ModelConfig, **call: Any) -> Any:
    """Return a function of nothing that computes a loss, hidden states and gradients of a model, as one compiled program."""
    graphdef, shapes = nnx.split(models.abstract(config))
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda p: jnp.asarray(0.2 * draw(p.shape), jnp.float32), shapes)

    def loss(params):
        hidden, _, _ = nnx.merge(graphdef, params).hidden(TOKENS, **call)
        return jnp.mean(hidden.astype(jnp.float32) ** 3), hidden

    # Otherwise XLA leaves out roundings where it can, in one program and not in the other.
    lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params)
    return lowered.compile({"xla_allow_excess_precision": False})(params)


@pytest.mark.parametrize(
    ("name", "fields"),
    slow_after(
        3,
        [
            ("gla", dict(remat="dots", unroll_layers=True)),
            ("softmax", dict(remat="dots", norm="zero_centred_rms")),
            ("mamba2", dict(remat="none")),
            ("gla", dict(remat="full")),
            ("rwkv7", dict(remat="dots")),
            ("gated_deltanet", dict(remat="dots", residual_scale=0.5)),
            ("softmax", dict(remat="dots", norm="layer")),
            *(
                (m, dict(remat="dots"))
                for m in mixers.METHODS
                if m not in ("gla", "softmax", "mamba2", "rwkv7", "gated_deltanet")
            ),
        ],
    ),
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sums", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_is_the_same_function(name, fields, dtype, sums, monkeypatch):
    """Hidden states and all gradients are those of the plain layers, with documents: equal to rounding in float32, where some gradients
    are 0 but for rounding, and in bfloat16 about as far from float32's as those of the plain layers.
    """
    config = small_config(name, "L", **fields | (dict(unroll_layers=True) if sums else {}))
    call = dict(segment_ids=SEGMENTS)
    exact = gradients_of(config, **call)
    config.dtype = dtype
    plain = gradients_of(config, **call)
    monkeypatch.setattr(block, "fuses_gradient", lambda x: True)
    monkeypatch.setattr(block, "fuses_sum", lambda x: sums)
    got = gradients_of(config, **call)
    floor = 1e-9 * max(float(jnp.abs(x).max()) for x in jax.tree.leaves(exact))
    for x in zip(*map(jax.tree.leaves, (got, plain, exact)), strict=True):
        a, b, c = (np.asarray(v, np.float64) for v in x)
        assert a.shape == c.shape
        if dtype == "float32":
            assert np.abs(a - c).max() <= 2e-5 * np.abs(c).max() + floor
        else:
            error, allowed = (np.sqrt(np.mean((v - c) ** 2)) for v in (a, b))
            assert error <= 1.5 * allowed + 1e-2 * np.sqrt(np.mean(c**2)) + floor


@pytest.mark.parametrize("sums", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_has_all_derivatives(sums, monkeypatch):
    """Forward-mode and second derivatives, and `vmap`, are those of the plain layers."""
    graphdef, params = nnx.split(
        models.Decoder(
            small_config("softmax", "L", remat="dots", unroll_layers=sums), rngs=nnx.Rngs(0)
        )
    )

    def loss(params):
        hidden, _, _ = nnx.merge(graphdef, params).hidden(TOKENS)
        return jnp.mean(hidden**3)

    def derivatives():
        gradient = jax.grad(loss)
        _, tangent = jax.jvp(loss, (params,), (params,))
        _, second = jax.jvp(gradient, (params,), (params,))
        twice = jax.grad(lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient(p))))(params)
        rows = jax.vmap(gradient)(jax.tree.map(lambda x: x[None], params))
        return tangent, second, twice, rows

    wanted = derivatives()
    monkeypatch.setattr(block, "fuses_gradient", lambda x: True)
    monkeypatch.setattr(block, "fuses_sum", lambda x: sums)
    for x, y in zip(jax.tree.leaves(derivatives()), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * float(jnp.abs(y).max()))


def test_frozen_scales_and_unused_norms():
    """A scale that is not differentiated, and a norm or a stream that nothing reads, are left out."""
    x, scale = jnp.linspace(-1, 2, 48).reshape(1, 6, 8), jnp.linspace(0.5, 1, 8)

    def op(x, scale):
        return branches.residual_norm(x, scale, eps=1e-5, count=2)

    def plain(x, scale):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale
        return x, (y, y)

    for used in (
        lambda r: jnp.sum(r[0] ** 2),
        lambda r: jnp.sum(r[1][0] ** 3),
        lambda r: jnp.sum(r[1][0] * r[1][1] ** 2 + r[0]),
    ):
        for arguments in ((0,), (1,), (0, 1)):
            got, wanted = (
                jax.grad(lambda *a, f=f, used=used: used(f(*a)), arguments)(x, scale)
                for f in (op, plain)
            )
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("channels", [8, pytest.param(768, marks=pytest.mark.slow)])
def test_a_sum_in_the_op_is_the_sum_before_it(channels, dtype):
    """The value is that of the op of a sum to the bit, and so are all gradients; what is added has the gradient of the stream."""
    draw = np.random.default_rng(0).standard_normal
    x, added = (jnp.asarray(draw((2, 5, channels)), dtype) for _ in range(2))
    scale = jnp.asarray(draw(channels), jnp.float32)

    def of(x, added, scale):
        return branches.residual_norm(x, scale, eps=1e-5, count=2, added=added)

    def before(x, added, scale):
        return branches.residual_norm(x + added, scale, eps=1e-5, count=2)

    got, wanted = (jax.vjp(f, x, added, scale) for f in (of, before))
    assert_equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    assert_equal(got[0], wanted[0])
    d_stream, d_norm = jnp.cos(x), jnp.cos(added)
    for used in ((d_stream, (d_norm, d_stream)), (d_stream, (d_norm * 0, d_norm * 0))):
        d_x, d_added, d_scale = got[1](used)
        assert_equal((d_x, d_added, d_scale), wanted[1](used))
        assert_equal(d_x, d_added)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_layers_leave_their_sum_to_the_next_one(remat, monkeypatch):
    """All layers do, or none: in a loop, where a layer is computed again from its inputs alone, or where one of them adds by XLA."""
    pairs = []
    run = block.Block.__call__

    def call(self, x, *arguments, **others):
        pairs.append(isinstance(x, tuple))
        return run(self, x, *arguments, **others)

    monkeypatch.setattr(block.Block, "__call__", call)
    monkeypatch.setattr(block, "fuses_gradient", lambda x: True)
    monkeypatch.setattr(block, "fuses_sum", lambda x: True)
    plain, unrolled = {}, dict(unroll_layers=True)
    none = plain, unrolled | dict(residual_scale=0.5), unrolled | dict(norm="layer")
    for fields in (unrolled, *none):
        wanted = fields == unrolled and remat != "full"
        decoder = models.Decoder(
            small_config("softmax", "L", remat=remat, **fields), rngs=nnx.Rngs(0)
        )
        pairs.clear()
        jax.eval_shape(lambda decoder=decoder: decoder.hidden(TOKENS)[0])
        assert pairs and set(pairs) == {wanted}


def test_no_gradient_by_a_kernel_is_no_sum_by_it(monkeypatch):
    """Without the op of the norm, what a layer adds is added in front of the norm, whatever the sum's kernel supports."""
    config = small_config("softmax", "L", remat="dots", unroll_layers=True)
    plain = gradients_of(config)
    monkeypatch.setattr(block, "fuses_sum", lambda x: True)
    jax.tree.map(np.testing.assert_array_equal, gradients_of(config), plain)


def test_names_what_is_not_accepted():
    x, scale = jnp.ones((1, 4, 8)), jnp.ones(8)
    with pytest.raises(ValueError, match=r"x has shape \(1, 4, 8\) and scale \(4,\)"):
        branches.residual_norm(x, scale[:4], eps=1e-5)
    with pytest.raises(ValueError, match="count=0; accepted are numbers from 1"):
        branches.residual_norm(x, scale, eps=1e-5, count=0)
    with pytest.raises(ValueError, match=r"added has shape \(1, 3, 8\) and dtype float32; accepted are those of x, \(1, 4, 8\)"):  # fmt: skip
        branches.residual_norm(x, scale, eps=1e-5, added=x[:, :3])
    with pytest.raises(ValueError, match="added has shape .* and dtype bfloat16; accepted"):
        branches.residual_norm(x, scale, eps=1e-5, added=x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="implementation='triton'; accepted are"):
        branches.residual_norm(x, scale, eps=1e-5, implementation="triton")
    with pytest.raises(NotImplementedError, match="requires 64 tokens or more in all rows, not 4"):
        branches.residual_norm(x, scale, eps=1e-5, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("width", "tokens", "dtype", "fused"),
    [
        (1024, 64, jnp.bfloat16, True),
        (768, 64, jnp.bfloat16, True),
        (2048, 4096, jnp.bfloat16, True),
        (1024, 64, jnp.float32, False),
        (640, 64, jnp.bfloat16, False),
        (1024, 62, jnp.bfloat16, False),
    ],
)
def test_which_layers_the_kernel_serves(width, tokens, dtype, fused):
    x = jax.ShapeDtypeStruct((1, tokens, width), dtype)
    assert not branches.fuses_gradient(jnp.zeros(x.shape, x.dtype))  # no Hopper card
    assert not branches.fuses_sum(jnp.zeros(x.shape, x.dtype))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        found = []
        jax.eval_shape(
            lambda x: found.append((branches.fuses_gradient(x), branches.fuses_sum(x))), x
        )
    assert found == [(fused, fused)]
