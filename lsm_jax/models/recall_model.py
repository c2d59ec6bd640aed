"""The small model for measurements of recall and of state tracking: gated short convolutions, layers of the method and
feedforwards by a pattern, without positions.

With the pattern CL it is zoology's hybrid of a "BaseConv" layer and a layer of the method, with RMS norms in place of layer norms
and no dropout.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import mixers
from lsm_jax.feedforward import SwiGLU, SwiGLUConfig
from lsm_jax.mixers.base import Context, ShortConvolution
from lsm_jax.mixers.layers import Dense, RMSNorm, matmul_to_float32, parameter
from lsm_jax.models.config import DTYPES

LETTERS = "CLF"


@dataclasses.dataclass(kw_only=True)
class RecallModelConfig:
    """The config of the small model (`RecallModel`) that is trained on associative recall or on state tracking.

    Attributes:
        mixer: the method's config, of a type in `lsm_jax.mixers.METHODS`.
        vocab_size: number of tokens in the vocabulary.
        hidden_size: width.
        pattern: the layers in order: C is a gated short convolution, L the method, F a SwiGLU feedforward of the usual
            inner width, 8/3 of the model's.
        conv_size: width of C's convolution.
        norm_eps: epsilon of the norms before the layers and the head.
        init_std: standard deviation of the initial embedding and projections; some methods define another for
            their projections.
        dtype: the dtype of activations, "float32" or "bfloat16"; parameters are float32.
    """

    mixer: Any
    vocab_size: int = 8192
    hidden_size: int = 64
    pattern: str = "CL"
    conv_size: int = 3
    norm_eps: float = 1e-5
    init_std: float = 0.02
    dtype: str = "float32"

    def validate(self) -> None:
        """Raise ValueError if a field of the config of the model for associative recall is not accepted."""
        for name in ("vocab_size", "hidden_size", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}={getattr(self, name)}: it must be greater than 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype={self.dtype!r}: accepted are {', '.join(DTYPES)}")
        if "L" not in self.pattern or set(self.pattern) - set(LETTERS):
            raise ValueError(
                f"model.pattern={self.pattern!r}: accepted are the letters C (convolution), L (the "
                "method) and F (feedforward), with at least one L"
            )
        if self.conv_size < 2:
            raise ValueError(f"model.conv_size={self.conv_size}: it must be at least 2")
        mixers.method_of(self.mixer)
        try:
            self.mixer.validate(self.hidden_size)
        except ValueError as error:
            raise ValueError(f"model.mixer: {error}") from error
        if getattr(self.mixer, "balance", "layer") != "layer":
            raise ValueError(
                f"model.mixer.balance={self.mixer.balance!r}: accepted for recall is 'layer'"
            )


class GatedConvolution(nnx.Module):
    """A layer that multiplies a short causal convolution of tokens by a gate and adds the result to its
    input: `y = x + conv(x) ⊙ (x W + b)` (BaseConv, arXiv 2312.04927).
    """

    def __init__(self, config: RecallModelConfig, *, rngs: nnx.Rngs):
        size = config.hidden_size
        self.conv = ShortConvolution(
            "conv", size, config.conv_size, rngs=rngs, axis="embed", bias=True, silu=False
        )
        self.proj = Dense(
            size, size, axes=("embed", None), bias=True, rngs=rngs, init_std=config.init_std
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the layer's output `x + conv(x) ⊙ (x W + b)`, [B, T, D], for tokens x [B, T, D]."""
        return x + self.conv(x, Context())[0] * self.proj(x)


class RecallModel(nnx.Module):
    """A small model for associative recall: an embedding, pre-norm residual layers by the config's pattern,
    and a norm; the head is the embedding's transpose.
    """

    def __init__(self, config: RecallModelConfig, *, rngs: nnx.Rngs):
        config.validate()
        self.config = config = copy.deepcopy(config)
        size, depth = config.hidden_size, len(config.pattern)
        draw = jax.random.normal(rngs.params(), (config.vocab_size, size))
        self.embedding = parameter(config.init_std * draw, ("vocab", "embed"), weight_decay=True)
        options: dict[str, Any] = dict(rngs=rngs, init_std=config.init_std, num_layers=depth)
        self.layers = nnx.List(
            [self._layer(letter, place, options) for place, letter in enumerate(config.pattern)]
        )
        norms = [RMSNorm(size, eps=config.norm_eps) for _ in range(depth + 1)]
        self.norms = nnx.List(norms)

    def _layer(self, letter: str, place: int, options: dict[str, Any]) -> nnx.Module:
        config = self.config
        if letter == "C":
            return GatedConvolution(config, rngs=options["rngs"])
        if letter == "F":
            inner = SwiGLUConfig.for_width(config.hidden_size, multiple_of=16)
            given = {name: options[name] for name in ("rngs", "init_std")}
            return SwiGLU(inner, config.hidden_size, **given)
        return mixers.build(config.mixer, config.hidden_size, layer=place, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the hidden states after the last norm, [B, T, D] in the config's dtype, of tokens int
        [B, T].
        """
        return self.hidden(tokens)[0]

    def hidden(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the model's last hidden states [B, T, D] for the tokens [B, T], and the sum of the losses that its
        layers report (a router's balance loss).
        """
        x = self.embedding[...][tokens].astype(self.config.dtype)
        own = [
            (i, layer.innermost())
            for i, layer in enumerate(self.layers)
            if isinstance(layer, mixers.Mixer)
        ]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layer for _, layer in own))
        places = jnp.array([place for place, _ in own])
        shared = type(own[0][1]).init_shared(x, [(places, stacked)])
        losses = jnp.zeros(())
        for place, layer in enumerate(self.layers):
            inner = self.norms[place](x)
            if isinstance(layer, mixers.Mixer):
                inner, _, context = layer.run(inner, layer=place, shared=shared)
                shared = context.shared
                losses += sum(v for name, v in context.aux.items() if name.endswith("_loss"))
            else:
                inner = layer(inner) if isinstance(layer, GatedConvolution) else layer(inner)[0]
            x = x + inner
        return self.norms[-1](x), losses

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the float32 logits [..., vocab] of hidden states [..., D]; float32 states are multiplied
        with the GPU's TF32 products.
        """
        head = self.embedding[...].astype(hidden.dtype).T
        if hidden.dtype == jnp.bfloat16:
            return matmul_to_float32(hidden, head)
        return jnp.matmul(hidden, head, precision=jax.lax.Precision.DEFAULT)


def recall_state_size(config: RecallModelConfig, max_length: int) -> dict[str, list[int]]:
    """Return how many numbers of state each layer stores for one sequence while it decodes.

    Args:
        config: the model.
        max_length: the number of tokens that softmax attention must store; other methods do not depend on it.

    Returns:
        Two lists with a number for each layer. `memory`: the size of the memory (keys and values for
        attention; 0 for other layers). `all`: the size of the memory and of the tails of convolutions and
        token shifts.
    """
    options: dict[str, Any] = dict(num_layers=len(config.pattern))

    def states():
        mixer = mixers.build(config.mixer, config.hidden_size, rngs=nnx.Rngs(0), **options)
        return mixer.init_state(1, max_length, jnp.dtype(config.dtype))

    def count(tree: Any) -> int:
        kinds = ((x, x.dtype) for x in jax.tree.leaves(tree))
        kept = ((x, kind) for x, kind in kinds if not jnp.issubdtype(kind, jnp.integer))
        return sum(x.size * (1 + jnp.issubdtype(kind, jnp.complexfloating)) for x, kind in kept)

    state = jax.eval_shape(states)
    memory, tails = count(state.memory), count(state.tails)
    convolution = (config.conv_size - 1) * config.hidden_size
    sizes = dict(L=memory + tails, C=convolution, F=0)
    return dict(
        memory=[memory if letter == "L" else 0 for letter in config.pattern],
        all=[sizes[letter] for letter in config.pattern],
    )
