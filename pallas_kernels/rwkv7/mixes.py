"""The gradients of `token_mixes` by one Hopper kernel, and by another where each token is mixed with the one before it in its row."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import channel_rows, pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.rwkv7 import tokens

_AHEAD = 2
_WIDTH = 128  # channels of a row of the tiles, which have no heads

REQUIREMENTS = (
    Requirement(
        "x and before in bfloat16",
        lambda c: all(c[n].dtype == jnp.bfloat16 for n in ("x", "before") if n in c),
        lambda c: ", ".join(jnp.dtype(c[n].dtype).name for n in ("x", "before") if n in c),
    ),
    Requirement("at most 8 mixes", lambda c: c["results"] <= 8, lambda c: str(c["results"])),
    Requirement(
        f"a multiple of {tokens.CHANNELS} channels",
        lambda c: c["x"].shape[2] % tokens.CHANNELS == 0,
        lambda c: str(c["x"].shape[2]),
    ),
    tokens.divided("x", _AHEAD),
)  # fmt: skip


def unsupported(call: Mapping[str, Any]) -> str | None:
    """Return the first requirement of the Hopper kernel that a call of `token_mixes`, its arrays (or their shapes and dtypes) by name,
    does not meet, or None if it supports it; `results` is the number of its results.
    """
    return first_unmet(REQUIREMENTS, call)


def _rows(x: jax.Array) -> jax.Array:
    """Return an array [B, T, D] as [B T, D / 128, 128], or [D] as [D / 128, 128]."""
    return x.reshape(*(-1,) * (x.ndim == 3), x.shape[-1] // _WIDTH, _WIDTH)


def backward(
    step_back: jax.Array,
    shares: jax.Array,
    gradients: Sequence[jax.Array],
    twice: tuple[int, ...] = (),
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of the tokens and of the tokens before them, [B, T, D] in bfloat16, and of the shares, [N, D] in float32.

    Args:
        step_back: the tokens before minus the tokens, [B, T, D] bfloat16.
        shares: [N, D] in float32, as they multiply.
        gradients: of the N mixes, and of one more for each index in `twice`, [B, T, D] bfloat16.
        twice: the indices of the mixes of which there is one more.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.
    """
    numbers = [str(i) for i in range(len(shares))]
    more = {f"again_{i}": str(i) for i in twice}

    def compute(given, weights, total):
        given = dict(given)
        for n, of in more.items():
            given[of] = given[of] + given[n]
        before = functools.reduce(operator.add, (given[n] * weights[n] for n in numbers))
        whole = functools.reduce(operator.add, (given[n] for n in numbers))
        outputs = dict(x=whole - before, before=before)
        return outputs, {n: given[n] * given["step_back"] for n in numbers}

    shape = step_back.shape
    arrays = dict(zip([*numbers, *more], gradients, strict=True)) | dict(step_back=step_back)
    results = tokens.run(
        compute,
        arrays={n: _rows(x) for n, x in arrays.items()},
        weights={n: _rows(x) for n, x in zip(numbers, shares, strict=True)},
        outputs=dict(x=jnp.bfloat16, before=jnp.bfloat16),
        sums=numbers,
        ahead=_AHEAD,
        name="token_mixes_backward",
        interpret=interpret,
    )
    d_shares = jnp.stack([results[n].reshape(shape[2]) for n in numbers])
    return results["x"].reshape(shape), results["before"].reshape(shape), d_shares


def backward_in_rows(
    x: jax.Array,
    shares: jax.Array,
    gradients: Sequence[jax.Array],
    twice: tuple[int, ...] = (),
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the tokens, [B, T, D] in bfloat16, and of the shares, [N, D] in float32, where each token is mixed with the
    one before it in its row, zeros before the first.

    A thread block computes its tokens from the last to the first, so that the gradient of a token as the one before the next is at hand.

    Args:
        x: the tokens, [B, T, D] bfloat16.
        shares, gradients, twice, interpret: as those of `backward`.
    """
    length, channels = x.shape[1:]
    count, tiles = x.shape[0] * length, channels // _WIDTH
    rows = tokens.CHANNELS // _WIDTH
    columns = tiles // rows
    block = tokens.block_tokens(count, columns)
    registers = channel_rows(rows, _WIDTH, tokens.WARPS)
    indices = range(len(shares))

    def kernel(refs):
        own = pl.ds(lax.axis_index("column") * rows, rows)
        index = lax.axis_index("block")
        start = index * block
        end = jnp.minimum(start + block, count)

        def load(ref):
            return plgpu.load(ref.at[own], layout=registers, optimized=False)

        def store(value, ref, at):
            ref.at[at, own][...] = plgpu.layout_cast(value.astype(ref.dtype), registers)

        def gradients_of(token):
            return [load(refs[f"gradient_{i}"].at[token]) for i in range(len(gradients))]

        def load_step(token):
            # The tokens `token` and those before it; below the block's first one they are loaded, and not used.
            at = [jnp.maximum(token - i, 0) for i in range(_AHEAD)]
            ahead = [load(refs["x"].at[jnp.maximum(t - 1, 0)]) for t in at]
            return [gradients_of(t) for t in at], ahead

        shared = [load(refs["shares"].at[i]) for i in indices]

        def added(values):
            wide = [g.astype(jnp.float32) for g in values]
            for i, g in zip(twice, wide[len(indices) :], strict=True):
                wide[i] = wide[i] + g
            return wide[: len(indices)]

        def of_before(wide):
            return functools.reduce(operator.add, map(operator.mul, wide, shared))

        zero = shared[0] * 0.0

        def step(i, state):
            (values, ahead), own_x, after, carry = state
            token = end - 1 - i * _AHEAD
            following = load_step(token - _AHEAD)
            for j in range(_AHEAD):
                t = token - j
                wide, earlier = added(values[j]), ahead[j].astype(jnp.float32)
                before = of_before(wide)
                d_x = functools.reduce(operator.add, wide) - before + after
                store(d_x, refs["d_x"], t)
                first = lax.rem(t, length) == 0
                step_back = jnp.where(first, zero, earlier) - own_x
                carry = [c + g * step_back for c, g in zip(carry, wide, strict=True)]
                after = jnp.where(first, zero, before)
                own_x = earlier
            return following, own_x, after, carry

        following = of_before(added(gradients_of(jnp.minimum(end, count - 1))))
        after = jnp.where(lax.rem(end, length) == 0, zero, following)
        own_x = load(refs["x"].at[end - 1]).astype(jnp.float32)
        state = load_step(end - 1), own_x, after, [zero] * len(indices)
        *_, carry = lax.fori_loop(0, (end - start) // _AHEAD, step, state)
        for i, total in enumerate(carry):
            store(total, refs[f"sum_{i}"], index)

    blocks = -(-count // block)
    per_block = jax.ShapeDtypeStruct((blocks, tiles, _WIDTH), jnp.float32)
    results = launch(
        kernel,
        inputs=dict(x=_rows(x), shares=shares.reshape(-1, tiles, _WIDTH))
        | {f"gradient_{i}": _rows(g) for i, g in enumerate(gradients)},
        outputs=dict(d_x=jax.ShapeDtypeStruct((count, tiles, _WIDTH), x.dtype))
        | {f"sum_{i}": per_block for i in indices},
        grid=dict(column=columns, block=blocks),
        name="token_mixes_backward",
        interpret=interpret,
    )
    d_shares = jnp.stack([jnp.sum(results[f"sum_{i}"], axis=0).reshape(channels) for i in indices])
    return results["d_x"].reshape(x.shape), d_shares
