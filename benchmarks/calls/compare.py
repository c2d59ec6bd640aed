"""The comparison of a kernel's results and gradients with XLA's in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 64
"""Tokens between which the kernels of NVIDIA cards round a memory."""


class Compared(NamedTuple):
    """One call of an op that implementations are compared on.

    Attributes:
        run: a function of an implementation's name and of `arrays`, which returns the output and what else is compared.
        arrays: the arrays that are differentiated, by name.
        cotangents: the gradients of the results.
        unchanged: a function of the results and the gradients that returns whether what no token updates has its bits.
        tf32: whether the call allows products in tf32, without which the Triton kernels refuse float32.
        by_head: the names of arrays that have one number a head, [G], which every token uses: see `sizes_of_sums`.
        part: where the output is not of all tokens: T, a token, and the number of outputs that do not depend on it and on later ones.
    """

    run: Callable[[str, dict[str, jax.Array]], tuple[jax.Array, ...]]
    arrays: dict[str, jax.Array]
    cotangents: tuple[jax.Array, ...]
    unchanged: Callable[[Any, Any], bool] = lambda results, gradients: True
    tf32: bool = False
    by_head: tuple[str, ...] = ()
    part: tuple[int, int, int] | None = None


def case_id(case: Any) -> str:
    """Return the name of a kernel's case: its fields joined by hyphens, those that are tuples by points."""
    fields = (".".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in case)
    return "-".join(x.replace(", ", " ").replace(" ", "_") for x in fields if x)


def error(actual: Any, expected: Any, size: Any = None) -> float:
    """Return the RMS of the difference of two arrays relative to the RMS of `size`, by default of `expected`, or to 1 if that is 0; NaN if an
    entry is NaN.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    size = np.sqrt(np.mean(np.square(expected if size is None else size))) or 1.0
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / size)


def error_of_numbers(actual: Any, expected: Any) -> float:
    """Return `error` of the entries that are not NaN, or NaN unless the same entries of both arrays are NaN."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    numbers = ~np.isnan(expected)
    if not np.array_equal(numbers, ~np.isnan(actual)):
        return float("nan")
    return error(actual[numbers], expected[numbers]) if numbers.any() else 0.0


def widened(tree: Any) -> Any:
    """Return the arrays of a tree in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two trees of arrays are equal; a NaN is equal to a NaN."""
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return all(bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs)


def program(call: Compared, implementation: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return the compiled function of cotangents and arrays that returns the results of a call and the gradients by name."""

    def both(cotangents, arrays):
        results, pull = jax.vjp(functools.partial(call.run, implementation), arrays)
        return results, pull(cotangents)[0]

    return jax.jit(both)


def expected(call: Compared) -> tuple[Any, Any]:
    """Return the results and gradients by XLA in float32 at full precision."""
    with jax.default_matmul_precision("highest"):
        return program(call, "xla")(*widened((call.cotangents, call.arrays)))


def sizes_of_sums(call: Compared) -> dict[str, np.ndarray]:
    """Return, by name, the numbers [G] to which errors of the gradients of `call.by_head` are relative: the size of the sum, over all tokens,
    that each gradient is.

    The terms of the sum are the gradients of the array if it had a number for each token. They have both signs, so that their sum may be
    far smaller than they are, and than the rounding errors that they bring. Those errors are alike in a chunk, for which a kernel rounds
    the memory once, and independent between chunks. So the size is the root of the sum, over chunks and rows, of the squares of the
    chunks' sums of absolute terms: about that of the gradient itself, unless chunks cancel.
    """
    if not call.by_head:
        return {}
    batch, length = call.cotangents[0].shape[:2]
    by_token = {
        n: jnp.broadcast_to(call.arrays[n], (batch, length, *call.arrays[n].shape))
        for n in call.by_head
    }
    _, terms = expected(call._replace(arrays=call.arrays | by_token))
    sizes = {}
    for name in call.by_head:
        absolute = np.abs(np.asarray(terms[name], np.float64))
        absolute = np.pad(absolute, [(0, 0), (0, -length % CHUNK), (0, 0)])
        by_chunk = absolute.reshape(batch, -1, CHUNK, absolute.shape[2]).sum(2)
        sizes[name] = np.sqrt(np.sum(by_chunk**2, (0, 1)))
    return sizes


def errors_of(call: Compared, found: tuple[Any, Any]) -> dict[str, float]:
    """Return the errors of the results ("output", "final", "final 2") and gradients ("d_NAME") of a call, relative to those of XLA in float32
    or, of the gradients of `call.by_head`, to `sizes_of_sums`.
    """
    wanted, sizes = expected(call), sizes_of_sums(call)
    names = ("output", "final", "final 2")
    errors = {n: error(a, b) for n, a, b in zip(names, found[0], wanted[0], strict=False)}
    return errors | {f"d_{n}": error(a, wanted[1][n], sizes.get(n)) for n, a in found[1].items()}


def judged(call: Compared, implementation: str) -> dict[str, Any]:
    """Return the errors of a call by an implementation, whether a second run and the states that nothing updates have the same bits, and how
    many outputs of the first two thirds of the tokens change with the others.
    """
    precision = "tensorfloat32" if call.tf32 else None

    def fused(cotangents, arrays):
        with jax.default_matmul_precision(precision):
            return compiled(cotangents, arrays)

    compiled = program(call, implementation)
    found = fused(call.cotangents, call.arrays)
    same = same_bits(found, fused(call.cotangents, call.arrays)) and call.unchanged(*found)
    output = found[0][0]
    length = output.shape[1]
    length, place, kept = call.part or (length, length * 2 // 3, length * 2 // 3)
    changed = {
        n: x.at[:, place:].multiply(2) if x.shape[:2] == (len(output), length) else x
        for n, x in call.arrays.items()
    }
    later = fused(call.cotangents, changed)[0][0]
    different = later[:, :kept] != output[:, :kept]
    errors = {n: float(f"{e:.3g}") for n, e in errors_of(call, found).items()}
    return dict(errors=errors, same_bits=same, not_causal=int(jnp.sum(different)))
