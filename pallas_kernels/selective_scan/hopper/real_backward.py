"""The last phase of the backward pass of `selective_scan`, whose memories are real: the gradients of each
chunk's inputs.

With G_t the gradient of h_t from token t and later ones, `G_t = dy_t C_t + decay_{t+1} G_{t+1}`. Then `dB_t =
Σ_d δ_t u_t G_t`, `dC_t = Σ_d dy_t h_t`, `du_t = δ_t Σ_n B_t G_t + D dy_t`, `dδ_t = u_t Σ_n B_t G_t + Σ_n A
decay_t h_{t-1} G_t` and `dA = Σ_t δ_t decay_t h_{t-1} G_t`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.selective_scan.hopper.real_block import (
    CHUNK,
    LOG2E,
    ROWS,
    WARPS,
    Block,
    Sizes,
    kernel_inputs,
    token_buffers,
)
from pallas_kernels.selective_scan.inputs import RealInputs as Inputs

_F32 = jnp.float32
_IN_REGISTERS = 64  # numbers of a channel's memories that are in registers at a time


class _ChunkGradient:
    """The gradients of a selective scan's inputs in one chunk of 64 tokens, computed by a warpgroup for 64
    channels from the last token to the first.

    The chunk is divided into groups of `count` tokens, whose memories fit into registers. First the memories
    that enter the groups are stored in shared memory. Then, from the last group to the first, the memories of
    a group's tokens are recomputed, and its gradients are computed from them.

    Attributes:
        block: the warpgroup's row and channels.
        rates: the rates of decay times log2(e), [4, 16, N].
        skip: the factor D of u in the output, [4, 16].
        start: the position in the row of the chunk's first token.
        count: the number of tokens of a group.
    """

    def __init__(self, block: Block, rates, skip, start, count: int):
        self.block, self.rates, self.skip, self.start, self.count = block, rates, skip, start, count

    def load(self, t):
        """Return, for the chunk's token t, the step size δ and the input u, [4, 16] for the warpgroup's 64
        channels, the write's factors b and the decay of the memories, both [4, 16, N]. The first three are
        loaded from shared memory.
        """
        block = self.block
        delta, u = (block.token_channels(n, t) for n in ("delta", "u"))
        b = block.token_states("b", t)
        return delta, u, b, block.decay(delta, self.rates, t)

    def advance(self, delta, u, b, decay, memory):
        """Return the memories [4, 16, N] of the warpgroup's channels after one more token, `decay memory + δ
        u b`.
        """
        return decay * memory + self.block.spread(delta * u) * b

    def store_starts(self, memory) -> None:
        """Store in shared memory the memories [4, 16, N] that enter each group of `count` consecutive tokens
        of the chunk, computed token by token from `memory`, which enters the chunk.
        """
        starts = self.block.smem["starts"]

        def group(index, memory):
            starts.at[index][...] = memory
            for i in range(self.count):
                memory = self.advance(*self.load(index * self.count + i), memory)
            return memory

        last = CHUNK // self.count - 1
        starts.at[last][...] = lax.fori_loop(0, last, group, memory)

    def group(self, first, offset: int, carry):
        """Compute and store the gradients of a selective scan's inputs at one group of `count` consecutive
        tokens; return the carry for the group before it.

        Args:
            first: the index in the chunk of the first token of two neighbouring groups, whose gradients of b
                and c `store_sums` writes together.
            offset: the index, counted from `first`, of this group's first token: 0 or `count`.
            carry: the gradient of the memory after the group from later tokens, and the sum over later tokens
                of the gradients of a, both [4, 16, N].
        """
        block, refs, sums = self.block, self.block.refs, self.block.smem["sums"]
        d_memory, d_rates = carry
        memory = block.load_memory(block.smem["starts"].at[lax.div(first + offset, self.count)])
        tokens = []
        for i in range(self.count):
            loaded = self.load(first + offset + i)
            tokens.append((*loaded, memory))
            memory = self.advance(*loaded, memory)
        for i in reversed(range(self.count)):
            t = first + offset + i
            delta, u, b, decay, before = tokens[i]
            dy = block.token_channels("dy", t)
            d_output = block.spread(dy)
            sums.at[0, offset + i][...] = jnp.sum(d_output * memory, axis=1)
            g = d_memory + d_output * block.token_states("c", t)
            sums.at[1, offset + i][...] = jnp.sum(block.spread(delta * u) * g, axis=1)
            d_write = block.sum_states(g * b)
            d_memory = decay * g
            d_exponent = d_memory * before
            d_delta = u * d_write + block.sum_states(d_exponent * self.rates) * (1 / LOG2E)
            to = block.b, self.start + t, block.channels
            refs["du"].at[*to][...] = (delta * d_write + self.skip * dy).astype(jnp.bfloat16)
            refs["d_delta"].at[*to][...] = d_delta
            d_rates = d_rates + block.spread(delta) * d_exponent
            memory = before
        return d_memory, d_rates

    def store_sums(self, first) -> None:
        """Write to global memory the gradients of b and c (the factors of writes and reads), summed over this
        warpgroup's 64 channels, at 2 `count` consecutive tokens: two groups, from token `first` of the
        chunk on.
        """
        block, sums = self.block, self.block.smem["sums"]
        plgpu.commit_smem()
        tokens = pl.ds(self.start + first, 2 * self.count)
        for which, name in enumerate(("dc", "db")):
            by_warp = [plgpu.load(sums.at[which, :, w]) for w in range(WARPS)]
            to = block.refs[name].at[block.b, block.column, tokens]
            to[...] = sum(by_warp[1:], by_warp[0])
        plgpu.commit_smem()


def chunk_backward(
    x: Inputs, dy, entering, d_leaving, *, interpret: Any = False
) -> tuple[Any, ...]:
    """Compute, for all chunks in parallel, the gradients of a selective scan's inputs u, delta, a, b and c.

    Args:
        x: the inputs of the scan: u, the step sizes delta, the rates of decay a, the factors b and c of
            writes and reads, and d.
        dy: [B, T, D], the gradient of the output.
        entering: [B, chunks, D / 16, 16, N], the memories that enter each chunk.
        d_leaving: [B, chunks, D / 16, 16, N], the gradients of the memories after each chunk, from later
            chunks.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    sizes = Sizes.of(x)
    count = _IN_REGISTERS // sizes.states

    def kernel(refs, smem):
        block = Block(refs, smem, sizes.states)
        chunk = lax.axis_index("chunk")
        start = chunk * CHUNK
        index = block.b, chunk, block.channels
        memory = block.load_memory(refs["entering"].at[*index])
        d_memory = block.load_memory(refs["d_leaving"].at[*index])
        skip = block.load_channels(refs["d"].at[block.channels])
        block.copy_tokens(start)
        gradient = _ChunkGradient(block, block.rates(), skip, start, count)
        gradient.store_starts(memory)

        def two_groups(index, carry):
            first = CHUNK - (index + 1) * (2 * count)
            for offset in (count, 0):
                carry = gradient.group(first, offset, carry)
            gradient.store_sums(first)
            return carry

        steps = CHUNK // (2 * count)
        _, d_rates = lax.fori_loop(0, steps, two_groups, (d_memory, block.zero()))
        refs["da"].at[*index][...] = d_rates

    struct = jax.ShapeDtypeStruct
    by_channel = (*x.u.shape[:2], sizes.groups, ROWS)
    by_token = struct((sizes.batch, sizes.columns, x.u.shape[1], sizes.states), _F32)
    outputs = dict(
        du=struct(by_channel, jnp.bfloat16),
        d_delta=struct(by_channel, _F32),
        da=sizes.memories(sizes.batch, sizes.chunks, sizes.groups),
        db=by_token,
        dc=by_token,
    )
    starts = plgpu.SMEM((CHUNK // count, WARPS, ROWS, sizes.states), _F32)
    sums = plgpu.SMEM((2, 2 * count, WARPS, sizes.states), _F32)
    results = launch(
        kernel,
        inputs=kernel_inputs(x, dy=dy, entering=entering, d_leaving=d_leaving),
        outputs=outputs,
        grid=sizes.grid,
        scratch=token_buffers(x, "delta", "u", "b", "c", "dy", starts=starts, sums=sums),
        name="selective_scan_chunk_backward",
        interpret=interpret,
    )
    da = jnp.sum(results["da"], axis=(0, 1)).reshape(x.a.shape)
    db, dc = (jnp.sum(results[name], axis=1) for name in ("db", "dc"))
    return results["du"].reshape(x.u.shape), results["d_delta"].reshape(x.u.shape), da, db, dc
