"""The fields that the configs of delta rules have in common whose heads have a given number of key channels."""

from __future__ import annotations

import dataclasses

from lsm_jax.mixers import checks
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class DeltaRuleConfig(RecurrentConfig):
    """The base class of the configs of delta rules with as many heads of values as of keys.

    Attributes:
        num_heads: heads of queries, keys and values.
        head_dim: key channels of a head.
        expand_v: number of value channels of a head, divided by head_dim.
        conv_size: width of the short convolutions on q, k and v; 1 means no convolution, only the SiLU that follows it.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 6
    head_dim: int = 256
    expand_v: float = 2.0
    conv_size: int = 4
    norm_eps: float = 1e-5

    def value_dim(self) -> int:
        """Return the number of value channels of one head: `head_dim` times `expand_v`."""
        return round(self.expand_v * self.head_dim)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of a delta rule is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.positive(
            self, num_heads=self.num_heads, head_dim=self.head_dim, norm_eps=self.norm_eps
        )
        checks.expanded(self, "expand_v", self.expand_v, self.head_dim, 1)
        checks.convolution_width(self)


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GroupedDeltaRuleConfig(DeltaRuleConfig):
    """The base class of the configs of delta rules that may have more heads of values than of keys.

    Attributes:
        num_heads: heads of queries and keys.
        num_value_heads: heads of values, gates and memories, a multiple of `num_heads`; None is `num_heads`.
    """

    num_value_heads: int | None = None

    def value_heads(self) -> int:
        """Return the number of heads of values, each with its own memory: `num_value_heads`, or `num_heads` if that is
        None.
        """
        return self.num_heads if self.num_value_heads is None else self.num_value_heads

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of a delta rule is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        super().validate(hidden_size)
        checks.value_heads(self)
