"""A selective scan with real memories (Mamba) by the Triton kernels in `bodies`, on NVIDIA cards of compute capability 8.0 or more.

A row is divided into as many parts as fill a card. Forward: the memories that enter the parts, and then all outputs; the memory before
each chunk is saved. Backward: the gradients of the memories after the parts, and then all gradients.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.selective_scan.inputs import RealInputs as Inputs
from pallas_kernels.triton import launch

__all__ = ["CHUNK", "REQUIREMENTS", "Inputs", "backward", "forward", "unsupported"]

_F32 = jnp.float32
CHUNK = 32
"""The number of tokens must be a multiple of this; the memory before each chunk is saved for `backward`."""
_CHANNELS = 64  # of a program
_STATES = (8, 16, 32)
_DTYPES = ("bfloat16", "float16", "float32")
_FULL = 256  # programs with which a card needs no more
_PROGRAMS = 512  # programs into which fewer are divided
_BLOCK = 512  # entries of all memories of a row that a program of `selective_carry` computes

REQUIREMENTS = (
    Requirement(
        f"u in {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}",
        lambda c: jnp.dtype(c.u.dtype).name in _DTYPES,
        lambda c: jnp.dtype(c.u.dtype).name,
    ),
    Requirement(
        f"a multiple of {_CHANNELS} channels",
        lambda c: c.u.shape[2] % _CHANNELS == 0,
        lambda c: str(c.u.shape[2]),
    ),
    Requirement(
        f"memories of {', '.join(map(str, _STATES[:-1]))} or {_STATES[-1]} numbers for each channel",
        lambda c: c.state_size in _STATES,
        lambda c: str(c.state_size),
    ),
    launch.INSTALLED,
)


class Groups(NamedTuple):
    """How many tokens a kernel loads or computes together, and the number of warps of its programs.

    Attributes:
        tokens: the number of tokens of a group.
        warps: the number of warps of a program.
    """

    tokens: int
    warps: int


FORWARD = Groups(4, 4)
"""The groups of `bodies.selective_writes` and `bodies.selective_forward`."""
BACKWARD = {8: Groups(4, 4), 16: Groups(4, 4), 32: Groups(2, 4)}
"""The groups of `bodies.selective_backward`, by N: the memories before all tokens of a group are in registers."""


def unsupported(call) -> str | None:
    """Return the first requirement of the Triton kernels that a call of `selective_scan` does not meet, or None if they support it."""
    return first_unmet(REQUIREMENTS, call)


class _Sizes(NamedTuple):
    """The sizes of a call: rows, chunks of a row, channels D, entries N of a channel's memory, and parts of a row."""

    batch: int
    chunks: int
    channels: int
    states: int
    parts: int
    chunks_of_part: int

    @classmethod
    def of(cls, x: Inputs) -> _Sizes:
        batch, length, channels = x.u.shape
        chunks = length // CHUNK
        programs = batch * channels // _CHANNELS
        parts = 1 if programs >= _FULL else min(chunks, math.ceil(_PROGRAMS / programs))
        each = math.ceil(chunks / parts)
        return cls(batch, chunks, channels, x.a.shape[1], math.ceil(chunks / each), each)

    def memories(self, count: int) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of an array with `count` memories of each row."""
        return jax.ShapeDtypeStruct((self.batch, count, self.channels, self.states), _F32)

    def run(self, kernel, inputs, outputs, groups: Groups, x: Inputs, **constants) -> dict[str, jax.Array]:  # fmt: skip
        """Run one of the kernels with a program for each part and 64 channels of a row."""
        return launch.call(
            kernel,
            inputs,
            outputs,
            programs=self.batch * self.parts * (self.channels // _CHANNELS),
            warps=groups.warps,
            stages=1,
            D=self.channels,
            N=self.states,
            C=CHUNK,
            BD=_CHANNELS,
            PARTS=self.parts,
            PER=self.chunks_of_part,
            GROUP=groups.tokens,
            DOCUMENTS=x.continues is not None,
            **constants,
        )


def _rates(x: Inputs) -> jax.Array:
    return x.a * math.log2(math.e)


def _entering(sizes: _Sizes, x: Inputs, tokens, factor, initial, *, reverse: bool) -> jax.Array:
    """Return the memory that enters each part, [B, parts, D, N], or with `reverse` the gradient of the memory after each part.

    Args:
        sizes: the sizes of the call.
        x: the scan's inputs.
        tokens: [B, T, D], u, or with `reverse` dy.
        factor: [B, T, N], b, or with `reverse` c.
        initial: [B, D, N], the memory before the row, or with `reverse` the gradient of the memory after it.
        reverse: whether the gradient is computed, from the last part to the first.
    """
    from pallas_kernels.selective_scan.triton import bodies

    if sizes.parts == 1:
        return initial[:, None]
    memories = sizes.memories(sizes.parts)
    results = sizes.run(
        bodies.selective_writes,
        (tokens, x.delta, _rates(x), factor, x.continues, sizes.chunks),
        dict(write=memories, decay=memories),
        FORWARD,
        x,
        REVERSE=reverse,
    )
    size = sizes.channels * sizes.states
    return launch.call(
        bodies.selective_carry,
        (results["write"], results["decay"], initial),
        dict(entering=memories),
        programs=sizes.batch * (size // _BLOCK),
        warps=4,
        stages=1,
        **dict(SIZE=size, BLOCK=_BLOCK, PARTS=sizes.parts, REVERSE=reverse),
    )["entering"]


def forward(x: Inputs, initial, *, save: bool, interpret: Any = False) -> tuple[Any, Any, Any]:
    """Compute a selective scan; return the output [B, T, D] in u's dtype, the memory after the last token [B, D, N], and, if `save`, the
    memories before each chunk of 32 tokens, [B, T / 32, D, N], for `backward` (else None). `interpret` has no effect.
    """
    from pallas_kernels.selective_scan.triton import bodies

    del interpret
    sizes = _Sizes.of(x)
    entering = _entering(sizes, x, x.u, x.b, initial, reverse=False)
    results = sizes.run(
        bodies.selective_forward,
        (x.u, x.delta, _rates(x), x.b, x.c, x.d, x.continues, entering, sizes.chunks),
        dict(
            y=jax.ShapeDtypeStruct(x.u.shape, x.u.dtype),
            states=sizes.memories(sizes.chunks) if save else jax.ShapeDtypeStruct((1,), _F32),
            final=sizes.memories(sizes.parts),
        ),
        FORWARD,
        x,
        SAVE=save,
    )
    return results["y"], results["final"][:, -1], results["states"] if save else None


def backward(x: Inputs, states, dy, d_final, *, interpret: Any = False) -> tuple[Inputs, Any]:
    """Return the gradients of the scan's inputs, in the same `Inputs` tuple, and of the memory before the first token, given the memories
    `states` before each chunk as the forward pass returned them, and the gradients of the output, dy [B, T, D], and of the final memory,
    d_final [B, D, N]. `interpret` has no effect.
    """
    from pallas_kernels.selective_scan.triton import bodies

    del interpret
    sizes = _Sizes.of(x)
    leaving = _entering(sizes, x, dy, x.c, d_final, reverse=True)
    groups = BACKWARD[sizes.states]
    by_column = (sizes.batch, sizes.channels // _CHANNELS, *x.b.shape[1:])
    results = sizes.run(
        bodies.selective_backward,
        (x.u, x.delta, _rates(x), x.b, x.c, x.d, x.continues, states, dy, leaving, sizes.chunks),
        dict(
            du=jax.ShapeDtypeStruct(x.u.shape, x.u.dtype),
            d_delta=jax.ShapeDtypeStruct(x.u.shape, _F32),
            da=sizes.memories(sizes.parts),
            db=jax.ShapeDtypeStruct(by_column, _F32),
            dc=jax.ShapeDtypeStruct(by_column, _F32),
            d_entering=sizes.memories(sizes.parts),
            starts=sizes.memories(sizes.parts * (CHUNK // groups.tokens)),
        ),
        groups,
        x,
    )
    dd = jnp.sum(dy.astype(_F32) * x.u.astype(_F32), axis=(0, 1))
    gradients = Inputs(
        results["du"],
        results["d_delta"],
        jnp.sum(results["da"], axis=(0, 1)),
        jnp.sum(results["db"], axis=1),
        jnp.sum(results["dc"], axis=1),
        dd,
        None if x.continues is None else jnp.zeros_like(x.continues),
    )
    return gradients, results["d_entering"][:, 0]
