"""Where one token runs as a fused step over its memory, in place, and why it does not elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends import chosen
from lsm_jax.ops.core.segments import finish_output, read_tokens, select
from lsm_jax.ops.core.states import Layer
from lsm_jax.ops.linear import kernels as linear_kernels

KERNEL = "decode_step"
"""What ops call the kernel in `choices`; by name it is "mosaic_gpu", of one token."""


def take(state: Any) -> tuple[Any, Layer | None]:
    """A state whose memory may be a `Layer`, as one of its own; and that layer."""
    layer = getattr(state, "memory", None)
    if not isinstance(layer, Layer):
        return state, None
    return state._replace(memory=layer.read()), layer


def put(layer: Layer | None, result: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    """An op's output and final state, its memory back in the stack it was taken from."""
    output, state = result
    return result if layer is None else (output, state._replace(memory=layer.write(state.memory)))


def choose(
    kernel: str, why: str | None, form: str, implementation: str | None, q, k, v, memory, *,
    layer: Layer | None = None, absent: dict[str, Any] | None = None, passes: int = 3,
) -> tuple[str, str | None]:  # fmt: skip
    """`KERNEL` and None where it serves the call, else `kernel` and why nothing better.

    Args:
        kernel: what the call would run as otherwise.
        why: what that one takes in place of the call, or None.
        form: as the op's, and the arrays.
        implementation: as the op's.
        q: queries.
        k: keys.
        v: values.
        memory: the state's, or the layer's.
        layer: where the memory is one of a stack.
        absent: other arguments by name, of which the kernel knows none.
        passes: over a memory of its own that XLA makes; None picks the kernel where it makes fewer, two.
    """
    if q.shape[1] != 1 or form != "chunk" or implementation not in (None, linear_kernels.AUTOMATIC):
        return kernel, why
    own = _why_not(q, k, v, memory, absent or {})
    if own is None and implementation is None and layer is None and passes == 2:
        own = "a memory in a stack of layers': XLA passes over another as often"
    if own is None:
        return KERNEL, None
    return kernel, own if implementation is None else why


def _why_not(q, k, v, memory, absent: dict[str, Any]) -> str | None:
    why = linear_kernels.why_no_kernel(
        linear_kernels.AUTOMATIC, "chunk", q, k, v, memory, narrow=False
    )
    if why is not None:
        return why
    for name, value in absent.items():
        if value is not None:
            return f"no {name}"
    # Imported where it may serve: elsewhere the backends cost nothing.
    from pallas_kernels.decode_step import unsupported

    queries, values = (jax.ShapeDtypeStruct((*x.shape[:1], *x.shape[2:]), x.dtype) for x in (q, v))
    return unsupported(queries, values, memory)


def within(kernel: str, layer: Layer | None, q) -> Layer | None:
    """The layer that `run` is to write; None where it is put back from outside."""
    unsharded = jax.sharding.get_abstract_mesh().empty and jax.typeof(q).sharding.mesh.empty
    return layer if kernel == KERNEL and unsharded else None


def run(
    options: Any, by_xla: Callable[..., Any], layer: Layer | None, arrays: dict[str, Any]
) -> Any:
    """An op of one token, `options.fused` as `chosen.choose` gives it.

    The derivatives are the XLA form's, and so is what `jax.vmap` makes of it.

    Args:
        options: the op's.
        by_xla: its XLA form.
        layer: where the memory is one of a stack; the state's own is not read then.
        arrays: the op's, by name.
    """

    def xla(arrays, layer):
        return put(layer, by_xla(options, **arrays))

    mapped = jax.custom_batching.custom_vmap(lambda *x: _step(options.scale, *x))

    @mapped.def_vmap
    def _(_, in_batched, *x):
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        out = jax.vmap(xla, in_axes=tuple(axes))(*x)
        return out, jax.tree.map(lambda _: True, out)

    step = jax.custom_jvp(lambda *x: mapped(*x))
    step.defjvp(lambda primals, tangents: jax.jvp(xla, primals, tangents))
    if options.fused == "always":
        return step(arrays, layer)
    return chosen.by_platform(arrays, layer, cuda=step, default=xla)


def _step(scale: float, arrays: dict[str, Any], layer: Layer | None) -> tuple[jax.Array, Any]:
    from pallas_kernels import decode_step as kernel

    arrays = dict(arrays)
    state, q, v = (arrays.pop(name) for name in ("state", "q", "v"))
    tokens = read_tokens(
        arrays.pop("segment_ids"), arrays.pop("update_mask"), state.segment_id, None
    )
    bonus, constant = (arrays.pop(name, None) for name in ("bonus", "constant_log_decay"))
    if constant is not None:
        arrays["log_decay"] = jnp.broadcast_to(constant, v.shape[:3])
    # Keys, gates and decays: nothing where the token does not write.
    rest: Any = {n: select(tokens.written, x)[:, 0] for n, x in arrays.items() if x is not None}
    output, memory = kernel.decode_step(
        state.memory if layer is None else layer.stack,
        select(tokens.real, q)[:, 0], v=select(tokens.written, v)[:, 0], bonus=bonus, **rest,
        emptied=None if tokens.run is None else tokens.run[:, 0] > 0,
        layer=None if layer is None else layer.index, scale=scale,
    )  # fmt: skip
    if layer is not None:
        memory = layer._replace(stack=memory)
    output = finish_output(tokens, output[:, None])
    return output, state._replace(memory=memory, segment_id=tokens.last_id)
