"""Decode one token of an op by a fused kernel on an NVIDIA GPU, which updates the memory in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.registry import PALLAS, TRITON, Backend, Call
from lsm_jax.ops.core.segments import finish_output, read_tokens, select
from lsm_jax.ops.core.states import Layer, store_layer
from pallas_kernels.requirements import Requirement


def decode_backend(
    run_xla: Callable[[Call], Any],
    *,
    name: str = "mosaic_gpu",
    without: tuple[str, ...] = (),
    stacked_only: bool = False,
) -> Backend:
    """Return the backend of an op for calls of one token, as in decoding: a kernel that updates the memory in
    place. `ops.choices()` calls it "decode_step" ("triton decode_step" if it is Triton's).

    Args:
        run_xla: the op's XLA backend; it computes the kernel's derivatives, and calls under `jax.vmap`.
        name: "mosaic_gpu" (Hopper) or "triton".
        without: names of arguments and options of the op that the kernel does not support.
        stacked_only: `implementation=None` selects the kernel only for a memory that is one layer of a stack,
            because XLA reads and writes any other memory no more often than the kernel.
    """

    def absent(name: str) -> Requirement:
        def met(call: Call) -> bool:
            return call.arguments.get(name, getattr(call.options, name, None)) is None

        return Requirement(f"no {name}", met)

    def declined(call: Call) -> str | None:
        if not stacked_only or call.layer is not None:
            return None
        return "this memory is not one layer of a stack, and XLA is as fast there"

    hopper = dict(platforms=("cuda",), compute_capabilities=("9.0",))
    cards: dict[str, Any] = TRITON if name == "triton" else hopper
    return Backend(
        name=name,
        label="triton decode_step" if name == "triton" else "decode_step",
        run=functools.partial(_run, name, run_xla),
        requirements=(
            Requirement(
                "one state per row, not one per segment",
                lambda call: call.arguments["state"].memory.ndim == 4,
            ),
            *PALLAS,
            *map(absent, without),
        ),
        more=functools.partial(_unsupported_by_kernel, name),
        **cards,
        declined=declined,
        in_place=True,
        concerns=lambda call: call.length == 1 and call.options.form == "chunk",
    )


def _unsupported_by_kernel(name: str, call: Call) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.decode_step import unsupported

    q, v = (call.arguments[name] for name in "qv")
    q, v = (jax.ShapeDtypeStruct((*x.shape[:1], *x.shape[2:]), x.dtype) for x in (q, v))
    return unsupported(q, v, call.arguments["state"].memory, name)


def in_place(layer: Layer | None, q: jax.Array) -> Layer | None:
    """Return `layer`, the memory in the stack of all layers' memories, if the op must store the new memory in the stack
    itself: for one token, without a mesh. Return None if the op's caller stores it.
    """
    unsharded = jax.sharding.get_abstract_mesh().empty and jax.typeof(q).sharding.mesh.empty
    return layer if unsharded and q.shape[1] == 1 else None


def _run(name: str, run_xla: Callable[[Call], Any], call: Call) -> Any:
    """Compute one token's output and state by the kernel of the backend called `name`, which updates the memory in
    place; derivatives and `jax.vmap` use the op's XLA form.
    """

    def xla(arguments, layer):
        result = run_xla(call._replace(arguments=arguments, layer=None))
        return store_layer(layer, result)

    mapped = jax.custom_batching.custom_vmap(lambda *x: _step(name, call.options, *x))

    @mapped.def_vmap
    def _(_, in_batched, *x):
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        out = jax.vmap(xla, in_axes=tuple(axes))(*x)
        return out, jax.tree.map(lambda _: True, out)

    step = jax.custom_jvp(lambda *x: mapped(*x))
    step.defjvp(lambda primals, tangents: jax.jvp(xla, primals, tangents))
    return step(call.arguments, call.layer)


def _step(
    name: str, options: Any, arguments: dict[str, Any], layer: Layer | None
) -> tuple[jax.Array, Any]:
    from pallas_kernels.decode_step import decode_step

    arrays = dict(arguments)
    state, q, v = (arrays.pop(name) for name in ("state", "q", "v"))
    tokens = read_tokens(
        arrays.pop("segment_ids"), arrays.pop("update_mask"), state.segment_id, None
    )
    bonus, constant = (arrays.pop(name, None) for name in ("bonus", "constant_log_decay"))
    if constant is not None:
        arrays["log_decay"] = jnp.broadcast_to(constant, v.shape[:3])
    # Keys, gates and decays are 0 where the token does not write.
    rest: Any = {n: select(tokens.written, x)[:, 0] for n, x in arrays.items() if x is not None}
    output, memory = decode_step(
        state.memory if layer is None else layer.stack,
        select(tokens.real, q)[:, 0],
        v=select(tokens.written, v)[:, 0],
        bonus=bonus,
        **rest,
        emptied=None if tokens.run is None else tokens.run[:, 0] > 0,
        layer=None if layer is None else layer.index,
        scale=options.scale,
        erase=getattr(options, "erase", "decayed"),
        implementation=name,
    )
    if layer is not None:
        memory = layer._replace(stack=memory)
    output = finish_output(tokens, output[:, None])
    return output, state._replace(memory=memory, segment_id=tokens.last_id)
