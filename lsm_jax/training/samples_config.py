"""The config of the texts that a run samples during training."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(kw_only=True)
class SamplesConfig:
    """The config of the texts that are sampled during training.

    Attributes:
        every: steps between samples; 0 samples none.
        prompts: the texts to continue; an empty one requires that documents begin with a BOS token.
        num_tokens: number of tokens to generate at most, for each prompt.
        temperature: divides the logits; 0 is greedy.
        seed: the seed of sampling.
    """

    every: int = 0
    prompts: tuple[str, ...] = ("",)
    num_tokens: int = 128
    temperature: float = 0.8
    seed: int = 0

    def validate(self) -> None:
        """Raise ValueError if a field of the samples' config is out of range."""
        if self.every < 0:
            raise ValueError(f"samples.every={self.every}: it must be at least 0")
        if not self.prompts:
            raise ValueError("samples.prompts=(): accepted are one text and more")
        if not 1 <= self.num_tokens < 2**31:
            raise ValueError(f"samples.num_tokens={self.num_tokens}: accepted are 1 to 2^31 - 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"samples.temperature={self.temperature}: accepted are 0 (greedy) and positive numbers"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"samples.seed={self.seed}: accepted are 0 to 2^63 - 1")
