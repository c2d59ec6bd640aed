"""What `implementation=None` picked for each op and why nothing better: logged once, and kept for the run directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from absl import logging
from jax.sharding import AxisType

Fused = Literal["always", "maybe", "never"]

_CHOICES: dict[str, str] = {}


def form_of(form: str, implementation: str | None, length: int) -> str:
    """The form that serves `length` tokens: one alone, as in decoding, is a step of the recurrence.

    XLA reads and writes the memory in place then, where a kernel for chunks would be given 63 tokens more.
    """
    return "recurrent" if length == 1 and implementation is None and form == "chunk" else form


def note(op: str, choice: str) -> None:
    """Record a choice at trace time; a new one is logged."""
    known = _CHOICES.get(op, "")
    if choice not in known.split("; "):
        _CHOICES[op] = f"{known}; {choice}" if known else choice
        logging.info("%s runs as %s", op, choice)


def choose(op: str, form: str, implementation: str | None, kernel: str, why: str | None) -> Fused:
    """Whether a fused kernel runs: always (asked for by name), maybe (the platform decides, at lowering) or never.

    Args:
        op: for messages.
        form: that XLA would run.
        implementation: None, "xla" or `kernel`.
        kernel: the name of the kernel's backend.
        why: what the kernel takes in place of this call, or None if it serves it.

    Raises:
        NotImplementedError: `kernel` is asked for by name and does not serve the call.
    """
    if implementation == "xla":
        note(op, f"xla, {form} form")
        return "never"
    if implementation is None:
        choice = f"xla, {form} form"
        note(
            op,
            f"{kernel} on Hopper, else {choice}"
            if why is None
            else f"{choice} ({kernel} takes {why})",
        )
        return "maybe" if why is None else "never"
    if why is not None:
        raise NotImplementedError(f"{op}: implementation={implementation!r} takes {why}")
    note(op, kernel)
    return "always"


def by_platform(
    *arguments: Any, default: Callable[..., Any], **branches: Callable[..., Any]
) -> Any:
    """`jax.lax.platform_dependent`, decided while tracing inside a `jax.shard_map` whose mesh knows its devices: it is for them.

    Left to lowering, which branch runs is a number that the forward pass hands to the backward, with what every branch leaves for
    it, and from one `jax.shard_map` to the next XLA no longer sees that it is constant.
    """
    platform = mesh_platform()
    if platform is None or AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
        return jax.lax.platform_dependent(*arguments, default=default, **branches)
    return branches.get(platform, default)(*arguments)


def mesh_platform() -> str | None:
    """Of the mesh's devices: "cpu", "cuda", "rocm" or "tpu"; None where it does not know them."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform not in ("cpu", "gpu", "tpu"):
        return None
    gpu = "cuda" if device.device_kind.startswith("NVIDIA") else "rocm"
    return gpu if device.platform == "gpu" else device.platform


def choices() -> dict[str, str]:
    """What each op traced so far in this process runs as."""
    return dict(_CHOICES)
