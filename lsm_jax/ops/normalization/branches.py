"""The residual stream, and its root-mean-square norm for each product that reads it: an op whose gradient is one pass over memory on
Hopper, and whose value is another, if what a layer adds to the stream is added by the op.

Of the norm and the sum in front of it, XLA computes value and gradient in two passes each: the sum with its mean square, then the norm;
sums over channels, then the gradient with that of the stream added. Here the stream goes through the op, so that all its gradients arrive
together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
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
_SUM = "residual_norm_forward"
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
    added: Float[Array, "B T D"] | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], ...]]:
    """Return the residual stream x, or x + added, and `count` times its norm `scale ⊙ x / sqrt(mean(x²) + eps)`, computed in float32.

    The stream continues with the first result and each product reads a norm of its own, so that their gradients are added where
    that of x is computed.

    Args:
        x: [B, T, D].
        scale: [D].
        eps: added to the mean square.
        count: the number of norms, at least 1.
        added: [B, T, D] in x's dtype, what a layer adds to the stream; None adds nothing. The sum is rounded to this dtype before it is
            normalised.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a backend's name ("xla" or
            "mosaic_gpu"), or a tuple of names in order of preference; of the gradient, and with `added` of the value. Without `added`,
            the norm itself is XLA's.

    Returns:
        The stream, and a tuple of norms [B, T, D] in x's dtype. All derivatives exist; only the value and the first derivative in
        reverse mode are computed by kernels.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the requirement.
        ValueError: a shape, a dtype, `count` or `implementation` is not accepted.
    """
    check_implementation(_OP, implementation)
    if x.ndim != 3 or scale.shape != x.shape[2:]:
        raise ValueError(
            f"{_OP}: x has shape {x.shape} and scale {scale.shape}; accepted are [B, T, D] and [D]"
        )
    if count < 1:
        raise ValueError(f"{_OP}: count={count!r}; accepted are numbers from 1")
    if added is not None and (added.shape != x.shape or added.dtype != x.dtype):
        raise ValueError(
            f"{_OP}: added has shape {added.shape} and dtype {added.dtype}; accepted are those of x, {x.shape} and {x.dtype}"
        )
    stream, *norms = over_mesh(
        _run,
        dict(x=x, added=added),
        dict(scale=scale),
        static_of(_OP, BranchOptions(eps, count), implementation),
        axes=dict(x=TOKENS[:2], added=TOKENS[:2], scale=(None,)),
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


def fuses_sum(x: jax.Array) -> bool:
    """Return whether kernels compute the gradient of x [B, T, D] and its norm, and by default x as a sum with its norm."""
    call = Call(_SUM, BranchOptions(0.0, 1), dict(x=x, added=x))
    return fuses_gradient(x) and _unsupported_sum(call) is None


def _unsupported_sum(call: Call) -> str | None:
    from pallas_kernels.residual_norm import unsupported_forward

    return unsupported_forward(call.arguments["x"], call.arguments["added"])


def _unsupported_arrays(call: Call) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.residual_norm import unsupported

    x = call.arguments["x"]
    return unsupported(x, (x,) * call.options.count)


def _run(static: Static, x, added, scale) -> tuple[jax.Array, ...]:
    """Return the stream and its norms on one device; the backends of gradient and value are selected here."""
    arguments = dict(x=x, scale=scale)
    of_gradient = select(Call(static.op, static.options, arguments, static.implementation))
    if added is None:
        return _branches(static.options, of_gradient, x, scale)
    arguments = dict(x=x, added=added, scale=scale)
    of_value = select(Call(_SUM, static.options, arguments, static.implementation))
    return _sum(static.options, (of_value, of_gradient), x, added, scale)


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
    return results, tuple(_tangents_p.bind(x, _root(options, square), scale, *tangents, **params))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _sum(options: BranchOptions, selections: tuple[Selection, Selection], x, added, scale):
    stream, normed, _ = _sum_values(options, selections[0], x, added, scale)
    return stream, *(normed,) * options.count


@_sum.defjvp
def _sum_tangent(options, selections, primals, tangents):
    scale, (d_x, d_added, d_scale) = primals[2], tangents
    stream, stored, root = _sum_values(options, selections[0], *primals)
    # Saved instead of the two terms, so that the backward pass neither adds them nor runs the kernel again.
    stream, root = saved(stream), saved(root)
    normed = product_input(_normed_p.bind(stream, root, scale, stored))
    d_stream = ad.add_tangents(ad.instantiate_zeros(d_x), ad.instantiate_zeros(d_added))
    params = dict(options=options, selection=selections[1])
    results = stream, *(normed,) * options.count
    return results, tuple(_tangents_p.bind(stream, root, scale, d_stream, d_scale, **params))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _sum_values(options, selection, x, added, scale) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the sum, its norm, and the root [B, T, 1]."""
    call = Call(_SUM, options, dict(x=x, added=added, scale=scale))
    with jax.named_scope(_SUM):
        return selection.function(lambda backend: functools.partial(backend.run, call))()


@_sum_values.defjvp
def _sum_values_tangent(options, selection, primals, tangents):
    return jax.jvp(functools.partial(sum_and_norm, options.eps), primals, tangents)


def sum_and_norm(eps: float, x, added, scale) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return by XLA the sum of x and `added`, both [B, T, D], its norm in their dtype, and what the norm multiplies it by before the
    scale, 1 / sqrt(mean square + eps), [B, T, 1].
    """
    stream = x + added
    root = jax.lax.rsqrt(_mean_square(stream) + eps)
    return stream, _scaled(stream, root, scale), root


def _scaled(x, root, scale) -> jax.Array:
    return (x.astype(root.dtype) * root * scale).astype(x.dtype)


def _stored_or_scaled(x, root, scale, *stored) -> jax.Array:
    return stored[0] if stored else _scaled(x, root, scale)


# The norm that a kernel has stored; where rematerialisation computes it again, from the stream and the root if those are saved. With the
# kernel's result alone it would run the kernel again.
_normed_p = jex.core.Primitive("residual_norm_stored")
_normed_p.def_impl(_stored_or_scaled)
_normed_p.def_abstract_eval(lambda x, *_: x)
mlir.register_lowering(_normed_p, mlir.lower_fun(_stored_or_scaled, multiple_results=False))


def _normed_jvp(primals, tangents):
    return jax.jvp(_stored_or_scaled, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _normed_batched(arguments, axes):
    return jax.vmap(_stored_or_scaled, in_axes=tuple(axes))(*arguments), 0


def _normed_again(saveable, unknown, present, eqn):
    """Return how `jax.checkpoint` divides `_normed_p` between forward and backward pass: a rule of `partial_eval_jaxpr_custom`."""
    # A stream that is computed again comes from the kernel, and the norm with it.
    again = present[0] or any(unknown)
    inputs = eqn.invars if again else eqn.invars[:3]
    needed = [
        v
        for v, p in zip(inputs, present, strict=False)
        if not p and not isinstance(v, jex.core.Literal)
    ]
    known = None if any(unknown) else eqn
    return known, eqn.replace(invars=inputs), [any(unknown)], [True], needed


ad.primitive_jvps[_normed_p] = _normed_jvp
batching.primitive_batchers[_normed_p] = _normed_batched
pe.partial_eval_jaxpr_custom_rules[_normed_p] = _normed_again


def _mean_square(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.mean(wide * wide, axis=-1, keepdims=True)


def _normed(options: BranchOptions, x, square, scale) -> jax.Array:
    wide = x.astype(square.dtype)
    return (wide * _root(options, square) * scale).astype(x.dtype)


def _root(options: BranchOptions, square) -> jax.Array:
    return jax.lax.rsqrt(square + options.eps)


def _tangents(x, root, scale, d_x, d_scale, *, options, selection) -> list[jax.Array]:
    """Return the tangents of stream and norms, a linear function of those of x and scale; `root` is 1 / sqrt(mean(x²) + eps)."""

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
    lambda x, root, scale, d_x, d_scale, *, options, selection: [x] * (1 + options.count)
)
mlir.register_lowering(_tangents_p, mlir.lower_fun(_tangents, multiple_results=True))


def _tangents_jvp(primals, tangents, **params):
    instantiated = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(_tangents, **params), tuple(primals), instantiated)


def _tangents_batched(arguments, axes, **params):
    results = jax.vmap(functools.partial(_tangents, **params), in_axes=tuple(axes))(*arguments)
    return results, [0] * len(results)


def _tangents_transposed(gradients, x, root, scale, d_x, d_scale, *, options, selection):
    d_stream, *d_norms = (None if type(g) is ad.Zero else g for g in gradients)
    d_norms = tuple(g for g in d_norms if g is not None)
    if d_norms:
        results = _gradients(options, selection, x, root, scale, d_stream, d_norms)
    else:
        results = d_stream, jnp.zeros_like(scale)
    wanted = ad.is_undefined_primal(d_x), ad.is_undefined_primal(d_scale)
    return [None, None, None, *(g if w else None for g, w in zip(results, wanted, strict=True))]


ad.primitive_jvps[_tangents_p] = _tangents_jvp
ad.primitive_transposes[_tangents_p] = _tangents_transposed
batching.primitive_batchers[_tangents_p] = _tangents_batched


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(options, selection, x, root, scale, d_stream, d_norms):
    arguments = dict(x=x, root=root, scale=scale, d_stream=d_stream, d_norms=d_norms)
    call = Call(_OP, options, arguments)
    with jax.named_scope(_OP):
        return selection.function(lambda backend: functools.partial(backend.run, call))()


@_gradients.defjvp
def _gradients_tangent(options, selection, primals, tangents):
    # The root is computed again, since it is a function of x whose tangent is not known here.
    def of(x, scale, d_stream, d_norms):
        return gradients(options.eps, x, scale, d_stream, d_norms)

    (x, _, *rest), (d_x, _, *d_rest) = primals, tangents
    return jax.jvp(of, (x, *rest), (d_x, *d_rest))


def gradients(eps: float, x, scale, d_stream, d_norms, root=None) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x [B, T, D] and scale [D] by XLA, from those of the stream (None is zero) and of its norms, a tuple; all
    [B, T, D]. `root` is 1 / sqrt(mean(x²) + eps), [B, T, 1], or None.
    """
    root = jax.lax.rsqrt(_mean_square(x) + eps) if root is None else root
    wide = root.dtype
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

    arguments = {name: a for name, a in call.arguments.items() if name != "root"}
    return residual_norm_gradients(**arguments, eps=call.options.eps)


def run_sum_xla(call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the sum, its norm and the root by XLA."""
    return sum_and_norm(call.options.eps, **call.arguments)


def run_sum_kernel(call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the sum, its norm and the root by the fused kernel."""
    from pallas_kernels.residual_norm import residual_norm_forward
    from pallas_kernels.residuals import behind_barrier

    x, added, scale = (call.arguments[name] for name in ("x", "added", "scale"))
    *arrays, root = residual_norm_forward(x, added, scale, eps=call.options.eps)
    stream, normed, root = behind_barrier((*arrays, root))
    return stream, normed, root[..., None]


register(
    _SUM,
    Backend(
        name="mosaic_gpu",
        run=run_sum_kernel,
        requirements=REQUIREMENTS,
        more=_unsupported_sum,
        platforms=("cuda",),
        compute_capabilities=("9.0",),
    ),
    Backend(name="xla", run=run_sum_xla),
)
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
