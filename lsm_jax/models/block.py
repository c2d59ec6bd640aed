"""The layers of the decoder: a block around a mixer and a feedforward, and the period of blocks that the decoder
repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import feedforward, mixers
from lsm_jax.mixers.layers import LayerNorm, RMSNorm, draw_xavier
from lsm_jax.models.branches import by_product
from lsm_jax.models.config import LayerConfig, ModelConfig
from lsm_jax.ops.core.saved import product_input, saved
from lsm_jax.ops.normalization.branches import (
    fuses_gradient,
    fuses_sum,
    most_norms,
    residual_norm,
)
from lsm_jax.parallel import constrain, shards_of

ACTIVATIONS = ("batch", "sequence", None)  # the axes of the residual stream
_XAVIER_GAIN = 2**-2.5  # of `LayerConfig.mixer_init`


def new_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Return a norm of the residual stream, of the kind that the config has."""
    size, eps = config.hidden_size, config.norm_eps
    if config.norm == "layer":
        return LayerNorm(size, eps=eps, bias=config.norm_bias)
    return RMSNorm(size, eps=eps, zero_centred=config.norm == "zero_centred_rms")


class Block(nnx.Module):
    """One layer of the decoder, which adds to the residual stream x: `x += mixer(norm(x))`, then `x +=
    feedforward(norm(x))` if the layer has a feedforward. With `LayerConfig.post_norm` they are `norm(mixer(x))` and
    `norm(feedforward(x))`. The model's `residual_scale` multiplies both terms.
    """

    def __init__(
        self, config: LayerConfig, model: ModelConfig, *, rngs: nnx.Rngs, layer: jax.Array | int
    ):
        size = model.hidden_size
        options: dict[str, Any] = dict(
            rngs=rngs, init_std=model.init_std, layer=layer, num_layers=model.num_layers
        )
        self.residual_scale, self.post_norm = model.residual_scale, config.post_norm
        self.mixer_norm = new_norm(model)
        self.mixer = mixers.build(
            config.mixer,
            size,
            **options,
            loss_layers=model.mixers_like(config.mixer),
        )
        inner = config.feedforward
        self.feedforward_norm = None if inner is None else new_norm(model)
        self.feedforward = None if inner is None else feedforward.build(inner, size, **options)
        if config.mixer_init == "xavier":
            draw_xavier(self.mixer, _XAVIER_GAIN, rngs)
        if model.scaled_output_init:
            self._scale_outputs((2 * model.num_layers) ** -0.5)
        self.in_fp8: tuple[str, ...] = ()
        if model.matmul == "fp8":
            parts = [part for part in (self.mixer, self.feedforward) if part is not None]
            self.in_fp8 = tuple(name for part in parts for name in mixers.use_fp8(part))
        self.adapted: tuple[str, ...] = ()
        if model.lora is not None:
            parts = [part for part in (self.mixer, self.feedforward) if part is not None]
            named = [n for part in parts for n in mixers.add_adapters(part, model.lora, rngs=rngs)]
            self.adapted = tuple(dict.fromkeys(named))

    def _scale_outputs(self, factor: float) -> None:
        """Multiply by `factor` the initial kernels of the projections whose outputs are added to the residual stream:
        those at the end of mixer and feedforward.
        """
        kernels = [projection.kernel for projection in self.mixer.output_projections()]
        feedforwards: tuple[Any, ...] = (
            self.feedforward,
            getattr(self.feedforward, "shared", None),
        )
        for part in feedforwards:
            if part is None:
                continue
            if not hasattr(part, "down_proj"):
                raise ValueError(
                    f"model.scaled_output_init=True: {type(part).__name__} has no down_proj; accepted are feedforwards with one"
                )
            kernels.append(getattr(part.down_proj, "kernel", part.down_proj))
        for kernel in kernels:
            kernel[...] = factor * kernel[...]

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> tuple[Any, Any]:
        """Return the states of one layer's mixer and of its feedforward (None without one) before any token."""
        arguments = (batch_size, max_length, dtype)
        inner = None if self.feedforward is None else self.feedforward.init_state(*arguments)
        return self.mixer.init_state(*arguments), inner

    def adds_later(self, x: jax.Array) -> bool:
        """Return whether this layer, without a state, computes the sum in front of it in one pass with its norm, so that the layer before
        should leave it the two terms of the stream x [B, T, D].
        """
        return isinstance(self.mixer_norm, RMSNorm) and self._adds_by_kernel(x)

    def __call__(
        self,
        x: jax.Array | tuple[jax.Array, jax.Array],
        shared: dict[str, jax.Array],
        state: tuple[Any, Any] | None,
        **call: Any,
    ) -> tuple[Any, dict[str, jax.Array], tuple[Any, Any], dict[str, jax.Array]]:
        """Return the residual stream x [B, T, D] after this layer, the values that travel from layer to
        layer, the states of the layer's mixer and feedforward, and statistics by name.

        If x is a pair, the stream is the sum of its two arrays, and the one after the layer is such a pair too; sums are then computed
        with the norms behind them (`adds_later`).
        """
        mixer_state, inner_state = (None, None) if state is None else state
        fresh = state is None

        def mix(x):
            y, after, context = self.mixer.run(x, shared=shared, state=mixer_state, **call)
            return y, after, dict(context.shared), dict(context.aux)

        pair = isinstance(x, tuple)
        x, term = x if isinstance(x, tuple) else (x, None)
        with jax.named_scope("mixer"):
            x, (y, mixer_state, shared, aux) = self._branch(
                x, term, self.mixer_norm, mix, fresh, pair
            )
        term = self._term(y, self.mixer_norm)
        if self.feedforward is not None and self.feedforward_norm is not None:
            feed = functools.partial(self.feedforward, shared=shared, state=inner_state, **call)
            norm = self.feedforward_norm
            with jax.named_scope("feedforward"):
                x, (y, inner_state, more) = self._branch(x, term, norm, feed, fresh, pair)
            term = self._term(y, norm)
            aux = {**aux, **more}
        x = (x, constrain(term, ACTIVATIONS)) if pair else constrain(x + term, ACTIVATIONS)
        return x, shared, (mixer_state, inner_state), aux

    def _adds_by_kernel(self, x: jax.Array) -> bool:
        # A factor of the terms would be a pass of its own in front of the kernel.
        plain = not self.post_norm and self.residual_scale == 1
        return plain and fuses_gradient(x) and fuses_sum(x)

    def _branch(
        self,
        x: jax.Array,
        term: jax.Array | None,
        norm: RMSNorm | LayerNorm,
        layer: Callable[[jax.Array], Any],
        fresh: bool,
        pair: bool,
    ) -> tuple[jax.Array, Any]:
        """Return the residual stream x + term [B, T, D], and what `layer` (a mixer or a feedforward) returns for its norm; a term of None is
        zero.

        Where a kernel computes the gradients of both at once, the stream goes through the op of the norm, and each product of the
        layer reads a norm of its own. `fresh` says that the layer has no state, `pair` that the op also adds the term.
        """
        fuses = pair and fresh and isinstance(norm, RMSNorm) and self._adds_by_kernel(x)
        if term is not None and not fuses:
            x, term = constrain(x + term, ACTIVATIONS), None
            # Saved instead of the term, of equal size, so that the backward pass does not add them again.
            x = x if self.post_norm else saved(x)
        if self.post_norm:
            return x, layer(x)
        if not (fresh and isinstance(norm, RMSNorm) and fuses_gradient(x)):
            return x, layer(product_input(norm(x)))
        # Devices that share the heads would add up the gradient of each norm, not their sum.
        most = most_norms() if shards_of("heads") == 1 else 1
        count, branched = by_product(layer, x, most)
        stream, norms = residual_norm(x, norm.factors(), eps=norm.eps, count=count, added=term)
        stream = stream if term is None else constrain(stream, ACTIVATIONS)
        return stream, branched(*norms)

    def _term(self, y: jax.Array, norm: RMSNorm | LayerNorm) -> jax.Array:
        """Return what the output y [B, T, D] of a mixer or feedforward adds to the residual stream."""
        y = norm(y) if self.post_norm else y
        return y if self.residual_scale == 1 else self.residual_scale * y


def _check_adapters(blocks: list[Block], lora: mixers.LoRAConfig) -> None:
    """Raise ValueError if no layer of a period has a projection of a name that the config of adapters has as target."""
    missing = [name for name in lora.targets if not any(name in b.adapted for b in blocks)]
    if not missing:
        return
    parts = [part for b in blocks for part in (b.mixer, b.feedforward) if part is not None]
    kinds = " and ".join(dict.fromkeys(type(part).__name__ for part in parts))
    has = sorted({name for part in parts for name in mixers.adaptable(part)})
    raise ValueError(
        f"model.lora.targets={lora.targets}: a layer of {kinds} has no projection {', '.join(missing)}; it has "
        f"{', '.join(has)}; several are written \"('q_proj', 'k_proj')\", and ('all',) names all"
    )


class Period(nnx.Module):
    """The layers of one period, the shortest pattern that a decoder repeats; the first of them has the index
    `first` in the model.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, first: jax.Array | int):
        self.blocks = nnx.List(
            [
                Block(config.layers[letter], config, rngs=rngs, layer=first + place)
                for place, letter in enumerate(config.period())
            ]
        )
        if config.lora is not None:
            _check_adapters(list(self.blocks), config.lora)
        if config.matmul == "fp8" and not any(block.in_fp8 for block in self.blocks):
            raise ValueError(
                f"model.matmul='fp8': no dense layer of this model of width {config.hidden_size} has at least 128 inputs and outputs, "
                "multiples of 16, which a product in FP8 requires; accepted is 'default'"
            )


def stack_periods(config: ModelConfig, keys: jax.Array) -> Period:
    """Return the decoder's periods, one for each random key in `keys`, as one `Period` whose parameters have
    a leading axis "layers".

    All parameters are drawn in one compiled function.
    """

    def make(key, first):
        return nnx.state(Period(config, rngs=nnx.Rngs(key), first=first), nnx.Param)

    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Period(config, rngs=nnx.Rngs(0), first=0)))
    first = jnp.arange(len(keys)) * len(config.period())
    periods = nnx.merge(graphdef, jax.jit(jax.vmap(make))(keys, first))
    for _, leaf in nnx.iter_graph(periods):
        if isinstance(leaf, nnx.Param):
            leaf.set_metadata(logical_axes=("layers", *leaf.logical_axes))
    return periods
