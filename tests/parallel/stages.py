"""Compare a pipeline that is cut at layers, of made-up layers whose order shows, with the layers in order; `tests.parallel.traffic`
runs it in a process of eight devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax.parallel import MeshConfig, Stages, make_mesh, pipelined_at_layers, transfers

CUT = Stages((0, 0, 0, 1), 2)
AXES = {0: [("layers", None)], 1: [("layers", None, "embed"), ("layers", None)]}


def apply(kind: int, arrays, number, x, rows, constant):
    """Apply a made-up layer, and return its statistics; both depend on the layer's kind and number, so that a wrong order
    shows.
    """
    if kind == 0:
        x = jnp.tanh(arrays[0] * x + rows + constant * number)
    else:
        x = jnp.sin(x @ arrays[0]) + arrays[1].sum() * number
    return x, {f"{kind}_mean": jnp.mean(x), "rows_count": number * jnp.ones(()) * x.shape[0]}


def in_order(layers, x, rows, constant):
    """Return x after all layers, and the statistics of each layer by its number."""
    statistics, taken = {}, [0, 0]
    for number, kind in enumerate(CUT.kinds):
        arrays = [a[taken[kind]] for a in layers[kind]]
        taken[kind] += 1
        x, statistics[number] = apply(kind, arrays, number, x, rows, constant)
    return x, statistics


def in_stages(layers, x, rows, constant):
    """Return the same as `in_order`, from the pipeline."""

    def program(sequence, entries, carry, rows, constant):
        found = {0: [], 1: []}
        for kind in sequence:
            arrays, number = entries[kind][len(found[kind])]
            carry, aux = apply(kind, arrays, number, carry, rows, constant)
            found[kind].append(aux)
        for kind, several in found.items():
            zeros = {f"{kind}_mean": jnp.zeros(()), "rows_count": jnp.zeros(())}
            several += [zeros] * (CUT.entries(kind) - len(several))
        return carry, {k: jax.tree.map(lambda *a: jnp.stack(a), *v) for k, v in found.items()}

    def stage(layers, carry, rows, constant):
        index, entries = layers
        programs = [lambda *a, s=s: program(s, *a) for s in CUT.programs()]
        return jax.lax.switch(index, programs, entries, carry, rows, constant)

    x, found = pipelined_at_layers(stage, CUT, layers, AXES, x, rows, constant, microbatches=4)
    statistics = {}
    for kind in (0, 1):
        for entry, position in enumerate(CUT.table(kind).reshape(-1)):
            if position < len(CUT.layers_of(kind)):
                number = int(CUT.layers_of(kind)[position])
                statistics[number] = {
                    name: (jnp.sum if name.endswith("_count") else jnp.mean)(value[entry], axis=0)
                    for name, value in found[kind].items()
                }
    return x, dict(sorted(statistics.items()))


def made_up() -> int:
    """Assert that values, statistics and all gradients of the stages are those of the layers in order; return how many bytes
    each device sends by all-to-all.
    """
    rng = np.random.default_rng(0)
    layers = {
        0: [rng.normal(size=(3, 4))],
        1: [rng.normal(size=(1, 4, 4)), rng.normal(size=(1, 3))],
    }
    x, rows = rng.normal(size=(2, 8, 4))

    def gradient_of(run):
        def loss(layers, x, rows, constant):
            y, statistics = run(layers, x, rows, constant)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), (y, statistics)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))

    given = jax.tree.map(jnp.float32, (layers, x, rows, 0.1))
    expected = gradient_of(in_order)(*given)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, pipeline=2), jax.devices()[:2])):
        compiled = gradient_of(in_stages).lower(*given).compile()
        got = compiled(*given)
    # The mean of a microbatch's rows is averaged, and the rows of each microbatch are counted.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    return sum(t.bytes for t in transfers(compiled) if t.kind == "all-to-all")
