"""Tests of block-sparse attention, MoBA and NSA: it is compared with its definitions in `tests.ops`, and here with softmax
attention, which it equals where all blocks are selected.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import mixers, ops
from tests.mixers import goldens
from tests.mixers.conftest import Small
from tests.mixers.goldens import SLOW
from tests.mixers.test_mixers import close


def random_inputs(length=13):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, length, 2, 8)) for key in keys]


@pytest.mark.parametrize("form", ["chunk", SLOW[0]])
def test_enough_blocks_are_softmax_attention(form):
    q, k, v = random_inputs()
    expected, _ = ops.attention(q, k, v)
    for size, count in ((4, 4), (64, 1), (1, 13)):
        o, _ = ops.block_attention(q, k, v, block_size=size, num_blocks=count, form=form)
        close(o, expected, 1e-6)


def test_one_block_is_attention_inside_blocks():
    """With the own block alone, blocks are documents."""
    q, k, v = random_inputs()
    o, _ = ops.block_attention(q, k, v, block_size=4, num_blocks=1)
    ids = jnp.broadcast_to(1 + jnp.arange(13, dtype=jnp.int32) // 4, (2, 13))
    close(o, ops.attention(q, k, v, segment_ids=ids)[0], 1e-6)


def test_the_selected_block_is_the_one_that_agrees_with_the_query():
    """Keys of block 1 point towards the last query, those of block 0 away from it."""
    q, k, v = random_inputs(9)
    towards = 3 * q[:, -1:]
    k = k.at[:, :4].set(-towards).at[:, 4:8].set(towards)
    o, _ = ops.block_attention(q, k, v, block_size=4, num_blocks=2)
    seen = [4, 5, 6, 7, 8]
    alone, _ = ops.attention(q[:, seen], k[:, seen], v[:, seen])
    close(o[:, -1], alone[:, -1], 1e-6)


def test_a_layer_decodes_what_it_was_trained_on():
    """With blocks so small that some are not selected."""
    small = Small(mixers.get_method("moba"), stirred=True, block_size=2, num_blocks=2)
    whole, final = small(state=small.state())
    state, outputs = small.state(), []
    for part in (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 10)):
        y, state = small(small.x[:, part], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    close(state, final)
    close(small()[0], whole)
    full = Small(mixers.get_method("moba"), stirred=True)()[0]
    assert np.abs(full - whole).max() > 1e-3


def one_kind(kind, **options):
    """Return the output of NSA with the gate of one kind of attention open: means, selected blocks or window."""
    q, k, v = random_inputs()
    gates = jnp.zeros((2, 13, 2, 3)).at[..., kind].set(1.0)
    options = dict(block_size=4, num_blocks=4, window=5) | options
    return ops.native_sparse_attention(q, k, v, gates, **options)[0]


def test_each_kind_of_native_sparse_attention():
    """Enough selected blocks are softmax attention, the window is a window, and means of single tokens are tokens."""
    q, k, v = random_inputs()
    expected, _ = ops.attention(q, k, v)
    close(one_kind(1), expected, 1e-6)
    close(one_kind(0, block_size=1), expected, 1e-6)
    close(one_kind(2), ops.attention(q, k, v, window=5)[0], 1e-6)
    assert not one_kind(0)[:, :3].any()  # no block is complete


@pytest.mark.parametrize("form", ["chunk", SLOW[0]])
@pytest.mark.parametrize(("kind", "name"), [(0, "means_o"), (1, "selected_o")])
def test_native_sparse_attention_is_the_published_one(kind, name, form):
    """The golden has attention to means and to selected blocks alone, in float32, with blocks of 4 tokens."""
    golden = goldens.load("native_sparse_attention")
    q, k, v = (jnp.asarray(golden[n]) for n in "qkv")
    gates = jnp.zeros((*q.shape[:3], 3)).at[..., kind].set(1.0)
    options = dict(block_size=4, num_blocks=4, window=5, form=form)
    o, _ = ops.native_sparse_attention(q, k, v, gates, **options)
    close(o, golden[name])


def test_kinds_are_added_with_their_gates():
    q, k, v = random_inputs()
    gates = jax.random.uniform(jax.random.key(7), (2, 13, 2, 3))
    o, _ = ops.native_sparse_attention(q, k, v, gates, block_size=2, num_blocks=3, window=5)
    parts = (one_kind(kind, block_size=2, num_blocks=3) for kind in range(3))
    close(o, sum(gates[..., kind, None] * part for kind, part in enumerate(parts)), 1e-6)


def test_a_layer_of_nsa_decodes_what_it_was_trained_on():
    small = Small(mixers.get_method("nsa"), stirred=True, block_size=2, num_blocks=3, window=3)
    whole, final = small(state=small.state())
    state, outputs = small.state(), []
    for part in (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 10)):
        y, state = small(small.x[:, part], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    close(state, final)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_blocks=2), "num_blocks=2; accepted are integers from 3"),
        (dict(window=None), "window=None; accepted are integers from 1"),
        (dict(gates=jnp.ones((2, 13, 2, 2))), "gates has shape (2, 13, 2, 2); accepted is [B, T, H, 3]"),
    ],
)  # fmt: skip
def test_errors_of_nsa_name_the_argument(change, message):
    q, k, v = random_inputs()
    with pytest.raises(ValueError) as error:
        ops.native_sparse_attention(q, k, v, **dict(gates=jnp.ones((2, 13, 2, 3))) | change)
    assert message in str(error.value)
    for field in (dict(num_blocks=2), dict(window=None)):
        with pytest.raises(ValueError, match=f"NSAConfig.{next(iter(field))}"):
            mixers.NSAConfig(**field).validate(64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_size=0), "block_size=0; accepted are integers from 1"),
        (dict(num_blocks=1.5), "num_blocks=1.5; accepted are integers from 1"),
        (dict(form="associative"), "form='associative'; accepted are 'recurrent', 'chunk'"),
        (dict(initial_state=ops.attention_state(2, 9, 2, 8, 7)), "initial_state.values has shape"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError) as error:
        ops.block_attention(*random_inputs(), **change)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="MoBAConfig.window=8: accepted is None"):
        mixers.MoBAConfig(num_heads=2, window=8).validate(16)
