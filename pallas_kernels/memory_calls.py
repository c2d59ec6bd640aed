"""Functions that `linear_attention`, `delta_rule` and `dplr` share: the selection of a backend, the padding of tokens,
reverse-mode differentiation, and the requirements of kernels.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.residuals import name_residuals

FOLDERS = {"mosaic_gpu": "hopper", "mosaic_tpu": "tpu", "triton": "triton"}
"""The folder, inside an op's package, with the modules of each implementation, by the implementation's name."""


class MemoryCall(NamedTuple):
    """The arrays of one call of `linear_attention`, `delta_rule` or `dplr`, or only their shapes and dtypes, which requirements check.

    Attributes:
        q: [B, T, H, K], the queries.
        k: [B, T, Hk, K], the keys.
        v: [B, T, G, V], the values.
        log_decay: [B, T, G] or [B, T, G, K], the log decay, one per token or per key channel, or None.
        value_log_decay: [B, T, G, V], the log decay per value channel, or None.
        bonus: [G, K], the weight of a token's own key and value in its output, or None.
        a: [B, T, *, K], the first factor of DPLR's low-rank transition, or None for the other ops.
        b: [B, T, *, K], the second factor of DPLR's low-rank transition, or None for the other ops.
        erase: which memory a key of the delta rule reads to erase: "decayed" or "undecayed".
    """

    q: Any
    k: Any
    v: Any
    log_decay: Any = None
    value_log_decay: Any = None
    bonus: Any = None
    a: Any = None
    b: Any = None
    erase: str = "decayed"


def backend_module(op: str, implementation: str, variant: str) -> Any:
    """Import and return the module of an op's backend, `pallas_kernels.OP.FOLDER.VARIANT`. It is imported only here, so that a backend
    that is not used adds no time to the import of the package.

    Raises:
        ValueError: `implementation` is not one of the names in `FOLDERS`, or the op has no such folder.
    """
    folder = Path(__file__).parent / op
    accepted = tuple(name for name, inside in FOLDERS.items() if (folder / inside).exists())
    if implementation not in accepted:
        raise ValueError(f"{op}: implementation={implementation!r}; accepted are {accepted}")
    return importlib.import_module(f"pallas_kernels.{op}.{FOLDERS[implementation]}.{variant}")


def supported_backend(op: str, implementation: str, variant: str, call: MemoryCall) -> Any:
    """Import and return the module of an op's backend (see `backend_module`), after checking that it supports the arrays of
    `call`.

    Raises:
        NotImplementedError: the backend does not support the arrays of `call`; the message says which requirement they do not
        meet.
        ValueError: `implementation` is not one of the names in `FOLDERS`.
    """
    backend = backend_module(op, implementation, variant)
    reason = first_unmet(backend.REQUIREMENTS, call)
    if reason is not None:
        raise NotImplementedError(f"{op}: implementation={implementation!r} requires {reason}")
    return backend


def pad_to_multiple(multiple: int, run: Any, *arrays: Any) -> tuple[Any, ...]:
    """Append tokens to `run` [B, T] (document numbers) and to the arrays [B, T, ...] so that T is a multiple of `multiple`, and
    return all of them; those that are None stay None.

    The added tokens are zeros, which write nothing, and belong to the last document.
    """
    padding = -arrays[0].shape[1] % multiple
    if padding == 0:
        return run, *arrays
    tokens = [(0, 0), (0, padding)]
    padded = (None if x is None else jnp.pad(x, tokens + [(0, 0)] * (x.ndim - 2)) for x in arrays)
    return None if run is None else jnp.pad(run, tokens, mode="edge"), *padded


# ------------------------------------------------------------------------------------------------------------------ derivative


class Options(NamedTuple):
    """The arguments of `call_backend` that are not arrays.

    Attributes:
        backend: the backend's module, with the functions `forward` and `backward`.
        scale: the factor by which the queries q are multiplied.
        interpret: parameters of the backend's interpreter, or False.
        exact: whether the output is float32, instead of the dtype in which the backend returns it.
        erase: which memory a key of the delta rule reads to erase: "decayed" or, if the backend supports it, "undecayed".
        save_memories: whether the forward pass of a derivative also stores the memories before all chunks, which the backward pass
            otherwise computes again; only backends with `SAVES_MEMORIES` do.
        rank: number of consecutive rows that are one token, of which each reads after all are written; more than one only for a
            backend that supports it.
    """

    backend: Any
    scale: float
    interpret: Any
    exact: bool = False
    erase: str = "decayed"
    save_memories: bool = False
    rank: int = 1


def _keywords(options: Options, bonus: Any) -> dict[str, Any]:
    """Return the keyword arguments that a backend's `forward` and `backward` have in common: `scale`, `interpret`, if there is one
    `bonus`, `erase` unless it is "decayed", and `rank` unless it is 1.
    """
    keywords = dict(scale=options.scale, interpret=options.interpret)
    if options.erase != "decayed":
        keywords["erase"] = options.erase
    if options.rank != 1:
        keywords["rank"] = options.rank
    return keywords if bonus is None else keywords | dict(bonus=bonus)


def _forward_keywords(options: Options, bonus: Any) -> dict[str, Any]:
    """Return the keyword arguments of a backend's `forward`, except `save`: `scale`, `interpret`, `bonus` if there is one, and
    `exact` if a float32 output is requested and the backend can compute it.
    """
    exact = options.exact and getattr(options.backend, "HAS_EXACT", False)
    return _keywords(options, bonus) | (dict(exact=True) if exact else {})


def _output(options: Options, output: Any) -> Any:
    """Return a backend's output in the dtype that `options` requests: float32 if `exact`, else unchanged."""
    return output.astype(jnp.float32) if options.exact else output


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def call_backend(options: Options, arrays: tuple[Any, ...], bonus: Any = None) -> Any:
    """Compute an op by one backend: return the output and the final memories. Differentiable once, in reverse mode.

    Args:
        options: the backend and its options.
        arrays: the arguments of the backend's `forward`; the first is q, and the last three are log_decay (or None), run (the tokens'
            document numbers) and initial (the initial memories; None only for a backend with `FROM_ZERO`).
        bonus: the weight of a token's own key and value in its output, for a backend that supports it, or None.
    """
    keywords = _forward_keywords(options, bonus)
    output, final, _ = options.backend.forward(*arrays, save=False, **keywords)
    return _output(options, output), final


def _run_forward(options, arrays, bonus):
    log_decay = arrays[-3]
    arrays, bonus = jax.tree.map(lambda primal: primal.value, (arrays, bonus))
    keywords = _forward_keywords(options, bonus)
    if options.save_memories and getattr(options.backend, "SAVES_MEMORIES", False):
        keywords["save_memories"] = True
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
    d_output, d_final = cotangents
    if isinstance(d_final, SymbolicZero) and getattr(options.backend, "FROM_ZERO", False):
        d_final = None
    d_output, d_final = (
        zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in (d_output, d_final)
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
    """Return the requirement of a kernel that the arrays of a `MemoryCall` with these names are bfloat16."""
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]

    def others(call: MemoryCall) -> list[str]:
        dtypes = {n: jnp.dtype(getattr(call, n).dtype) for n in names}
        return [f"{n} in {dtype.name}" for n, dtype in dtypes.items() if dtype != jnp.bfloat16]

    return Requirement(
        f"{listed} in bfloat16", lambda call: not others(call), lambda call: ", ".join(others(call))
    )


def key_dims(*sizes: int) -> Requirement:
    """Return the requirement of a kernel that K, the number of key channels of a head, is one of the numbers `sizes`."""
    listed = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
    return Requirement(
        f"K of {listed}", lambda call: call.q.shape[3] in sizes, lambda call: str(call.q.shape[3])
    )


def value_dims(*sizes: int) -> Requirement:
    """Return the requirement of a kernel that V, the number of value channels of a head, is one of the numbers `sizes`."""
    listed = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
    return Requirement(
        f"V of {listed}", lambda call: call.v.shape[3] in sizes, lambda call: str(call.v.shape[3])
    )


def or_in_parts(values: Requirement) -> Requirement:
    """Return the requirement `values` with the words on more value channels, which `delta_rule` computes in parts."""
    return values._replace(
        text=f"{values.text}, or a multiple of 256 in parts if q has no more heads than v"
    )


def _in_slices(size: int) -> bool:
    """Return whether Hopper's kernels with a decay per channel support `size` key or value channels, in slices: 64, or a multiple of 128."""
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
    """Return the log decay of one call of an op: `value_log_decay`, one per value channel, if it is not None, else `log_decay`."""
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
DECAYED_ERASE = Requirement(
    "erase='decayed'",
    lambda call: call.erase == "decayed" or call.log_decay is None,
    lambda call: repr(call.erase),
)
NO_BONUS = Requirement(
    "no bonus unless the decay is log_decay [B, T, G, K] alone", lambda call: call.bonus is None
)


def _tpu_dtypes(call: MemoryCall) -> set[str]:
    """Return the names of the dtypes of the queries, keys and values of a call, as a set."""
    return {jnp.dtype(x.dtype).name for x in (call.q, call.k, call.v)}


def _small_multiple(size: int) -> bool:
    """Return whether the TPU kernels support heads of `size` key or value channels: a positive multiple of 8, at most 256."""
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
"""The requirements that every TPU kernel of `linear_attention`, `delta_rule` and `dplr` has."""
TPU_IN_PARTS = (*TPU[:2], or_in_parts(TPU[2]))
"""Those of the op `delta_rule`, which computes more value channels in parts."""
