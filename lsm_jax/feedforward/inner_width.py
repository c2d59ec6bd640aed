"""The inner width of a feedforward, which the configs of several have."""

from __future__ import annotations

import dataclasses
from typing import Self

from lsm_jax.mixers import checks


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class InnerWidthConfig:
    """The fields of a feedforward's config that give its inner width.

    Attributes:
        hidden_ratio: the inner width, divided by hidden_size.
        intermediate_size: the inner width; None computes it from `hidden_ratio`.
    """

    hidden_ratio: float = 4.0
    intermediate_size: int | None = None

    @classmethod
    def for_width(cls, hidden_size: int, multiple_of: int) -> Self:
        """Return the config with the default inner width, rounded up to a multiple of `multiple_of`."""
        wanted = int(cls.hidden_ratio * hidden_size)
        return cls(intermediate_size=-(-wanted // multiple_of) * multiple_of)

    def width(self, hidden_size: int) -> int:
        """Return the inner width in a model of width `hidden_size`."""
        given = self.intermediate_size
        return int(hidden_size * self.hidden_ratio) if given is None else given

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config is not valid."""
        checks.fields(self)
        checks.positive(self, hidden_ratio=self.hidden_ratio)
        if self.intermediate_size is not None:
            checks.positive(self, intermediate_size=self.intermediate_size)
