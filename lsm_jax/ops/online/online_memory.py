"""Online-learned memories: the memory is a small model that takes a gradient step on each token (TTT, Titans).

Token t shows the model its key k_t and asks for its value v_t; all gradients ∇_t of a mini-batch are taken at the weights
W_0 of its start. With step η_t, and i the token's place in its mini-batch:

* TTT (arXiv 2407.04620): `A_t = A_{t-1} - η_t ∇_t`, weights `W_t = W_0 + c_i A_t`;
* Titans (arXiv 2501.00663 Eq. 13-14): `S_t = μ_t S_{t-1} - η_t ∇_t`, weights `W_t = a_t W_{t-1} + S_t`.

The output is the model's answer to q_t under W_t. Updates are no monoid, for ∇ depends on W_0: there is no associative form.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends.registry import Backend, check_implementation, register
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.core.shared_rows import state_axes
from lsm_jax.ops.core.states import per_chunk, scan_tokens
from lsm_jax.ops.online.inner_models import (
    Inner,
    Layer,
    Layers,
    apply_layer,
    check_inner,
    finish_inner,
    gradients,
    layers_of,
)
from lsm_jax.ops.online.windows import Part, Windows, cut_into_windows
from lsm_jax.parallel import TOKENS, over_mesh
from lsm_jax.parallel.sequence import hand_on

FORMS = ("recurrent", "chunk")


class OnlineState(NamedTuple):
    """State of `online_memory`, float32. Weights are kept without what is left of `inner`'s, so an empty state is 0.

    Every array leads with [B], or with [B, S] with one state a segment.

    Attributes:
        start: a `Layer` a layer, what the mini-batch's first weights have beside `inner`'s.
        current: likewise, Titans' present weights; None for TTT.
        sums: likewise, TTT's A or Titans' S.
        start_log_kept: [B, G], the logarithm of how much of `inner`'s weights the mini-batch's first ones have; None for TTT.
        log_kept: [B, G], likewise, the present ones.
        position: [B], tokens of the mini-batch written so far, 0 to mini_batch - 1.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    start: Layers
    current: Layers | None
    sums: Layers
    start_log_kept: Float[Array, ...] | None
    log_kept: Float[Array, ...] | None
    position: Int[Array, ...]
    segment_id: Int[Array, " B"]


def online_state(
    batch_size: int,
    num_heads: int,
    sizes: tuple[int, ...],
    *,
    bias: bool = False,
    momentum: bool = False,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> OnlineState:
    """An empty `OnlineState`.

    Args:
        batch_size: rows.
        num_heads: memories a row, G.
        sizes: (K, V), or (K, M, V) for two layers.
        bias: whether layers have biases.
        momentum: for Titans' rule.
        num_segments: gives each row that many states.
        dtype: of the weights.
    """
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)

    def empty() -> Layers:
        return tuple(
            Layer(
                jnp.zeros((*rows, num_heads, before, after), dtype),
                jnp.zeros((*rows, num_heads, after), dtype) if bias else None,
            )
            for before, after in itertools.pairwise(sizes)
        )

    kept = jnp.zeros((*rows, num_heads), dtype) if momentum else None
    return OnlineState(
        empty(),
        empty() if momentum else None,
        empty(),
        kept,
        kept,
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(batch_size, jnp.int32),
    )


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
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], OnlineState]:
    """Teach a small model to answer `k` with `v`, and ask it `q`.

    A mini-batch begins with a document and then every `mini_batch` tokens, wherever documents and calls begin and end.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G. They are not scaled: the model sees them as it sees keys.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values; one memory for each of the G heads.
        inner: the models a document starts from.
        eta: [B, T, G], the step, at least 0.
        mini_batch: tokens whose gradients are taken at the same weights.
        coefficients: TTT's c, [mini_batch], by the place of the token that reads; None is 1.
        log_momentum: Titans' log μ, [B, T, G], at most 0. It and `log_decay` come together, without `coefficients`.
        log_decay: Titans' log a, [B, T, G], at most 0.
        residual: the model is x + f(x), hence the target of f is v - k; needs K = V.
        norm_eps: of the inner model's norm.
        initial_state: the state to go on from; with start [B, S, ...], segment id s has state s - 1. None is empty.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 where a token must not change the memory (it still reads it, and takes no place).
        form: "recurrent" (token by token) or "chunk" (a mini-batch's gradients and reads by matrix products, the dual form
            of arXiv 2407.04620 section 2.5, scanned over windows of the row).
        implementation: None or "xla".
        chunk_size: tokens in a window, a power of two; None, or more than `mini_batch`, is the greatest power of two up to
            `mini_batch`. Windows that hold one mini-batch of one document, as where `mini_batch` divides every document's
            place in the row, cost one pass over them, those with an end of one inside two, and with a beginning, three.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        ValueError: shapes, heads, form, implementation, chunk size or mini-batch that are not accepted.
    """
    op = "online_memory"
    if form not in FORMS:
        raise ValueError(
            f"{op}: form={form!r}; accepted are 'recurrent', 'chunk' (its updates do not compose)"
        )
    check_implementation(op, implementation)
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    check_inner(op, inner, heads, key_dim, value_dim)
    gates = dict(eta=eta, log_momentum=log_momentum, log_decay=log_decay)
    for name, gate in gates.items():
        if gate is not None:
            checks.check_shape(op, name, gate, (batch, length, heads), "B, T, G")
    _check_rule(op, mini_batch, coefficients, log_momentum, log_decay)
    if residual and key_dim != value_dim:
        raise ValueError(
            f"{op}: residual=True, but keys have {key_dim} channels and values {value_dim}; "
            "accepted are as many"
        )
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(q, k, v, *inner.weights, *gates.values(), coefficients)
    sizes = (key_dim, *(w.shape[-1] for w in inner.weights))
    momentum = log_momentum is not None
    kept = dict(bias=inner.biases is not None, momentum=momentum, dtype=dtype)
    empty = functools.partial(online_state, batch, heads, sizes, **kept)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)

    options = _Options(
        mini_batch=mini_batch,
        residual=residual,
        norm_eps=checks.check_number(op, "norm_eps", norm_eps, at_least=0),
        by_token=form == "recurrent",
        size=min(size, 1 << (mini_batch.bit_length() - 1)),
        fresh=initial_state is None,
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
    """The op on one device after the other: a gradient step needs the weights before it, so that updates do not compose."""
    options, state = static.options, arguments.pop("state")
    initial = jax.tree.map(
        lambda x: x.astype(options.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x, state
    )

    resumed = static._replace(options=options._replace(fresh=False))

    def run_from(arguments, state):
        output, after = function(resumed, **arguments, state=state)
        return output, jax.tree.map(lambda x, y: x.astype(y.dtype), after, state)

    return hand_on(axis, run_from, arguments, initial)


class _Options(NamedTuple):
    mini_batch: int
    residual: bool
    norm_eps: float
    by_token: bool
    size: int
    fresh: bool
    dtype: Any
    precision: jax.lax.Precision


class _Inputs(NamedTuple):
    """Arrays by head: q [..., G, R, K], k [..., G, K], target [..., G, V], gates [..., G]."""

    q: Array
    k: Array
    target: Array
    eta: Array
    log_momentum: Array | None
    log_decay: Array | None


class _Memory(NamedTuple):
    """What a row's memory holds, as in `OnlineState`."""

    start: Layers
    current: Layers | None
    sums: Layers
    start_log_kept: Array | None
    log_kept: Array | None


def _by_xla(
    options, q, k, v, eta, log_momentum, log_decay, state, segment_ids, update_mask,
    inner, coefficients,
):  # fmt: skip
    batch, length, heads, value_dim = v.shape
    dtype = options.dtype
    num_segments = state.position.shape[1] if state.position.ndim == 2 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    inner = jax.tree.map(lambda x: x.astype(dtype), inner)
    if coefficients is None and log_momentum is None:
        coefficients = jnp.ones(options.mini_batch, dtype)
    elif coefficients is not None:
        coefficients = coefficients.astype(dtype)

    def prepare(x) -> Any:
        return None if x is None else select(tokens.written, jnp.asarray(x).astype(dtype))

    k, v_wide = prepare(checks.spread_keys(k, heads)), prepare(v)
    inputs = _Inputs(
        q=checks.group_queries(select(tokens.real, q).astype(dtype), heads),
        k=k,
        target=v_wide - k if options.residual else v_wide,
        eta=prepare(eta),
        log_momentum=prepare(log_momentum),
        log_decay=prepare(log_decay),
    )
    cast = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
    memory = _Memory(*cast(tuple(state[: len(_Memory._fields)])))
    if options.by_token:
        output, memory, position = _recurrent(
            options, inner, coefficients, inputs, memory, state.position, tokens
        )
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)
        crosses = not options.fresh or tokens.written is not None
        windows, position = cut_into_windows(
            tokens, chunks, state.position, length, options.mini_batch,
            coefficients, inputs.log_momentum, inputs.log_decay, crosses=crosses,
        )  # fmt: skip
        by_window = jax.tree.map(functools.partial(_by_head, chunks), inputs)
        step = functools.partial(_window, options, inner, coefficients)
        # Only the memory between windows is kept for the backward pass: inside one there are many times as much.
        step = jax.checkpoint(step, prevent_cse=False)
        output, memory = scan_tokens(step, (by_window, windows), memory, None, chunks.slot)
        output = chunks.join(jnp.moveaxis(output, -2, 2), length)
    output = output.reshape(batch, length, -1, value_dim)
    output = finish_output(tokens, output).astype(v.dtype)
    kept = dict(position=position, segment_id=tokens.last_id)
    return output, OnlineState(**memory._asdict(), **kept)


def _by_head(chunks, x):  # [B, T, G, ..., *] -> [B, N, G, ..., C, *]
    if x.ndim == 3:
        return jnp.moveaxis(chunks.split(x), 2, 3)
    return jnp.moveaxis(chunks.split(x), 2, -2)


def _add(a: Layers, b: Layers) -> Layers:
    return jax.tree.map(jnp.add, a, b)


def _weights(fixed: Layers, own: Layers, log_kept: Array | None) -> Layers:
    """The weights of which `own` is what they have beside the share `exp(log_kept)` of the initial ones."""
    return _add(fixed if log_kept is None else _scaled(jnp.exp(log_kept), fixed), own)


def _scaled(factor: Array, layers: Layers) -> Layers:
    """`factor` [B] or [B, G] times [B, G, ...]."""
    return jax.tree.map(lambda x: per_chunk(factor, x) * x, layers)


def _choose(condition: Array, a: Any, b: Any) -> Any:
    """`a` in the rows where `condition` [B], else `b`."""
    return jax.tree.map(lambda x, y: jnp.where(per_chunk(condition, x), x, y), a, b)


def _next_mini_batch(memory: _Memory, coefficients: Array | None) -> _Memory:
    """The memory after the last token of a mini-batch."""
    if memory.current is not None:
        return memory._replace(start=memory.current, start_log_kept=memory.log_kept)
    assert coefficients is not None
    last = coefficients[-1]
    return memory._replace(
        start=_add(memory.start, jax.tree.map(lambda x: last * x, memory.sums)),
        sums=jax.tree.map(jnp.zeros_like, memory.sums),
    )


def _recurrent(options, inner, coefficients, inputs, memory, position, tokens):
    """By definition: one token, one gradient, one step."""
    fixed, precision = layers_of(inner), options.precision
    written = tokens.written
    if written is None:
        written = jnp.ones(inputs.k.shape[:2], bool)

    def step(carry, x):
        (memory, position), (token, writes) = carry, x
        seen, slopes = gradients(
            inner, _weights(fixed, memory.start, memory.start_log_kept),
            token.k[..., None, :], token.target[..., None, :], options.norm_eps, precision,
        )  # fmt: skip
        update = tuple(
            Layer(
                -token.eta[..., None, None] * a[..., 0, :, None] * g[..., 0, None, :],
                None if layer.bias is None else -token.eta[..., None] * g[..., 0, :],
            )
            for a, g, layer in zip(seen, slopes, fixed, strict=True)
        )
        if memory.current is None:
            after = memory._replace(sums=_add(memory.sums, update))
        else:
            sums = _add(_scaled(jnp.exp(token.log_momentum), memory.sums), update)
            current = _add(_scaled(jnp.exp(token.log_decay), memory.current), sums)
            log_kept = memory.log_kept + token.log_decay
            after = memory._replace(current=current, sums=sums, log_kept=log_kept)
        memory = _choose(writes, after, memory)
        position = position + writes
        if memory.current is None:
            coefficient = coefficients[jnp.maximum(position - 1, 0)]
            present = _add(memory.start, _scaled(coefficient, memory.sums))
        else:
            present = memory.current
        output = token.q[..., None, :]
        for i, layer in enumerate(_weights(fixed, present, memory.log_kept)):
            layer = jax.tree.map(lambda x: x[:, :, None], layer)
            output = apply_layer(layer, output if i == 0 else jax.nn.gelu(output), precision)
        output = finish_inner(inner, output, options.norm_eps)[..., 0, :]
        full = position == options.mini_batch
        following = _choose(full, _next_mini_batch(memory, coefficients), memory)
        carry = following, jnp.where(full, 0, position)
        return carry, output + token.q if options.residual else output

    output, (memory, position) = scan_tokens(
        step, (inputs, written), (memory, position), tokens.run, tokens.slot
    )
    return output, memory, position


def _window(options, inner, coefficients, memory: _Memory, x: tuple[_Inputs, Windows]):
    """A window of the row; see `Windows` for the mini-batches it may hold."""
    inputs, window = x
    part = functools.partial(_part, options, inner, inputs, window)
    if window.reset is not None:
        memory = _choose(window.reset, jax.tree.map(jnp.zeros_like, memory), memory)
    output, memory = part(memory, window.goes_on)
    memory = _choose(window.full, _next_mini_batch(memory, coefficients), memory)

    def also(other: Part, start: _Memory, output, memory):
        def compute(start, output, memory):
            more, after = part(start, other)
            here = other.here[:, None, None, :, None]
            return jnp.where(here, more, output), _choose(jnp.any(other.here, 1), after, memory)

        def skip(_, output, memory):
            return output, memory

        return jax.lax.cond(jnp.any(other.here), compute, skip, start, output, memory)

    if window.next is not None:
        output, memory = also(window.next, memory, output, memory)
    if window.begins is not None:
        fresh = jax.tree.map(jnp.zeros_like, memory)
        output, memory = also(window.begins, fresh, output, memory)
    return memory, output


def _part(options, inner, inputs: _Inputs, window: Windows, memory: _Memory, part: Part):
    """All reads of a window as by tokens of one mini-batch that began with `memory`, and the memory after them.

    Reads go layer by layer: a token's x meets the gradients written before it by products with the x of those tokens.
    """
    fixed, precision = layers_of(inner), options.precision
    start = _weights(fixed, memory.start, memory.start_log_kept)
    seen, slopes = gradients(inner, start, inputs.k, inputs.target, options.norm_eps, precision)
    steps = [-inputs.eta[..., None] * g for g in slopes]
    weights = start
    if memory.current is not None:
        weights = _weights(fixed, memory.current, memory.log_kept)
    lower = window.lower[:, :, None]
    keep, lift = window.keep[:, :, None, :, None], window.lift[:, :, None, :, None]
    output = inputs.q
    for i, (a, step) in enumerate(zip(seen, steps, strict=True)):
        x = output if i == 0 else jax.nn.gelu(output)
        spread = functools.partial(jax.tree.map, lambda w: w[:, :, None])
        output = keep * apply_layer(spread(weights[i]), x, precision)
        output = output + lift * apply_layer(spread(memory.sums[i]), x, precision)
        scores = jnp.einsum("bgrik,bgjk->bgrij", x, a, precision=precision)
        if fixed[i].bias is not None:
            scores = scores + 1
        scores = jnp.tril(scores) * lower
        output = output + jnp.einsum("bgrij,bgjv->bgriv", scores, step, precision=precision)
    output = finish_inner(inner, output, options.norm_eps)
    if options.residual:
        output = output + inputs.q

    def written(row):  # [B, G, C], how much of each token's step there is in the end
        return tuple(
            Layer(
                jnp.einsum("bgck,bgcv->bgkv", a, row[..., None] * step, precision=precision),
                None if layer.bias is None else jnp.sum(row[..., None] * step, axis=-2),
            )
            for a, step, layer in zip(seen, steps, fixed, strict=True)
        )

    sums = written(part.into_sums)
    if memory.current is None:
        return output, memory._replace(sums=_add(memory.sums, sums))
    current = _add(
        _scaled(jnp.exp(part.log_decay), memory.current),
        _add(_scaled(part.lift, memory.sums), written(part.into_current)),
    )
    sums = _add(_scaled(part.keep_sums, memory.sums), sums)
    log_kept = memory.log_kept + part.log_decay
    return output, memory._replace(current=current, sums=sums, log_kept=log_kept)


def _check_rule(op, mini_batch, coefficients, log_momentum, log_decay):
    if not checks.is_count(mini_batch):
        raise ValueError(f"{op}: mini_batch={mini_batch!r}; accepted are integers from 1")
    if (log_momentum is None) != (log_decay is None):
        missing = "log_momentum" if log_momentum is None else "log_decay"
        raise ValueError(f"{op}: {missing} is missing; log_momentum and log_decay come together")
    if coefficients is not None:
        if log_momentum is not None:
            raise ValueError(
                f"{op}: coefficients are given with log_momentum and log_decay; accepted are "
                "coefficients (TTT) or the two gates (Titans)"
            )
        checks.check_shape(op, "coefficients", coefficients, (mini_batch,), "mini_batch")


register(
    "online_memory",
    Backend(name="xla", run=lambda call: _by_xla(call.options, **call.arguments)),
)
