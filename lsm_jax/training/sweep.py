"""Training of many small models at once: members differ by seed and learning rate only, and are stacked and
mapped by `jax.vmap`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

Data = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SweepState:
    """Everything that a step changes.

    Attributes:
        step: number of steps taken.
        params: the parameters of all members, [M, ...].
        opt_state: the optimizer states of all members, [M, ...].
    """

    step: Any
    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Sweep:
    """M members that train on the same batches in the same order. The methods are pure functions, to be
    compiled by the caller.

    Attributes:
        init: a key -> the parameters of one member.
        loss: (parameters of one member, a batch) -> its mean loss.
        optimizer: gradients -> updates for a learning rate of 1.
        seeds: the seed of each member's parameters, [M].
        rates: each member's peak learning rate, [M].
        schedule: the step, from 0 -> the factor of all learning rates.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Data], jax.Array]
    optimizer: optax.GradientTransformation
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    schedule: Callable[[jax.Array], jax.Array]

    def first(self) -> SweepState:
        """The state before the first step."""
        keys = jnp.stack([jax.random.key(seed) for seed in self.seeds])
        params = jax.vmap(self.init)(keys)
        return SweepState(jnp.zeros((), jnp.int32), params, jax.vmap(self.optimizer.init)(params))

    def train(
        self, state: SweepState, data: Data, batches: Int[Array, "N B"]
    ) -> tuple[SweepState, Float[Array, "N M"]]:
        """Take N steps.

        Args:
            state: the state before the steps; the caller should donate it.
            data: arrays whose first axis is the examples; all stay on the device.
            batches: the indices of the examples of each step's batch.

        Returns:
            The state after the steps, and the loss of each step and member.
        """
        rates = jnp.asarray(self.rates, jnp.float32)

        def step(state: SweepState, rows: jax.Array):
            batch = jax.tree.map(lambda x: x[rows], data)

            def one(params, opt_state, rate):
                loss, grads = jax.value_and_grad(self.loss)(params, batch)
                updates, opt_state = self.optimizer.update(grads, opt_state, params)
                params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
                return params, opt_state, loss

            rate = rates * self.schedule(state.step)
            params, opt_state, losses = jax.vmap(one)(state.params, state.opt_state, rate)
            return SweepState(state.step + 1, params, opt_state), losses

        return jax.lax.scan(step, state, batches)

    def evaluate(
        self,
        score: Callable[[Any, Data], jax.Array],
        params: Any,
        data: Data,
        batch_size: int,
    ) -> Float[Array, " M"]:
        """The mean score of each member over all examples.

        Args:
            score: (parameters of one member, a batch) -> its mean score.
            params: the parameters of all members.
            data: arrays whose first axis is the examples.
            batch_size: number of examples computed at a time; it must divide the number of examples.
        """
        batches = jax.tree.map(lambda x: x.reshape(-1, batch_size, *x.shape[1:]), data)
        scores = jax.lax.map(lambda b: jax.vmap(lambda p: score(p, b))(params), batches)
        return jnp.mean(scores, axis=0)


def epoch_blocks(
    rng: np.random.Generator, sizes: list[int], batch_size: int, most: int
) -> list[tuple[int, Int[np.ndarray, "N B"]]]:
    """One epoch over several sets of examples, as blocks of batches in shuffled order; each block has
    examples of one set.

    All blocks have the same number of batches, so that the training on each set compiles once.

    Args:
        rng: shuffles the examples of each set and the order of blocks.
        sizes: number of examples in each set; examples that do not fill a last batch are left out.
        batch_size: number of examples in a batch.
        most: number of batches in a block at most; a block has the largest number up to this that divides
            each set's number of batches.

    Returns:
        (index of the set, indices of its examples [N, batch_size]) of each block.

    Raises:
        ValueError: a set is smaller than a batch.
    """
    counts = [size // batch_size for size in sizes]
    if min(counts) < 1:
        raise ValueError(
            f"batch_size={batch_size}: it must be at most the examples of every set, {min(sizes)}"
        )
    length = max(n for n in range(1, most + 1) if all(count % n == 0 for count in counts))
    blocks = []
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        rows = rng.permutation(size)[: count * batch_size].astype(np.int32)
        blocks += [(index, block) for block in rows.reshape(-1, length, batch_size)]
    return [blocks[i] for i in rng.permutation(len(blocks))]
