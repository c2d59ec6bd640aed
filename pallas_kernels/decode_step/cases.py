"""Sizes and tolerances of `decode_step`, which applies one token to each memory, for its tests and
benchmarks.

- `INTERPRETED`: small cases for the interpreter, on a CPU.
- `HOPPER`: cases that run on the card.
- `TIMED_HEADS`, `TIMED_DIM`, `TIMED_BATCHES`: sizes that `python -m benchmarks decode_step` times.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

OUTPUT_TOLERANCE, MEMORY_TOLERANCE = 5e-3, 1e-5
"""Largest difference of the output and of the memory from the recurrence in float32, relative in RMS."""


class Case(NamedTuple):
    """The sizes of one tested call of `decode_step`, which applies one token to each memory, and its options.

    Attributes:
        op: the method: "linear" (linear attention), "delta" (the delta rule), "undecayed delta" (whose
            keys read the undecayed memory) or "dplr" (RWKV7).
        heads: the numbers of heads of q, of k (and a and b) and of v.
        key_dim: K, the number of key channels.
        value_dim: V, the number of value channels.
        decays: words separated by spaces: "token" (one per memory), "key" or "value" (one per channel) or
            "constant" for a log decay of that kind; "strong" if those below -0.1 are replaced by -120;
            "bonus" for RWKV6's bonus.
        documents: whether there are segment ids and a mask.
        stacked: whether the memory is one layer of a stack.
        dtype: the dtype of q, k and v.
        batch: B, the number of rows.
    """

    op: str
    heads: tuple[int, int, int]
    key_dim: int
    value_dim: int
    decays: str
    documents: bool
    stacked: bool
    dtype: type
    batch: int = 4

    @property
    def id(self) -> str:
        """The name of this case of `decode_step` in the tests' output: its method, sizes and options."""
        heads = ",".join(map(str, self.heads))
        options = [name for name in ("documents", "stacked") if getattr(self, name)]
        decays = [self.decays.replace(" ", "+")] if self.decays else []
        sizes = [f"B={self.batch}", f"heads={heads}", f"K={self.key_dim}", f"V={self.value_dim}"]
        return "-".join([self.op, *sizes, *decays, *options, jnp.dtype(self.dtype).name])


INTERPRETED = (
    Case("linear", (2, 2, 2), 32, 64, "key bonus", False, True, jnp.bfloat16),
    Case("delta", (1, 1, 2), 64, 32, "token", True, True, jnp.float32),
    Case("dplr", (4, 2, 2), 32, 64, "strong key", True, True, jnp.bfloat16),
    Case("linear", (4, 1, 2), 16, 32, "value", True, False, jnp.float32),
    Case("linear", (2, 2, 2), 64, 64, "constant", True, True, jnp.float32),
    Case("linear", (2, 1, 2), 256, 32, "", False, False, jnp.bfloat16),
    Case("linear", (2, 1, 2), 64, 128, "strong value token", True, True, jnp.float32),
    Case("delta", (2, 2, 4), 128, 64, "strong key", True, False, jnp.bfloat16),
    Case("delta", (2, 2, 2), 64, 64, "", False, True, jnp.float32),
    Case("dplr", (2, 1, 2), 64, 64, "token", False, False, jnp.float32),
    Case("dplr", (2, 2, 2), 64, 64, "constant", True, False, jnp.float32),
    Case("undecayed delta", (2, 1, 2), 64, 32, "strong token", True, True, jnp.float32),
)
"""Cases for the interpreter; those of the fast tests come first."""
HOPPER = (
    Case("linear", (4, 2, 2), 128, 128, "key bonus", True, True, jnp.bfloat16, 256),
    Case("linear", (4, 4, 4), 128, 256, "key", False, True, jnp.bfloat16, 16),
    Case("linear", (2, 1, 4), 64, 64, "constant value", True, False, jnp.float32, 64),
    Case("delta", (3, 3, 3), 256, 512, "token", True, True, jnp.bfloat16, 64),
    Case("delta", (16, 16, 16), 128, 128, "strong key", False, False, jnp.bfloat16, 1),
    Case("delta", (4, 2, 4), 96, 32, "", True, False, jnp.float32, 4),
    Case("undecayed delta", (3, 3, 3), 256, 512, "strong token", True, True, jnp.bfloat16, 64),
    Case("dplr", (16, 16, 16), 64, 64, "key", True, True, jnp.bfloat16, 16),
    Case("dplr", (8, 4, 4), 128, 128, "strong token", True, False, jnp.float32, 256),
)
"""Cases that run on an NVIDIA Hopper GPU."""
TIMED_HEADS, TIMED_DIM = 16, 128
"""The number of heads, and K = V, of the calls that are timed."""
TIMED_BATCHES = (1, 16, 64, 256)
"""B of the calls that are timed."""
