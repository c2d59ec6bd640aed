"""Selection of the backends by which a call of an op is computed: once for each call, by the shapes of the
arrays that one device has.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import logging

from lsm_jax.ops.backends.registry import Backend, Call, backends_of
from lsm_jax.ops.core.platforms import compute_capabilities, for_platform, mesh_platform
from pallas_kernels.triton import launch

_CHOICES: dict[str, str] = {}
_PLATFORMS = {"cuda": "NVIDIA", "tpu": "TPU", "rocm": "AMD", "cpu": "CPU"}


class Selection(NamedTuple):
    """The backends that may run one call of an op, by platform and in order of preference.

    Attributes:
        backends: in order of preference, at most one for each platform. The platform is decided when the
            program is lowered; a single backend runs on whatever the program is lowered for.
    """

    backends: tuple[Backend, ...]

    def function(self, of: Callable[[Backend], Callable[..., Any]]) -> Callable[..., Any]:
        """Return the function that computes the call: that of the only selected backend, or a function that
        calls the backend of the platform for which the program is lowered.

        Args:
            of: a function that returns a backend's function; the functions of all backends have the same
                arguments and results.
        """
        if len(self.backends) == 1:
            return of(self.backends[0])
        branches: dict[str, Callable[..., Any]] = {}
        default = None
        for backend in self.backends:
            function = of(backend)
            for platform in backend.platforms:
                branches.setdefault(platform, function)
            if not backend.platforms:
                default = function
        return for_platform(default, **branches)

    def only(self, name: str) -> bool:
        """Return whether every backend that was selected for this call of an op is called `name`, so that no platform
        runs another.
        """
        return all(backend.name == name for backend in self.backends)

    def on_mesh(self) -> Selection:
        """Return the selection with only the first backend that runs on the devices of the current mesh; the
        same selection if the mesh's platform is not known, or no backend runs on it.
        """
        platform = mesh_platform()
        if platform is None:
            return self
        first = next((b for b in self.backends if not b.platforms or platform in b.platforms), None)
        return self if first is None else Selection((first,))


def select(call: Call) -> Selection:
    """Return the backends that run a call. The selection, and the reasons against backends with a higher
    preference, are logged and recorded for `choices`.

    With `implementation=None` these are the first automatic backend for each platform that supports the call.
    A backend that is automatic on some cards only is not considered if the cards are not known.
    With a name, the first backend of that name that supports it. With several names, the first of them for
    each platform that supports it.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names their
            requirements.
    """
    implementation = call.implementation
    backends = backends_of(call.op)
    if implementation is None:
        considered = [backend for backend in backends if _is_automatic(backend)]
    else:
        names = implementation if isinstance(implementation, tuple) else (implementation,)
        considered = [b for name in names for b in backends if b.name == name]
    named = isinstance(implementation, str)
    selected: list[Backend] = []
    reasons: dict[str, str] = {}
    for backend in considered:
        if not backend.concerns(call) or (selected and (named or _covered(backend, selected))):
            continue
        reason = _reason_against(backend, call)
        if reason is None:
            selected.append(backend)
        else:
            reasons[backend.label or backend.name] = reason
    if not selected:
        told = [f"{name} {reason}" for name, reason in reasons.items()]
        why = list(reasons.values())[-1] if named and reasons else "; ".join(told)
        why = why or "has no kernel for calls of this kind"
        raise NotImplementedError(f"{call.op}: implementation={implementation!r} {why}")
    note(call.op, _describe(selected, reasons, call))
    return Selection(tuple(selected))


def _is_automatic(backend: Backend) -> bool:
    """Return whether `implementation=None` considers the backend. If it is automatic on some cards only, the program must be for
    NVIDIA cards that are known.
    """
    if isinstance(backend.automatic, bool):
        return backend.automatic
    return mesh_platform() in (None, "cuda") and bool(backend.automatic and compute_capabilities())


def _reason_against(backend: Backend, call: Call) -> str | None:
    """Return the reason, in words, why a backend that is considered for a call is not selected; None if it is."""
    automatic = call.implementation is None
    if (reason := _other_card(backend)) is not None:
        return f"requires {reason}"
    if automatic and not isinstance(backend.automatic, bool):
        cards = compute_capabilities()
        if not cards.issubset(backend.automatic):
            return f"not used: by name only on compute capability {', '.join(sorted(cards))}"
    if (reason := backend.unsupported(call)) is not None:
        if automatic and reason == launch.INSTALLED.text:
            _suggest_triton()
        return f"requires {reason}"
    if automatic and (reason := backend.declined(call)) is not None:
        return f"not used: {reason}"
    return None


@functools.cache
def _suggest_triton() -> None:
    """Log, once in a process, how to install the packages of the Triton kernels."""
    logging.warning(
        "Fused kernels for compute capability %s are not installed, and ops run as plain XLA: pip install "
        "'lsm_jax[cuda13,triton]' installs them (jax-triton and Triton, 1 GB)",
        ", ".join(sorted(compute_capabilities())),
    )


def _covered(backend: Backend, selected: list[Backend]) -> bool:
    """Return whether the backends in `selected` already cover every platform that `backend` supports, so that it would
    never run.
    """
    if any(not b.platforms for b in selected):
        return True
    taken = {platform for b in selected for platform in b.platforms}
    return bool(backend.platforms) and taken.issuperset(backend.platforms)


def _other_card(backend: Backend) -> str | None:
    """Return the cards that the backend requires, in words, if the program is for other cards; else None."""
    if not backend.compute_capabilities:
        return None
    cards = compute_capabilities()
    if cards.issubset(backend.compute_capabilities):
        return None
    listed = " or ".join(backend.compute_capabilities)
    return f"an NVIDIA card of compute capability {listed}, not {', '.join(sorted(cards))}"


def _describe(selected: list[Backend], reasons: dict[str, str], call: Call) -> str:
    """Return a text that names the selected backend for each platform, and why those of higher preference
    were not selected: "mosaic_gpu on NVIDIA, xla elsewhere (...)".
    """

    def name(backend: Backend) -> str:
        if backend.name == "xla" and hasattr(call.options, "form"):
            return f"xla, {call.form} form"
        return backend.label or backend.name

    def where(backend: Backend) -> str:
        if not backend.platforms:
            return f"{name(backend)}{' elsewhere' if len(selected) > 1 else ''}"
        known = backend.compute_capabilities
        if call.implementation is None and not isinstance(backend.automatic, bool):
            known = backend.automatic
        cards = " ".join(known)
        places = ", ".join(_PLATFORMS[p] for p in backend.platforms)
        return f"{name(backend)} on {places}{f' {cards}' if cards else ''}"

    if isinstance(call.implementation, str):
        return name(selected[0])
    told = "; ".join(f"{other} {reason}" for other, reason in reasons.items())
    return ", ".join(map(where, selected)) + (f" ({told})" if told else "")


def note(op: str, choice: str) -> None:
    """Record a text that describes the backends by which an op is computed, for `choices`; log it if it is
    new for that op.
    """
    known = _CHOICES.get(op, "")
    if choice not in known.split("; "):
        _CHOICES[op] = f"{known}; {choice}" if known else choice
        logging.info("%s runs as %s", op, choice)


def choices() -> dict[str, str]:
    """Return, for each op traced in this process, the backends that run it, and the requirements that ruled
    out backends with a higher preference.
    """
    return dict(_CHOICES)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Return a context manager that leaves the record of selected backends (`choices`) as it was before the `with` block,
    such as for ops that are traced only to count their memory.
    """
    before = choices()
    try:
        yield
    finally:
        _CHOICES.clear()
        _CHOICES.update(before)


def clear_choices() -> None:
    """Delete the record, which `choices` returns, of the backends that were selected for earlier calls of
    ops.
    """
    _CHOICES.clear()
