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
from lsm_jax.parallel.sequence import run_in_turn

FORMS = ("recurrent", "chunk")


class OnlineState(NamedTuple):
    """State of `online_memory`, float32.

    Weights are stored as the difference from the decayed weights of `inner`, so that an empty state is 0.
    The arrays have the leading axes [B], or [B, S] with one state per segment.

    Attributes:
        start: one `Layer` for each layer: the weights at the start of the mini-batch, less the decayed ones
            of `inner`.
        current: likewise, the current weights of Titans; None for TTT.
        sums: likewise, the sums of gradient steps: A of TTT or S of Titans.
        start_log_kept: [B, G], the log of the factor by which the weights of `inner` had decayed at the
            start of the mini-batch; None for TTT.
        log_kept: [B, G], likewise, for the current weights.
        position: [B], the number of written tokens of the present mini-batch, 0 to mini_batch - 1.
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
        batch_size: B.
        num_heads: G, the number of memories.
        sizes: (K, V), or (K, M, V) for two layers.
        bias: whether the layers have biases.
        momentum: whether the state is for Titans' rule instead of TTT's.
        num_segments: states per row; None is one state per row.
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

    options = _Options(
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
    """Run the op on one device after the other: a gradient step requires the weights before it, so that
    updates cannot be composed.
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


class _Options(NamedTuple):
    """Static options of `online_memory`.

    Attributes:
        mini_batch: as the op's argument.
        residual: as the op's argument.
        norm_eps: as the op's argument.
        by_token: whether the form is "recurrent".
        size: tokens in a window.
        no_state: whether the caller gave no state.
        dtype: of the state and of all sums.
        precision: of matrix products.
    """

    mini_batch: int
    residual: bool
    norm_eps: float
    by_token: bool
    size: int
    no_state: bool
    dtype: Any
    precision: jax.lax.Precision


class _Inputs(NamedTuple):
    """The op's arrays by head: q [..., G, R, K], k [..., G, K], target [..., G, V], and gates [..., G]."""

    q: Array
    k: Array
    target: Array
    eta: Array
    log_momentum: Array | None
    log_decay: Array | None


class _Memory(NamedTuple):
    """The part of `OnlineState` that updates change."""

    start: Layers
    current: Layers | None
    sums: Layers
    start_log_kept: Array | None
    log_kept: Array | None


def _run_xla(
    options: _Options,
    q,
    k,
    v,
    eta,
    log_momentum,
    log_decay,
    state: OnlineState,
    segment_ids,
    update_mask,
    inner: Inner,
    coefficients,
) -> tuple[Array, OnlineState]:
    """The output in v's dtype and the final state, on one device."""
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
        windows, position = cut_into_windows(
            tokens,
            chunks,
            state.position,
            length,
            options.mini_batch,
            coefficients,
            inputs.log_momentum,
            inputs.log_decay,
            unaligned=not options.no_state or tokens.written is not None,
        )
        by_window = jax.tree.map(functools.partial(_by_head, chunks), inputs)
        step = functools.partial(_window, options, inner, coefficients)
        # The backward pass stores only the memories between windows: the arrays inside a window are many
        # times as large.
        step = jax.checkpoint(step, prevent_cse=False)
        output, memory = scan_tokens(step, (by_window, windows), memory, None, chunks.slot)
        output = chunks.join(jnp.moveaxis(output, -2, 2), length)
    output = output.reshape(batch, length, -1, value_dim)
    output = finish_output(tokens, output).astype(v.dtype)
    return output, OnlineState(**memory._asdict(), position=position, segment_id=tokens.last_id)


def _by_head(chunks, x):
    """[B, T, G, ..., *] -> [B, N, G, ..., C, *]."""
    if x.ndim == 3:
        return jnp.moveaxis(chunks.split(x), 2, 3)
    return jnp.moveaxis(chunks.split(x), 2, -2)


def _add(a: Layers, b: Layers) -> Layers:
    return jax.tree.map(jnp.add, a, b)


def _weights(initial: Layers, learned: Layers, log_kept: Array | None) -> Layers:
    """The weights `exp(log_kept) initial + learned`; None is a factor of 1."""
    return _add(initial if log_kept is None else _scale(jnp.exp(log_kept), initial), learned)


def _scale(factor: Array, layers: Layers) -> Layers:
    """Multiply layers [B, G, ...] by `factor` [B] or [B, G]."""
    return jax.tree.map(lambda x: per_chunk(factor, x) * x, layers)


def _select_rows(condition: Array, a: Any, b: Any) -> Any:
    """`a` in the rows where `condition` [B] is True, and `b` in the others."""
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
    """Output, final memory and position, token by token: one gradient and one step for each token."""
    initial, precision = layers_of(inner), options.precision
    written = tokens.written
    if written is None:
        written = jnp.ones(inputs.k.shape[:2], bool)

    def step(carry, x):
        (memory, position), (token, writes) = carry, x
        layer_inputs, d_outputs = gradients(
            inner,
            _weights(initial, memory.start, memory.start_log_kept),
            token.k[..., None, :],
            token.target[..., None, :],
            options.norm_eps,
            precision,
        )
        update = tuple(
            Layer(
                -token.eta[..., None, None] * a[..., 0, :, None] * g[..., 0, None, :],
                None if layer.bias is None else -token.eta[..., None] * g[..., 0, :],
            )
            for a, g, layer in zip(layer_inputs, d_outputs, initial, strict=True)
        )
        if memory.current is None:
            after = memory._replace(sums=_add(memory.sums, update))
        else:
            sums = _add(_scale(jnp.exp(token.log_momentum), memory.sums), update)
            current = _add(_scale(jnp.exp(token.log_decay), memory.current), sums)
            log_kept = memory.log_kept + token.log_decay
            after = memory._replace(current=current, sums=sums, log_kept=log_kept)
        memory = _select_rows(writes, after, memory)
        position = position + writes
        if memory.current is None:
            coefficient = coefficients[jnp.maximum(position - 1, 0)]
            present = _add(memory.start, _scale(coefficient, memory.sums))
        else:
            present = memory.current
        output = token.q[..., None, :]
        for i, layer in enumerate(_weights(initial, present, memory.log_kept)):
            layer = jax.tree.map(lambda x: x[:, :, None], layer)
            output = apply_layer(layer, output if i == 0 else jax.nn.gelu(output), precision)
        output = finish_inner(inner, output, options.norm_eps)[..., 0, :]
        full = position == options.mini_batch
        next_memory = _select_rows(full, _next_mini_batch(memory, coefficients), memory)
        carry = next_memory, jnp.where(full, 0, position)
        return carry, output + token.q if options.residual else output

    output, (memory, position) = scan_tokens(
        step, (inputs, written), (memory, position), tokens.run, tokens.slot
    )
    return output, memory, position


def _window(options, inner, coefficients, memory: _Memory, x: tuple[_Inputs, Windows]):
    """The memory after a window of the row, and its output; see `Windows` for the mini-batches that it may
    contain.
    """
    inputs, window = x
    run_part = functools.partial(_run_part, options, inner, inputs, window)
    if window.reset is not None:
        memory = _select_rows(window.reset, jax.tree.map(jnp.zeros_like, memory), memory)
    output, memory = run_part(memory, window.present)
    memory = _select_rows(window.full, _next_mini_batch(memory, coefficients), memory)

    def add_part(part: Part, start: _Memory, output, memory):
        """Output and memory with those of `part`, which starts from the memory `start`, in the rows that
        have such tokens.
        """

        def compute(start, output, memory):
            part_output, after = run_part(start, part)
            member = part.member[:, None, None, :, None]
            memory = _select_rows(jnp.any(part.member, 1), after, memory)
            return jnp.where(member, part_output, output), memory

        def skip(_, output, memory):
            return output, memory

        return jax.lax.cond(jnp.any(part.member), compute, skip, start, output, memory)

    if window.next is not None:
        output, memory = add_part(window.next, memory, output, memory)
    if window.new_documents is not None:
        empty = jax.tree.map(jnp.zeros_like, memory)
        output, memory = add_part(window.new_documents, empty, output, memory)
    return memory, output


def _run_part(options, inner, inputs: _Inputs, window: Windows, memory: _Memory, part: Part):
    """The outputs of a window's tokens, all computed as tokens of one mini-batch that starts from `memory`;
    and the memory after it.

    Outputs are computed layer by layer: the product of a layer's input with the gradient steps of earlier
    tokens is computed from its scalar products with the layer's inputs at those tokens.
    """
    initial, precision = layers_of(inner), options.precision
    start = _weights(initial, memory.start, memory.start_log_kept)
    layer_inputs, d_outputs = gradients(
        inner, start, inputs.k, inputs.target, options.norm_eps, precision
    )
    steps = [-inputs.eta[..., None] * g for g in d_outputs]
    weights = start
    if memory.current is not None:
        weights = _weights(initial, memory.current, memory.log_kept)
    lower = window.lower[:, :, None]
    keep, lift = window.keep[:, :, None, :, None], window.lift[:, :, None, :, None]
    output = inputs.q
    for i, (a, step) in enumerate(zip(layer_inputs, steps, strict=True)):
        x = output if i == 0 else jax.nn.gelu(output)
        by_query = functools.partial(jax.tree.map, lambda w: w[:, :, None])
        output = keep * apply_layer(by_query(weights[i]), x, precision)
        output = output + lift * apply_layer(by_query(memory.sums[i]), x, precision)
        scores = jnp.einsum("bgrik,bgjk->bgrij", x, a, precision=precision)
        if initial[i].bias is not None:
            scores = scores + 1
        scores = jnp.tril(scores) * lower
        output = output + jnp.einsum("bgrij,bgjv->bgriv", scores, step, precision=precision)
    output = finish_inner(inner, output, options.norm_eps)
    if options.residual:
        output = output + inputs.q

    def sum_steps(factors):
        """The sum of the tokens' steps, each multiplied by its factor [B, G, C]."""
        return tuple(
            Layer(
                jnp.einsum("bgck,bgcv->bgkv", a, factors[..., None] * step, precision=precision),
                None if layer.bias is None else jnp.sum(factors[..., None] * step, axis=-2),
            )
            for a, step, layer in zip(layer_inputs, steps, initial, strict=True)
        )

    sums = sum_steps(part.into_sums)
    if memory.current is None:
        return output, memory._replace(sums=_add(memory.sums, sums))
    current = _add(
        _scale(jnp.exp(part.log_decay), memory.current),
        _add(_scale(part.lift, memory.sums), sum_steps(part.into_current)),
    )
    sums = _add(_scale(part.keep_sums, memory.sums), sums)
    log_kept = memory.log_kept + part.log_decay
    return output, memory._replace(current=current, sums=sums, log_kept=log_kept)


def _check_rule(op, mini_batch, coefficients, log_momentum, log_decay):
    """Raise ValueError unless the arguments are those of TTT or of Titans."""
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


register(
    "online_memory",
    Backend(name="xla", run=lambda call: _run_xla(call.options, **call.arguments)),
)
