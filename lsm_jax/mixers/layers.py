"""Layers that mixers, feedforwards and models share. Parameters are float32 and need no mesh to be built.

Every parameter carries two pieces of metadata: `logical_axes`, which `lsm_jax.parallel` maps to a mesh, and
`weight_decay`, whether the optimizer may decay it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lsm_jax import ops
from lsm_jax.ops.core.saved import saved


def parameter(
    value: jax.Array, logical_axes: tuple[str | None, ...], *, weight_decay: bool
) -> nnx.Param:
    """Return a trainable parameter in float32, also with `jax_enable_x64`, with a logical name for each axis,
    and whether weight decay applies to it.
    """
    if len(logical_axes) != value.ndim:
        raise ValueError(
            f"logical_axes={logical_axes} does not name the axes of shape {value.shape}"
        )
    return nnx.Param(
        value.astype(jnp.float32), logical_axes=logical_axes, weight_decay=weight_decay
    )


def matmul_precision(dtype: DTypeLike) -> jax.lax.Precision:
    """Return the precision of matrix products with operands of `dtype`: full for float32 and wider, and the
    default for 16-bit floats, whose products are exact in float32 in any case.
    """
    narrow = jnp.dtype(dtype).itemsize <= 2
    return jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST


def matmul_to_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return x [..., M, K] times w [K, N], both of one dtype, accumulated and returned in float32 (float64
    for float64).

    Gradients are computed by products in x's dtype: products in float32, of a converted x, would take a GPU
    many times as long.
    """
    if x.dtype.itemsize >= 4:
        return _product(x, w)
    return _widening_product(x, w)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, precision=matmul_precision(x.dtype))


@jax.custom_vjp
def _widening_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the matrix product of x and w with a float32 result.

    On a CPU the operands are converted to float32: XLA has no bfloat16 product with a float32 result there for some
    layouts.
    """

    def widened(x: jax.Array, w: jax.Array) -> jax.Array:
        return _product(x.astype(jnp.float32), w.astype(jnp.float32))

    def mixed(x: jax.Array, w: jax.Array) -> jax.Array:
        if w.shape[-1] == 1:  # XLA does not compile it for one row with `sampling.compiler_options`
            return jnp.sum(x.astype(jnp.float32) * w[:, 0].astype(jnp.float32), -1, keepdims=True)
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    return jax.lax.platform_dependent(x, w, cpu=widened, default=mixed)


def _widening_backward(operands, grad):
    _, pull = jax.vjp(_product, *operands)
    return pull(grad.astype(operands[0].dtype))


_widening_product.defvjp(lambda x, w: (_widening_product(x, w), (x, w)), _widening_backward)


def project(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return a dense layer's output: x [..., D] times kernel [D, F] plus bias [F], in `dtype` (None is x's).

    The kernel is cast to x's dtype, and sums are float32.
    """
    kernel = kernel.astype(x.dtype)
    if dtype is None or jnp.dtype(dtype) == x.dtype:
        y = _product(x, kernel)
    else:
        y = matmul_to_float32(x, kernel).astype(dtype)
    return y if bias is None else y + bias.astype(y.dtype)


class Dense(nnx.Module):
    """A dense layer on the last axis, `y = x W (+ b)`, with W cast to x's dtype and accumulated in float32.

    Args:
        in_size: channels of x.
        out_size: channels of y.
        axes: logical names of W's two axes.
        bias: whether to add a bias, initialised to zero and free of weight decay.
        init_std: W is drawn from a normal distribution of this standard deviation.

    Attributes:
        lora: an adapter that `lsm_jax.mixers.lora` set, or None.
        product: the function that multiplies, with the arguments of `project`. Mixture-of-Memories sets
            another in a copy of its inner mixer, whose kernels may have an axis of memories and whose tokens
            are arranged by memory.
    """

    lora: Any = None
    product: Callable[..., jax.Array] = staticmethod(project)

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        axes: tuple[str | None, str | None],
        rngs: nnx.Rngs,
        bias: bool = False,
        init_std: float = 0.02,
    ):
        kernel = init_std * jax.random.normal(rngs.params(), (in_size, out_size), jnp.float32)
        self.kernel = parameter(kernel, axes, weight_decay=True)
        zeros = jnp.zeros(out_size, jnp.float32)
        self.bias = parameter(zeros, axes[1:], weight_decay=False) if bias else None

    def __call__(self, x: jax.Array, *, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the projection of x [..., in_size] by this dense layer, [..., out_size] in `dtype` (None is
        x's).
        """
        bias = None if self.bias is None else self.bias[...]
        y = self.product(x, self.kernel[...], bias, dtype)
        return y if self.lora is None else y + self.lora(x, dtype)


class OrthogonalDense(Dense):
    """A `Dense` layer whose initial matrix has orthogonal rows or columns, as some matrices of RWKV7.

    Args:
        gain: the norm of the initial matrix's orthogonal rows or columns; with 0 the matrix starts at zero.
        bias: initial value of the bias; None for no bias.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        gain: float,
        axes: tuple[str | None, str | None],
        rngs: nnx.Rngs,
        bias: jax.Array | None = None,
    ):
        kernel = jnp.zeros((in_size, out_size), jnp.float32)
        if gain:
            draw = jax.nn.initializers.orthogonal(gain)
            kernel = draw(rngs.params(), (in_size, out_size), jnp.float32)
        self.kernel = parameter(kernel, axes, weight_decay=True)
        self.bias = None if bias is None else parameter(bias, axes[1:], weight_decay=False)


def draw_xavier(module: nnx.Module, gain: float, rngs: nnx.Rngs) -> None:
    """Draw the kernels of a module's `Dense` layers again, Xavier-uniform: within ±gain sqrt(6 / (inputs + outputs)).

    Kernels with an axis of memories, [G, inputs, outputs], are drawn as G matrices. Layers with an initialisation of their own
    (`OrthogonalDense`) are not changed.
    """
    for _, layer in nnx.iter_graph(module):
        if type(layer) is Dense:
            shape = layer.kernel[...].shape
            bound = gain * math.sqrt(6 / (shape[-2] + shape[-1]))
            layer.kernel[...] = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def narrow_gradient(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return x, with a gradient that is rounded to `dtype` and stored in it.

    The gradient of a float32 product of bfloat16 operands is rounded by `matmul_to_float32` in any case; a bias beside it would
    otherwise have the gradient stored in float32.
    """
    return x


@narrow_gradient.defjvp
def _narrow_tangent(dtype, primals, tangents):
    (x,), (tangent,) = primals, tangents
    if tangent.dtype == jnp.dtype(dtype):
        return x, tangent
    # The transpose has the barrier too. A rule for the backward pass alone would exclude forward-mode derivatives.
    narrow = jax.lax.optimization_barrier(tangent.astype(dtype))
    return x, narrow.astype(tangent.dtype)


def recomputed(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Return `function`, wrapped so that only its arguments and arrays of the given names are saved for the backward pass, which computes
    all else again; for mostly elementwise functions. Around it, the rematerialisation of a layer may save fewer of the names; with
    `remat="none"` all are saved.

    Otherwise a scan over layers would save every float32 array between bfloat16 arguments and results.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
    return jax.checkpoint(function, policy=policy, prevent_cse=False)


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """Divide x by its root mean square over the last axis, `x / sqrt(mean(x²) + eps)`; computed and returned in float32
    (or float64).
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(mean_square(x) + eps)


def mean_square(x: jax.Array) -> jax.Array:
    """Return the mean of x² over the last axis, which remains with length 1, in float32 (or float64)."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.mean(x * x, axis=-1, keepdims=True)


class RMSNorm(nnx.Module):
    """Root-mean-square norm of the last axis with a learned scale, computed in float32 and returned in x's
    dtype.

    Args:
        size: channels of the last axis.
        eps: added to the mean square.
        axis: logical name of the scale's axis.
        num_heads: length of the last axis but one, if each of its heads has a scale; None means one scale for
            all.
        zero_centred: whether the channels are multiplied by 1 + the learned scale, which starts at 0 (Gemma, Qwen3-Next),
            instead of by the scale.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        axis: str = "norm",
        num_heads: int | None = None,
        zero_centred: bool = False,
    ):
        self.eps, self.zero_centred = eps, zero_centred
        shape, axes = ((size,), (axis,))
        if num_heads is not None:
            shape, axes = (num_heads, size), ("heads", None)
        start = jnp.zeros if zero_centred else jnp.ones
        self.scale = parameter(start(shape, jnp.float32), axes, weight_decay=False)

    def __call__(
        self,
        x: jax.Array,
        gate: jax.Array | None = None,
        *,
        factor: float = 1.0,
        activation: str = "silu",
    ) -> jax.Array:
        """Normalise x [..., size], and multiply it by `factor`, and by the activation ("silu" or "sigmoid") of a gate [..., size] if
        one is given.

        With a gate, x is [B, T, size], [B, T, H, size] or, with heads that have scales of their own, [B, T, ..., H, size].
        """
        scale = self.factors()
        scale = scale if factor == 1 else factor * scale
        if gate is None:
            # A few numbers for each token: rematerialisation saves them, and not the pass over x.
            square = saved(recomputed(mean_square)(x))
            return recomputed(self._normed)(x, square, scale)
        if scale.ndim == 2 and x.ndim > 4:
            scale = jnp.tile(scale, (math.prod(x.shape[2:-2]), 1))
        heads = (*x.shape[:2], -1, x.shape[-1])
        y = ops.gated_rms_norm(
            x.reshape(heads), gate.reshape(heads), scale, eps=self.eps, activation=activation
        )
        return y.reshape(x.shape)

    def factors(self) -> jax.Array:
        """Return what multiplies the normalised channels: the learned scale, or 1 + it with `zero_centred`."""
        return 1 + self.scale[...] if self.zero_centred else self.scale[...]

    def _normed(self, x: jax.Array, square: jax.Array, scale: jax.Array) -> jax.Array:
        return (x.astype(square.dtype) * jax.lax.rsqrt(square + self.eps) * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm of the last axis with a learned scale and bias, computed in float32 and returned in x's dtype.

    Args:
        size: channels of the last axis.
        eps: added to the variance.
        bias: whether there is a bias.
    """

    def __init__(self, size: int, *, eps: float, bias: bool = True):
        self.eps = eps
        fixed = dict(logical_axes=("norm",), weight_decay=False)
        self.scale = parameter(jnp.ones(size, jnp.float32), **fixed)
        self.bias = parameter(jnp.zeros(size, jnp.float32), **fixed) if bias else None

    def __call__(self, x: jax.Array, *, factor: float = 1.0) -> jax.Array:
        """Subtract the mean of x [..., size] over the last axis, divide by the standard deviation, scale, add the bias and
        multiply by `factor`; shape and dtype do not change.
        """
        return _layer_norm(x, self.scale, self.bias, self.eps, factor)


def _layer_norm(
    x: jax.Array, scale: nnx.Param, bias: nnx.Param | None, eps: float, factor: float = 1.0
) -> jax.Array:
    def norm(x, scale, bias):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        y = rms_normalize(wide, eps) * scale
        y = y if bias is None else y + bias
        return (y if factor == 1 else factor * y).astype(x.dtype)

    return recomputed(norm)(x, scale[...], None if bias is None else bias[...])


class HeadNorm(nnx.Module):
    """Layer norm of each head (a group norm with one group per head) with a learned scale and bias, computed
    in float32 and returned in x's dtype.

    Args:
        num_heads: H.
        head_dim: V.
        eps: added to the variance.
        bias: whether there is a bias.
        scale: initial value of the scale, possibly traced.
        axis: logical name of the heads' axis.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        eps: float,
        bias: bool = True,
        scale: jax.Array | float = 1.0,
        axis: str = "heads",
    ):
        self.eps = eps
        shape, fixed = (num_heads, head_dim), dict(logical_axes=(axis, None), weight_decay=False)
        self.scale = parameter(jnp.full(shape, scale, jnp.float32), **fixed)
        self.bias = parameter(jnp.zeros(shape, jnp.float32), **fixed) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer norm to each head of x [..., H, V] on its own; shape and dtype do not change."""
        return _layer_norm(x, self.scale, self.bias, self.eps)


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class RopeScaling:
    """A reduction of rotary frequencies for documents that are longer than those of a model's first training.

    Attributes:
        kind: "linear" divides all by `factor` (arXiv 2306.15595); "llama3" (Llama 3.1) divides those with
            wavelengths above `original_length / low_freq_factor`, does not change those with wavelengths
            below `original_length / high_freq_factor`, and interpolates linearly in `original_length /
            wavelength` between the two.
        factor: the largest divisor of a frequency, at least 1.
        low_freq_factor: "llama3" only.
        high_freq_factor: "llama3" only; greater than `low_freq_factor`.
        original_length: "llama3" only: the length in tokens of the documents of the first training.
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def apply(self, frequency: jax.Array) -> jax.Array:
        """Return the frequencies of the rotary embedding, in radians per token, lowered for a longer context;
        the shape does not change.
        """
        if self.kind == "linear":
            return frequency / self.factor
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_length * frequency / (2 * math.pi)
        unchanged = jnp.clip((turns - low) / (high - low), 0, 1)
        return frequency * (unchanged + (1 - unchanged) / self.factor)


def rotate(
    x: jax.Array,
    positions: jax.Array,
    *,
    base: float,
    scaling: RopeScaling | None = None,
    channels: int | None = None,
    interleaved: bool = False,
) -> jax.Array:
    """Apply the rotary position embedding (arXiv 2104.09864), in which the first half of the rotated channels is
    paired with the second half, or each channel with the next one.

    Args:
        x: [B, T, H, K].
        positions: [B, T] integers, the positions of the tokens in their documents.
        base: wavelengths run from 2π to 2π · base.
        scaling: a reduction of the frequencies, or None.
        channels: number of channels of a head that are rotated, its first ones; even; None is all K.
        interleaved: whether the pairs are neighbours, channels 2i and 2i + 1, instead of i and i + K / 2.

    Returns:
        [B, T, H, K] in x's dtype; angles and products in float32.
    """
    if channels is not None and channels < x.shape[-1]:
        turned = rotate(
            x[..., :channels], positions, base=base, scaling=scaling, interleaved=interleaved
        )
        return jnp.concatenate([turned, x[..., channels:]], axis=-1)
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    frequency = frequency if scaling is None else scaling.apply(frequency)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    # Saved once, since they are the same in all layers; each layer's backward pass would compute them again.
    cos, sin = saved(jnp.cos(angle)), saved(jnp.sin(angle))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Cut the channels of an array into heads: reshape [B, T, H * K] to [B, T, H, K], where H is `num_heads`."""
    return x.reshape(*x.shape[:-1], num_heads, -1)


def merge_heads(x: jax.Array) -> jax.Array:
    """Put the channels of all heads side by side: reshape [B, T, H, K] to [B, T, H * K]."""
    return x.reshape(*x.shape[:-2], -1)


def log_uniform_step_bias(
    rngs: nnx.Rngs, size: int, *, low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4
) -> jax.Array:
    """Draw biases whose softplus is log-uniform in [low, high] and at least `floor` (as in the code of
    Mamba2, arXiv 2405.21060).
    """
    uniform = jax.random.uniform(rngs.params(), (size,), jnp.float32)
    step = jnp.exp(uniform * (jnp.log(high) - jnp.log(low)) + jnp.log(low))
    step = jnp.maximum(step, floor)
    return step + jnp.log(-jnp.expm1(-step))


def log_uniform_rate(rngs: nnx.Rngs, size: int, *, low: float, high: float) -> jax.Array:
    """Draw `log A` of A uniform in [low, high) and at least 1e-6, so that the logarithm is finite."""
    rate = jax.random.uniform(rngs.params(), (size,), jnp.float32, low, high)
    return jnp.log(jnp.maximum(rate, 1e-6))
