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
    """Save a checkpoint after a training step on a mesh whose stages are not whole periods, and one on a single device;
    assert that the other restores the same state and takes the same second step.
    """
    one, cut = dict(data=1), dict(data=1, pipeline=4)

    def start(axes):
        config = run_of(PATTERN, mesh=MeshConfig(**axes))
        mesh = make_mesh(config.mesh, jax.devices()[: axes.get("pipeline", 1)])
        jax.set_mesh(mesh)
        return make_program(config, mesh), batch()

    for saves, restores in ((cut, one), (one, cut)):
        program, rows = start(saves)
        state = program.init()
        compiled = program.train_step.lower(state, rows).compile()
        if saves is cut:
            sent = sum(t.bytes for t in transfers(compiled) if t.kind == "all-to-all")
            planned = plan(run_of(PATTERN, mesh=MeshConfig(**cut)), 4).communication
            assert sent == planned["layers dealt out, and back"], (sent, planned)
            print("dealt out as planned")
        state, _ = compiled(state, rows)
        stored = Checkpoints(pathlib.Path(folder) / f"{len(saves)}")
        data = iter(grain.MapDataset.range(4).to_iter_dataset())
        stored.save(1, state, data)
        stored.wait()
        saved = jax.tree.map(np.asarray, state)
        after, metrics = compiled(state, rows)
        expected = jax.tree.map(np.asarray, (after.params, metrics))
        program, rows = start(restores)
        found = stored.restore(abstract_like(jax.eval_shape(program.init), program.shardings), data)
        assert found is not None
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found), saved)
        after, metrics = program.train_step(found, rows)
        compare("parameters", jax.tree.map(np.asarray, after.params), expected[0])
        np.testing.assert_allclose(metrics["train/loss"], expected[1]["train/loss"], rtol=1e-5)
        print("restored", restores, flush=True)
        stored.close()


if __name__ == "__main__":
    main(sys.argv[1])
