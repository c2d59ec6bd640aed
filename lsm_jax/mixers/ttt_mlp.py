"""TTT-MLP (arXiv 2407.04620): TTT-Linear whose inner model has two layers,
`f(x) = x + LN(gelu(x W₁ + b₁) W₂ + b₂)`.
"""

from __future__ import annotations

import dataclasses

from lsm_jax.mixers import checks
from lsm_jax.mixers.method import ONLINE_NOTE, Method
from lsm_jax.mixers.ttt_linear import TTTLinear, TTTLinearConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class TTTMLPConfig(TTTLinearConfig):
    """The config of TTT-MLP: the fields of TTT-Linear, and the inner model's width.

    Attributes:
        inner_expand: number of channels between the inner model's two layers, divided by the channels of a
            head.
    """

    base_lr: float = 0.1
    inner_expand: int = 4

    def sizes(self, hidden_size: int) -> tuple[int, ...]:
        """Return the numbers of channels of TTT-MLP's inner model: of its keys, its hidden layer and its values."""
        size = hidden_size // self.num_heads
        return (size, self.inner_expand * size, size)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of TTT-MLP is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        super().validate(hidden_size)
        checks.positive(self, inner_expand=self.inner_expand)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: those of TTT-Linear with the
        products of both layers, and the gradient's backward pass through the second layer.
        """
        around = hidden_size * (
            8.0 * hidden_size + 2 * self.num_heads + 4 * checks.convolution_taps(self)
        )
        return around + 14 * self.inner_expand * hidden_size * self.sizes(hidden_size)[0]


class TTTMLP(TTTLinear):
    """The layer of TTT-MLP: a mixer that maps [B, T, D] to [B, T, D]; `TTTMLPConfig` says what its options mean."""


METHOD = Method(
    name="ttt_mlp",
    paper="arXiv 2407.04620",
    op="online_memory",
    gate="1",
    write="-η ∇_W ½‖f(k) - v‖² at the mini-batch's start",
    read="f(q) = q + LN(gelu(q W₁ + b₁) W₂ + b₂)",
    state="W₁, b₁, W₂, b₂ and the mini-batch's sums of gradients; 3 tokens of q, k",
    forms=("recurrent", "chunk"),
    config=TTTMLPConfig,
    module=TTTMLP,
    note=ONLINE_NOTE,
)
