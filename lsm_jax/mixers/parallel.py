"""Two mixers side by side on the same input, whose outputs are added (Falcon-H1, arXiv 2507.22448): `y = b_1 f_1(a_1 x) + b_2
f_2(a_2 x)`, with constant scales a and b.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers.base import Context, Mixer, ShortConvolution, TokenShift
from lsm_jax.mixers.mamba2 import Mamba2Config
from lsm_jax.mixers.method import METHODS, Method, build
from lsm_jax.mixers.softmax import SoftmaxConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ParallelConfig:
    """The config of two mixers side by side.

    Attributes:
        first: the config of a mixer that has no losses, shares no values with other layers and does not depend on its layer.
        second: the same for the second mixer.
        input_scales: two numbers that multiply the input of each.
        output_scales: two numbers that multiply the output of each.
    """

    first: Any = dataclasses.field(default_factory=Mamba2Config)
    second: Any = dataclasses.field(default_factory=SoftmaxConfig)
    input_scales: tuple[float, ...] = (1.0, 1.0)
    output_scales: tuple[float, ...] = (1.0, 1.0)

    @classmethod
    def for_width(cls, hidden_size: int) -> ParallelConfig:
        """Return the config of Mamba-2 beside softmax attention, both in their customary proportions at this width."""
        return cls(
            first=Mamba2Config.for_width(hidden_size), second=SoftmaxConfig.for_width(hidden_size)
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config is not accepted, or does not fit a model of width `hidden_size`."""
        able = {m.config: m.name for m in METHODS.values() if _alone(m.module)}
        for name in ("first", "second"):
            inner = getattr(self, name)
            if type(inner) not in able:
                raise ValueError(
                    f"ParallelConfig.{name}={inner!r} cannot stand beside another mixer; accepted are the configs of "
                    f"{', '.join(able.values())}"
                )
            inner.validate(hidden_size)
        for name in ("input_scales", "output_scales"):
            scales = getattr(self, name)
            if len(scales) != 2 or not all(math.isfinite(s) and s > 0 for s in scales):
                raise ValueError(
                    f"ParallelConfig.{name}={scales}: accepted are two numbers above 0"
                )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: those of both mixers."""
        parts = (self.first, self.second)
        return sum(part.flops_per_token(hidden_size, seq_len) for part in parts)


def _alone(module: Any) -> bool:
    """Return whether mixers of a class have neither losses nor values that travel from layer to layer, and need no layer's index."""
    shares = module.init_shared.__func__ is not Mixer.init_shared.__func__
    return not (shares or module.has_losses or module.uses_depth or module.positions_in_memory)


class Parallel(Mixer):
    """The layer of two mixers side by side, which maps [B, T, D] to [B, T, D]; `ParallelConfig` says what its options mean.

    Its memory is a tuple with those of both. Names of short convolutions begin with the mixer's number.
    """

    op = ops.linear_memory  # not called: each mixer calls its own

    def __init__(
        self, config: ParallelConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        given = dict(rngs=rngs, init_std=init_std)
        self.first = build(config.first, hidden_size, **given)
        self.second = build(config.second, hidden_size, **given)
        self.uses_positions = any(part.uses_positions for part in self.parts)
        for number, part in enumerate(self.parts):
            for remembering in part.remembering():
                remembering.name = f"{number}.{remembering.name}"

    @property
    def parts(self) -> tuple[Mixer, Mixer]:
        """Return both mixers."""
        return self.first, self.second

    def innermost(self) -> Mixer:
        """Return the first mixer."""
        return self.first

    def output_projections(self) -> tuple[Any, ...]:
        """Return the projections of both mixers whose outputs are added to the residual stream."""
        return tuple(p for part in self.parts for p in part.output_projections())

    def remembering(self) -> tuple[ShortConvolution | TokenShift, ...]:
        """Return the short convolutions and token shifts of both mixers."""
        return tuple(layer for part in self.parts for layer in part.remembering())

    def through_memory(
        self, x: jax.Array, context: Context, memory: Any
    ) -> tuple[jax.Array, Any, Context]:
        """Return the sum [B, T, D] of both mixers' outputs for tokens x [B, T, D], their final memories, and the context."""
        memories = (None, None) if memory is None else memory
        scales = zip(self.config.input_scales, self.config.output_scales, strict=True)
        outputs, after = [], []
        for part, (into, out), before in zip(self.parts, scales, memories, strict=True):
            inner = dataclasses.replace(context, saved={}, bypass={})
            given = x if into == 1 else into * x
            o, final, inner = part.through_memory(given, inner, before)
            y, inner = part.finish(o, given, inner)
            outputs.append(y if out == 1 else out * y)
            after.append(final)
            context = context.add(shared=inner.shared, tails=inner.tails, aux=inner.aux)
        return outputs[0] + outputs[1], tuple(after), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the sum o [B, T, D] of the outputs, and the context."""
        return o, context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> tuple[Any, Any]:
        """Return the states of both mixers' memories before any token."""
        first, second = (part.init_memory(batch_size, max_length, dtype) for part in self.parts)
        return first, second


METHOD = Method(
    name="parallel",
    paper="arXiv 2507.22448",
    op="linear_memory",
    gate="those of both mixers",
    write="those of both mixers",
    read="the sum of both",
    state="both states",
    config=ParallelConfig,
    module=Parallel,
)
