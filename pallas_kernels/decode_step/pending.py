"""Writes to matrix memories that wait for the last token of their group, and the products of decays that both kernels of
`pallas_kernels.decode_step.deferred` compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.compat import pl
from pallas_kernels.decode_step import hopper

_F32 = jnp.float32


class Pending(NamedTuple):
    """The writes of a group of n tokens that the memories do not hold yet, of up to n - 1 tokens.

    Attributes:
        keys: [B, n - 1, G K].
        values: [B, n - 1, G V].
        decays: [B, n - 1, G K] float32, encoded as by `api.decay_factor`.
    """

    keys: Float[Array, "B N GK"]
    values: Float[Array, "B N GV"]
    decays: Float[Array, "B N GK"]


class ChannelGate(NamedTuple):
    """A key channel's bias, the token's inner channels, and the channel's column of the matrix."""

    bias: Any
    inner: list[Any]
    up: list[Any]

    def logit(self):
        """Compute what the token's decay is a function of."""
        gate = self.bias
        for inner, up in zip(self.inner, self.up, strict=True):
            gate += inner.astype(_F32) * up.astype(_F32)
        return gate

    def decay(self, temperature: float):
        """Compute the token's decay, encoded as by `api.decay_factor`."""
        return hopper.gated_factor(self.logit(), temperature)


def plain_decay(factor):
    """Return the decay that `factor` encodes as in `api.decay_factor`."""
    return jnp.where(factor > 0, 0.0, 1.0) + factor


def joined_decay(a, b):
    """Return the product of two decays, all encoded as by `api.decay_factor`: of slow ones, from `decay - 1` of each, so that the error of a
    long product does not grow faster than that of its decays.
    """
    slow = a + b + a * b
    product = jnp.maximum(plain_decay(a) * plain_decay(b), jnp.finfo(_F32).tiny)
    return jnp.where((jnp.maximum(a, b) <= 0) & (slow > -0.5), slow, product)


def filled_places(count: Any, group: int) -> list[Any]:
    """Return for each of the n - 1 pending writes of a group its place in the buffers, another filled place where it is none. No token
    reads the place that it writes, even if it ignores what it reads there.
    """
    other = jnp.where(count > 0, count - 1, group - 2)
    return [jnp.where(j < count, j, other) for j in range(group - 1)]


def gated_output(output, gate):
    """Return `output silu(gate)` in float32."""
    root = lax.rsqrt(1.0 + jnp.exp(-gate))  # the sigmoid without a division
    return output * (gate * (root * root))


def run_in_place(
    memory: Any,
    pending: Pending,
    outputs: dict[str, jax.ShapeDtypeStruct],
    launch: Callable[[dict[str, Any]], dict[str, jax.Array]],
) -> tuple[Any, jax.Array, Pending]:
    """Return the outputs of a kernel that updates the memory and the pending writes in place, and these: the output with its squares where
    `outputs` has them. `launch` runs the kernel with references to the memory and the writes, by name.
    """

    def in_place(refs):
        memory_ref, *pending_refs, output_refs = refs
        results = launch(
            dict(memory=memory_ref) | dict(zip(Pending._fields, pending_refs, strict=True))
        )
        for name, ref in output_refs.items():
            ref[...] = results[name]

    empty = {name: jnp.zeros(x.shape, x.dtype) for name, x in outputs.items()}
    memory, *writes, results = pl.run_state(in_place)((memory, *pending, empty))
    output = tuple(results[name] for name in outputs)
    return output if len(output) > 1 else output[0], memory, Pending(*writes)
