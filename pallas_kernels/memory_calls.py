"""Functions that `linear_attention`, `delta_rule` and `dplr` share: selecting a backend, padding, the derivative, requirements."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.residuals import name_residuals

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
    """Return the module of an op's backend. It is imported here, so that a backend that is not used adds no
    time to the import of the package.

    Raises:
        ValueError: the implementation does not exist.
    """
    if implementation not in FOLDERS:
        raise ValueError(f"{op}: implementation={implementation!r}; accepted are {tuple(FOLDERS)}")
    return importlib.import_module(f"pallas_kernels.{op}.{FOLDERS[implementation]}.{variant}")


def supported_backend(op: str, implementation: str, variant: str, call: MemoryCall) -> Any:
    """`backend_module`, if it supports the call.

    Raises:
        NotImplementedError: it does not; the message gives the first requirement that the call does not meet.
        ValueError: an implementation that does not exist.
    """
    backend = backend_module(op, implementation, variant)
    reason = first_unmet(backend.REQUIREMENTS, call)
    if reason is not None:
        raise NotImplementedError(f"{op}: implementation={implementation!r} requires {reason}")
    return backend


def pad_to_multiple(multiple: int, run: Any, *arrays: Any) -> tuple[Any, ...]:
    """Return run and the arrays, [B, T, ...] or None, with T padded to a multiple.

    The tokens at the end are zeros, which write nothing, and belong to the last document.
    """
    padding = -arrays[0].shape[1] % multiple
    if padding == 0:
        return run, *arrays
    tokens = [(0, 0), (0, padding)]
    padded = (None if x is None else jnp.pad(x, tokens + [(0, 0)] * (x.ndim - 2)) for x in arrays)
    return None if run is None else jnp.pad(run, tokens, mode="edge"), *padded


# ------------------------------------------------------------------------------------------------------------------ derivative


class Options(NamedTuple):
    """The static arguments of `call_backend`.

    Attributes:
        backend: the module with the functions `forward` and `backward`.
        scale: multiplies q.
        interpret: parameters of the backend's interpreter, or False.
        exact: whether the output is float32.
    """

    backend: Any
    scale: float
    interpret: Any
    exact: bool = False


def _keywords(options: Options, bonus: Any) -> dict[str, Any]:
    """The keyword arguments of both functions of a backend."""
    keywords = dict(scale=options.scale, interpret=options.interpret)
    return keywords if bonus is None else keywords | dict(bonus=bonus)


def _forward_keywords(options: Options, bonus: Any) -> dict[str, Any]:
    """Those of `forward` without `save`."""
    exact = options.exact and getattr(options.backend, "HAS_EXACT", False)
    return _keywords(options, bonus) | (dict(exact=True) if exact else {})


def _output(options: Options, output: Any) -> Any:
    """The output in the dtype that the call returns."""
    return output.astype(jnp.float32) if options.exact else output


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def call_backend(options: Options, arrays: tuple[Any, ...], bonus: Any = None) -> Any:
    """Return the output and the final memories; differentiable once, in reverse.

    Args:
        options: the backend and its options.
        arrays: the arguments of the backend's `forward`; the first is q, and the last three are log_decay (or None), run and initial.
        bonus: of a backend that supports one, or None.
    """
    keywords = _forward_keywords(options, bonus)
    output, final, _ = options.backend.forward(*arrays, save=False, **keywords)
    return _output(options, output), final


def _run_forward(options, arrays, bonus):
    log_decay = arrays[-3]
    arrays, bonus = jax.tree.map(lambda primal: primal.value, (arrays, bonus))
    keywords = _forward_keywords(options, bonus)
    output, *rest = options.backend.forward(*arrays, save=True, **keywords)
    output, final, residuals = name_residuals((_output(options, output), *rest))
    # A constant decay requires no gradient, and the backward pass is cheaper without it. Residuals are arrays, so this flag is the
    # size of an array.
    needs_decay = log_decay is not None and log_decay.perturbed
    saved = arrays, bonus, residuals, jnp.zeros((int(needs_decay), 0))
    return (output, final), saved


def _run_backward(options, saved, cotangents):
    arrays, bonus, residuals, needs_decay = saved
    zeros: Any = jnp.zeros
    d_output, d_final = (
        zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents
    )
    gradients = options.backend.backward(
        *arrays,
        residuals,
        d_output.astype(arrays[0].dtype),
        d_final,
        decay_gradient=needs_decay.shape[0] == 1,
        **_keywords(options, bonus),
    )
    # All arrays but run have a gradient; that of the bonus is last.
    *of_tokens, d_decay, d_initial = gradients[: len(arrays) - 1]
    log_decay = arrays[-3]
    if log_decay is not None and d_decay is None:
        d_decay = jnp.zeros_like(log_decay)
    return (*of_tokens, d_decay, None, d_initial), None if bonus is None else gradients[-1]


call_backend.defvjp(_run_forward, _run_backward, symbolic_zeros=True)


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
    """Whether Hopper's kernels with a decay per channel support so many channels, in slices."""
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
