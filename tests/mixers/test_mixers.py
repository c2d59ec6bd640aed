"""Tests of properties that all mixers have. They are parametrised over the table of methods, so that a new
method requires no new test for them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


def close(actual, expected, tolerance=1e-5):
    """Assert that every leaf of `actual` differs from that of `expected` by at most `tolerance` times the
    latter's largest entry.
    """
    leaves, wanted = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(leaves) == len(wanted)
    for a, b in zip(leaves, wanted, strict=True):
        wide = np.complex128 if np.iscomplexobj(b) else np.float64
        assert np.iscomplexobj(a) == np.iscomplexobj(b)
        b = np.asarray(b, wide)
        np.testing.assert_allclose(
            np.asarray(a, wide), b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max())
        )


def test_row_is_complete(method):
    for field in ("name", "paper", "op", "gate", "write", "read", "state"):
        assert getattr(method, field), field
    assert method.forms in (("recurrent", "chunk", "associative"), ("recurrent", "chunk"), ())
    assert len(method.forms) == 3 or method.note, "say why it has no associative form"
    method.config.for_width(1024).validate(1024)
    assert method.module.op.__name__ == method.op


def test_forms_agree(method, make, small):
    if not method.forms:
        pytest.skip("the op has no forms")
    expected = make(method, form="recurrent")()
    close(small(), expected)
    for form in method.forms[2:]:
        close(make(method, form=form)(), expected)


@pytest.mark.slow
def test_forms_agree_in_every_gradient(method, make, small):
    if not method.forms:
        pytest.skip("the op has no forms")

    def run(small):
        (of_mixer, of_x), _ = small.gradient(small.mixer, small.x)
        return nnx.to_pure_dict(nnx.state(of_mixer)), of_x

    expected = run(make(method, form="recurrent"))
    close(run(small), expected, 3e-5)
    for form in method.forms[2:]:
        close(run(make(method, form=form)), expected, 3e-5)


@pytest.mark.few
def test_prefill_then_decoding_equals_one_call(small):
    whole, final = small(state=small.state())
    y, state = small(small.x[:, :5], state=small.state())
    outputs = [y]
    for t in range(5, 10):
        y, state = small(small.x[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    close(state, final)
    close(small()[0], whole)


def test_state_has_one_static_shape(small):
    def shapes(tree):
        return jax.tree.map(lambda a: (a.shape, a.dtype), tree)

    fresh = small.state()
    for length in (1, 3, 10):
        _, after = jax.eval_shape(small.call, small.mixer, small.x[:, :length], state=fresh)
        assert shapes(after) == shapes(fresh)


@pytest.mark.few
def test_packed_documents_equal_documents_alone(small):
    """Each document in a packed row of ten tokens has the output that it has alone: two documents of five
    tokens, in one call and token by token.
    """
    alone = jnp.concatenate([small(small.x[:, :5])[0], small(small.x[:, 5:])[0]], axis=1)
    ids = jnp.tile(jnp.repeat(jnp.array([3, 1], jnp.int32), 5), (small.x.shape[0], 1))
    close(small(segment_ids=ids)[0], alone)
    state, outputs = small.state(), []
    for t in range(10):
        token = slice(t, t + 1)
        y, state = small(small.x[:, token], segment_ids=ids[:, token], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), alone)


@pytest.mark.few
@pytest.mark.parametrize("how", ["padding", "mask"])
def test_tokens_left_out_change_nothing(small, how):
    keep = np.ones(10, bool)
    keep[[0, 3, 4, 6, 9]] = False
    live = jnp.tile(jnp.array(keep, jnp.int32), (small.x.shape[0], 1))
    call = dict(segment_ids=live) if how == "padding" else dict(update_mask=live)
    y, state = small(state=small.state(), **call)
    alone, final = small(small.x[:, keep], state=small.state())
    close(y[:, keep], alone)
    if how == "mask":
        close(state, final)
    other = jnp.where(live[..., None] != 0, small.x, 7.0)
    again, state_again = small(other, state=small.state(), **call)
    assert (again[:, keep] == y[:, keep]).all()
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state_again, state))


def test_causal_to_the_bit(small):
    y, _ = small()
    ids = jnp.tile(jnp.repeat(jnp.array([1, 2], jnp.int32), 5), (small.x.shape[0], 1))
    packed, _ = small(segment_ids=ids)
    for t in (1, 4, 6, 9):
        changed = small.x.at[:, t].multiply(-20.0)
        assert (small(changed)[0][:, :t] == y[:, :t]).all()
        assert (small(changed)[0][:, t] != y[:, t]).any()
        assert (small(changed, segment_ids=ids)[0][:, :t] == packed[:, :t]).all()


@pytest.mark.parametrize("size", [0.0, pytest.param(1.0, marks=pytest.mark.slow), 1e3])
def test_gradients_are_finite(small, size):
    gradients, _ = small.gradient(small.mixer, small.x * size)
    for leaf in jax.tree.leaves(gradients):
        assert jnp.isfinite(leaf).all()


@pytest.mark.few
def test_every_parameter_is_used_and_described(small):
    (gradients, _), _ = small.gradient(small.mixer, small.x)
    used = dict(nnx.to_flat_state(nnx.state(gradients)))
    for path, param in nnx.to_flat_state(nnx.state(small.mixer, nnx.Param)):
        name = "/".join(map(str, path))
        assert jnp.any(used[path][...] != 0), f"{name} has no gradient"
        assert len(param.logical_axes) == param[...].ndim, name
        assert param[...].dtype == jnp.float32, name
        assert param.weight_decay == (path[-1] == "kernel"), name


@pytest.mark.few
def test_bfloat16_runs_close_to_float32(method, make):
    """A mixer's output in bfloat16 is near that in float32. The norms of heads have a large epsilon: with a
    small one they would amplify rounding errors where a head's output is nearly 0.
    """
    fields = {f.name for f in dataclasses.fields(method.config)}
    small = make(method, **({"norm_eps": 1.0} if "norm_eps" in fields else {}))
    exact, _ = small()
    y, state = small(small.x.astype(jnp.bfloat16), state=small.state(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    error = jnp.sqrt(jnp.mean((y - exact) ** 2) / jnp.mean(exact**2))
    assert error < 0.03
    for leaf in jax.tree.leaves(state.tails):
        assert leaf.dtype in (jnp.bfloat16, jnp.int32)


def test_flops_count_projections_and_memory(method, small):
    flops = small.config.flops_per_token(small.x.shape[-1], 10)
    leaves = nnx.to_flat_state(nnx.state(small.mixer, nnx.Param))
    matrices = sum(p[...].size for path, p in leaves if path[-1] == "kernel")
    assert 2 * matrices < flops < 4 * matrices


def test_wrong_op_fields_are_refused(method, make):
    if method.forms:
        with pytest.raises(ValueError, match="form='parallel'.*'recurrent', 'chunk'"):
            make(method, form="parallel")
        with pytest.raises(ValueError, match="chunk_size=48.*powers of two"):
            make(method, chunk_size=48)
    with pytest.raises(ValueError, match="implementation='nonsense'"):
        make(method, implementation="nonsense")()
