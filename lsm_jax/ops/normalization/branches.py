"""The residual stream, and its root-mean-square norm for each product that reads it: an op whose gradient is one pass over memory on
Hopper.

Of the norm and the sum in front of it, XLA computes the gradient in two passes: sums over channels, then the gradient with that of the
stream added. Here the stream goes through the op, so that all its gradients arrive together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import PALLAS, Backend, Call, check_implementation, register
from lsm_jax.ops.backends.run import Static, static_of
from lsm_jax.ops.backends.select import Selection, select
from lsm_jax.ops.core.platforms import compute_capabilities
from lsm_jax.ops.core.saved import product_input, saved
from lsm_jax.parallel import TOKENS, alone, over_mesh
from pallas_kernels.requirements import Requirement, first_unmet

_OP = "residual_norm"
_MIN_TOKENS = 64

REQUIREMENTS = (
    Requirement(
        f"{_MIN_TOKENS} tokens or more in all rows",
        lambda call: _tokens(call) >= _MIN_TOKENS,
        lambda call: str(_tokens(call)),
    ),
    *PALLAS,
)


def _tokens(call: Call) -> int:
    batch, length, _ = call.arguments["x"].shape
    return batch * length


class BranchOptions(NamedTuple):
    """The options of `residual_norm` that are constant when a program is compiled.

    Attributes:
        eps: added to the mean square.
        count: the number of norms.
    """

    eps: float
    count: int


def residual_norm(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    count: int = 1,
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], ...]]:
    """Return the residual stream x, and `count` times its norm `scale ⊙ x / sqrt(mean(x²) + eps)`, computed in float32.

    The stream continues with the first result and each product reads a norm of its own, so that their gradients are added where
    that of x is computed.

    Args:
        x: [B, T, D].
        scale: [D].
        eps: added to the mean square.
        count: the number of norms, at least 1.
        implementation: of the gradient: None (the first automatic backend that supports the call; see docs/kernels.md), a backend's
            name ("xla" or "mosaic_gpu"), or a tuple of names in order of preference. The norm itself is XLA's.

    Returns:
        x, and a tuple of norms [B, T, D] in x's dtype. All derivatives exist; only the first in reverse mode is computed by a kernel.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the requirement.
        ValueError: a shape, `count` or `implementation` is not accepted.
    """
    check_implementation(_OP, implementation)
    if x.ndim != 3 or scale.shape != x.shape[2:]:
        raise ValueError(
            f"{_OP}: x has shape {x.shape} and scale {scale.shape}; accepted are [B, T, D] and [D]"
        )
    if count < 1:
        raise ValueError(f"{_OP}: count={count!r}; accepted are numbers from 1")
    stream, *norms = over_mesh(
        _run,
        dict(x=x),
        dict(scale=scale),
        static_of(_OP, BranchOptions(eps, count), implementation),
        axes=dict(x=TOKENS[:2], scale=(None,)),
        out_axes=TOKENS[:2],
        in_sequence=alone,
    )
    return stream, tuple(norms)


def most_norms() -> int:
    """Return the largest number of norms whose gradients one kernel adds."""
    from pallas_kernels.residual_norm import MOST

    return MOST


def fuses_gradient(x: jax.Array) -> bool:
    """Return whether a kernel computes the gradient of x [B, T, D] and its norm by default: on Hopper, for the sizes and dtypes that it
    supports, where no mesh axis is explicit.
    """
    if compute_capabilities() != {"9.0"}:
        return False
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return False
    call = Call(_OP, BranchOptions(0.0, 1), dict(x=x))
    return first_unmet(REQUIREMENTS, call) is None and _unsupported_arrays(call) is None


def _unsupported_arrays(call: Call) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.residual_norm import unsupported

    x = call.arguments["x"]
    return unsupported(x, (x,) * call.options.count)


def _run(static: Static, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
    """Return the stream and its norms on one device; the backend of the gradient is selected here."""
    call = Call(static.op, static.options, dict(x=x, scale=scale), static.implementation)
    return _branches(static.options, select(call), x, scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _branches(options: BranchOptions, selection: Selection, x, scale) -> tuple[jax.Array, ...]:
    return x, *(_normed(options, x, _mean_square(x), scale),) * options.count


@_branches.defjvp
def _branches_tangent(options, selection, primals, tangents):
    x, scale = primals
    # A few numbers for each token: rematerialisation saves them, and not the pass over x.
    square = saved(_mean_square(x))
    params = dict(options=options, selection=selection)
    results = x, *(product_input(_normed(options, x, square, scale)),) * options.count
    return results, tuple(_tangents_p.bind(x, square, scale, *tangents, **params))


def _mean_square(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.mean(wide * wide, axis=-1, keepdims=True)


def _normed(options: BranchOptions, x, square, scale) -> jax.Array:
    wide = x.astype(square.dtype)
    return (wide * jax.lax.rsqrt(square + options.eps) * scale).astype(x.dtype)


def _tangents(x, square, scale, d_x, d_scale, *, options, selection) -> list[jax.Array]:
    """Return the tangents of stream and norms, a linear function of those of x and scale; `square` is the mean of x²."""

    def normed(x, scale):
        return _normed(options, x, _mean_square(x), scale)

    _, tangent = jax.jvp(normed, (x, scale), (d_x, d_scale))
    return [d_x, *[tangent] * options.count]


# A primitive, since a linear function with a transpose of its own has no second derivative in JAX (`linear_call`), and a function
# with `jax.custom_vjp` none in forward mode.
_tangents_p = jex.core.Primitive("residual_norm_tangents")
_tangents_p.multiple_results = True
_tangents_p.def_impl(_tangents)
_tangents_p.def_abstract_eval(
    lambda x, square, scale, d_x, d_scale, *, options, selection: [x] * (1 + options.count)
)
mlir.register_lowering(_tangents_p, mlir.lower_fun(_tangents, multiple_results=True))


def _tangents_jvp(primals, tangents, **params):
    instantiated = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(_tangents, **params), tuple(primals), instantiated)


def _tangents_batched(arguments, axes, **params):
    results = jax.vmap(functools.partial(_tangents, **params), in_axes=tuple(axes))(*arguments)
    return results, [0] * len(results)


def _tangents_transposed(gradients, x, square, scale, d_x, d_scale, *, options, selection):
    d_stream, *d_norms = (None if type(g) is ad.Zero else g for g in gradients)
    d_norms = tuple(g for g in d_norms if g is not None)
    if d_norms:
        results = _gradients(options, selection, x, square, scale, d_stream, d_norms)
    else:
        results = d_stream, jnp.zeros_like(scale)
    wanted = ad.is_undefined_primal(d_x), ad.is_undefined_primal(d_scale)
    return [None, None, None, *(g if w else None for g, w in zip(results, wanted, strict=True))]


ad.primitive_jvps[_tangents_p] = _tangents_jvp
ad.primitive_transposes[_tangents_p] = _tangents_transposed
batching.primitive_batchers[_tangents_p] = _tangents_batched


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(options, selection, x, square, scale, d_stream, d_norms):
    arguments = dict(x=x, square=square, scale=scale, d_stream=d_stream, d_norms=d_norms)
    call = Call(_OP, options, arguments)
    return selection.function(lambda backend: functools.partial(backend.run, call))()


@_gradients.defjvp
def _gradients_tangent(options, selection, primals, tangents):
    # The mean square is computed again, since it is a function of x whose tangent is not known here.
    def of(x, scale, d_stream, d_norms):
        return gradients(options.eps, x, scale, d_stream, d_norms)

    (x, _, *rest), (d_x, _, *d_rest) = primals, tangents
    return jax.jvp(of, (x, *rest), (d_x, *d_rest))


def gradients(eps: float, x, scale, d_stream, d_norms, square=None) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x [B, T, D] and scale [D] by XLA, from those of the stream (None is zero) and of its norms, a tuple; all
    [B, T, D]. `square` is the mean of x² over channels, [B, T, 1], or None.
    """
    square = _mean_square(x) if square is None else square
    wide = square.dtype
    root = jax.lax.rsqrt(square + eps)
    normed = x.astype(wide) * root
    total = sum(g.astype(wide) for g in d_norms[1:]) + d_norms[0].astype(wide)
    d_normed = total * scale
    d_x = root * (d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True))
    d_x = d_x if d_stream is None else d_x + d_stream.astype(wide)
    d_scale = jnp.sum(total * normed, axis=(0, 1))
    return d_x.astype(x.dtype), d_scale.astype(scale.dtype)


def run_xla(call: Call) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients of x and scale by XLA."""
    return gradients(call.options.eps, **call.arguments)


def run_kernel(call: Call) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients of x and scale by the fused kernel."""
    from pallas_kernels.residual_norm import residual_norm_gradients

    arguments = {name: a for name, a in call.arguments.items() if name != "square"}
    return residual_norm_gradients(**arguments, eps=call.options.eps)


register(
    _OP,
    Backend(
        name="mosaic_gpu",
        run=run_kernel,
        requirements=REQUIREMENTS,
        more=_unsupported_arrays,
        platforms=("cuda",),
        compute_capabilities=("9.0",),
    ),
    Backend(name="xla", run=run_xla),
)
