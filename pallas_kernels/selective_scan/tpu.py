"""A selective scan, `h_t = keep_t e^{δ_t A} h_{t-1} + δ_t u_t B_t`, `y_t = Σ_n C_t h_t + D u_t`, on Mosaic TPU.

A program has some channels of a row, whose memories are in VMEM, [N, channels], channels in lanes, and walks over the chunks: one
kernel forward, and one backward that walks against time, makes a chunk's memories again from the one that entered it and carries
the gradient.

B and C come as [N, T], which wastes nothing ([T, N] has 128 lanes for N numbers, in HBM too). A group's tokens are rolled to the
first lanes, where each token's column has a static place and is broadcast to all lanes: one broadcast serves all of a program's
channels. Gradients of B and C are sums over lanes; each block of channels leaves its part, and XLA adds the parts: they are small, and
blocks stay independent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.selective_scan import tpu_layout
from pallas_kernels.selective_scan.tpu_layout import CHUNK, Layout, read_row, write_row

_F32 = jnp.float32
STATES = (8, 16, 24, 32)
_WIDEST, _HELD = 1024, 8192  # channels, and numbers of the memory, of a program
_GROUP = 16  # tokens of an unrolled step
_LOG2E = math.log2(math.e)


def reason(u, state_size: int) -> str | None:
    """What this backend takes in place of these arguments (arrays or their shapes), or None."""
    if (why := tpu_layout.reason(u)) is not None:
        return why
    if state_size not in STATES:
        listed = ", ".join(map(str, STATES[:-1]))
        return f"{listed} or {STATES[-1]} numbers a channel, not {state_size}"
    return None


class Inputs(NamedTuple):
    """What both kernels read. Attributes: u: [B, T, D] bfloat16 or float32; delta: [B, T, D]; a: [D, N]; b, c: [B, T, N]; d: [D];
    keep: [B, T], 0 where a document begins, or None. All but u are float32."""

    u: Any
    delta: Any
    a: Any
    b: Any
    c: Any
    d: Any
    keep: Any


def forward(x: Inputs, initial, *, save: bool = True, interpret: Any = False) -> tuple[Any, ...]:
    """Output [B, T, D] in u's dtype, final memory [B, N, D], and the memories that enter each chunk, [B, T/128, N, D]; these None
    unless `save`."""
    layout, given = _given(x)
    given |= dict(initial=(initial, layout.memory()))
    outs = dict(y=layout.tokens(x.u.dtype), final=layout.memory())
    if save:
        outs["before"] = layout.memories()
    rooms = dict(memory=layout.room(), write=layout.row_room(), read=layout.row_room())
    found = layout.call(_forward_kernel, given, outs, rooms, interpret)
    return found["y"], found["final"], found.get("before")


def backward(x: Inputs, before, dy, d_final, *, interpret: Any = False) -> tuple[Inputs, Any]:
    """Gradients of the inputs, and of the first memory; `dy` in u's dtype."""
    layout, given = _given(x, reverse=True)
    given |= dict(
        dy=(dy, layout.tokens(dy.dtype)),
        before=(before, layout.memories()),
        d_final=(d_final, layout.memory()),
    )
    outs = dict(
        du=layout.tokens(x.u.dtype),
        d_delta=layout.tokens(),
        da=layout.memory(),
        db=layout.parts(),
        dc=layout.parts(),
        dd=layout.sums(),
        d_initial=layout.memory(),
    )
    rooms = dict(
        later=layout.room(),
        d_rates=layout.room(),
        held=layout.room(CHUNK),
        write=layout.row_room(),
        dy=layout.row_room(),
        of_write=layout.row_room(),
        of_decay=layout.row_room(),
    )
    found = layout.call(_backward_kernel, given, outs, rooms, interpret)
    da = jnp.sum(found["da"], axis=0).T
    db, dc = (jnp.swapaxes(jnp.sum(found[n], axis=1), 1, 2) for n in ("db", "dc"))
    dd = jnp.sum(found["dd"], axis=(0, 1))
    keep = None if x.keep is None else jnp.zeros_like(x.keep)
    grads = Inputs(found["du"], found["d_delta"], da, db, dc, dd, keep)
    return grads, found["d_initial"]


def _given(x: Inputs, *, reverse: bool = False) -> tuple[Layout, dict]:
    """What both kernels read: name -> (array, (shape, block)); `a` in powers of two."""
    states = x.a.shape[1]
    layout = Layout(x.u, states, min(_WIDEST, _HELD // states), reverse=reverse)
    given = dict(
        u=(x.u, layout.tokens(x.u.dtype)),
        delta=(x.delta, layout.tokens()),
        a=((x.a * _LOG2E).T, layout.by_channel(states)),
        b=(jnp.swapaxes(x.b, 1, 2), layout.by_token()),
        c=(jnp.swapaxes(x.c, 1, 2), layout.by_token()),
        d=(x.d[None], layout.by_channel(1)),
    )
    if x.keep is not None:
        given["keep"] = x.keep[:, None], layout.scalars()
    return layout, given


def _forward_kernel(refs: dict, rooms: dict, first, last):
    memory = rooms["memory"]

    @pl.when(first)
    def _():
        memory[...] = refs["initial"][...]

    if "before" in refs:
        refs["before"][...] = memory[...]
    u = refs["u"][...].astype(_F32)
    rooms["write"][...] = refs["delta"][...] * u
    rates = refs["a"][...]

    def step(t, columns, memory):
        memory = _advance(refs, rooms, rates, t, columns["b"], memory)
        write_row(rooms["read"], t, jnp.sum(columns["c"] * memory, axis=0, keepdims=True))
        return memory

    memory[...] = _walk(refs, "bc", step, memory[...])
    refs["y"][...] = (rooms["read"][...] + refs["d"][...] * u).astype(refs["y"].dtype)

    @pl.when(last)
    def _():
        refs["final"][...] = memory[...]


def _backward_kernel(refs: dict, rooms: dict, first, last):
    later, d_rates, held = rooms["later"], rooms["d_rates"], rooms["held"]

    @pl.when(first)
    def _():
        later[...] = refs["d_final"][...]
        d_rates[...] = jnp.zeros_like(d_rates)
        refs["dd"][...] = jnp.zeros_like(refs["dd"])

    u, delta, dy = (refs[name][...].astype(_F32) for name in ("u", "delta", "dy"))
    rooms["write"][...] = delta * u
    rooms["dy"][...] = dy
    refs["dd"][...] += jnp.sum(dy * u, axis=0, keepdims=True)
    rates = refs["a"][...]

    def remember(t, columns, carry):
        memory, dc = carry
        held[t] = memory
        memory = _advance(refs, rooms, rates, t, columns["b"], memory)
        return memory, _put_column(dc, t, read_row(rooms["dy"], t) * memory)

    def back(t, columns, carry):
        later, d_rates, db = carry
        g = later + read_row(rooms["dy"], t) * columns["c"]
        db = _put_column(db, t, read_row(rooms["write"], t) * g)
        write_row(rooms["of_write"], t, jnp.sum(columns["b"] * g, axis=0, keepdims=True))
        later = _decay(refs, rates, t) * g
        of_decay = later * held[t]
        write_row(rooms["of_decay"], t, jnp.sum(of_decay * rates, axis=0, keepdims=True))
        return later, d_rates + read_row(refs["delta"], t) * of_decay, db

    none = jnp.zeros(refs["db"].shape, _F32)
    _, refs["dc"][...] = _walk(refs, "b", remember, (refs["before"][...], none))
    carry = _walk(refs, "bc", back, (later[...], d_rates[...], none), reverse=True)
    later[...], d_rates[...], refs["db"][...] = carry

    # Loaded again: nothing as large stays in registers meanwhile.
    u, delta, dy = (refs[name][...].astype(_F32) for name in ("u", "delta", "dy"))
    of_write = rooms["of_write"][...]
    refs["du"][...] = (delta * of_write + refs["d"][...] * dy).astype(refs["du"].dtype)
    refs["d_delta"][...] = u * of_write + rooms["of_decay"][...] * (1 / _LOG2E)

    @pl.when(last)
    def _():
        refs["d_initial"][...] = later[...]
        refs["da"][...] = d_rates[...]


def _walk(refs: dict, names: str, step, carry, *, reverse: bool = False):
    """`step(token, {name: its column [N, 1]}, carry)` for a chunk's tokens, or against time."""

    def some(start, carry):
        shift = lax.rem(CHUNK - start, CHUNK)
        rolled = {n: pltpu.roll(refs[n][...], shift, 1) for n in names}
        for i in reversed(range(_GROUP)) if reverse else range(_GROUP):
            columns = {n: x[:, i : i + 1] for n, x in rolled.items()}
            carry = step(start + i, columns, carry)
        return carry

    return tpu_layout.walk(_GROUP, some, carry, reverse=reverse)


def _put_column(columns, t, x) -> Any:
    """`columns` [N, C] with the sums of x [N, channels] at token t."""
    here = lax.broadcasted_iota(jnp.int32, columns.shape, 1) == t
    return jnp.where(here, jnp.sum(x, axis=1, keepdims=True), columns)


def _advance(refs, rooms, rates, t, b, memory) -> Any:
    return _decay(refs, rates, t) * memory + read_row(rooms["write"], t) * b


def _decay(refs, rates, t) -> Any:
    """[N, channels]; `rates` in powers of two."""
    factor = jnp.exp2(read_row(refs["delta"], t) * rates)
    return factor * refs["keep"][0, t] if "keep" in refs else factor
