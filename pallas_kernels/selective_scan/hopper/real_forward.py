"""The three phases of the forward pass of `selective_scan` on Hopper GPUs: what each chunk writes, the
memories that enter the chunks, and the outputs. The first two, in reverse order of time, also begin the
backward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.selective_scan.hopper.common import for_tokens
from pallas_kernels.selective_scan.hopper.real_block import (
    CHUNK,
    ROWS,
    Block,
    Sizes,
    kernel_inputs,
    token_buffers,
)
from pallas_kernels.selective_scan.inputs import RealInputs as Inputs

_AHEAD = 6  # chunks that `scan` loads ahead


def chunk_writes(x: Inputs, dy=None, *, interpret: Any = False) -> tuple[Any, Any]:
    """Compute, for all chunks in parallel, the memory after the chunk if it started from an empty one, and
    the sum of the chunk's step sizes δ, which gives its decay.

    With dy, return in place of the first result the gradient of the memory that enters each chunk, as far as
    it comes from the chunk's own outputs.

    Args:
        x: the inputs of the scan: u, the step sizes delta, the rates of decay a, the factors b and c of
            writes and reads, and d.
        dy: [B, T, D], the gradient of the output, or None.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        The memories (or their gradients), [B, chunks, D / 16, 16, N], and the sums of δ, [B, chunks, D / 16,
        16].
    """
    sizes = Sizes.of(x)
    names = ("delta", "u", "b") if dy is None else ("delta", "dy", "c")
    inputs = {n: a for n, a in kernel_inputs(x, dy=dy).items() if n in (*names, "a", "continues")}

    def kernel(refs, smem):
        block = Block(refs, smem, sizes.states)
        chunk = lax.axis_index("chunk")
        block.copy_tokens(chunk * CHUNK)
        rates = block.rates()

        def step(t, carry):
            memory, total = carry
            delta = block.token_channels("delta", t)
            decay = block.decay(delta, rates, t)
            if dy is None:
                write = delta * block.token_channels("u", t)
                memory = decay * memory + block.spread(write) * block.token_states("b", t)
            else:
                d_output = block.spread(block.token_channels("dy", t))
                memory = decay * (memory + d_output * block.token_states("c", t))
            return memory, total + delta

        zeros = block.sum_states(block.zero())
        memory, total = for_tokens(CHUNK, step, (block.zero(), zeros), reverse=dy is not None)
        refs["writes"].at[block.b, chunk, block.channels][...] = memory
        refs["total"].at[block.b, chunk, block.channels][...] = total

    chunks = (sizes.batch, sizes.chunks, sizes.groups)
    results = launch(
        kernel,
        inputs=inputs,
        outputs=dict(
            writes=sizes.memories(*chunks),
            total=jax.ShapeDtypeStruct((*chunks, ROWS), jnp.float32),
        ),
        grid=sizes.grid,
        scratch=token_buffers(x, *names),
        name="selective_scan_chunk_writes",
        interpret=interpret,
    )
    return results["writes"], results["total"]


def scan(
    x: Inputs, writes: tuple[Any, Any], initial, *, reverse: bool = False, interpret: Any = False
) -> tuple[Any, Any]:
    """Compute, chunk after chunk, the memory that enters each chunk, [B, chunks, D / 16, 16, N], and the
    memory after the last chunk, [B, D / 16, 16, N], from what each chunk writes and its decay.

    With `reverse`, the scan begins at the last chunk, and in place of memories it computes their gradients.

    Args:
        x: the inputs of the scan: u, the step sizes delta, the rates of decay a, the factors b and c of
            writes and reads, and d.
        writes: the results of `chunk_writes`: the memory after each chunk if it started from an empty one,
            and the sum of the chunk's step sizes δ.
        initial: [B, D / 16, 16, N], the memory before the first chunk of the scan.
        reverse: whether the scan begins at the last chunk.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    sizes = Sizes.of(x)
    chunks = sizes.chunks
    inputs = dict(writes=writes[0], total=writes[1], initial=initial, a=kernel_inputs(x)["a"])
    if x.continues is not None:  # 0 for a chunk in which a document begins: no memory crosses it
        continues = x.continues.reshape(sizes.batch, chunks, CHUNK)
        inputs["continues"] = jnp.min(continues, axis=2)

    def kernel(refs, smem):
        block = Block(refs, smem, sizes.states)
        rates = block.rates()

        def chunk_of_step(index):
            index = jnp.minimum(index, chunks - 1)
            return chunks - 1 - index if reverse else index

        def load_chunks(index):
            loaded = []
            for i in range(_AHEAD):
                at = chunk_of_step(index + i)
                continues = refs["continues"][block.b, at] if "continues" in refs else None
                write = block.load_memory(refs["writes"].at[block.b, at, block.channels])
                total = block.load_channels(refs["total"].at[block.b, at, block.channels])
                loaded.append((write, total, continues))
            return loaded

        def step(index, carry):
            memory, loaded = carry
            following = load_chunks((index + 1) * _AHEAD)
            for i, (write, total, continues) in enumerate(loaded):
                at = index * _AHEAD + i
                inside = at < chunks

                @pl.when(inside)
                def _(memory=memory, at=at):
                    entering = refs["entering"].at[block.b, chunk_of_step(at), block.channels]
                    entering[...] = memory

                decay = jnp.exp2(block.spread(total) * rates)
                decay = decay if continues is None else decay * continues
                memory = jnp.where(inside, decay * memory + write, memory)
            return memory, following

        start = block.load_memory(refs["initial"].at[block.b, block.channels])
        steps = -(-chunks // _AHEAD)
        memory, _ = lax.fori_loop(0, steps, step, (start, load_chunks(0)))
        refs["final"].at[block.b, block.channels][...] = memory

    results = launch(
        kernel,
        inputs=inputs,
        outputs=dict(
            entering=sizes.memories(sizes.batch, chunks, sizes.groups),
            final=sizes.memories(sizes.batch, sizes.groups),
        ),
        grid=sizes.grid | dict(chunk=1),
        scratch=dict(barrier=plgpu.Barrier(num_arrivals=1)),  # not used
        name="selective_scan_scan",
        interpret=interpret,
    )
    return results["entering"], results["final"]


def chunk_forward(x: Inputs, entering, *, interpret: Any = False) -> Any:
    """Compute, for all chunks in parallel, the output y [B, T, D] bfloat16 of a selective scan from the
    inputs and the memories that enter each chunk, [B, chunks, D / 16, 16, N].
    """
    sizes = Sizes.of(x)

    def kernel(refs, smem):
        block = Block(refs, smem, sizes.states)
        chunk = lax.axis_index("chunk")
        start = chunk * CHUNK
        memory = block.load_memory(refs["entering"].at[block.b, chunk, block.channels])
        skip = block.load_channels(refs["d"].at[block.channels])
        block.copy_tokens(start)
        rates = block.rates()

        def step(t, memory):
            delta, u = (block.token_channels(n, t) for n in ("delta", "u"))
            write = block.spread(delta * u) * block.token_states("b", t)
            memory = block.decay(delta, rates, t) * memory + write
            y = block.sum_states(memory * block.token_states("c", t)) + skip * u
            refs["y"].at[block.b, start + t, block.channels][...] = y.astype(jnp.bfloat16)
            return memory

        for_tokens(CHUNK, step, memory)

    y = jax.ShapeDtypeStruct((*x.u.shape[:2], sizes.groups, ROWS), jnp.bfloat16)
    results = launch(
        kernel,
        inputs=kernel_inputs(x, entering=entering),
        outputs=dict(y=y),
        grid=sizes.grid,
        scratch=token_buffers(x, "delta", "u", "b", "c"),
        name="selective_scan_chunk_forward",
        interpret=interpret,
    )
    return results["y"].reshape(x.u.shape)
