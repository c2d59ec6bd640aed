"""Draw examples of state tracking: permutations that act one after another, and the state after each.

The words of a permutation group (arXiv 2404.08819, 2411.12537, 2502.10297). Parity is the group of two things.
"""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import dataclasses
import functools
import itertools

import numpy as np
from jaxtyping import Int

from lsm_jax.data.recall_task import NOT_ASKED, RecallExamples

MOVES = ("all", "swaps")
_LARGEST = 6  # 720 permutations


@dataclasses.dataclass(kw_only=True)
class TrackingTask:
    """A task of state tracking: which permutations act, in how many moves, and after which moves the state is asked.

    Attributes:
        things: number of things that are permuted: 2 is parity, 5 is the group S5.
        moves: "all" permutations, or "swaps": those that exchange two things, and the one that moves none.
        length: moves in an example; a token that marks the start comes before them.
        first: the first move, counted from 1, after which the state is asked; it is asked after all later ones too.
        num_examples: number of examples.
    """

    things: int
    length: int
    num_examples: int
    moves: str = "all"
    first: int = 1

    @property
    def name(self) -> str:
        """The tracking task's name in tables and metrics: the group, and the moves after which the state is asked, such as
        "S5 41-256"."""
        swaps = "" if self.moves == "all" else f" {self.moves}"
        return f"S{self.things}{swaps} {self.first}-{self.length}"

    @property
    def num_tokens(self) -> int:
        """The number of tokens in an example: the moves, and the start."""
        return self.length + 1

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError if a field of the tracking task is not accepted, or the vocabulary has too few tokens."""
        if not 2 <= self.things <= _LARGEST:
            raise ValueError(f"things={self.things}: accepted is a number from 2 to {_LARGEST}")
        if self.moves not in MOVES:
            raise ValueError(f"moves={self.moves!r}: accepted are {', '.join(MOVES)}")
        for name in ("length", "num_examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if not 1 <= self.first <= self.length:
            raise ValueError(f"first={self.first}: accepted is a number from 1 to {self.length}")
        if vocab_size < (least := tracking_vocabulary(self.things)):
            raise ValueError(
                f"vocab_size={vocab_size}: a start, {least // 2} moves and as many states require {least}"
            )


def tracking_vocabulary(things: int) -> int:
    """Return the number of token ids of a tracking task: N moves, N states and the start, N = things!."""
    return 2 * len(permutations(things)) + 1


@functools.cache
def permutations(things: int) -> Int[np.ndarray, "N K"]:
    """Return all N permutations of K things in lexicographic order, [N, K]: entry i is what i becomes."""
    return np.array(list(itertools.permutations(range(things))), np.int32)


@functools.cache
def products(things: int) -> Int[np.ndarray, "N N"]:
    """Return the table of products of all N permutations: entry [a, b] is the number of "first b, then a"."""
    table = permutations(things)
    places = things ** np.arange(things)
    number = {code: i for i, code in enumerate((table @ places).tolist())}
    codes = table[:, table] @ places
    return np.vectorize(number.__getitem__, otypes=[np.int32])(codes)


def tracking_examples(task: TrackingTask, *, seed: int | tuple[int, ...] = 0) -> RecallExamples:
    """Draw the examples of a tracking task: a start, then moves, drawn uniformly and independently; the target after move t
    is the state, the product of the moves 1 to t.

    With N permutations the moves are the token ids 0..N-1, the states N..2N-1 and the start 2N: no id has two meanings, though
    a model has one embedding for tokens and targets.

    Args:
        task: the group, the length and the number of examples.
        seed: the same seed gives the same examples.

    Raises:
        ValueError: a field of the task is not accepted.
    """
    task.validate(tracking_vocabulary(task.things))
    rng = np.random.default_rng(seed)
    table = permutations(task.things)
    moved = np.sum(table != np.arange(task.things), axis=1)
    choices = np.flatnonzero(moved <= 2) if task.moves == "swaps" else np.arange(len(table))
    shape = (task.num_examples, task.num_tokens)
    tokens = np.full(shape, 2 * len(table), np.int32)
    tokens[:, 1:] = choices[rng.integers(len(choices), size=(task.num_examples, task.length))]
    targets = np.full(shape, NOT_ASKED, np.int32)
    state, after = np.zeros(task.num_examples, np.int32), products(task.things)
    for t in range(1, task.num_tokens):
        state = after[tokens[:, t], state]
        if t >= task.first:
            targets[:, t] = len(table) + state
    return RecallExamples(tokens, targets)
