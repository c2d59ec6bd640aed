"""Run an op: map it over the mesh's devices, and compute it on each device by the backend that is selected there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from lsm_jax.ops.backends.registry import Backend, Call, backends_of
from lsm_jax.ops.backends.select import select
from lsm_jax.ops.core.saved import saves_memories
from lsm_jax.ops.core.states import Layer, store_layer


class Static(NamedTuple):
    """The definition of a call of an op without its arrays: name, options, implementation and backends; hashable.

    Attributes:
        op: the op's name.
        options: the op's static options, a NamedTuple.
        implementation: the names of the backends that the caller accepts; None selects one automatically.
        backends: the op's backends at the time of the call, so that a program cached before another backend
            was registered is not used afterwards.
        save_memories: whether a kernel's forward pass stores the memories before all chunks for the backward pass.
    """

    op: str
    options: Any
    implementation: str | tuple[str, ...] | None
    backends: tuple[Backend, ...]
    save_memories: bool = False


def static_of(op: str, options: Any, implementation: str | tuple[str, ...] | None) -> Static:
    """Return what defines a call of the op besides its arrays (its name, options, `implementation`, present
    backends, and whether memories are saved here), as a hashable `Static` by which compiled programs are cached.
    """
    return Static(op, options, implementation, backends_of(op), saves_memories())


def run_inline(static: Static, layer: Layer | None = None, **arguments: Any) -> Any:
    """Run an op on one device by the first of its backends that supports the call there, without compiling it as a
    program of its own.

    Args:
        static: the call without its arrays.
        layer: the layer of a stack in which the memory is updated in place, or None.
        arguments: the op's arrays by name.
    """
    call = Call(
        static.op, static.options, arguments, static.implementation, layer, static.save_memories
    )

    # The arrays are closed over, so that no further frame is between this function and the backend.
    def function(backend: Backend) -> Callable[[], Any]:
        if layer is None or backend.in_place:
            return functools.partial(backend.run, call)
        return lambda: store_layer(layer, backend.run(call._replace(layer=None)))

    with jax.named_scope(static.op):  # by which a profile knows the kernel's op
        return select(call).function(function)()


# Compiled as one program also when called outside `jax.jit`, as in a notebook.
run = jax.jit(run_inline, static_argnums=0)
"""`run_inline`, as one program."""
