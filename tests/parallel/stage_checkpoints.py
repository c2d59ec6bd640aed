"""Move checkpoints between one device and a mesh whose pipeline stages are not whole periods; `test_pipeline` runs it in a process
of four devices.
"""

from __future__ import annotations

import pathlib
import sys

import grain
import jax
import numpy as np

from lsm_jax.parallel import MeshConfig, make_mesh, transfers
from lsm_jax.training.checkpoints import Checkpoints, abstract_like
from lsm_jax.training.memory_plan import plan
from lsm_jax.training.step import make_program
from tests.parallel.meshes import batch, compare, run_of

PATTERN = "linear_attention+none/softmax+none"


def main(folder: str) -> None:
    """Take training steps on a mesh whose stages are not whole periods and on one device in turn, from each other's
    checkpoints; assert that the restored state is the saved one, and that both take the same next step.
    """
    rows, data = batch(), iter(grain.MapDataset.range(4).to_iter_dataset())
    configs = {n: run_of(PATTERN, mesh=MeshConfig(data=1, pipeline=n)) for n in (1, 4)}
    meshes = {n: make_mesh(config.mesh, jax.devices()[:n]) for n, config in configs.items()}
    programs = {}
    for n in (1, 4):
        with jax.set_mesh(meshes[n]):
            programs[n] = make_program(configs[n], meshes[n])
    with jax.set_mesh(meshes[4]):
        state = programs[4].init()
        compiled = programs[4].train_step.lower(state, rows).compile()
        sent = sum(t.bytes for t in transfers(compiled) if t.kind == "all-to-all")
    planned = plan(configs[4], 4).communication["layers dealt out, and back"]
    assert sent == planned, (sent, planned)
    print("dealt out as planned", flush=True)
    steps = {1: programs[1].train_step, 4: compiled}
    for saves, restores in ((4, 1), (1, 4)):
        with jax.set_mesh(meshes[saves]):
            state, _ = steps[saves](state, rows)
            stored = Checkpoints(pathlib.Path(folder) / f"of {saves}")
            stored.save(1, state, data)
            stored.wait()
            saved = jax.tree.map(np.asarray, state)
            expected, metrics = steps[saves](state, rows)
            expected = jax.tree.map(np.asarray, expected.params)
        with jax.set_mesh(meshes[restores]):
            program = programs[restores]
            target = abstract_like(jax.eval_shape(program.init), program.shardings)
            state = stored.restore(target, data)
            assert state is not None
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), saved)
            after, more = steps[restores](state, rows)
        stored.close()
        compare("parameters", jax.tree.map(np.asarray, after.params), expected)
        np.testing.assert_allclose(more["train/loss"], metrics["train/loss"], rtol=1e-5)
        print(f"restored on {restores} devices", flush=True)
        state = after


if __name__ == "__main__":
    main(sys.argv[1])
