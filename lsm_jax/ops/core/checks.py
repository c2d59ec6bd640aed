"""Checks and conversions of the arguments of every op: shapes, heads, forms, dtypes."""

from __future__ import annotations

import inspect
import math
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

FORMS = ("recurrent", "chunk", "associative")
DEFAULT_CHUNK_SIZE = 64
_OWN_FOLDERS = str(Path(jax.__file__).parent), str(Path(__file__).parents[2])  # jax, lsm_jax


def check_form(op: str, form: str) -> None:
    """Raise ValueError unless `form`, the argument of the op called `op`, is one of the accepted forms: recurrent,
    chunk and associative.
    """
    if form not in FORMS:
        raise ValueError(f"{op}: form={form!r}; accepted are {', '.join(map(repr, FORMS))}")


def check_shape(op: str, name: str, array, expected: tuple[int | None, ...], letters: str) -> None:
    """Raise ValueError unless the array, the argument `name` of the op called `op`, has the expected shape; None in
    `expected` accepts any length of that axis. `letters` name the axes in the message.
    """
    shape = jnp.shape(array)
    fits = len(shape) == len(expected) and all(
        e is None or e == s for s, e in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if e is None else str(e) for e in expected)
        swapped = (*shape[:1], *shape[2:0:-1], *shape[3:])
        fits = (
            letters.startswith("B, T")
            and len(shape) == len(expected) >= 3
            and all(e is None or e == s for s, e in zip(swapped, expected, strict=True))
        )
        hint = "; heads are in front of tokens: jnp.swapaxes(array, 1, 2)" if fits else ""
        raise ValueError(
            f"{op}: {name} has shape {tuple(shape)}; accepted is [{letters}] = [{wanted}]{hint}"
        )


_ROUNDING = 1e-5  # above 0, of a logarithm of 1
# Modules between an op and the code that called it, such as the frames of `jax.jit(ops.linear_memory)`.
_BETWEEN = re.compile(r"(lsm_jax\.(ops|parallel)|jax|jaxlib|functools|contextlib)(\.|$)")


def check_logarithm(op: str, name: str, array) -> None:
    """Raise ValueError if the argument `name` of the op called `op`, the logarithm of a factor of at most 1, is positive.
    Only the values of arrays outside of `jax.jit` are known; inside of it nothing is checked.
    """
    if array is None or isinstance(array, jax.core.Tracer) or jnp.size(array) == 0:
        return
    if not jnp.issubdtype(jnp.result_type(array), jnp.floating):
        return
    if not getattr(array, "is_fully_addressable", True):
        return  # a part of it is on other hosts
    with jax.ensure_compile_time_eval():  # of a constant of a program, too
        largest = float(jnp.max(array))
    if largest > _ROUNDING:
        raise ValueError(
            f"{op}: {name} has values up to {largest:.4g}; accepted are at most 0, the natural logarithms of factors in (0, 1]"
        )


def check_filled(op: str, name: str, array) -> None:
    """Raise ValueError if an axis of the array, the argument `name` of the op called `op`, has size 0."""
    if 0 in jnp.shape(array):
        raise ValueError(f"{op}: {name} has shape {jnp.shape(array)}; no axis may be empty")


def check_row_channels(op: str, name: str, array) -> tuple[int, int, int]:
    """Raise ValueError unless the argument `name` of the op called `op` has three axes; return their sizes (B, T, D)."""
    if jnp.ndim(array) != 3:
        raise ValueError(f"{op}: {name} has shape {jnp.shape(array)}; accepted is [B, T, D]")
    check_filled(op, name, array)
    return array.shape


def check_qkv(op: str, q, k, v) -> tuple[int, int, int, int, int, int, int]:
    """Raise ValueError unless the shapes and the numbers of heads of queries, keys and values match; return (B, T, H,
    key heads, G, K, V).
    """
    for name, array, letters in (
        ("q", q, "B, T, H, K"),
        ("k", k, "B, T, H, K"),
        ("v", v, "B, T, G, V"),
    ):
        if jnp.ndim(array) != 4:
            raise ValueError(f"{op}: {name} has shape {jnp.shape(array)}; accepted is [{letters}]")
        check_filled(op, name, array)
        if not jnp.issubdtype(jnp.asarray(array).dtype, jnp.floating):
            raise ValueError(f"{op}: {name} has dtype {array.dtype}; accepted are floating ones")
    batch, length, query_heads, key_dim = q.shape
    if k.shape[2] == v.shape[2] == query_heads:
        warn_of_heads_first(op, "q", q.shape)
    check_shape(op, "k", k, (batch, length, None, key_dim), "B, T, H, K")
    check_shape(op, "v", v, (batch, length, None, None), "B, T, G, V")
    key_heads, value_heads = k.shape[2], v.shape[2]
    if value_heads % key_heads:
        raise ValueError(f"{op}: k has {key_heads} heads; they must divide v's {value_heads}")
    if query_heads % value_heads and value_heads % query_heads:
        raise ValueError(
            f"{op}: q has {query_heads} heads; accepted are multiples and divisors of v's {value_heads}"
        )
    return batch, length, query_heads, key_heads, value_heads, key_dim, v.shape[3]


def warn_of_heads_first(op: str, name: str, shape: tuple[int, ...]) -> None:
    """Warn (UserWarning; Python shows the same one once) if a call of the op called `op` from outside of the library has more
    heads than tokens, and more tokens than one: all arrays then may be [B, H, T, ...], which their shapes alone do not show.

    Layers of the library, whose prompts may be short, and a decoding step of one token never warn.

    Args:
        name: the argument with the shape `shape`, [B, T, H, ...].
    """
    length, heads = shape[1:3]
    if not 1 < length < heads:
        return
    stack = traceback.walk_stack(inspect.currentframe())
    callers = (frame.f_globals.get("__name__", "") for frame, _ in stack)
    caller = next((module for module in callers if not _BETWEEN.match(module)), "")
    if caller.partition(".")[0] == "lsm_jax":
        return
    warnings.warn(
        f"{op}: {name} has shape {tuple(shape)}, read as [B, T, H, ...]: {length} tokens and {heads} heads. If heads are in front "
        f"of tokens, swap both axes of all arrays: jnp.swapaxes({name}, 1, 2)",
        stacklevel=2,
        skip_file_prefixes=_OWN_FOLDERS,
    )


def check_rows(op: str, batch: int, length: int, segment_ids, update_mask) -> None:
    """Raise ValueError unless `segment_ids` and `update_mask` have the shape of the tokens, [B, T], and ids are
    integers.
    """
    if segment_ids is not None:
        check_shape(op, "segment_ids", segment_ids, (batch, length), "B, T")
        if not jnp.issubdtype(jnp.asarray(segment_ids).dtype, jnp.integer):
            raise ValueError(
                f"{op}: segment_ids has dtype {segment_ids.dtype}; accepted are integers"
            )
    if update_mask is not None:
        check_shape(op, "update_mask", update_mask, (batch, length), "B, T")


def check_chunk_size(op: str, chunk_size: int | None, length: int) -> int:
    """Return the number of tokens in a chunk for a call of `length` tokens: the given chunk size or the
    default, but no more than the smallest power of two of at least `length`.
    """
    if chunk_size is None:
        chunk_size = DEFAULT_CHUNK_SIZE
    if not is_count(chunk_size) or chunk_size & (chunk_size - 1):
        raise ValueError(f"{op}: chunk_size={chunk_size!r}; accepted are powers of two and None")
    return min(int(chunk_size), 1 << (length - 1).bit_length())


def is_count(value: Any) -> bool:
    """Return whether `value`, such as a chunk size, is an integer of 1 or more; True and 16.0 are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 1


def check_number(op: str, name: str, value: Any, *, at_least: float = -math.inf) -> float:
    """Return `value` as a float; raise ValueError unless it is a finite Python number of at least `at_least`.
    It becomes a constant of the program, so that traced arrays are refused.
    """
    numbers = (int, float, np.integer, np.floating)
    known = isinstance(value, numbers) and not isinstance(value, bool)
    if not (known and math.isfinite(value) and value >= at_least):
        bound = "" if at_least == -math.inf else f" from {at_least:g}"
        raise ValueError(f"{op}: {name}={value!r}; accepted are finite Python numbers{bound}")
    return float(value)


def scale_or_default(op: str, scale: float | None, key_dim: int) -> float:
    """Return the factor that multiplies the queries of the op: `scale`, or 1 / sqrt(key channels) if that is None."""
    return key_dim**-0.5 if scale is None else check_number(op, "scale", scale)


def state_or_empty(op: str, state: Any, empty: Callable[..., Any], segment_ids: Any) -> Any:
    """Return the state that the caller of an op gave, after checks of its shapes, or an empty one if it is None.

    Args:
        op: the op's name, for messages.
        state: the argument `initial_state` of the op's caller.
        empty: makes an empty state; called with `num_segments`.
        segment_ids: the argument `segment_ids` of the op's caller, [B, T] or None.

    Raises:
        ValueError: the state has another type, arrays that are missing, too many or of another shape or kind,
            or one state per segment without `segment_ids`.
    """
    if state is None:
        return empty(num_segments=None)
    wanted = jax.eval_shape(lambda: empty(num_segments=None))
    kind = type(wanted).__name__
    if type(state) is not type(wanted):
        raise ValueError(
            f"{op}: initial_state is a {type(state).__name__}; accepted are {kind} and None"
        )
    given, expected = (jax.tree_util.tree_leaves_with_path(x) for x in (state, wanted))
    names, expected_names = (
        ["initial_state" + jax.tree_util.keystr(path) for path, _ in x] for x in (given, expected)
    )
    if names != expected_names:
        raise ValueError(
            f"{op}: initial_state holds {', '.join(names)}; accepted with these arguments is a {kind} of "
            f"{', '.join(expected_names)}"
        )
    rank, segments = len(expected[0][1].shape), ()
    if jnp.ndim(given[0][1]) == rank + 1:
        segments = jnp.shape(given[0][1])[1:2]
        if segment_ids is None:
            raise ValueError(
                f"{op}: {names[0]} has shape {jnp.shape(given[0][1])}, one state per segment, and segment_ids=None; "
                f"accepted are segment_ids [B, T], or a state of one memory per row"
            )
        wanted = jax.eval_shape(lambda: empty(num_segments=segments[0]))
    for name, (_, array), like in zip(names, given, jax.tree.leaves(wanted), strict=True):
        check_shape(op, name, array, like.shape, _STATE_LETTERS if segments else "B, ...")
        for of, called in _KINDS:
            if jnp.issubdtype(like.dtype, of) and not jnp.issubdtype(jnp.result_type(array), of):
                raise ValueError(
                    f"{op}: {name} has dtype {jnp.result_type(array)}; accepted with these arguments are {called} dtypes"
                )
    return state


_STATE_LETTERS = "B, S, ..."
_KINDS = ((jnp.integer, "integer"), (jnp.floating, "real"), (jnp.complexfloating, "complex"))


def compute_dtype(*arrays: Array | None):
    """Return the dtype of an op's states and sums: float64 if any input is float64 or complex128, else float32."""
    wide = any(
        a is not None and jnp.asarray(a).dtype in (jnp.float64, jnp.complex128) for a in arrays
    )
    return jnp.float64 if wide else jnp.float32


def matmul_precision(*arrays: Array) -> jax.lax.Precision:
    """Return the precision of an op's matrix products: full if an input is float32 or wider, and the default
    if all are 16-bit floats, whose products are exact in float32 in any case.
    """
    narrow = all(a.dtype in (jnp.bfloat16, jnp.float16) for a in arrays)
    return jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST


def group_queries(q: Array, value_heads: int) -> Array:
    """Group query heads [B, T, H, K] by the memory that they read: [B, T, G, R, K], with R = H / G heads for
    each of the G memories. If H < G, several memories read each head: it is repeated for them, and R is 1.
    """
    batch, length, heads, key_dim = q.shape
    if heads < value_heads:
        q = jnp.repeat(q, value_heads // heads, axis=2)
    return q.reshape(batch, length, value_heads, -1, key_dim)


def spread_keys(k: Array, value_heads: int) -> Array:
    """Repeat the heads of the keys k [B, T, Hk, K] so that each of the G memories (value heads) has one:
    [B, T, G, K].
    """
    return k if k.shape[2] == value_heads else jnp.repeat(k, value_heads // k.shape[2], axis=2)


def check_log_decay(op: str, log_decay, dims: tuple[int, int, int, int]) -> None:
    """Raise ValueError unless `log_decay` is None or has one of the shapes [G], [B, T, G] and [B, T, G, K];
    `dims` are (B, T, G, K).
    """
    batch, length, heads, key_dim = dims
    accepted = ((heads,), (batch, length, heads), (batch, length, heads, key_dim))
    if log_decay is not None and jnp.shape(log_decay) not in accepted:
        raise ValueError(
            f"{op}: log_decay has shape {jnp.shape(log_decay)}; accepted are "
            f"[G], [B, T, G] and [B, T, G, K] = {', '.join(map(str, accepted))}{heads_first(log_decay, batch, length, heads)}"
        )
    check_logarithm(op, "log_decay", log_decay)


def heads_first(array, batch: int, length: int, heads: int) -> str:
    """Return the end of an error message if an array has the axes of heads and tokens in the wrong order, [B, H, T, ...];
    otherwise "".
    """
    if length == heads or jnp.shape(array)[:3] != (batch, heads, length):
        return ""
    return "; heads are in front of tokens: jnp.swapaxes(array, 1, 2)"
