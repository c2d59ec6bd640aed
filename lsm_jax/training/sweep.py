"""Train many small models (the members of a sweep) at once. Members differ by seed and learning rate only;
their parameters are stacked and mapped by `jax.vmap`."""

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
    """The state of a sweep that trains M models at once: everything that a training step changes.

    Attributes:
        step: number of training steps taken.
        params: the parameters of all members, [M, ...].
        opt_state: the optimizer states of all members, [M, ...].
    """

    step: Any
    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep of M models (its members) that train at once, on the same batches in the same order. Its
    methods are pure functions, to be compiled by the caller.

    Attributes:
        init: function from a random key to the initial parameters of one member.
        loss: function (parameters of one member, a batch) -> the member's mean loss on the batch.
        optimizer: transformation of gradients to updates for a learning rate of 1.
        seeds: the seed of each member's parameters, [M].
        rates: each member's peak learning rate, [M].
        schedule: function from the number of the step, from 0, to a factor by which all learning rates are multiplied.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Data], jax.Array]
    optimizer: optax.GradientTransformation
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    schedule: Callable[[jax.Array], jax.Array]

    def first(self) -> SweepState:
        """Return the state of all members before the first training step: initial parameters and optimizer
        states."""
        keys = jnp.stack([jax.random.key(seed) for seed in self.seeds])
        params = jax.vmap(self.init)(keys)
        return SweepState(jnp.zeros((), jnp.int32), params, jax.vmap(self.optimizer.init)(params))

    def train(
        self, state: SweepState, data: Data, batches: Int[Array, "N B"]
    ) -> tuple[SweepState, Float[Array, "N M"]]:
        """Take N training steps with all members of the sweep.

        Args:
            state: the state of all members before the steps; the caller should donate it.
            data: arrays of the training examples, whose first axis is that of examples; all stay on the device.
            batches: the indices of the examples in each of the N steps' batches, [N, examples in a batch].

        Returns:
            The state of all members after the steps, and the losses [N, M] of each step and member.
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
        """Return the mean score of each member of the sweep over all examples, [M].

        Args:
            score: function (parameters of one member, a batch) -> the member's mean score on the batch.
            params: the parameters of all members, [M, ...].
            data: arrays of the test examples, whose first axis is that of examples.
            batch_size: number of examples computed at a time; it must divide the number of examples.
        """
        batches = jax.tree.map(lambda x: x.reshape(-1, batch_size, *x.shape[1:]), data)
        scores = jax.lax.map(lambda b: jax.vmap(lambda p: score(p, b))(params), batches)
        return jnp.mean(scores, axis=0)


def epoch_blocks(
    rng: np.random.Generator, sizes: list[int], batch_size: int, most: int
) -> list[tuple[int, Int[np.ndarray, "N B"]]]:
    """Return the order of one training epoch over several sets of examples, as a shuffled list of blocks;
    each block is several batches of examples of one set.

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
