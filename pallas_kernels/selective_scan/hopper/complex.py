"""A scan of complex numbers on Mosaic GPU (Hopper): `h_t = a_t h_{t-1} + u_t`, `y_t = c_t Re h_t`, one number
for each channel.

A thread computes one channel of a chunk of 32 tokens. The phases are those of `hopper.real`, with the product
of a chunk's a_t as its decay. The gradient of a complex number z of a real loss L is
`dL/d(Re z) + i dL/d(Im z)`. With G_t the gradient of h_t, `G_t = c_t dy_t + conj(a_{t+1}) G_{t+1}`,
`da_t = conj(h_{t-1}) G_t`, `du_t = Re G_t` and `dc_t = dy_t Re h_t`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.selective_scan.hopper.common import for_tokens, grid_requirements
from pallas_kernels.selective_scan.inputs import ComplexInputs as Inputs

_F32, _BF16 = jnp.float32, jnp.bfloat16
CHANNELS, CHUNK = 128, 32
_AHEAD = 16  # chunks that `scan` loads ahead

REQUIREMENTS = (
    Requirement("u in bfloat16", lambda c: c.u.dtype == _BF16, lambda c: jnp.dtype(c.u.dtype).name),
    Requirement(
        f"a multiple of {CHANNELS} channels of one complex number",
        lambda c: c.u.shape[2] % CHANNELS == 0,
        lambda c: str(c.u.shape[2]),
    ),
    *grid_requirements(CHUNK),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Hopper kernels that a call of `complex_scan` does not meet, or None
    if they support it.
    """
    return first_unmet(REQUIREMENTS, call)


def forward(x: Inputs, initial, *, save: bool, interpret: Any = False) -> tuple[Any, Any, Any]:
    """Compute a scan of complex memories, one number per channel; return the output [B, T, D] bfloat16, the
    memory after the last token [B, 2, D] (real and imaginary part), and the memories that enter each chunk of
    32 tokens, [B, chunks, 2, D].
    """
    del save  # the memories are computed in any case
    writes = chunk_writes(x, interpret=interpret)
    entering, final = scan(writes, initial, interpret=interpret)
    return chunk_forward(x, entering, interpret=interpret), final, entering


def backward(x: Inputs, entering, dy, d_final, *, interpret: Any = False) -> tuple[Inputs, Any]:
    """Return the gradients of the scan's inputs, in the same `Inputs` tuple, and of the memory before the
    first token, given the memories `entering` each chunk as the forward pass returned them, and the gradients
    of the output, dy [B, T, D], and of the final memory, d_final [B, 2, D].
    """
    writes = chunk_writes(x, dy, interpret=interpret)
    d_leaving, d_initial = scan(writes, d_final, reverse=True, interpret=interpret)
    return chunk_backward(x, dy, entering, d_leaving, interpret=interpret), d_initial


class _Complex(NamedTuple):
    """One complex number per channel, where each thread of a warpgroup has the number of its channel, as its real and its
    imaginary part.
    """

    real: Any
    imag: Any

    def times(self, other: _Complex) -> _Complex:
        real = self.real * other.real - self.imag * other.imag
        return _Complex(real, self.real * other.imag + self.imag * other.real)

    def plus(self, other: _Complex) -> _Complex:
        return _Complex(self.real + other.real, self.imag + other.imag)

    def conjugate(self) -> _Complex:
        return _Complex(self.real, -self.imag)


class _Block:
    """One warpgroup's part of a complex scan's kernel, 128 channels of one chunk of a row: the functions that load and store its
    arrays.

    Attributes:
        refs: references to the arrays in global memory, by name.
        smem: references to buffers in shared memory by name.
        chunk: the index of the chunk in its row.
    """

    def __init__(self, refs: dict[str, Any], smem: dict[str, Any], chunk):
        self.refs, self.smem, self.chunk = refs, smem, chunk
        self.b = lax.axis_index("row")
        self.channels = pl.ds(lax.axis_index("column") * CHANNELS, CHANNELS)

    def copy_tokens(self) -> None:
        """Copy the chunk's 32 tokens of every input that has a buffer in shared memory to that buffer, and
        wait for the copies.
        """
        tokens = pl.ds(self.chunk * CHUNK, CHUNK)
        for name, buffer in self.smem.items():
            if name in _BY_TOKEN:
                source = self.refs[name].at[self.b, tokens, self.channels]
                plgpu.copy_gmem_to_smem(source, buffer, self.smem["barrier"])
        plgpu.barrier_wait(self.smem["barrier"])

    def row(self, name: str, t) -> Any:
        """Load from shared memory the values of the input `name` at the chunk's token t, one for each of the
        128 channels, as float32.
        """
        return plgpu.load(self.smem[name].at[t]).astype(_F32)

    def decay(self, t) -> _Complex:
        """Load from shared memory the complex decay a of the chunk's token t, one number for each of the 128
        channels.
        """
        return _Complex(self.row("real", t), self.row("imag", t))

    def load_memory(self, name: str, *index: Any) -> _Complex:
        """Load the complex memories of the 128 channels from global memory, at [b, *index] of the array
        `name`, [B, ..., 2, D]; b is the batch's row.
        """
        ref = self.refs[name].at[self.b, *index]
        return _Complex(*(plgpu.load(ref.at[part, self.channels]) for part in range(2)))

    def store_memory(self, x: _Complex, name: str, *index: Any) -> None:
        """Store x, the complex memories of the 128 channels, in global memory at [b, *index] of the array
        `name`, [B, ..., 2, D]; b is the batch's row.
        """
        for part in range(2):
            self.refs[name].at[self.b, *index, part, self.channels][...] = x[part]

    def store_token(self, name: str, t, x) -> None:
        """Store x, one number for each of the 128 channels, at the chunk's token t of the output `name`, [B,
        T, D], in global memory.
        """
        to = self.refs[name].at[self.b, self.chunk * CHUNK + t, self.channels]
        to[...] = x.astype(to.dtype)


_BY_TOKEN = ("u", "c", "real", "imag", "dy")


def _constant(value: float) -> Any:
    return plgpu.layout_cast(
        jnp.full(CHANNELS, value, _F32), plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)
    )


def _launch(kernel, inputs, outputs, *, chunks: int, tokens=(), buffers=(), name: str, interpret):
    """Run a kernel of the complex scan, `kernel(block)` in one warpgroup for each 128 channels, chunk and
    row; return its outputs by name.

    Args:
        kernel: a function called once per warpgroup, with a `_Block`.
        inputs: the input arrays by name.
        outputs: the outputs' shapes and dtypes by name.
        chunks: the number of warpgroups for each row and each 128 channels.
        tokens: the names of the inputs whose values at a chunk's tokens are copied to shared memory.
        buffers: names of further buffers in shared memory, one float32 number for each token and channel.
        name: the kernel's name in profiles.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    first = next(iter(inputs.values()))
    scratch = {n: plgpu.SMEM((CHUNK, CHANNELS), inputs[n].dtype) for n in tokens}
    scratch |= {n: plgpu.SMEM((CHUNK, CHANNELS), _F32) for n in buffers}
    return launch(
        lambda refs, smem: kernel(_Block(refs, smem, lax.axis_index("chunk"))),
        inputs=inputs,
        outputs=outputs,
        grid=dict(column=first.shape[-1] // CHANNELS, chunk=chunks, row=first.shape[0]),
        scratch=scratch | dict(barrier=plgpu.Barrier(num_arrivals=max(1, len(tokens)))),
        name=f"complex_scan_{name}",
        interpret=interpret,
    )


def _memories(like, *axes: int) -> Any:
    """Return the shape of an array of complex memories, [B, *axes, 2, D] float32, with B and D as in the
    array `like` [B, ..., D].
    """
    return jax.ShapeDtypeStruct((like.shape[0], *axes, 2, like.shape[-1]), _F32)


def chunk_writes(x: Inputs, dy=None, *, interpret: Any = False) -> tuple[Any, Any]:
    """Compute, for all chunks in parallel, the complex memory after the chunk if it started from an empty
    one, and the product of the chunk's decays a, each [B, chunks, 2, D].

    With dy [B, T, D], the gradient of the output, return in place of the first result the gradient of the
    memory that enters each chunk, as far as it comes from the chunk's own outputs.
    """
    chunks = x.u.shape[1] // CHUNK
    names = ("real", "imag", "u") if dy is None else ("real", "imag", "c", "dy")
    arrays = x._asdict() | dict(dy=dy)

    def kernel(block):
        block.copy_tokens()
        zero = _constant(0.0)

        def step(t, carry):
            memory, factor = carry
            decay = block.decay(t)
            if dy is None:
                memory = decay.times(memory).plus(_Complex(block.row("u", t), 0.0))
            else:
                d_real = block.row("c", t) * block.row("dy", t)
                memory = decay.conjugate().times(memory.plus(_Complex(d_real, 0.0)))
            return memory, decay.times(factor)

        start = _Complex(zero, zero), _Complex(_constant(1.0), zero)
        memory, factor = for_tokens(CHUNK, step, start, reverse=dy is not None)
        block.store_memory(memory, "writes", block.chunk)
        block.store_memory(factor, "factor", block.chunk)

    results = _launch(
        kernel,
        {name: arrays[name] for name in names},
        dict(writes=_memories(x.u, chunks), factor=_memories(x.u, chunks)),
        chunks=chunks,
        tokens=names,
        name="chunk_writes",
        interpret=interpret,
    )
    return results["writes"], results["factor"]


def scan(
    writes: tuple[Any, Any], initial, *, reverse: bool = False, interpret: Any = False
) -> tuple[Any, Any]:
    """Compute, chunk after chunk, the complex memory that enters each chunk, [B, chunks, 2, D], and the
    memory after the last chunk, [B, 2, D], from what each chunk writes and its decay.

    With `reverse`, the scan begins at the last chunk, and in place of memories it computes their gradients.

    Args:
        writes: the results of `chunk_writes`: the memory after each chunk if it started from an empty one, and the product of the
            chunk's decays.
        initial: [B, 2, D], the memory before the first chunk of the scan.
        reverse: whether the scan begins at the last chunk.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    chunks = writes[0].shape[1]

    def kernel(block):
        def chunk_of_step(index):
            index = jnp.minimum(index, chunks - 1)
            return chunks - 1 - index if reverse else index

        def load_chunks(index):
            names = ("writes", "factor")
            return [
                tuple(block.load_memory(name, chunk_of_step(index + i)) for name in names)
                for i in range(_AHEAD)
            ]

        def step(index, carry):
            memory, loaded = carry
            following = load_chunks((index + 1) * _AHEAD)
            for i, (write, factor) in enumerate(loaded):
                at = index * _AHEAD + i

                @pl.when(at < chunks)
                def _(memory=memory, at=at):
                    block.store_memory(memory, "entering", chunk_of_step(at))

                factor = factor.conjugate() if reverse else factor
                after = factor.times(memory).plus(write)
                memory = _Complex(
                    *(jnp.where(at < chunks, a, m) for a, m in zip(after, memory, strict=True))
                )
            return memory, following

        carry = (block.load_memory("initial"), load_chunks(0))
        memory, _ = lax.fori_loop(0, -(-chunks // _AHEAD), step, carry)
        block.store_memory(memory, "final")

    results = _launch(
        kernel,
        dict(writes=writes[0], factor=writes[1], initial=initial),
        dict(entering=_memories(initial, chunks), final=_memories(initial)),
        chunks=1,
        name="scan",
        interpret=interpret,
    )
    return results["entering"], results["final"]


def chunk_forward(x: Inputs, entering, *, interpret: Any = False) -> Any:
    """Compute, for all chunks in parallel, the output y [B, T, D] bfloat16 of a complex scan from the inputs
    and the memories that enter each chunk, [B, chunks, 2, D].
    """

    def kernel(block):
        memory = block.load_memory("entering", block.chunk)
        block.copy_tokens()

        def step(t, memory):
            memory = block.decay(t).times(memory).plus(_Complex(block.row("u", t), 0.0))
            block.store_token("y", t, block.row("c", t) * memory.real)
            return memory

        for_tokens(CHUNK, step, memory)

    return _launch(
        kernel,
        x._asdict() | dict(entering=entering),
        dict(y=jax.ShapeDtypeStruct(x.u.shape, _BF16)),
        chunks=x.u.shape[1] // CHUNK,
        tokens=x._fields,
        name="chunk_forward",
        interpret=interpret,
    )["y"]


def chunk_backward(x: Inputs, dy, entering, d_leaving, *, interpret: Any = False) -> Inputs:
    """Compute, for all chunks in parallel, the gradients of a complex scan's inputs: of u, of c, and of the
    real and the imaginary part of the decay a.

    Args:
        x: the inputs of the scan: u, the factors c of the outputs, and the real and imaginary part of the decay a.
        dy: [B, T, D], the gradient of the output.
        entering: [B, chunks, 2, D], the memories that enter each chunk.
        d_leaving: [B, chunks, 2, D], the gradients of the memories after each chunk, from later chunks.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    buffer_names = ("before_real", "before_imag")  # the memory before each token

    def kernel(block):
        memory = block.load_memory("entering", block.chunk)
        d_memory = block.load_memory("d_leaving", block.chunk)
        block.copy_tokens()
        buffers = [block.smem[name] for name in buffer_names]

        def recompute(t, memory):
            for part, buffer in zip(memory, buffers, strict=True):
                buffer.at[t][...] = part
            return block.decay(t).times(memory).plus(_Complex(block.row("u", t), 0.0))

        def gradient(t, carry):
            d_memory, after = carry
            dy = block.row("dy", t)
            block.store_token("dc", t, dy * after.real)
            g = d_memory.plus(_Complex(block.row("c", t) * dy, 0.0))
            block.store_token("du", t, g.real)
            before = _Complex(*(plgpu.load(buffer.at[t]) for buffer in buffers))
            d_decay = before.conjugate().times(g)
            block.store_token("d_real", t, d_decay.real)
            block.store_token("d_imag", t, d_decay.imag)
            return block.decay(t).conjugate().times(g), before

        memory = for_tokens(CHUNK, recompute, memory)
        for_tokens(CHUNK, gradient, (d_memory, memory), reverse=True)

    names = ("du", "dc", "d_real", "d_imag")
    results = _launch(
        kernel,
        x._asdict() | dict(dy=dy, entering=entering, d_leaving=d_leaving),
        {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in zip(names, x, strict=True)},
        chunks=x.u.shape[1] // CHUNK,
        tokens=(*x._fields, "dy"),
        buffers=buffer_names,
        name="chunk_backward",
        interpret=interpret,
    )
    return Inputs(*(results[name] for name in names))
