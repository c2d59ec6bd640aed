"""The forms in which XLA computes `online_memory`: token by token, and by windows of a row's tokens.

The docstring of `lsm_jax.ops.online.online_memory` defines the updates. The recurrent form computes one
gradient for each token. The chunk form is the dual form of arXiv 2407.04620 section 2.5: it computes the
gradients of a window's tokens, and the outputs of the weights after each of them, by matrix products, without
the weights themselves.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.backends.registry import Backend, register
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import per_chunk, scan_tokens
from lsm_jax.ops.core.segments import cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.online.inner_models import (
    Inner,
    Layer,
    Layers,
    apply_layer,
    finish_inner,
    gradients,
    layers_of,
)
from lsm_jax.ops.online.state import OnlineState
from lsm_jax.ops.online.windows import Part, Windows, cut_into_windows


class Options(NamedTuple):
    """The options of `online_memory` that are constant when a program is compiled.

    Attributes:
        mini_batch: the number of tokens whose gradients are taken at the same weights.
        residual: whether the inner model adds its input to its output.
        norm_eps: epsilon of the inner model's norm.
        by_token: whether the form is "recurrent".
        size: tokens in a window.
        no_state: whether the caller gave no state.
        dtype: the dtype of the state and of all sums.
        precision: the precision of matrix products.
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
    """The arrays of `online_memory`, split by head: queries q [..., G, R, K], keys k [..., G, K], the values `target`
    [..., G, V] that the inner model is trained to return, the learning rate eta [..., G], and the log gates of momentum
    and decay [..., G].
    """

    q: Array
    k: Array
    target: Array
    eta: Array
    log_momentum: Array | None
    log_decay: Array | None


class _Memory(NamedTuple):
    """The arrays of the online memory that gradient steps change: weights at the mini-batch's start, present weights,
    sums of gradients, and log decays of the initial weights.

    The rest of `OnlineState` (the place in a mini-batch and the segment id) is counted, not trained.
    """

    start: Layers
    current: Layers | None
    sums: Layers
    start_log_kept: Array | None
    log_kept: Array | None


def run_xla(
    options: Options,
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
    """Compute `online_memory` by XLA on one device: return the output [B, T, H, V] in v's dtype and the state after the
    last token.
    """
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
    """Cut an array of tokens [B, T, G, ..., *] into N chunks of C tokens with the heads before the tokens, [B, N, G,
    ..., C, *]; * is an axis of channels or absent.
    """
    if x.ndim == 3:
        return jnp.moveaxis(chunks.split(x), 2, 3)
    return jnp.moveaxis(chunks.split(x), 2, -2)


def _add(a: Layers, b: Layers) -> Layers:
    return jax.tree.map(jnp.add, a, b)


def _weights(initial: Layers, learned: Layers, log_kept: Array | None) -> Layers:
    """Return the present weights of the inner model: its initial weights times `exp(log_kept)`, plus the
    change that gradient steps have made.

    `log_kept` is the sum of the log decays so far; None is a factor of 1.
    """
    return _add(initial if log_kept is None else _scale(jnp.exp(log_kept), initial), learned)


def _scale(factor: Array, layers: Layers) -> Layers:
    """Multiply every array [B, G, ...] of the online memory's layers by a factor for each row [B], or for each row and
    memory [B, G].
    """
    return jax.tree.map(lambda x: per_chunk(factor, x) * x, layers)


def _select_rows(condition: Array, a: Any, b: Any) -> Any:
    """Select between two pytrees of arrays [B, ...] by row: `a` where `condition` [B] is True, and `b` elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(per_chunk(condition, x), x, y), a, b)


def _next_mini_batch(memory: _Memory, coefficients: Array | None) -> _Memory:
    """Return the online memory at the start of the next mini-batch, whose gradients are taken at the weights
    after the last token of the mini-batch before.
    """
    if memory.current is not None:
        return memory._replace(start=memory.current, start_log_kept=memory.log_kept)
    assert coefficients is not None
    last = coefficients[-1]
    return memory._replace(
        start=_add(memory.start, jax.tree.map(lambda x: last * x, memory.sums)),
        sums=jax.tree.map(jnp.zeros_like, memory.sums),
    )


def _recurrent(options, inner, coefficients, inputs, memory, position, tokens):
    """Return output, final memory and place in the mini-batch of `online_memory`, computed token by token: one gradient
    and one step of the inner model for each token.
    """
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
    """Return the online memory after one window of the row's tokens, and the window's outputs: the body of
    the scan over windows. `Windows` describes the mini-batches that a window may contain.
    """
    inputs, window = x
    run_part = functools.partial(_run_part, options, inner, inputs, window)
    if window.reset is not None:
        memory = _select_rows(window.reset, jax.tree.map(jnp.zeros_like, memory), memory)
    output, memory = run_part(memory, window.present)
    memory = _select_rows(window.full, _next_mini_batch(memory, coefficients), memory)

    def add_part(part: Part, start: _Memory, output, memory):
        """Add to a window's results those of one more of its mini-batches, `part`, a mask of tokens, which begins from
        the online memory `start`.

        Return `output` with the outputs of the mini-batch's tokens in their places, and the online memory after them.
        Batch rows that have no token in the mini-batch have `output` and `memory` returned unchanged.
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
    """Return the outputs of all tokens of a window, computed as if they were of the mini-batch of `part`,
    which starts from the online memory `memory`; and the memory after the tokens of `part`.

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
        """Return the sum of the gradient steps of a chunk's tokens, each multiplied by its factor [B, G, C],
        in the shapes of the weights of the inner model's layers.
        """
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


register(
    "online_memory",
    Backend(name="xla", run=lambda call: run_xla(call.options, **call.arguments)),
)
