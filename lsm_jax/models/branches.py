"""A copy of a layer's input for each product that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex

_PRODUCTS = ("dot_general", "custom_vjp_call", "optimization_barrier")


def by_product(
    function: Callable[[jax.Array], Any], x: jax.Array, most: int
) -> tuple[int, Callable[..., Any]]:
    """Return a number of copies of x, at most `most`, and `function` of as many copies, as a function of copies in place of x.

    Each product that `function` computes from x reads a copy of its own, and so do functions with a backward pass of their own, as products
    in FP8, and barriers, as of `unjoined` in front of a product; all else reads the last one. So the gradients of x that are arrays in
    memory anyway arrive apart, and those that XLA adds while it computes them as a sum.
    """
    structure = []

    def flat(x):
        leaves, tree = jax.tree.flatten(function(x))
        structure.append(tree)
        return leaves

    closed = jax.make_jaxpr(flat)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    jaxpr = closed.jaxpr
    (var,) = jaxpr.invars
    products = sum(eqn.invars.count(var) for eqn in jaxpr.eqns if _is_product(eqn))
    others = jaxpr.outvars.count(var) + sum(eqn.invars.count(var) for eqn in jaxpr.eqns) - products
    copies = [jex.core.Var(var.aval) for _ in range(products + (others > 0))][:most] or [var]
    shared = copies[-1]
    own = iter(copies[: len(copies) - (others > 0)])

    def renamed(inputs: list[Any], product: bool) -> list[Any]:
        return [v if v is not var else next(own, shared) if product else shared for v in inputs]

    eqns = [eqn.replace(invars=renamed(eqn.invars, _is_product(eqn))) for eqn in jaxpr.eqns]
    names = jaxpr.debug_info.with_unknown_names()
    split = jaxpr.replace(
        invars=copies, outvars=renamed(jaxpr.outvars, False), eqns=eqns, debug_info=names
    )
    run = jex.core.jaxpr_as_fun(jex.core.ClosedJaxpr(split, closed.consts))
    return len(copies), lambda *arrays: structure[0].unflatten(run(*arrays))


def _is_product(eqn: Any) -> bool:
    return eqn.primitive.name in _PRODUCTS
