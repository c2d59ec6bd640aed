"""A scan of complex numbers, `h_t = a_t h_{t-1} + u_t`, `y_t = c_t Re h_t`, one a channel, on Mosaic TPU.

Programs walk as in `tpu`; a token is a row, its channels in lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.compat import pl
from pallas_kernels.selective_scan import tpu_layout
from pallas_kernels.selective_scan.tpu_layout import CHUNK, Layout, read_row, write_row

__all__ = ["CHUNK", "Inputs", "backward", "forward", "reason"]

_F32 = jnp.float32
_WIDEST = 1024  # channels of a program: a row of them fills a register
_UNROLL = 16


def reason(u) -> str | None:
    """What this backend takes in place of this argument (an array or its shape), or None."""
    return tpu_layout.reason(u)


class Inputs(NamedTuple):
    """What both kernels read, [B, T, D]. Attributes: u, c: bfloat16 or float32; real, imag: a's parts, float32."""

    u: Any
    c: Any
    real: Any
    imag: Any


def forward(x: Inputs, initial, *, save: bool = True, interpret: Any = False) -> tuple[Any, ...]:
    """Output [B, T, D] in u's dtype, final memory [B, 2, D], and the memories that enter each chunk, [B, T/128, 2, D]; these None
    unless `save`."""
    layout = Layout(x.u, 2, _WIDEST)
    given = _given(layout, x) | dict(initial=(initial, layout.memory()))
    outs = dict(y=layout.tokens(x.u.dtype), final=layout.memory())
    if save:
        outs["before"] = layout.memories()
    rooms = dict(memory=layout.room(), u=layout.row_room(), read=layout.row_room())
    found = layout.call(_forward_kernel, given, outs, rooms, interpret)
    return found["y"], found["final"], found.get("before")


def backward(x: Inputs, before, dy, d_final, *, interpret: Any = False) -> tuple[Inputs, Any]:
    """Gradients of the inputs, and of the first memory; `dy` in u's dtype."""
    layout = Layout(x.u, 2, _WIDEST, reverse=True)
    given = _given(layout, x) | dict(
        dy=(dy, layout.tokens(dy.dtype)),
        before=(before, layout.memories()),
        d_final=(d_final, layout.memory()),
    )
    outs: dict[str, Any] = {f"d_{n}": layout.tokens(a.dtype) for n, a in x._asdict().items()}
    outs["d_initial"] = layout.memory()
    rooms = dict(later=layout.room())
    names = "u", "given", "before_0", "before_1", "g_0", "g_1"
    rooms |= {name: layout.row_room() for name in names}
    found = layout.call(_backward_kernel, given, outs, rooms, interpret)
    return Inputs(*(found[f"d_{name}"] for name in x._fields)), found["d_initial"]


def _given(layout: Layout, x: Inputs) -> dict:
    return {name: (a, layout.tokens(a.dtype)) for name, a in x._asdict().items()}


def _forward_kernel(refs: dict, rooms: dict, first, last):
    memory = rooms["memory"]

    @pl.when(first)
    def _():
        memory[...] = refs["initial"][...]

    if "before" in refs:
        refs["before"][...] = memory[...]
    rooms["u"][...] = refs["u"][...].astype(_F32)

    def step(t, memory):
        memory = _advance(refs, rooms, t, memory)
        write_row(rooms["read"], t, memory[0])
        return memory

    _write_pair(memory, _walk(step, _pair(memory)))
    y = refs["c"][...].astype(_F32) * rooms["read"][...]
    refs["y"][...] = y.astype(refs["y"].dtype)

    @pl.when(last)
    def _():
        refs["final"][...] = memory[...]


def _backward_kernel(refs: dict, rooms: dict, first, last):
    later = rooms["later"]

    @pl.when(first)
    def _():
        later[...] = refs["d_final"][...]

    rooms["u"][...] = refs["u"][...].astype(_F32)
    rooms["given"][...] = refs["c"][...].astype(_F32) * refs["dy"][...].astype(_F32)

    def remember(t, memory):
        _keep(rooms, "before", t, memory)
        return _advance(refs, rooms, t, memory)

    def back(t, later):
        g = later[0] + read_row(rooms["given"], t), later[1]
        _keep(rooms, "g", t, g)
        real, imag = (read_row(refs[name], t) for name in ("real", "imag"))
        return real * g[0] + imag * g[1], real * g[1] - imag * g[0]

    _walk(remember, _pair(refs["before"]))
    _write_pair(later, _walk(back, _pair(later), reverse=True))

    before, g = ([rooms[f"{name}_{part}"][...] for part in range(2)] for name in ("before", "g"))
    memory = refs["real"][...] * before[0] - refs["imag"][...] * before[1] + rooms["u"][...]
    found = dict(
        u=g[0],
        c=refs["dy"][...].astype(_F32) * memory,
        real=before[0] * g[0] + before[1] * g[1],
        imag=before[0] * g[1] - before[1] * g[0],
    )
    for name, gradient in found.items():
        refs[f"d_{name}"][...] = gradient.astype(refs[f"d_{name}"].dtype)

    @pl.when(last)
    def _():
        refs["d_initial"][...] = later[...]


def _advance(refs, rooms, t, memory):
    """The memory, real and imaginary part, after one more token."""
    a = [read_row(refs[name], t) for name in ("real", "imag")]
    real = a[0] * memory[0] - a[1] * memory[1] + read_row(rooms["u"], t)
    return real, a[0] * memory[1] + a[1] * memory[0]


def _walk(step, carry, *, reverse: bool = False):
    """`step(token, carry)` for a chunk's tokens, or against time."""

    def some(start, carry):
        for i in reversed(range(_UNROLL)) if reverse else range(_UNROLL):
            carry = step(start + i, carry)
        return carry

    return tpu_layout.walk(_UNROLL, some, carry, reverse=reverse)


def _pair(ref) -> tuple[Any, Any]:
    return ref[0:1, :], ref[1:2, :]


def _write_pair(ref, pair) -> None:
    ref[0:1, :], ref[1:2, :] = pair


def _keep(rooms, name: str, t, pair) -> None:
    for part in range(2):
        write_row(rooms[f"{name}_{part}"], t, pair[part])
