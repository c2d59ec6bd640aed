"""A selective scan on Mosaic TPU: `h_t = continues_t e^{δ_t A} h_{t-1} + δ_t u_t B_t`,
`y_t = Σ_n C_t h_t + D u_t`.

A program has one chunk of a row and some of the channels, whose memories [N, channels] stay in VMEM from
chunk to chunk, with channels in lanes. There is one kernel forward and one backward. The backward kernel
processes the chunks in reverse order, recomputes the memories of a chunk's tokens from the memory that enters
the chunk, and carries the gradient of the memory.

B and C are transposed to [B, N, T] before the kernels: an array [T, N] would be padded to 128 lanes, in HBM
too. A kernel rotates the lanes of B and C such that a group of 16 tokens is in the first lanes. Each token's
column [N, 1] then has a static index, and is broadcast to all lanes once for all channels of a program. The
gradients of B and C are sums over channels. Each program writes the sum over its channels, and XLA adds the
sums of all programs: they are small, and the programs stay independent.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, pltpu
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.selective_scan.inputs import RealInputs as Inputs
from pallas_kernels.selective_scan.tpu import layout as tpu_layout
from pallas_kernels.selective_scan.tpu.layout import CHUNK, Layout, read_row, write_row

_F32 = jnp.float32
STATES = (8, 16, 24, 32)
_MAX_CHANNELS = 1024  # of a program
_MAX_NUMBERS = 8192  # of all memories of a program
_GROUP = 16  # tokens of an unrolled step
_LOG2E = math.log2(math.e)


REQUIREMENTS = (
    *tpu_layout.REQUIREMENTS,
    Requirement(
        f"memories of {', '.join(map(str, STATES[:-1]))} or {STATES[-1]} numbers for each channel",
        lambda c: c.state_size in STATES,
        lambda c: str(c.state_size),
    ),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the TPU kernels that a call of `selective_scan` does not meet, or None
    if they support it.
    """
    return first_unmet(REQUIREMENTS, call)


def forward(x: Inputs, initial, *, save: bool, interpret: Any = False) -> tuple[Any, Any, Any]:
    """Compute a selective scan; return the output [B, T, D] in u's dtype, the memory after the last token [B,
    D, N], and the memories that enter each chunk, [B, T/128, N, D] (None unless `save`), for `backward`.
    """
    layout, inputs = _inputs(x)
    inputs |= dict(initial=(jnp.swapaxes(initial, 1, 2), layout.memory()))
    outputs = dict(y=layout.tokens(x.u.dtype), final=layout.memory())
    if save:
        outputs["entering"] = layout.memories()
    scratch = dict(
        memory=layout.memory_scratch(), write=layout.token_scratch(), read=layout.token_scratch()
    )
    results = layout.call(_forward_kernel, inputs, outputs, scratch, interpret)
    return results["y"], jnp.swapaxes(results["final"], 1, 2), results.get("entering")


def backward(x: Inputs, entering, dy, d_final, *, interpret: Any = False) -> tuple[Inputs, Any]:
    """Return the gradients of the scan's inputs, in the same `Inputs` tuple, and of the memory before the
    first token, given the memories `entering` each chunk as the forward pass returned them, and the gradients
    of the output, dy [B, T, D], and of the final memory, d_final [B, D, N]; dy is in u's dtype.
    """
    layout, inputs = _inputs(x, reverse=True)
    inputs |= dict(
        dy=(dy, layout.tokens(dy.dtype)),
        entering=(entering, layout.memories()),
        d_final=(jnp.swapaxes(d_final, 1, 2), layout.memory()),
    )
    outputs = dict(
        du=layout.tokens(x.u.dtype),
        d_delta=layout.tokens(),
        da=layout.memory(),
        db=layout.token_parts(),
        dc=layout.token_parts(),
        dd=layout.sums(),
        d_initial=layout.memory(),
    )
    scratch = dict(
        d_memory=layout.memory_scratch(),
        d_rates=layout.memory_scratch(),
        before=layout.memory_scratch(CHUNK),  # the memory before each token
        write=layout.token_scratch(),
        dy=layout.token_scratch(),
        d_write=layout.token_scratch(),
        d_exponent=layout.token_scratch(),
    )
    results = layout.call(_backward_kernel, inputs, outputs, scratch, interpret)
    da = jnp.sum(results["da"], axis=0).T
    db, dc = (jnp.swapaxes(jnp.sum(results[n], axis=1), 1, 2) for n in ("db", "dc"))
    dd = jnp.sum(results["dd"], axis=(0, 1))
    d_continues = None if x.continues is None else jnp.zeros_like(x.continues)
    gradients = Inputs(results["du"], results["d_delta"], da, db, dc, dd, d_continues)
    return gradients, jnp.swapaxes(results["d_initial"], 1, 2)


def _inputs(x: Inputs, *, reverse: bool = False) -> tuple[Layout, dict]:
    """Return the layout of a selective scan's arrays on a TPU, and the inputs that its forward and backward
    kernel have in common, as name -> (array, (shape, block specification)), with the rates of decay a
    multiplied by log2(e).
    """
    states = x.a.shape[1]
    layout = Layout(x.u, states, min(_MAX_CHANNELS, _MAX_NUMBERS // states), reverse=reverse)
    inputs = dict(
        u=(x.u, layout.tokens(x.u.dtype)),
        delta=(x.delta, layout.tokens()),
        a=((x.a * _LOG2E).T, layout.by_channel(states)),
        b=(jnp.swapaxes(x.b, 1, 2), layout.by_token()),
        c=(jnp.swapaxes(x.c, 1, 2), layout.by_token()),
        d=(x.d[None], layout.by_channel(1)),
    )
    if x.continues is not None:
        inputs["continues"] = x.continues[:, None], layout.scalars()
    return layout, inputs


def _forward_kernel(refs: dict, scratch: dict, is_first, is_last):
    memory = scratch["memory"]

    @pl.when(is_first)
    def _():
        memory[...] = refs["initial"][...]

    if "entering" in refs:
        refs["entering"][...] = memory[...]
    u = refs["u"][...].astype(_F32)
    scratch["write"][...] = refs["delta"][...] * u
    rates = refs["a"][...]

    def step(t, columns, memory):
        memory = _advance(refs, scratch, rates, t, columns["b"], memory)
        write_row(scratch["read"], t, jnp.sum(columns["c"] * memory, axis=0, keepdims=True))
        return memory

    memory[...] = _for_tokens(refs, "bc", step, memory[...])
    refs["y"][...] = (scratch["read"][...] + refs["d"][...] * u).astype(refs["y"].dtype)

    @pl.when(is_last)
    def _():
        refs["final"][...] = memory[...]


def _backward_kernel(refs: dict, scratch: dict, is_first, is_last):
    d_memory, d_rates, before = scratch["d_memory"], scratch["d_rates"], scratch["before"]

    @pl.when(is_first)
    def _():
        d_memory[...] = refs["d_final"][...]
        d_rates[...] = jnp.zeros_like(d_rates)
        refs["dd"][...] = jnp.zeros_like(refs["dd"])

    u, delta, dy = (refs[name][...].astype(_F32) for name in ("u", "delta", "dy"))
    scratch["write"][...] = delta * u
    scratch["dy"][...] = dy
    refs["dd"][...] += jnp.sum(dy * u, axis=0, keepdims=True)
    rates = refs["a"][...]

    def recompute(t, columns, carry):
        memory, dc = carry
        before[t] = memory
        memory = _advance(refs, scratch, rates, t, columns["b"], memory)
        return memory, _put_column(dc, t, read_row(scratch["dy"], t) * memory)

    def gradient(t, columns, carry):
        d_memory, d_rates, db = carry
        g = d_memory + read_row(scratch["dy"], t) * columns["c"]
        db = _put_column(db, t, read_row(scratch["write"], t) * g)
        write_row(scratch["d_write"], t, jnp.sum(columns["b"] * g, axis=0, keepdims=True))
        d_memory = _decay(refs, rates, t) * g
        d_exponent = d_memory * before[t]
        write_row(scratch["d_exponent"], t, jnp.sum(d_exponent * rates, axis=0, keepdims=True))
        return d_memory, d_rates + read_row(refs["delta"], t) * d_exponent, db

    zeros = jnp.zeros(refs["db"].shape, _F32)
    _, refs["dc"][...] = _for_tokens(refs, "b", recompute, (refs["entering"][...], zeros))
    carry = (d_memory[...], d_rates[...], zeros)
    carry = _for_tokens(refs, "bc", gradient, carry, reverse=True)
    d_memory[...], d_rates[...], refs["db"][...] = carry

    # Loaded again, so that arrays of this size do not stay in registers during the scans.
    u, delta, dy = (refs[name][...].astype(_F32) for name in ("u", "delta", "dy"))
    d_write = scratch["d_write"][...]
    refs["du"][...] = (delta * d_write + refs["d"][...] * dy).astype(refs["du"].dtype)
    refs["d_delta"][...] = u * d_write + scratch["d_exponent"][...] * (1 / _LOG2E)

    @pl.when(is_last)
    def _():
        refs["d_initial"][...] = d_memory[...]
        refs["da"][...] = d_rates[...]


def _for_tokens(refs: dict, names: str, step, carry, *, reverse: bool = False):
    """Run `step(token, columns, carry)`, which returns the next carry, for the 128 tokens of a chunk, from
    the last to the first if `reverse`; return the last carry.

    `columns` contains, by name, the values [N, 1] at the token of the inputs `names` ("b" and "c", the
    factors of writes and reads).
    """

    def group(start, carry):
        shift = lax.rem(CHUNK - start, CHUNK)
        rolled = {n: pltpu.roll(refs[n][...], shift, 1) for n in names}
        for i in reversed(range(_GROUP)) if reverse else range(_GROUP):
            columns = {n: x[:, i : i + 1] for n, x in rolled.items()}
            carry = step(start + i, columns, carry)
        return carry

    return tpu_layout.for_groups(_GROUP, group, carry, reverse=reverse)


def _put_column(columns, t, x) -> Any:
    """Return `columns` [N, 128], with one column per token of a chunk, with token t's column replaced by the
    sum of x [N, channels] over the channels: that token's gradient of b or c.
    """
    here = lax.broadcasted_iota(jnp.int32, columns.shape, 1) == t
    return jnp.where(here, jnp.sum(x, axis=1, keepdims=True), columns)


def _advance(refs, scratch, rates, t, b, memory) -> Any:
    """Return the memories [N, channels] after the chunk's token t, given those before it: `decay memory +
    write b`, with b [N, 1] the factors of the write.
    """
    return _decay(refs, rates, t) * memory + read_row(scratch["write"], t) * b


def _decay(refs, rates, t) -> Any:
    """Return the decay of the memories at the chunk's token t, [N, channels]: `exp2(delta rates)`, or 0 at
    the first token of a document; `rates` is `a log2(e)`.
    """
    factor = jnp.exp2(read_row(refs["delta"], t) * rates)
    return factor * refs["continues"][0, t] if "continues" in refs else factor
