"""Mamba-3 with several inputs and outputs (MIMO, arXiv 2603.15569): R writes and reads for each token; see
`lsm_jax.mixers.mamba3`.
"""

from __future__ import annotations

import dataclasses

from lsm_jax.mixers.mamba3 import Mamba3, Mamba3Config
from lsm_jax.mixers.method import Method


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class Mamba3MIMOConfig(Mamba3Config):
    """The config of a Mamba-3 layer with several writes and reads for each token: the fields of Mamba-3, and

    Attributes:
        mimo_rank: the writes and reads R of a token.
    """

    mimo_rank: int | None = 4

    @classmethod
    def for_width(cls, hidden_size: int) -> Mamba3MIMOConfig:
        """Return the config of Mamba-3 with four ranks for a model of width `hidden_size`, with the published
        proportions: heads of 64 channels and 128 state channels; both smaller below width 512.
        """
        return cls(head_dim=min(64, hidden_size // 4), state_size=min(128, hidden_size // 4))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config is not accepted, or does not fit a model of width `hidden_size`."""
        super().validate(hidden_size)
        if self.mimo_rank is None:
            raise ValueError("Mamba3MIMOConfig.mimo_rank=None: accepted are positive numbers")


METHOD = Method(
    name="mamba3_mimo",
    paper="arXiv 2603.15569",
    op="linear_memory",
    gate="exp(A Δ), each head; keys and queries turn by angles of the token",
    write="Σ_r λ Δ k̂_rᵀ v_r, and Σ_r (1 - λ) Δ α k̂_rᵀ v_r of the token before, v_r = x ⊙ weights",
    read="q̂_r M + D v_r, R outputs a token",
    state="N × V a head; a token's B of all ranks, x and step",
    config=Mamba3MIMOConfig,
    module=Mamba3,
    feedforward=None,
    in_loop=True,
    fusions_tuned=False,
    note="`linear_memory` on rows of R T shifted keys and values, and each token's own writes outside",
)
