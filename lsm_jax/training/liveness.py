"""Estimate the peak memory in bytes of a traced function, from its jaxpr and without compiling it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend import core

# Operations that a compiler fuses into the operations that read their results: the results are stored only if
# a matrix product or a loop reads them.
_FUSED = frozenset(
    """
    abs add and broadcast_in_dim clamp convert_element_type copy cos div eq erf exp exp2 expand_dims expm1 floor ge gt
    integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad pow rem reshape rev round rsqrt select_n
    sign sin slice split sqrt square squeeze stop_gradient sub tan tanh transpose xor name
    """.split()
)
_REPEATED = frozenset("broadcast_in_dim expand_dims reshape squeeze".split())
_NOTHING = frozenset("empty empty2 platform_index".split())
_REDUCED = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or argmax argmin".split())


def peak_bytes(jaxpr: Any, platform: str) -> int:
    """Return the most bytes of arrays that exist at a time while a jaxpr's equations are executed in order,
    including its results but not its arguments.

    Elementwise results that only elementwise operations and reductions read count as fused into them, and
    their operands exist until then. A loop needs the peak of its body in addition to the arrays that it
    carries and stacks.

    Args:
        jaxpr: `jax.make_jaxpr(...)(...).jaxpr`, with the shapes of one device.
        platform: "cpu", "cuda" or "tpu", to select the branches of `jax.lax.platform_dependent`.
    """
    equations, results = _flat(jaxpr, platform)
    arguments = set(map(id, jaxpr.invars)) | set(map(id, jaxpr.constvars))
    consumers: dict[int, list[str]] = {}
    for name, _, ins, _ in equations:
        for var in ins:
            consumers.setdefault(id(var), []).append(name)
    final = {id(var) for var in results if not isinstance(var, core.Literal)}
    roots: dict[int, set[int]] = {}
    size: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for index, (name, _, ins, outs) in enumerate(equations):
        operands = {root for var in ins for root in roots.get(id(var), {id(var)})}
        for root in operands:
            last_use[root] = index
        for var in outs:
            if _is_empty(var):
                roots[id(var)], size[id(var)] = set(), 0
                continue
            readers = consumers.get(id(var), [])
            virtual = (
                name in _FUSED
                and id(var) not in final
                and bool(readers)
                and all(r in _FUSED | _REDUCED for r in readers)
            )
            roots[id(var)] = operands if virtual else {id(var)}
            size[id(var)] = 0 if virtual else _bytes(var)
    for var in final:
        for root in roots.get(var, {var}):
            last_use[root] = len(equations)
    ending: dict[int, list[int]] = {}
    for var, index in last_use.items():
        if var not in arguments:
            ending.setdefault(index, []).append(var)
    live = peak = 0
    for index, (_, inner, _, outs) in enumerate(equations):
        live += sum(size[id(var)] for var in outs)
        peak = max(peak, live + inner)
        live -= sum(size.get(var, 0) for var in ending.get(index, []))
        live -= sum(size[id(var)] for var in outs if id(var) not in last_use)
    return peak


def result_bytes(jaxpr: Any, platform: str) -> int:
    """Return the bytes of a jaxpr's results that are not also its arguments, such as the residuals that a
    layer saves for its backward pass.

    Each result is counted once; a result that only repeats or reshapes another array is counted as that
    array.

    Args:
        jaxpr: `jax.make_jaxpr(...)(...).jaxpr`, with the shapes of one device.
        platform: "cpu", "cuda" or "tpu", to select the branches of `jax.lax.platform_dependent`.
    """
    equations, results = _flat(jaxpr, platform)
    source: dict[int, list[Any]] = {
        id(out): ins for name, _, ins, outs in equations if name in _REPEATED for out in outs
    }
    sizes, seen, remaining = {}, set(map(id, (*jaxpr.invars, *jaxpr.constvars))), list(results)
    while remaining:
        var = remaining.pop()
        if isinstance(var, core.Literal) or id(var) in seen:
            continue
        seen.add(id(var))
        if id(var) in source:
            remaining += source[id(var)]
        elif not _is_empty(var):
            sizes[id(var)] = _bytes(var)
    return sum(sizes.values())


def _bytes(var: Any) -> int:
    aval = var.aval
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return int(aval.size) * aval.dtype.itemsize


def _inner(equation: Any) -> list[Any]:
    """Return the jaxprs that an equation of a jaxpr contains in its parameters, such as the body of a loop."""
    jaxprs = []
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                jaxprs.append(part.jaxpr)
            elif isinstance(part, core.Jaxpr):
                jaxprs.append(part)
    return jaxprs


class _Var:
    """An output of an equation in a jaxpr whose calls have been inlined. It replaces the jaxpr's variable,
    because each array in a function that is called twice must be counted as two arrays.

    Attributes:
        aval: the shape and dtype of the array.
        empty: whether the array needs no memory: JAX's placeholder for residuals of another platform's branch.
    """

    def __init__(self, aval: Any, empty: bool):
        self.aval, self.empty = aval, empty


def _grouped_product_bytes(equation: Any) -> int:
    """Return the bytes of temporary arrays of a grouped matrix product (`ragged_dot`) that is not computed by
    Hopper's kernel: XLA then stores all input and output rows once per group, and all of this twice."""
    groups = equation.invars[2].aval.size
    rows = [v for v in (*equation.invars[:2], *equation.outvars) if v.aval.shape[0] != groups]
    return 2 * groups * sum(map(_bytes, rows))


def _is_empty(var: Any) -> bool:
    return isinstance(var, _Var) and var.empty


_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "custom_lin",
)


def _called(equation: Any, platform: str) -> tuple[Any, list[Any]] | None:
    """Return (the jaxpr that an equation calls, the operands that it passes) if the equation is a call, such
    as of a jitted function, or a choice between platforms, which is treated as a call of the branch for
    `platform`; return None for other equations."""
    inner, given = _inner(equation), list(equation.invars)
    if choices := equation.params.get("branches_platforms"):
        index = next(
            (i for i, names in enumerate(choices) if names and platform in names),
            choices.index(None),
        )
        return inner[index], given[1:]
    return (inner[0], given) if equation.primitive.name in _CALLS and len(inner) == 1 else None


def _flat(
    jaxpr: Any, platform: str, names: dict[int, Any] | None = None
) -> tuple[list[Any], list[Any]]:
    """Return (equations, results) of a jaxpr after its calls are inlined and its choices between platforms
    are replaced by the branch of `platform`.

    An equation is a tuple (name of its primitive, peak bytes of the arrays inside it, such as those of a loop's
    body, input variables, output variables). `names` maps the id of a variable of the jaxpr to the variable
    that replaces it; None is an empty map.
    """
    names = {} if names is None else names
    equations = []

    def resolve(var):
        return names.get(id(var), var)

    for equation in jaxpr.eqns:
        ins = [resolve(v) for v in equation.invars if not isinstance(v, core.Literal)]
        ins = [v for v in ins if not isinstance(v, core.Literal)]
        if (call := _called(equation, platform)) is not None:
            body, operands = call
            inner_names = {
                id(var): given if isinstance(given, core.Literal) else resolve(given)
                for var, given in zip(body.invars, operands, strict=True)
            }
            inner_equations, results = _flat(body, platform, inner_names)
            equations += inner_equations
            for var, result in zip(equation.outvars, results, strict=True):
                names[id(var)] = result
            continue
        name = equation.primitive.name
        # The buffers of a kernel are not in device memory.
        inner = [] if name == "pallas_call" else _inner(equation)
        inside = max((peak_bytes(body, platform) for body in inner), default=0)
        # A trace without a GPU does not have Hopper's kernel for bfloat16.
        if name.startswith("ragged_dot") and (
            platform != "cuda" or ins[0].aval.dtype != jnp.bfloat16
        ):
            inside = _grouped_product_bytes(equation)
        empty = name in _NOTHING or (
            name in _REPEATED and bool(ins) and all(_is_empty(var) for var in ins)
        )
        outs = [_Var(var.aval, empty) for var in equation.outvars]
        names |= {id(var): out for var, out in zip(equation.outvars, outs, strict=True)}
        equations.append((name, inside, ins, outs))
    return equations, [resolve(v) for v in jaxpr.outvars]
