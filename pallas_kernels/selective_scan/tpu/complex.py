"""A scan of complex numbers on Mosaic TPU: `h_t = a_t h_{t-1} + u_t`, `y_t = c_t Re h_t`, one number for each
channel.

The programs process the chunks of a row as in `tpu.real`; each token is a row of channels in lanes. The
gradients are those of `hopper.complex`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.compat import pl
from pallas_kernels.requirements import first_unmet
from pallas_kernels.selective_scan.inputs import ComplexInputs as Inputs
from pallas_kernels.selective_scan.tpu import layout as tpu_layout
from pallas_kernels.selective_scan.tpu.layout import (
    CHUNK,
    REQUIREMENTS,
    Layout,
    read_row,
    write_row,
)

__all__ = ["CHUNK", "REQUIREMENTS", "Inputs", "backward", "forward", "unsupported"]

_F32 = jnp.float32
_MAX_CHANNELS = 1024  # of a program: one row of them fills a register
_UNROLL = 16  # tokens of an unrolled step


def unsupported(call) -> str | None:
    """Return the first requirement of the TPU kernels that a call of `complex_scan` does not meet, or None if
    they support it.
    """
    return first_unmet(REQUIREMENTS, call)


def forward(x: Inputs, initial, *, save: bool, interpret: Any = False) -> tuple[Any, Any, Any]:
    """Compute a scan of complex memories, one number per channel; return the output [B, T, D] in u's dtype,
    the memory after the last token [B, 2, D] (real and imaginary part), and the memories that enter each
    chunk, [B, T/128, 2, D] (None unless `save`), for `backward`.
    """
    layout = Layout(x.u, 2, _MAX_CHANNELS)
    inputs = _inputs(layout, x) | dict(initial=(initial, layout.memory()))
    outputs = dict(y=layout.tokens(x.u.dtype), final=layout.memory())
    if save:
        outputs["entering"] = layout.memories()
    scratch = dict(
        memory=layout.memory_scratch(), u=layout.token_scratch(), read=layout.token_scratch()
    )
    results = layout.call(_forward_kernel, inputs, outputs, scratch, interpret)
    return results["y"], results["final"], results.get("entering")


def backward(x: Inputs, entering, dy, d_final, *, interpret: Any = False) -> tuple[Inputs, Any]:
    """Return the gradients of the scan's inputs, in the same `Inputs` tuple, and of the memory before the
    first token, given the memories `entering` each chunk as the forward pass returned them, and the gradients
    of the output, dy [B, T, D], and of the final memory, d_final [B, 2, D]; dy is in u's dtype.
    """
    layout = Layout(x.u, 2, _MAX_CHANNELS, reverse=True)
    inputs = _inputs(layout, x) | dict(
        dy=(dy, layout.tokens(dy.dtype)),
        entering=(entering, layout.memories()),
        d_final=(d_final, layout.memory()),
    )
    outputs: dict[str, Any] = {f"d_{n}": layout.tokens(a.dtype) for n, a in x._asdict().items()}
    outputs["d_initial"] = layout.memory()
    scratch = dict(d_memory=layout.memory_scratch())
    names = "u", "d_read", "before_real", "before_imag", "g_real", "g_imag"
    scratch |= {name: layout.token_scratch() for name in names}
    results = layout.call(_backward_kernel, inputs, outputs, scratch, interpret)
    return Inputs(*(results[f"d_{name}"] for name in x._fields)), results["d_initial"]


def _inputs(layout: Layout, x: Inputs) -> dict:
    return {name: (a, layout.tokens(a.dtype)) for name, a in x._asdict().items()}


def _forward_kernel(refs: dict, scratch: dict, is_first, is_last):
    memory = scratch["memory"]

    @pl.when(is_first)
    def _():
        memory[...] = refs["initial"][...]

    if "entering" in refs:
        refs["entering"][...] = memory[...]
    scratch["u"][...] = refs["u"][...].astype(_F32)

    def step(t, memory):
        memory = _advance(refs, scratch, t, memory)
        write_row(scratch["read"], t, memory[0])
        return memory

    _write_memory(memory, _for_tokens(step, _read_memory(memory)))
    y = refs["c"][...].astype(_F32) * scratch["read"][...]
    refs["y"][...] = y.astype(refs["y"].dtype)

    @pl.when(is_last)
    def _():
        refs["final"][...] = memory[...]


def _backward_kernel(refs: dict, scratch: dict, is_first, is_last):
    d_memory = scratch["d_memory"]

    @pl.when(is_first)
    def _():
        d_memory[...] = refs["d_final"][...]

    scratch["u"][...] = refs["u"][...].astype(_F32)
    scratch["d_read"][...] = refs["c"][...].astype(_F32) * refs["dy"][...].astype(_F32)

    def recompute(t, memory):
        _write_token(scratch, "before", t, memory)
        return _advance(refs, scratch, t, memory)

    def gradient(t, d_memory):
        g = d_memory[0] + read_row(scratch["d_read"], t), d_memory[1]
        _write_token(scratch, "g", t, g)
        real, imag = (read_row(refs[name], t) for name in ("real", "imag"))
        return real * g[0] + imag * g[1], real * g[1] - imag * g[0]

    _for_tokens(recompute, _read_memory(refs["entering"]))
    _write_memory(d_memory, _for_tokens(gradient, _read_memory(d_memory), reverse=True))

    before, g = ([scratch[f"{name}_{part}"][...] for part in _PARTS] for name in ("before", "g"))
    memory = refs["real"][...] * before[0] - refs["imag"][...] * before[1] + scratch["u"][...]
    gradients = dict(
        u=g[0],
        c=refs["dy"][...].astype(_F32) * memory,
        real=before[0] * g[0] + before[1] * g[1],
        imag=before[0] * g[1] - before[1] * g[0],
    )
    for name, value in gradients.items():
        refs[f"d_{name}"][...] = value.astype(refs[f"d_{name}"].dtype)

    @pl.when(is_last)
    def _():
        refs["d_initial"][...] = d_memory[...]


_PARTS = ("real", "imag")


def _advance(refs, scratch, t, memory):
    """Return the complex memories [1, channels] after the chunk's token t, as (real part, imaginary part),
    given those before it in the same form.
    """
    a = [read_row(refs[name], t) for name in ("real", "imag")]
    real = a[0] * memory[0] - a[1] * memory[1] + read_row(scratch["u"], t)
    return real, a[0] * memory[1] + a[1] * memory[0]


def _for_tokens(step, carry, *, reverse: bool = False):
    """Run `step(token, carry)`, which returns the next carry, for the 128 tokens of a chunk, from the last to
    the first if `reverse`; return the last carry.
    """

    def group(start, carry):
        for i in reversed(range(_UNROLL)) if reverse else range(_UNROLL):
            carry = step(start + i, carry)
        return carry

    return tpu_layout.for_groups(_UNROLL, group, carry, reverse=reverse)


def _read_memory(ref) -> tuple[Any, Any]:
    return ref[0:1, :], ref[1:2, :]


def _write_memory(ref, memory) -> None:
    ref[0:1, :], ref[1:2, :] = memory


def _write_token(scratch, name: str, t, parts) -> None:
    """Store the complex numbers of token t, one per channel, given as (real part, imaginary part), in the
    buffers `name`_real and `name`_imag in VMEM.
    """
    for part, value in zip(_PARTS, parts, strict=True):
        write_row(scratch[f"{name}_{part}"], t, value)
