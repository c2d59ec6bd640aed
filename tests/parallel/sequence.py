"""Compare each op on rows that devices share with the op on one device: outputs, final state, and gradients
of both.

The kinds of calls: plain rows, documents that span devices, masked tokens, an initial state, and one state
per segment. `test_sequence` runs it in a process of eight devices:
`python -m tests.parallel.sequence DEVICES:CASE:FORM:KIND ...`.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops.cases import CASES, Case, call, make_inputs, make_state
from tests.parallel.sequence_models import mesh_of

BATCH, LENGTH = 2, 29  # not a multiple of any number of devices
KINDS = ("plain", "documents", "masked", "state", "segments")


def settings(kind: str, case: Case) -> dict:
    """Return the arguments that an op gets, besides its inputs, in one kind of call (such as "documents" or
    "segments").
    """
    rng = np.random.default_rng(3)
    ids = np.sort(rng.integers(1, 5, size=(BATCH, LENGTH)), axis=1)
    ids[1] = np.where(np.arange(LENGTH) < 17, 2, 3)  # documents longer than several shards
    ids[rng.random(ids.shape) < 0.1] = 0
    mask = rng.random((BATCH, LENGTH)) < 0.5
    given: dict = {}
    if kind == "documents":
        given["segment_ids"] = ids
    elif kind == "masked":
        given["update_mask"] = mask
    elif kind == "state":
        given = {"segment_ids": ids, "update_mask": mask, "initial_state": make_state(case, BATCH)}
        given["initial_state"] = given["initial_state"]._replace(
            segment_id=jnp.asarray([1, 3], jnp.int32)
        )
    elif kind == "segments":
        mixed = rng.integers(0, 4, size=(BATCH, LENGTH))
        given = {"segment_ids": mixed, "initial_state": make_state(case, BATCH, num_segments=3)}
    return jax.tree.map(jnp.asarray, given)


def measure(case: Case, form: str | None, inputs: dict, given: dict):
    """Return an op's outputs, its final state, and the gradients of a sum of all their entries with
    different weights.
    """
    floats = {n: x for n, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    state = given.get("initial_state")

    def loss(floats, state):
        more = {} if state is None else {"initial_state": state}
        out = call(case, inputs | floats, form=form, **(given | more))
        total = 0.0
        for x in jax.tree.leaves(out):
            if jnp.issubdtype(x.dtype, jnp.inexact):
                weights = np.cos(np.arange(x.size)).reshape(x.shape)
                total = total + jnp.sum(jnp.real(x) * weights)
                if jnp.iscomplexobj(x):
                    total = total + jnp.sum(
                        jnp.imag(x) * np.sin(np.arange(x.size)).reshape(x.shape)
                    )
        return total, out

    (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True, allow_int=True)(floats, state)
    return out, [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]


def compare(case: Case, form: str | None, kind: str, mesh) -> None:
    """Assert that an op's results on a mesh whose devices share each row equal those on one device."""
    inputs, given = make_inputs(case, BATCH, LENGTH), settings(kind, case)
    expected = jax.jit(lambda i, g: measure(case, form, i, g))(inputs, given)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda i, g: measure(case, form, i, g))(inputs, given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-9, atol=1e-10, err_msg=f"{case.name} {form} {kind}"
        )


def main(*which: str) -> None:
    """Compare ops on rows divided over devices with one device for each case DEVICES:CASE:FORM:KIND. DEVICES
    is the number of devices that share a row, or "NxM" if M devices also share the heads.
    """
    jax.config.update("jax_enable_x64", True)
    cases = {case.name: case for case in CASES}
    for given in which:
        devices, name, form, kind = given.split(":")
        compare(cases[name], None if form == "None" else form, kind, mesh_of(devices))
        print(given, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
