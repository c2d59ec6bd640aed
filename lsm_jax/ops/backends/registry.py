"""The backends of the ops: a `Backend` describes one implementation of an op, and a table lists each op's in order of
preference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from lsm_jax.ops.core.states import Layer
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.triton import launch


class Call(NamedTuple):
    """One call of an op on one device, as its backends see it: the op's name, options, arrays and implementation.

    Attributes:
        op: the op's name.
        options: the op's static options, a hashable NamedTuple.
        arguments: the op's arrays by name, None where absent.
        implementation: as the op's argument: None, a name, or names in order of preference.
        layer: where the state's memory is one layer of a stack to be updated in place, that layer; else None.
        save_memories: whether a kernel's forward pass stores the memories before all chunks for its backward pass, where it can.
    """

    op: str
    options: Any
    arguments: dict[str, Any]
    implementation: str | tuple[str, ...] | None = None
    layer: Layer | None = None
    save_memories: bool = False

    @property
    def length(self) -> int:
        """T, the number of tokens of each row in the call's arrays."""
        return next(self.arguments[name].shape[1] for name in "quxro" if name in self.arguments)

    @property
    def form(self) -> str:
        """The form (recurrent, chunk or associative) in which XLA computes this call of an op.

        A call of one token, as in decoding, is one step of the recurrence: XLA then reads and writes the
        memory in place, while a chunk would be padded with 63 tokens. With a backend selected by name, it is
        the form that the caller passed.
        """
        form = self.options.form
        one = self.length == 1 and form == "chunk" and not isinstance(self.implementation, str)
        return "recurrent" if one else form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of an op: the function that runs it, the platforms that it is for, and the requirements that a
    call must meet.

    Attributes:
        name: the name by which `implementation=` asks for it. Several backends of an op may have one name:
            the first of them that supports the call runs.
        run: computes the call's result; it must equal that of the op's definition, final state and all
            gradients included.
        requirements: conditions that a call must meet, in the order in which they are checked; `given` and
            `met` are called with a `Call`.
        more: checks further requirements, whose text depends on the call: returns the first that the call
            does not meet, or None.
        platforms: the platforms of JAX that it runs on ("cpu", "cuda", "rocm", "tpu"); empty means all.
        compute_capabilities: of the NVIDIA cards that it runs on, such as ("9.0",); empty means all.
        automatic: whether `implementation=None` may select it; or, of an NVIDIA backend, the compute
            capabilities of the cards on which it may.
        declined: returns the reason why `implementation=None` does not select the backend for a call that it
            supports, or None; for calls that another backend computes faster.
        in_place: whether `run` stores the final memory in the call's `layer`; if not, `run` is called without
            a layer.
        label: the name that `ops.choices()` and logs show; `name` if empty.
        concerns: whether the backend is made for calls of this kind; if not, it is skipped, and no reason is
            logged.
    """

    name: str
    run: Callable[[Call], Any]
    requirements: tuple[Requirement, ...] = ()
    more: Callable[[Call], str | None] = lambda call: None
    platforms: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    automatic: bool | tuple[str, ...] = True
    declined: Callable[[Call], str | None] = lambda call: None
    in_place: bool = False
    label: str = ""
    concerns: Callable[[Call], bool] = lambda call: True

    def unsupported(self, call: Call) -> str | None:
        """Return, in words, the first requirement of this backend that the call of an op does not meet; None if the
        backend supports the call.
        """
        return first_unmet(self.requirements, call) or self.more(call)


TRITON: dict[str, Any] = dict(
    platforms=("cuda",),
    compute_capabilities=launch.CAPABILITIES,
    automatic=("8.0", "8.6", "8.9", "12.0"),
)
"""Fields of every backend of Triton kernels. On 9.0 `implementation=None` selects the kernels for Hopper, but of `linear_memory` for few memories, and on 10.0
Triton's run by name only. An op whose kernels should not be automatic on all of the other cards passes `TRITON | dict(automatic=...)`."""

_BACKENDS: dict[str, tuple[Backend, ...]] = {}


def register(op: str, *backends: Backend, first: bool = True) -> None:
    """Add backends to an op, in their order of preference.

    Args:
        op: the op's name, such as "linear_memory".
        backends: the new backends, the preferred one first.
        first: whether the new backends come before those that the op has already; if False, after them.
    """
    present = _BACKENDS.get(op, ())
    _BACKENDS[op] = (*backends, *present) if first else (*present, *backends)


def unregister(op: str, *backends: Backend) -> None:
    """Remove the given backends from those that can compute the op called `op`, such as "linear_memory"."""
    _BACKENDS[op] = tuple(b for b in _BACKENDS[op] if b not in backends)


def backends_of(op: str) -> tuple[Backend, ...]:
    """Return the backends that are registered for the op called `op`, the preferred one first; empty if there is none."""
    return _BACKENDS.get(op, ())


def names_of_ops() -> tuple[str, ...]:
    """Return the names of the ops that have backends, in the order in which they were registered."""
    return tuple(_BACKENDS)


def names_of(backends: Iterable[Backend]) -> tuple[str, ...]:
    """Return the names of the given backends, each once: "xla" first, and the others in order of preference."""
    names = dict.fromkeys(backend.name for backend in backends)
    return tuple(sorted(names, key=lambda name: name != "xla"))


def check_implementation(op: str, implementation: Any) -> None:
    """Raise ValueError unless `implementation` is None, a name of a backend of the op called `op`, or a tuple
    of such names.

    Raises:
        ValueError: it is something else; the message lists the names.
    """
    accepted = names_of(backends_of(op))
    if implementation is None:
        return
    names = implementation if isinstance(implementation, tuple) else (implementation,)
    if not names or any(name not in accepted for name in names):
        listed = ", ".join(map(repr, accepted))
        alone = f" ({op} has no fused kernel)" if accepted == ("xla",) else ""
        raise ValueError(
            f"{op}: implementation={implementation!r}; accepted are None, {listed}, and a tuple of names in order of "
            f"preference{alone}"
        )


def _arrays(call: Call) -> list[Any]:
    return [x for x in call.arguments.values() if x is not None and hasattr(x, "dtype")]


PALLAS = (
    Requirement(
        "arrays outside jax.shard_map, or inside with check_vma=False",
        lambda call: not any(jax.typeof(x).manual_axis_type.varying for x in _arrays(call)),
    ),
    Requirement("32-bit indices (jax_enable_x64 off)", lambda call: not jax.config.jax_enable_x64),
)
"""What every Pallas kernel requires of where and how it is called."""
