"""Tests of Mixture-of-Memories on packed documents, and with tokens that padding or a mask leaves out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.mixers.mom_cases import (
    BATCH,
    FORMS,
    LENGTH,
    ROW_CONV,
    X,
    call,
    choices,
    float_arrays,
    made,
    oracle,
)
from tests.mixers.test_mixers import close

IDS = np.array([[2] * 4 + [0] * 2 + [1] * 3 + [2] * 2, [1] * 5 + [3] * 5 + [0]], np.int32)


def read_in(mixer, pieces, ids=IDS):
    """Return (y, state) of a Mixture-of-Memories for the input X with these segment ids, in consecutive
    calls whose numbers of tokens are `pieces`.
    """
    state, outputs, start = mixer.init_state(BATCH, LENGTH, jnp.float32), [], 0
    for size in pieces:
        piece = slice(start, start + size)
        y, state, _ = call(mixer, X[:, piece], segment_ids=ids[:, piece], state=state)
        outputs.append(y)
        start += size
    return jnp.concatenate(outputs, axis=1), state


def check_documents(mixer, y):
    """Assert that `y`, the output of a Mixture-of-Memories for packed rows, equals for each document the
    output by definition for that document alone in a row.
    """
    for b, row in enumerate(IDS):
        edges = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
        for start, end in zip(edges[:-1], edges[1:], strict=True):
            if row[start]:
                alone = jnp.zeros_like(X).at[:, : end - start].set(X[b : b + 1, start:end])
                expected = oracle(mixer, alone, choices(mixer, alone))[0, : end - start]
                close(y[b, start:end], expected)


@pytest.mark.parametrize(
    "name",
    ["gated_deltanet", ROW_CONV, *(pytest.param(n, marks=pytest.mark.slow) for n in ("rwkv7", "retnet", "mamba2", "gsa", "ttt_linear", "titans"))],
)  # fmt: skip
def test_documents_reset_every_memory(name):
    """Every document of a packed row begins with empty memories; the row is read in one call and token by
    token; an id that occurs again begins another document.
    """
    mixer = made(name)
    check_documents(mixer, call(mixer, X, segment_ids=IDS)[0])
    check_documents(mixer, read_in(mixer, (1,) * LENGTH)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gated_deltanet", "rwkv7", "retnet", "ttt_linear", "titans", ROW_CONV]
)
def test_documents_in_every_form_leave_states_that_go_on_alike(name):
    mixer, masked = made(name), made(name, execution="masked")
    _, state, _ = call(mixer, X, segment_ids=IDS)
    y, by_mask, _ = call(masked, X, segment_ids=IDS)
    check_documents(mixer, y)
    y, in_pieces = read_in(mixer, (3, 8))
    check_documents(mixer, y)
    _, by_token = read_in(mixer, (1,) * LENGTH)
    last = np.array([[2, 2], [3, 3]], np.int32)
    expected = call(mixer, X[:, :2], segment_ids=last, state=state)[0]
    for other in (by_mask, in_pieces, by_token):
        close(call(mixer, X[:, :2], segment_ids=last, state=other)[0], expected)
        close(call(mixer, X[:, :2], state=other)[0], expected)
        first = call(mixer, X[:, :1], segment_ids=last[:, :1], state=other)[0]
        close(first, expected[:, :1])
        new = call(mixer, X[:, :1], segment_ids=0 * last[:, :1] + 1, state=other)[0]
        close(new, oracle(mixer, X, choices(mixer, X))[:, :1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["padding", "mask"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    "name", ["gated_deltanet", "gla", "gsa", "rwkv7", "ttt_linear", "titans", ROW_CONV]
)
def test_tokens_left_out_change_nothing(how, form, resumed, name):
    mixer = made(name, execution=form)
    keep = np.ones(LENGTH, bool)
    keep[[0, 3, 4, 6, 9]] = False
    live = jnp.tile(jnp.array(keep, jnp.int32), (BATCH, 1))
    arguments = dict(segment_ids=live) if how == "padding" else dict(update_mask=live)
    alone, final, aux = call(mixer, X[:, keep])
    start = dict(state=mixer.init_state(BATCH, LENGTH, jnp.float32)) if resumed else {}
    y, state, own = call(mixer, X, **arguments, **start)
    close(y[:, keep], alone)
    close(float_arrays(state), float_arrays(final))
    for statistic in ("balance_loss", "load", "entropy"):
        close(own[f"mom/{statistic}"], aux[f"mom/{statistic}"])
    other = jnp.where(live[..., None] != 0, X, 7.0)
    again, state_again, _ = call(mixer, other, **arguments, **start)
    assert (again[:, keep] == y[:, keep]).all()
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state_again, state))
