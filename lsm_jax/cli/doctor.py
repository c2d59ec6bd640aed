"""Print versions, devices, and which kernels serve on this machine: `lsm doctor`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lsm_jax import __version__, programs
from lsm_jax.names import did_you_mean

_PLATFORMS = {"cuda": "NVIDIA", "rocm": "AMD", "tpu": "TPU", "cpu": "CPU"}
REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "ml-collections", "numpy")  # fmt: skip
OPTIONAL = {
    "jax-cuda13-plugin": "cuda13",
    "libtpu": "tpu",
    "jax-triton": "triton",
    "triton": "triton",
    "lm_eval": "lm-eval",
}
"""Distributions of the extras, with the extra that installs each."""


class Machine(NamedTuple):
    """The platform of the devices and, of NVIDIA cards, their compute capability: which backends can run depends on both.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        capability: such as "9.0"; empty for others.
    """

    platform: str
    capability: str = ""


def main(arguments: Sequence[str]) -> int:
    """Print the report, and return the exit status: 1 if there are problems, 2 if there is no such op, else 0."""
    parser = argparse.ArgumentParser(prog="lsm doctor")
    parser.add_argument("--op", help="one op, with all requirements of its backends")
    op = parser.parse_args(arguments).op
    from lsm_jax import ops  # noqa: F401  (registers the backends)
    from lsm_jax.ops.backends.registry import names_of_ops
    from lsm_jax.ops.experts import grouped_product, grouped_swiglu, narrow  # noqa: F401

    known = names_of_ops()
    if op is not None and op not in known:
        hint = did_you_mean(op, known)
        print(f"lsm doctor: --op={op}: accepted are {', '.join(known)}{hint}", file=sys.stderr)
        return 2
    import jax

    devices = jax.devices()
    machine = machine_of(devices[0])
    found = problems(devices)
    if op is None:
        print("Versions", *version_lines(), "", "Devices", *device_lines(devices), "", sep="\n")
    name = f"{_PLATFORMS[machine.platform]} {machine.capability}".strip()
    print(f"Kernels on {name}: the backend of each op, and why the others do not run here")
    for one in known if op is None else (op,):
        print(*op_lines(one, machine, requirements=op is not None), sep="\n")
    print("", *(found or ["No problem was found."]), sep="\n")
    return 1 if found else 0


def machine_of(device: Any) -> Machine:
    """Return the platform and the compute capability of a device of JAX."""
    if device.platform != "gpu":
        return Machine(device.platform)
    if device.device_kind.startswith("NVIDIA"):
        return Machine("cuda", str(getattr(device, "compute_capability", "")))
    return Machine("rocm")


def version_lines() -> Iterator[str]:
    """Yield a line for each version that matters: Python, the library, what it requires, and its extras."""
    yield f"  Python {platform.python_version()}, {platform.platform()}"
    yield f"  lsm_jax {__version__} in {Path(programs.__file__).parent}"
    yield "  " + ", ".join(f"{name} {_version(name)}" for name in REQUIRED)
    for name, extra in OPTIONAL.items():
        version = _version(name)
        yield f"  {name} {version}" if version else f"  {name}: not installed (extra [{extra}])"


def _version(name: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def device_lines(devices: Sequence[Any]) -> Iterator[str]:
    """Yield a line for each kind of device with its number and memory, and one for the host."""
    kinds: dict[str, list[Any]] = {}
    for device in devices:
        kinds.setdefault(device.device_kind, []).append(device)
    for kind, same in kinds.items():
        stats = same[0].memory_stats() or {}
        memory = f", {stats['bytes_limit'] / 2**30:.1f} GiB each" if "bytes_limit" in stats else ""
        yield f"  {len(same)} x {kind} ({same[0].platform}){memory}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield f"  host: {len(os.sched_getaffinity(0))} cores, {memory:.1f} GiB"
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        if os.environ.get(name):
            yield f"  {name}={os.environ[name]}"


def problems(devices: Sequence[Any]) -> list[str]:
    """Return a line for each thing that is wrong on this machine, with the command that mends it."""
    found = []
    present = {device.platform for device in devices}
    forced = os.environ.get("JAX_PLATFORMS", "")
    asked = f"; JAX_PLATFORMS={forced} forbids it" if forced else ""
    if Path("/dev/nvidia0").exists() and "gpu" not in present:
        found.append(
            f"Problem: there is an NVIDIA card, but JAX does not see it{asked or ': pip install lsm_jax[cuda13]'}"
        )
    if any(Path("/dev").glob("accel[0-9]*")) and "tpu" not in present:
        found.append(
            f"Problem: there is a TPU, but JAX does not see it{asked or ': pip install lsm_jax[tpu]'}"
        )
    return found


def op_lines(op: str, machine: Machine, *, requirements: bool = False) -> Iterator[str]:
    """Yield the lines about the backends of an op on a machine, in order of preference.

    Args:
        op: the op's name.
        machine: the devices for which programs are compiled.
        requirements: whether the requirements of each backend follow.
    """
    from lsm_jax.ops.backends.registry import backends_of

    yield f"  {op}"
    for backend in backends_of(op):
        yield f"    {backend.label or backend.name}: {status(backend, machine)}"
        if requirements:
            for requirement in backend.requirements:
                yield f"      requires {requirement.text}"


def status(backend: Any, machine: Machine) -> str:
    """Return whether a backend runs on a machine, or why it does not."""
    if backend.platforms and machine.platform not in backend.platforms:
        needed = " or ".join(_PLATFORMS[p] for p in backend.platforms)
        return f"not here: requires {needed}, this is {_PLATFORMS[machine.platform]}"
    cards = backend.compute_capabilities
    if cards and machine.capability not in cards:
        return f"not here: requires compute capability {' or '.join(cards)}, this is {machine.capability}"
    if backend.name == "triton" and importlib.util.find_spec("jax_triton") is None:
        return "not here: requires the extra [triton]"
    if not backend.automatic:
        return f'by name, implementation="{backend.name}"; nobody has run it on this platform yet'
    rest = "calls that meet its requirements" if backend.requirements else "every call"
    return f"runs {rest}"
