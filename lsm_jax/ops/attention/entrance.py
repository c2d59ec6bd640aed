"""The checks and conversions of arguments that the ops have in common whose memory is keys and values: `attention`,
`path_attention`, `block_attention` and `native_sparse_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.attention.state import AttentionState
from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.core import checks
from lsm_jax.parallel import TOKENS

FORMS = ("recurrent", "chunk")
_CLOSED_GATE = -4096.0  # its exponential is 0, in float64 too


def check_form(op: str, form: str) -> None:
    """Raise ValueError unless `form`, the argument of the op called `op`, is "recurrent" or "chunk"; there is no
    associative form.
    """
    if form not in FORMS:
        raise ValueError(
            f"{op}: form={form!r}; accepted are 'recurrent', 'chunk' (the memory grows with the document)"
        )


def check_tokens(
    op: str, q, k, v, *, implementation, segment_ids, update_mask
) -> tuple[int, int, int, int, int, int, int]:
    """Raise ValueError unless the arguments are accepted that these ops have in common; return (B, T, H, key heads, G, K,
    V).
    """
    check_implementation(op, implementation)
    sizes = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, *sizes[:2], segment_ids, update_mask)
    return sizes


def check_gates(op: str, log_forget, shape: tuple[int, int, int]) -> Array:
    """Raise ValueError if the argument `log_forget` of the op called `op` is not accepted; return the log gates of
    all tokens, [B, T, N], in at least float32: the gradient of a constant gate is a sum over tokens.
    """
    if jnp.shape(log_forget) not in (shape, shape[2:]):
        raise ValueError(
            f"{op}: log_forget has shape {jnp.shape(log_forget)}; accepted are [N] and [B, T, N] = {shape[2:]} and {shape}"
            f"{checks.heads_first(log_forget, *shape)}"
        )
    if not jnp.issubdtype(jnp.result_type(log_forget), jnp.floating):
        raise ValueError(
            f"{op}: log_forget has dtype {jnp.result_type(log_forget)}; accepted are floating dtypes"
        )
    checks.check_logarithm(op, "log_forget", log_forget)
    wide = jnp.promote_types(jnp.result_type(log_forget), jnp.float32)
    # Larger numbers in a sum would cost the other gates their digits, and in a kernel's tile the scores.
    return jnp.broadcast_to(jnp.maximum(jnp.asarray(log_forget, wide), _CLOSED_GATE), shape)


def state_or_empty(
    op: str, state: Any, empty: Callable[..., AttentionState], capacity: int, segment_ids: Any
) -> AttentionState:
    """Return the state that the caller of an op gave, after checks of its shapes, or an empty one if it is None.

    Args:
        op: the op's name, for messages.
        state: the argument `initial_state` of the op's caller, of any capacity.
        empty: makes an empty state; called with `capacity` and `num_segments`.
        capacity: tokens for which an empty state has room.
        segment_ids: the argument `segment_ids` of the op's caller, [B, T] or None.

    Raises:
        ValueError: as by `lsm_jax.ops.core.checks.state_or_empty`.
    """
    if isinstance(state, AttentionState) and jnp.ndim(state.keys) >= 4:
        capacity = state.keys.shape[-3]

    def of_this_capacity(*, num_segments: int | None) -> AttentionState:
        return empty(capacity=capacity, num_segments=num_segments)

    return checks.state_or_empty(op, state, of_this_capacity, segment_ids)


def axes_of(batched: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments `axes` and `out_axes` of `over_mesh` for an op's arrays by name: of "state" the axes of rows and
    heads, and of all others those of tokens.
    """
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS)
    state = batched["state"]
    rows = ("batch",) if state.count.ndim == 1 else ("batch", None)
    axes["state"] = jax.tree.map(lambda _: (*rows, None, "heads"), state)._replace(
        count=rows, segment_id=("batch",)
    )
    return dict(axes=axes, out_axes=(TOKENS, "state"))
