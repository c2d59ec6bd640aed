"""What `linear_memory`, `delta_memory` and `dplr_memory` share between their entrance and a fused kernel or XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends import chosen, one_token
from lsm_jax.ops.core.segments import Tokens
from lsm_jax.ops.core.shared_rows import state_axes
from lsm_jax.ops.core.states import Layer
from lsm_jax.ops.linear import kernels as linear_kernels
from lsm_jax.parallel import TOKENS, over_mesh

Array = jax.Array


class Pick(NamedTuple):
    """What runs a call. Attributes: kernel: its name, as `chosen.choices` tells it; fused: when it does."""

    kernel: str
    fused: chosen.Fused


def pick(
    op: str, form: str, asked: str, implementation: str | None, why_not: Callable[[str], str | None],
    q: Array, k: Array, v: Array, memory: Array, **one: Any,
) -> Pick:  # fmt: skip
    """What runs a call; it is noted.

    Args:
        op: for messages.
        form: that XLA would run.
        asked: the form asked for.
        implementation: as the op's.
        why_not: of a backend's name: what its kernel takes in place of this call, or None.
        q: queries.
        k: keys.
        v: values.
        memory: the state's.
        **one: the rest of `one_token.choose`.

    Raises:
        NotImplementedError: a kernel asked for by name does not serve the call.
    """
    kernel = linear_kernels.AUTOMATIC if implementation in (None, "xla") else implementation
    kernel, why = one_token.choose(
        kernel, why_not(kernel), asked, implementation, q, k, v, memory, **one
    )
    return Pick(kernel, chosen.choose(op, form, implementation, kernel, why))


def split_decay(log_decay: Array | None) -> tuple[Array | None, Array | None]:
    """A decay that each token has, and one that is constant [G]: at most one is not None."""
    constant = log_decay is not None and jnp.ndim(log_decay) == 1
    return (None, log_decay) if constant else (log_decay, None)


def spread_decay(
    log_decay: Array | None, constant: Array | None, tokens: Tokens, v: Array, dtype: Any
) -> Any:
    """The two of `split_decay` as one, [B or 1, T, G, ...]; None where both are."""
    if constant is None:
        return log_decay
    # One row is enough, unless some rows write where others do not.
    rows = 1 if tokens.written is None and tokens.slot is None else v.shape[0]
    return jnp.broadcast_to(constant.astype(dtype), (rows, *v.shape[1:3]))


def run_over_mesh(
    function: Callable[..., Any], batched: dict[str, Any], shared: dict[str, Any], options: Any, *,
    layer: Layer | None, in_sequence: Callable[..., Any],
) -> Any:  # fmt: skip
    """Output and final state of an op whose every device has rows and heads of its own.

    Args:
        function: the op on one device.
        batched: its arrays of [B, T, ...] by name, and the state.
        shared: its arrays of [G, ...].
        options: its static ones.
        layer: where the state's memory is one of a stack, to which the final one is put back.
        in_sequence: the op on one of the devices that share a row.
    """
    inner = one_token.within(options.kernel, layer, batched["q"])
    if inner is not None:
        shared = shared | {"layer": inner}
    state = batched["state"]
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | dict.fromkeys(shared, ("heads",))
    axes["state"] = state_axes(state, segments=state.memory.ndim == 5)
    result = over_mesh(
        function, batched, shared, options,
        axes=axes, out_axes=(TOKENS, "state"), in_sequence=in_sequence,
    )  # fmt: skip
    return result if inner is not None else one_token.put(layer, result)


def run(
    options: Any, by_xla: Callable[..., Any], run_kernel: Callable[..., Any], layer: Layer | None,
    arrays: dict[str, Any],
) -> Any:  # fmt: skip
    """An op on one device, as `options.kernel` and `options.fused` say.

    Args:
        options: the op's, static.
        by_xla: its XLA form, of `options` and `arrays`.
        run_kernel: its kernel, of the backend's name, the scale and `arrays`, with one `log_decay`.
        layer: where the memory is one of a stack.
        arrays: the op's, by name.
    """
    if options.kernel == one_token.KERNEL:
        return one_token.run(options, by_xla, layer, arrays)

    def xla(arrays):
        return by_xla(options, **arrays)

    def kernel(arrays):
        given = dict(arrays)
        constant = given.pop("constant_log_decay")
        if constant is not None:
            given["log_decay"] = constant
        return run_kernel(options.kernel, options.scale, **given)

    if options.fused == "maybe":
        return chosen.by_platform(arrays, cuda=kernel, default=xla)
    return kernel(arrays) if options.fused == "always" else xla(arrays)
