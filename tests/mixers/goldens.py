"""Results of the authors' code for recurrences and whole layers, and comparisons with them.

`goldens.npz`, `goldens_new_ops.npz`, `goldens_attention.npz`, `goldens_mla.npz` and `goldens_layers.npz` have arrays `<method>/<argument>`: inputs,
outputs, `cotangent_<output>` and `grad_<input>`, the gradients
of Σ ⟨output, cotangent⟩; `<method>/source` names the code that computed them, in float64 (layers in float32): fla is
flash-linear-attention 0.6.0, hf transformers 5.23.0, mamba state-spaces/mamba e9594ce, rg google-deepmind/recurrentgemma,
log-linear HanGuo97/log-linear-attention 7f86441, xlstm NX-AI/xlstm 032a6fb.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers

SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in ("recurrent", "associative")]
"""The forms in which goldens are compared in the slow tests only, for `pytest.mark.parametrize`."""

_PARTS = ("", "_new_ops", "_attention", "_mla", "_layers")
TOLERANCES = dict(float64=1e-10, float32=1e-5)
"""The dtypes in which ops are compared, with the largest errors."""
FILES = [Path(__file__).with_name(f"goldens{part}.npz") for part in _PARTS]


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one method or layer by their names."""
    arrays = {}
    for path in FILES:
        with np.load(path) as file:
            entries = (entry for entry in file.files if entry.partition("/")[0] == name)
            arrays |= {entry.partition("/")[2]: file[entry] for entry in entries}
    return arrays


def check(
    name: str,
    function: Callable,
    *,
    dtypes: Iterable[str] = tuple(TOLERANCES),
    symmetric: tuple[str, ...] = (),
):
    """Assert, in each of `dtypes`, that `function`, which maps the golden's arrays to outputs by name, returns the golden's outputs
    and has its gradients with respect to every input, to the dtype's tolerance times an array's largest entry (at least 1).

    Inputs named in `symmetric` are symmetric matrices, of whose gradients only the symmetric part has a meaning.
    """
    for dtype in dtypes:
        with jax.enable_x64(dtype == "float64"):
            _compare(load(name), function, name, dtype, symmetric)


def _compare(golden: dict, function: Callable, name: str, dtype: str, symmetric: tuple[str, ...]):
    given = {n: jnp.asarray(a, dtype) for n, a in golden.items() if f"grad_{n}" in golden}
    cotangents = {
        n.removeprefix("cotangent_"): jnp.asarray(a, dtype)
        for n, a in golden.items()
        if n.startswith("cotangent_")
    }

    def loss(given):
        outputs = function(given)
        return sum(jnp.vdot(outputs[n], c) for n, c in cotangents.items()), outputs

    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(given)
    results = {n: outputs[n] for n in cotangents}
    results |= {f"grad_{n}": a for n, a in gradients.items()}
    for n, actual in results.items():
        expected = golden[n]
        if n.removeprefix("grad_") in symmetric:
            actual, expected = (a + np.swapaxes(a, -1, -2) for a in (actual, expected))
        bound = TOLERANCES[dtype] * max(1.0, np.abs(expected).max())
        message = f"{name}/{n} in {dtype}"
        np.testing.assert_allclose(actual, expected, rtol=0, atol=bound, err_msg=message)


def run_layer(
    config, width: int, parameters: dict[str, jax.Array], x: jax.Array, *, memory: bool = False
) -> Any:
    """Return the output for x of the mixer with this config and these parameters, by their paths ("q_proj/kernel"); if
    `memory`, the output and the memory after the last token, from an empty state.
    """
    mixer = nnx.eval_shape(lambda: mixers.build(config, width, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(mixer)
    flat = {"/".join(map(str, path)): param for path, param in nnx.to_flat_state(state)}
    assert set(flat) == set(parameters), set(flat) ^ set(parameters)
    for path, param in flat.items():
        assert param.get_value().shape == parameters[path].shape, path
        param.set_value(parameters[path])
    mixer = nnx.merge(graph, state)
    if not memory:
        return mixer(x)[0]
    y, final, _ = mixer(x, state=mixer.init_state(*x.shape[:2], x.dtype))
    return y, final.memory
