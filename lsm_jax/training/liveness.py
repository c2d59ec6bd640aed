"""How much memory a traced function needs at most, from its jaxpr alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend import core

# What a compiler computes inside the loop of whoever reads it: such arrays never exist, unless a product or a loop reads them.
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
    """The most bytes that exist at a time while the equations run in order, arguments apart, results included.

    Elementwise results that only elementwise operations and reductions read are taken as fused into them, and what they are
    computed from is kept until then. Loops hold their body's peak beside what they carry and stack.

    Args:
        jaxpr: of `jax.make_jaxpr(...)(...).jaxpr`, shapes those of one device.
        platform: "cpu", "cuda" or "tpu", for what `jax.lax.platform_dependent` leaves to lowering.
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
    last: dict[int, int] = {}
    for place, (name, _, ins, outs) in enumerate(equations):
        read = {root for var in ins for root in roots.get(id(var), {id(var)})}
        for root in read:
            last[root] = place
        for var in outs:
            if _is_empty(var):
                roots[id(var)], size[id(var)] = set(), 0
                continue
            readers = consumers.get(id(var), [])
            virtual = name in _FUSED and id(var) not in final and bool(readers) and all(r in _FUSED | _REDUCED for r in readers)  # fmt: skip
            roots[id(var)] = read if virtual else {id(var)}
            size[id(var)] = 0 if virtual else _bytes(var)
    for var in final:
        for root in roots.get(var, {var}):
            last[root] = len(equations)
    ending: dict[int, list[int]] = {}
    for var, place in last.items():
        if var not in arguments:
            ending.setdefault(place, []).append(var)
    live = peak = 0
    for place, (_, inner, _, outs) in enumerate(equations):
        live += sum(size[id(var)] for var in outs)
        peak = max(peak, live + inner)
        live -= sum(size.get(var, 0) for var in ending.get(place, []))
        live -= sum(size[id(var)] for var in outs if id(var) not in last)
    return peak


def result_bytes(jaxpr: Any, platform: str) -> int:
    """Bytes of the results that are no arguments, as of `peak_bytes`.

    Each is counted once, and what only repeats or reshapes another array as that array.
    """
    equations, results = _flat(jaxpr, platform)
    source: dict[int, list[Any]] = {
        id(out): ins for name, _, ins, outs in equations if name in _REPEATED for out in outs
    }
    kept, seen, left = {}, set(map(id, (*jaxpr.invars, *jaxpr.constvars))), list(results)
    while left:
        var = left.pop()
        if isinstance(var, core.Literal) or id(var) in seen:
            continue
        seen.add(id(var))
        if id(var) in source:
            left += source[id(var)]
        elif not _is_empty(var):
            kept[id(var)] = _bytes(var)
    return sum(kept.values())


def _bytes(var: Any) -> int:
    aval = var.aval
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return int(aval.size) * aval.dtype.itemsize


def _inner(equation: Any) -> list[Any]:
    """The jaxprs in an equation."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                found.append(part.jaxpr)
            elif isinstance(part, core.Jaxpr):
                found.append(part)
    return found


class _Var:
    """An array of the program written out; a body that is called twice has two of each of its own.

    `empty` where it holds nothing: what another platform's branch would leave for the backward pass.
    """

    def __init__(self, aval: Any, empty: bool):
        self.aval, self.empty = aval, empty


def _of_every_group(equation: Any) -> int:
    """Bytes of what a product of groups makes outside Hopper: the rows, in and out, once for every group, and some again."""
    groups = equation.invars[2].aval.size
    rows = [v for v in (*equation.invars[:2], *equation.outvars) if v.aval.shape[0] != groups]
    return 2 * groups * sum(map(_bytes, rows))


def _is_empty(var: Any) -> bool:
    return isinstance(var, _Var) and var.empty


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_lin")  # fmt: skip


def _called(equation: Any, platform: str) -> tuple[Any, list[Any]] | None:
    """The jaxpr that a call, or a choice by platform, runs, and what it is given; None for other equations."""
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
    """(equations as (primitive, bytes of its inside, inputs, outputs), results), calls and the platform's choices written out."""
    names = {} if names is None else names
    equations = []

    def known(var):
        return names.get(id(var), var)

    for equation in jaxpr.eqns:
        ins = [known(v) for v in equation.invars if not isinstance(v, core.Literal)]
        ins = [v for v in ins if not isinstance(v, core.Literal)]
        if (call := _called(equation, platform)) is not None:
            body, operands = call
            own = {
                id(var): given if isinstance(given, core.Literal) else known(given)
                for var, given in zip(body.invars, operands, strict=True)
            }
            more, results = _flat(body, platform, own)
            equations += more
            for var, result in zip(equation.outvars, results, strict=True):
                names[id(var)] = result
            continue
        name = equation.primitive.name
        # What a kernel holds while it runs is not device memory.
        inner = [] if name == "pallas_call" else _inner(equation)
        inside = max((peak_bytes(body, platform) for body in inner), default=0)
        # Without a card, Hopper's kernel for bfloat16 is not in the trace.
        if name.startswith("ragged_dot") and (platform != "cuda" or ins[0].aval.dtype != jnp.bfloat16):  # fmt: skip
            inside = _of_every_group(equation)
        nothing = name in _NOTHING or (
            name in _REPEATED and bool(ins) and all(_is_empty(var) for var in ins)
        )
        outs = [_Var(var.aval, nothing) for var in equation.outvars]
        names |= {id(var): out for var, out in zip(equation.outvars, outs, strict=True)}
        equations.append((name, inside, ins, outs))
    return equations, [known(v) for v in jaxpr.outvars]
