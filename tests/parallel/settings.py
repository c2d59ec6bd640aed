"""Compare each op's outputs and gradients in three settings with a call without a mesh.

The settings: a mesh with explicit axes; inside a caller's `jax.shard_map` with checked replication; and, for
the associative form and ops without forms, without `jax.jit` under a mesh that also has an axis that does not
shard rows. `test_parallel` runs it in a process of four devices: `python -m tests.parallel.settings OP ...`.
"""

from __future__ import annotations

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lsm_jax import ops
from tests.ops.cases import CASES, FAMILIES, Case, call, make_inputs, make_state

BATCH, LENGTH = 4, 11  # two chunks of eight
IDS = jnp.asarray([[1, 1, 1, 0, 2, 2, 2, 2, 1, 2, 0]] * BATCH)


def run(op: str, case: Case | None, form: str | None, kind: str, inputs: dict):
    """Return the outputs of an op (its test case, form and inputs) in one kind of call, and for each row of
    the batch a sum of all its entries in the outputs, each with a different weight.

    `kind` is "plain" (no documents), "documents" (one state per row) or "segments" (one state per segment).
    """
    ids = inputs["ids"]
    if op == "cumulative_phase":
        out = ops.cumulative_phase(inputs["angle"], segment_ids=ids)
    elif op == "time_invariant_memory":
        out = ops.time_invariant_memory(*(inputs[n] for n in ("u", "delta", "A", "B", "C")))
    else:
        assert case is not None
        given = {} if kind == "plain" else {"segment_ids": ids}
        if kind == "segments":  # made here, so that its type does not vary over devices
            state = make_state(case, ids.shape[0], num_segments=2, empty=True)
            given["initial_state"] = state
        rest = {n: x for n, x in inputs.items() if n != "ids"}
        out = call(case, rest, form=form, **given)
    rows = 0.0
    for x in jax.tree.leaves(out):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            weights = np.cos(np.arange(math.prod(x.shape[1:])).reshape(x.shape[1:]))
            rows = rows + jnp.sum(jnp.real(x) * weights, axis=tuple(range(1, x.ndim)))
    return out, rows


def compare(op: str, case: Case | None, form: str | None, kind: str, inputs: dict) -> None:
    """Assert that an op's values and gradients under each kind of mesh are those of the call without a
    mesh.
    """
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=BATCH))
    batched = {n: x.shape[0] == BATCH and x.ndim > 2 for n, x in inputs.items()} | {"ids": True}
    moving = [n for n, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.inexact)]

    def both(inputs, rows_of):
        def loss(given):
            out, rows = rows_of(inputs | given)
            return jnp.sum(weights * rows), out

        (_, out), gradient = jax.value_and_grad(loss, has_aux=True)({n: inputs[n] for n in moving})
        return out, gradient

    def plain(inputs):
        return run(op, case, form, kind, inputs)

    def place(mesh):
        rows, whole = PartitionSpec("data"), PartitionSpec()
        return {
            n: jax.device_put(x, NamedSharding(mesh, rows if batched[n] else whole))
            for n, x in inputs.items()
        }

    expected = jax.jit(lambda x: both(x, plain))(inputs)

    def check(setting, got):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            message = f"{op} {form} {kind}: {setting}"
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=message)

    mesh = jax.make_mesh((4,), ("data",))
    assert mesh.axis_types == (AxisType.Explicit,)
    with jax.set_mesh(mesh):
        out, gradient = jax.jit(lambda x: both(x, plain))(place(mesh))
        assert jax.typeof(jax.tree.leaves(out)[0]).sharding.spec[0] == "data"
    check("explicit axes", (out, gradient))

    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    if form in (
        None,
        "associative",
    ):  # otherwise each primitive is compiled alone, which takes long
        with jax.set_mesh(mesh):
            check("an extra axis, eagerly", both(inputs, plain))

    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    rows, whole = PartitionSpec("rows"), PartitionSpec()
    specs = {n: rows if batched[n] else whole for n in inputs}
    own = jax.shard_map(plain, mesh=mesh, in_specs=(specs,), out_specs=rows, check_vma=True)
    check("inside a shard_map", jax.jit(lambda x: both(x, own))(inputs))

    if form == "chunk":
        mesh = jax.make_mesh((2, 2), ("rows", "data"), axis_types=(AxisType.Auto,) * 2)
        given = dict(in_specs=(specs,), out_specs=rows, axis_names={"rows"}, check_vma=True)
        with jax.set_mesh(mesh):
            half = jax.shard_map(plain, **given)
            check("inside one over one of two axes", jax.jit(lambda x: both(x, half))(inputs))


def settings_of(op: str):
    """Return the triples (test case, form, kind of call) in which an op is compared with and without a mesh:
    one case in each of its forms. A case with a constant decay, an array without rows, is preferred.
    """
    if op not in FAMILIES:
        return [(None, None, "plain")]
    case = min(
        (c for c in CASES if c.op == op),
        key=lambda c: ("constant_decay" not in c.arrays, not c.fast),
    )
    kinds = {"recurrent": "plain", "chunk": "segments", "associative": "documents"}
    return [(case, form, kinds.get(str(form), "segments")) for form in case.forms]


def inputs_of(op: str, case: Case | None) -> dict:
    rng = np.random.default_rng(0)
    if op == "cumulative_phase":
        return {"angle": rng.uniform(-3, 3, size=(BATCH, LENGTH, 2)), "ids": IDS}
    if op == "time_invariant_memory":
        shapes = {"u": (BATCH, LENGTH, 3), "delta": (3,), "A": (3, 2), "B": (3, 2), "C": (3, 2)}
        given = {n: -np.abs(rng.normal(size=s)) for n, s in shapes.items()}
        return given | {"delta": -given["delta"], "ids": IDS}  # positive, for a decay
    assert case is not None
    return make_inputs(case, BATCH, LENGTH) | {"ids": IDS}


def main(*which: str) -> None:
    """Compare ops under meshes with calls without one, for each `OP`, with all its forms and kinds of
    calls, or `OP:FORM:KIND`.
    """
    jax.config.update("jax_enable_x64", True)
    assert jax.device_count() == 4
    for name in which:
        op, *only = name.split(":")
        for case, form, kind in settings_of(op):
            if not only or [str(form), kind] == only:
                inputs = {n: jnp.asarray(x) for n, x in inputs_of(op, case).items()}
                compare(op, case, form, kind, inputs)
                print(op, form, kind, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
