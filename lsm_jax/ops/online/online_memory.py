"""Memories that learn online: the memory is a small model, and each token trains it by one gradient step
(TTT, Titans).

Token t trains the model to output the value v_t for the key k_t. All gradients ∇_t of a mini-batch are
taken at the weights W_0 of its start. With the step size η_t, and i the token's index in its mini-batch:

* TTT (arXiv 2407.04620): `A_t = A_{t-1} - η_t ∇_t`, weights `W_t = W_0 + c_i A_t`;
* Titans (arXiv 2501.00663 Eq. 13-14): `S_t = μ_t S_{t-1} - η_t ∇_t`, weights `W_t = a_t W_{t-1} + S_t`.

The output is that of the model with weights W_t for the input q_t. Updates cannot be composed, since ∇
depends on W_0: there is no associative form.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.shared_rows import state_axes
from lsm_jax.ops.online.inner_models import Inner, check_inner
from lsm_jax.ops.online.state import OnlineState, online_state
from lsm_jax.ops.online.xla import Options
from lsm_jax.parallel import TOKENS, over_mesh
from lsm_jax.parallel.sequence import run_in_turn

FORMS = ("recurrent", "chunk")


def online_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    inner: Inner,
    eta: Float[Array, "B T G"],
    *,
    mini_batch: int = 16,
    coefficients: Float[Array, " mini_batch"] | None = None,
    log_momentum: Float[Array, "B T G"] | None = None,
    log_decay: Float[Array, "B T G"] | None = None,
    residual: bool = False,
    norm_eps: float = 1e-6,
    initial_state: OnlineState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], OnlineState]:
    """Train a small model to output `v` for the input `k`, and compute its outputs for the inputs `q`.

    The first mini-batch of a document begins with its first token, and each has `mini_batch` written
    tokens; a mini-batch may extend over several calls.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G. Like keys, they are not scaled.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values; one memory for each of the G heads.
        inner: the models at the start of each document.
        eta: [B, T, G], the step size, at least 0.
        mini_batch: the number of tokens whose gradients are taken at the same weights.
        coefficients: TTT's c, [mini_batch], indexed by the position in the mini-batch of the token that
            reads; None means 1.
        log_momentum: Titans' log μ, [B, T, G], at most 0. Requires `log_decay`, and excludes
            `coefficients`.
        log_decay: Titans' log a, [B, T, G], at most 0.
        residual: whether the model is x + f(x), so that the target of f is v - k; requires K = V.
        norm_eps: epsilon of the inner model's norm.
        initial_state: the state to continue from; None is an empty one. With start [B, S, ...] there is one
            state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the memory (they still read it, and are of no
            mini-batch).
        form: "recurrent" (token by token) or "chunk" (the gradients and reads of a mini-batch by matrix
            products, the dual form of arXiv 2407.04620 section 2.5, in a scan over windows of the row).
        implementation: None or "xla"; there is no fused kernel.
        chunk_size: tokens in a window, a power of two; None, and sizes above `mini_batch`, mean the largest
            power of two up to `mini_batch`. A window inside one mini-batch requires one pass; this is the
            case for all windows if every document begins at a multiple of `mini_batch`. A window that
            contains the end of a mini-batch requires two passes, and one that contains the start of a
            document three.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        ValueError: a shape, number of heads, form, implementation, chunk size or mini-batch is not
            accepted.
    """
    op = "online_memory"
    if form not in FORMS:
        raise ValueError(
            f"{op}: form={form!r}; accepted are 'recurrent', 'chunk' (updates cannot be composed)"
        )
    check_implementation(op, implementation)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    check_inner(op, inner, heads, key_dim, value_dim)
    gates = dict(eta=eta, log_momentum=log_momentum, log_decay=log_decay)
    for name, gate in gates.items():
        if gate is not None:
            checks.check_shape(op, name, gate, (batch, length, heads), "B, T, G")
        if name != "eta":
            checks.check_logarithm(op, name, gate)
    _check_rule(op, mini_batch, coefficients, log_momentum, log_decay)
    if residual and key_dim != value_dim:
        raise ValueError(
            f"{op}: residual=True requires as many channels of keys as of values; given are {key_dim} and {value_dim}"
        )
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(q, k, v, *inner.weights, *gates.values(), coefficients)
    sizes = (key_dim, *(w.shape[-1] for w in inner.weights))
    momentum = log_momentum is not None
    empty = functools.partial(
        online_state,
        batch,
        heads,
        sizes,
        bias=inner.biases is not None,
        momentum=momentum,
        dtype=dtype,
    )
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)

    options = Options(
        mini_batch=mini_batch,
        residual=residual,
        norm_eps=checks.check_number(op, "norm_eps", norm_eps, at_least=0),
        by_token=form == "recurrent",
        size=min(size, 1 << (mini_batch.bit_length() - 1)),
        no_state=initial_state is None,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
    )
    batched = dict(
        q=q, k=k, v=v, **gates, state=state, segment_ids=segment_ids, update_mask=update_mask
    )
    shared = dict(inner=inner, coefficients=coefficients)
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | dict(inner=("heads",))
    axes["state"] = state_axes(state, segments=state.position.ndim == 2)
    return over_mesh(
        run,
        batched,
        shared,
        static_of(op, options, implementation),
        axes=axes,
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )


def _in_sequence(axis, function, static, **arguments):
    """Compute `online_memory` where devices have consecutive parts of each row, on one device after the other: a
    gradient step requires the weights before it, so that updates cannot be composed.
    """
    options, state = static.options, arguments.pop("state")
    initial = jax.tree.map(
        lambda x: x.astype(options.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x, state
    )

    resumed = static._replace(options=options._replace(no_state=False))

    def run_from(arguments, state):
        output, after = function(resumed, **arguments, state=state)
        return output, jax.tree.map(lambda x, y: x.astype(y.dtype), after, state)

    return run_in_turn(axis, run_from, arguments, initial)


def _check_rule(op, mini_batch, coefficients, log_momentum, log_decay):
    """Raise ValueError unless `coefficients`, `log_momentum` and `log_decay` fit one rule of `online_memory`:
    TTT has at most `coefficients`, and Titans has `log_momentum` and `log_decay`.
    """
    if not checks.is_count(mini_batch):
        raise ValueError(f"{op}: mini_batch={mini_batch!r}; accepted are integers from 1")
    if (log_momentum is None) != (log_decay is None):
        missing = "log_momentum" if log_momentum is None else "log_decay"
        raise ValueError(
            f"{op}: {missing} is missing; accepted are both log_momentum and log_decay, or neither"
        )
    if coefficients is not None:
        if log_momentum is not None:
            raise ValueError(
                f"{op}: coefficients are given with log_momentum; accepted are coefficients (TTT), or log_momentum "
                "and log_decay (Titans)"
            )
        checks.check_shape(op, "coefficients", coefficients, (mini_batch,), "mini_batch")
