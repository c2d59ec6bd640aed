"""Functions that `linear_attention`, `delta_rule` and `dplr` share: requirements, padding, symbolic zeros."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.requirements import Requirement

FOLDERS = {"mosaic_gpu": "hopper", "mosaic_tpu": "tpu"}
"""The folder with each implementation's modules."""


class MemoryCall(NamedTuple):
    """The arrays of a call, or their shapes, which requirements check."""

    q: Any
    k: Any
    v: Any
    log_decay: Any = None
    value_log_decay: Any = None
    bonus: Any = None
    a: Any = None
    b: Any = None


def backend_module(op: str, implementation: str, variant: str) -> Any:
    """The module of an op's backend. It is imported here, so that a backend that is not used costs nothing at import.

    Raises:
        ValueError: an implementation that does not exist.
    """
    if implementation not in FOLDERS:
        raise ValueError(f"{op}: implementation={implementation!r}; accepted are {tuple(FOLDERS)}")
    return importlib.import_module(f"pallas_kernels.{op}.{FOLDERS[implementation]}.{variant}")


def pad_tokens(x: Any, padding: int) -> Any:
    """x [B, T, ...] with `padding` tokens of zeros at the end, which write nothing; None for None."""
    return None if x is None else jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))


def pad_documents(run: Any, padding: int) -> Any:
    """run [B, T] with `padding` tokens of the last document at the end; None for None."""
    return None if run is None else jnp.pad(run, [(0, 0), (0, padding)], mode="edge")


def materialize(cotangents: Any) -> list[Any]:
    """Cotangents with zeros in place of symbolic zeros."""
    zeros: Any = jnp.zeros
    return [zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents]


# ---------------------------------------------------------------------------------------------------------------- requirements


def in_bfloat16(*names: str) -> Requirement:
    """The requirement that the arrays with these names are bfloat16."""
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]

    def others(call: MemoryCall) -> list[str]:
        dtypes = {n: jnp.dtype(getattr(call, n).dtype) for n in names}
        return [f"{n} in {dtype.name}" for n, dtype in dtypes.items() if dtype != jnp.bfloat16]

    return Requirement(
        f"{listed} in bfloat16", lambda call: not others(call), lambda call: ", ".join(others(call))
    )


def key_dims(*sizes: int) -> Requirement:
    """The requirement that K is one of `sizes`."""
    listed = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
    return Requirement(
        f"K of {listed}", lambda call: call.q.shape[3] in sizes, lambda call: str(call.q.shape[3])
    )


def value_dims(*sizes: int) -> Requirement:
    """The requirement that V is one of `sizes`."""
    listed = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
    return Requirement(
        f"V of {listed}", lambda call: call.v.shape[3] in sizes, lambda call: str(call.v.shape[3])
    )


def _in_slices(size: int) -> bool:
    """Whether Hopper's kernels with a decay per channel have slices for so many channels."""
    return size == 64 or (size > 0 and size % 128 == 0)


KEYS_IN_SLICES = Requirement(
    "K of 64 or a multiple of 128",
    lambda call: _in_slices(call.q.shape[3]),
    lambda call: str(call.q.shape[3]),
)
VALUES_IN_SLICES = Requirement(
    "V of 64 or a multiple of 128",
    lambda call: _in_slices(call.v.shape[3]),
    lambda call: str(call.v.shape[3]),
)


def _decay(call: MemoryCall) -> Any:
    """The log decay of a call."""
    return call.log_decay if call.value_log_decay is None else call.value_log_decay


FLOAT32_DECAY = Requirement(
    "log_decay in float32",
    lambda call: jnp.dtype(_decay(call).dtype) == jnp.float32,
    lambda call: jnp.dtype(_decay(call).dtype).name,
)
ONE_DECAY = Requirement(
    "log_decay or value_log_decay, not both",
    lambda call: call.log_decay is None or call.value_log_decay is None,
)
NO_BONUS = Requirement(
    "no bonus unless the decay is log_decay [B, T, G, K] alone", lambda call: call.bonus is None
)


def _tpu_dtypes(call: MemoryCall) -> set[str]:
    """The names of the dtypes of q, k and v."""
    return {jnp.dtype(x.dtype).name for x in (call.q, call.k, call.v)}


def _small_multiple(size: int) -> bool:
    """Whether TPU kernels support so many channels."""
    return size % 8 == 0 and 0 < size <= 256


TPU = (
    Requirement(
        "q, k and v all in bfloat16 or all in float32",
        lambda call: len(_tpu_dtypes(call)) == 1 and _tpu_dtypes(call) <= {"bfloat16", "float32"},
        lambda call: ", ".join(sorted(_tpu_dtypes(call))),
    ),
    Requirement(
        "K a multiple of 8 up to 256",
        lambda call: _small_multiple(call.q.shape[3]),
        lambda call: str(call.q.shape[3]),
    ),
    Requirement(
        "V a multiple of 8 up to 256",
        lambda call: _small_multiple(call.v.shape[3]),
        lambda call: str(call.v.shape[3]),
    ),
)
"""Requirements of all TPU kernels of these ops."""
