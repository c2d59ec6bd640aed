"""Mamba2 (SSD, arXiv 2405.21060): `M_t = exp(Δ_t A) M_{t-1} + Δ_t B_tᵀ x_t`, `y_t = C_t M_t + D x_t`, gated,
with no feedforward.

The published block has one input projection and one convolution over x, B and C. Both act on the parts
independently, so here each part has one; the function and the number of parameters are the same.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.joined import project_together
from lsm_jax.mixers.layers import (
    Dense,
    log_uniform_rate,
    log_uniform_step_bias,
    merge_heads,
    parameter,
    recomputed,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.normed_product import product_of
from lsm_jax.mixers.op_config import RecurrentConfig
from lsm_jax.ops.core.platforms import compute_capabilities
from lsm_jax.ops.normalization.gated_product import fuses_product, gated_norm_product
from lsm_jax.ops.normalization.xla import NormOptions

NORMS = ("after_gate", "before_gate", "none")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class Mamba2Config(RecurrentConfig):
    """The config of a Mamba-2 layer: linear attention with one decay for each head and token.

    Attributes:
        expand: number of inner channels, divided by hidden_size.
        inner_size: number of inner channels; None is expand * hidden_size.
        head_dim: value channels of a head; there are inner channels / head_dim heads.
        state_size: key channels of a head (N).
        num_groups: groups of heads that share B and C.
        conv_size: width of the short convolution; 1 means no convolution, only the SiLU that follows it.
        norm: the norm of each group of heads in the output: "after_gate" normalises the gated output, "before_gate" gates the
            normalised one, "none" only gates.
        norm_eps: epsilon of the norm.
        projection_scales: five numbers that multiply the projections to z, x, B, C and dt.
    """

    expand: int = 2
    inner_size: int | None = None
    head_dim: int = 64
    state_size: int = 128
    num_groups: int = 1
    conv_size: int = 4
    norm: str = "after_gate"
    norm_eps: float = 1e-5
    projection_scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @classmethod
    def for_width(cls, hidden_size: int) -> Mamba2Config:
        """Return the config of Mamba-2 for a model of width `hidden_size`, with the published proportions: heads of 64
        channels and 128 state channels; both smaller below width 512.
        """
        return cls(head_dim=min(64, hidden_size // 4), state_size=min(128, hidden_size // 2))

    def inner(self, hidden_size: int) -> int:
        """Return the number of inner channels of a Mamba-2 layer in a model of width `hidden_size`."""
        return self.expand * hidden_size if self.inner_size is None else self.inner_size

    def num_heads(self, hidden_size: int) -> int:
        """Return the number of heads of a Mamba-2 layer in a model of width `hidden_size`: the inner width divided by
        `head_dim`.
        """
        return self.inner(hidden_size) // self.head_dim

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Mamba-2 is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.positive(
            self, expand=self.expand, state_size=self.state_size, norm_eps=self.norm_eps
        )
        checks.one_of(self, "norm", self.norm, NORMS)
        what = "expand * hidden_size" if self.inner_size is None else "inner_size"
        if self.inner_size is not None:
            checks.positive(self, inner_size=self.inner_size)
        checks.divides(self, "head_dim", self.head_dim, what, self.inner(hidden_size))
        heads = self.num_heads(hidden_size)
        checks.divides(self, "num_groups", self.num_groups, f"{what} / head_dim", heads)
        checks.convolution_width(self)
        scales = self.projection_scales
        positive = all(isinstance(s, (int, float)) and math.isfinite(s) and s > 0 for s in scales)
        if len(scales) != 5 or not positive:
            raise ValueError(
                f"{type(self).__name__}.projection_scales={scales!r}: it must be five numbers above 0"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head K V to decay the memory and 2 K V each to write and to read.
        """
        inner, heads = self.inner(hidden_size), self.num_heads(hidden_size)
        shared = 2 * self.num_groups * self.state_size
        projections = 2.0 * hidden_size * (3 * inner + shared + heads)
        convolution = 2 * checks.convolution_taps(self) * (inner + shared)
        return projections + convolution + inner * (5 * self.state_size + 2)


class Mamba2(Mixer):
    """The layer of Mamba2: a mixer that maps [B, T, D] to [B, T, D]; `Mamba2Config` says what its options mean.

    Attributes:
        projection_bias: whether projections have biases.
        convolution_bias: whether short convolutions have biases.
    """

    projection_bias: ClassVar[bool] = False
    convolution_bias: ClassVar[bool] = True
    op = ops.linear_memory
    memory_parts = ("x_proj", "b_proj", "dt_proj")
    token_parts = ("c_proj", "x_proj", "b_proj", "dt_proj")

    def __init__(
        self, config: Mamba2Config, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.num_heads = config.num_heads(hidden_size)
        inner, shared = config.inner(hidden_size), config.num_groups * config.state_size
        dense: dict[str, Any] = dict(rngs=rngs, init_std=init_std, bias=self.projection_bias)
        into: dict[str, Any] = dict(dense, axes=("embed", "heads"))
        self.z_proj = Dense(hidden_size, inner, **into)
        self.x_proj = Dense(hidden_size, inner, **into)
        self.b_proj = Dense(hidden_size, shared, **into)
        self.c_proj = Dense(hidden_size, shared, **into)
        self.dt_proj = Dense(hidden_size, self.num_heads, **into)
        convolution: dict[str, Any] = dict(width=config.conv_size, rngs=rngs, axis="heads")
        convolution["bias"] = self.convolution_bias
        self.x_conv = short_convolution("x", inner, **convolution)
        self.b_conv = short_convolution("b", shared, **convolution)
        self.c_conv = short_convolution("c", shared, **convolution)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        self.dt_bias = parameter(log_uniform_step_bias(rngs, self.num_heads), **fixed)
        self.a_log = parameter(log_uniform_rate(rngs, self.num_heads, low=1.0, high=16.0), **fixed)
        self.skip = parameter(jnp.ones(self.num_heads, jnp.float32), **fixed)
        ones = jnp.ones(inner, jnp.float32)
        self.norm_scale = None if config.norm == "none" else parameter(ones, **fixed)
        self.o_proj = Dense(inner, hidden_size, axes=("heads", "embed"), **dense)

    def _projected(self, x: jax.Array, *names: str) -> list[jax.Array]:
        """Return the projections of x to z, x, B, C or dt with these names, times their scales; that to dt in float32."""
        scales = dict(zip(("z", "x", "b", "c", "dt"), self.config.projection_scales, strict=True))
        layers = [(getattr(self, f"{n}_proj"), jnp.float32 if n == "dt" else None) for n in names]
        projected = zip(names, project_together(x, *layers, apart=True), strict=True)
        return [y if scales[n] == 1 else scales[n] * y for n, y in projected]

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return Mamba-2's queries C [B, T, groups, N] of tokens x [B, T, D], N state channels for each group
        of heads, and the context.
        """
        b, c, dt = self._projected(x, "b", "c", "dt")
        context = context.add(saved={"b": b, "dt": dt})
        c, context = self.c_conv(c, context)
        return split_heads(c, self.config.num_groups), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys B [B, T,
        groups, N], values Δ x [B, T, H, V] with the step size Δ, and the log decay Δ A [B, T, H] with the rate A. Where the op applies
        Δ and the skip (`_in_kernel`), the values are x, log_write is log Δ [B, T, H], and skip is D [H].
        """
        saved = context.saved
        b, dt = (saved["b"], saved["dt"]) if "b" in saved else self._projected(x, "b", "dt")
        dt = dt + self.dt_bias[...]
        step = jax.nn.softplus(dt)
        (inner,) = self._projected(x, "x")
        inner, context = self.x_conv(inner, context)
        inner = split_heads(inner, self.num_heads)

        @recomputed
        def scaled(inner, step):
            return (inner * step[..., None]).astype(x.dtype)

        b, context = self.b_conv(b, context)
        written = dict(
            k=split_heads(b, self.config.num_groups), log_decay=-jnp.exp(self.a_log[...]) * step
        )
        if self._in_kernel() and x.shape[1] > 1:
            # softplus(x) is e^x to rounding below -15, and 0 below -104.
            log_step = jnp.where(dt < -15, dt, jnp.log(jnp.where(dt < -15, 1.0, step)))
            return written | dict(v=inner, log_write=log_step, skip=self.skip[...]), context
        return written | dict(v=scaled(inner, step)), context.add(bypass={"inner": inner})

    def _in_kernel(self) -> bool:
        """Return whether the op multiplies x by Δ and adds D x, which Hopper's kernel does in registers, and the kernel of the gated norm
        has no skip: on Hopper by default, elsewhere where the config asks for that kernel alone."""
        if type(self).op is not ops.linear_memory:
            return False
        names = self.config.op.names()
        return names == ("mosaic_gpu",) or not names and "9.0" in compute_capabilities()

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: add the skip D x,
        multiply by silu(z), where z is a projection of x, normalise each group of heads, and project. The config's `norm` may
        change the order, or leave the norm out.
        """
        (z,) = self._projected(x, "z")
        z = split_heads(z, self.num_heads)
        inner = context.bypass.get("inner")  # if it is absent, o contains the skip
        skip = None if inner is None else self.skip[...]
        if self.norm_scale is None:
            y = _gated(o, inner, z, skip)
        else:
            # The kernel was timed in this step with a gate before the norm; with a skip it is automatic.
            timed = inner is None and self.config.norm == "after_gate" and self._in_kernel()
            scale = split_heads(self.norm_scale[...], self.num_heads)
            group = self.num_heads // self.config.num_groups
            product = product_of(self.o_proj)
            if timed and product is not None and fuses_product(o, z, group):
                norm = NormOptions(self.config.norm_eps, group, "silu", gate_first=True)
                kernel = self.o_proj.kernel[...].astype(o.dtype)
                return gated_norm_product(norm, product, o, z, scale, kernel), context
            y = ops.gated_rms_norm(
                o, z, scale, skip=skip, skip_input=inner, eps=self.config.norm_eps, group=group,
                gate_first=self.config.norm == "after_gate",
                implementation=("mosaic_gpu", "xla") if timed else None,
            )  # fmt: skip
        return self.o_proj(merge_heads(y)), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `linear_memory` that do not depend on the input; the scale is 1, so that
        queries are not scaled.
        """
        return dict(super().options(), scale=1.0)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        return ops.linear_state(
            batch_size, self.num_heads, self.config.state_size, self.config.head_dim
        )


@recomputed
def _gated(o: jax.Array, inner: Any, z: jax.Array, skip: Any) -> jax.Array:
    """Return (o + D x) silu(z), all [B, T, H, V], computed in float32; x and D are None if o contains D x."""
    wide = jnp.promote_types(o.dtype, jnp.float32)
    y = o.astype(wide)
    y = y if inner is None else y + skip[:, None] * inner.astype(wide)
    return (y * jax.nn.silu(z.astype(wide))).astype(o.dtype)


METHOD = Method(
    name="mamba2",
    paper="arXiv 2405.21060",
    op="linear_memory",
    gate="exp(-A Δ), each head",
    write="Δ Bᵀ x",
    read="C M + D x",
    state="N × V a head; 3 tokens of x, B, C",
    config=Mamba2Config,
    module=Mamba2,
    feedforward=None,
)
