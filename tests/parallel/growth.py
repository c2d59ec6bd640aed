"""Training runs on four devices whose buffers for the choices of experts overflow: the buffers grow, and no
step is lost.

Tests run it in a process of four devices: `python -m tests.parallel.growth FOLDER CASE...`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import text as benchmark_text
from configs import linear_moe
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import MoEConfig
from lsm_jax.models import Decoder
from lsm_jax.parallel import MeshConfig, make_mesh, place_batch, token_sharding
from lsm_jax.training import TrainConfig, loop, read_rows, train
from lsm_jax.training.expert_buffers import ExpertBuffers
from lsm_jax.training.loop import TrainLoop
from lsm_jax.training.step import OVERFLOW, make_program, params_of
from tests.parallel.meshes import batch, regrouped, run_of
from tests.training.tiny import stop_at, write_text


class Killed(Exception):
    """Raised by a test to end a training run at that point: nothing more is saved."""


def config(folder: Path, buffer: float, **changes) -> TrainConfig:
    """Return the training config of a run of 12 steps with experts, in which step 3 requires an
    `expert_buffer` above 2.4.
    """
    made = run_of("linear_attention+moe", mesh=MeshConfig(data=1, expert=4))
    experts = dict(num_experts=8, top_k=2, expert_size=8, balance_scale=0.0)
    made.model.num_layers, made.model.vocab_size = 1, 257
    made.model.layers["A"].feedforward = MoEConfig(**experts, expert_buffer=buffer)
    made.data = DataConfig(path=str(folder / "text"), sequence_length=16, num_threads=0, prefetch=0)
    made.data.heldout_fraction = 0.2
    made.optimizer.peak_lr, made.optimizer.warmup_tokens = 3e-2, 256
    fields = dict(total_tokens=12 * 128, log_every=1, eval_every=0, checkpoint_every=1000)
    return dataclasses.replace(made, **fields | dict(keep_last=100) | changes)


def values(workdir: Path, name: str = "train/loss") -> dict[int, float]:
    """Return the values of the metric `name` in a training run's metrics.jsonl by step, and assert that no
    step occurs twice.
    """
    rows = [row for row in read_rows(workdir / "metrics.jsonl") if name in row]
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row[name] for row in rows}


def growths(workdir: Path) -> list[tuple[int, str, float]]:
    """Return (training step, "training" or "evaluation", in which choices of experts did not fit, new
    `expert_buffer`) for each time that the expert buffers of a run became larger.
    """
    found = json.loads((workdir / "expert_buffers.json").read_text())["growths"]
    return [(g["step"], g["during"], g["expert_buffer"]["A"]) for g in found]


def steps_of(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def raising(*args):
    raise Killed


def run(folder: Path) -> None:
    """Check that a run whose buffers of experts grow has the losses of one that began with the largest
    buffer, also if it is killed.
    """
    large = folder / "large"
    train(config(folder, 4.0), large)
    expected = values(large)
    assert list(expected) == list(range(1, 13)) and not (large / "expert_buffers.json").exists()
    assert set(values(large, OVERFLOW).values()) == {0}

    # Steps 1 and 3 overflow. The step that was already started when the host read it is taken again, too.
    grown = folder / "grown"
    assert train(config(folder, 1.2), grown).step == 12
    assert values(grown) == expected
    assert growths(grown) == [(1, "training", 2.4), (3, "training", 4.0)]
    assert steps_of(grown) == [2, 12]
    counts, buffers = values(grown, OVERFLOW), values(grown, "moe/expert_buffer")
    assert 0 < counts[1] == counts[2] < counts[3] == counts[12]
    assert buffers == {step: 2.4 if step < 3 else 4.0 for step in range(1, 13)}
    assert set(values(grown, "train/skipped_steps").values()) == {0}
    saved = json.loads((grown / "config.json").read_text())
    assert saved["model"]["layers"]["A"]["feedforward"]["expert_buffer"] == 1.2

    # Killed after the growth, before the next checkpoint: the run continues with the buffers it had reached.
    killed = folder / "killed"
    ended_by(Killed, killed, config(folder, 2.4), on_report=lambda step: step == 5 and raising())
    assert steps_of(killed) == [2]
    train(config(folder, 2.4), killed)
    assert values(killed) == expected and growths(killed) == [(3, "training", 4.0)]
    assert values(killed, OVERFLOW)[12] == counts[3] - counts[2]
    print("run ok", flush=True)


def ended_by(kind: type[Exception], workdir: Path, *args, **options) -> None:
    try:
        train(*args, workdir, **options)
    except kind:
        return
    raise AssertionError(f"the training run did not end by the exception {kind.__name__}")


def evaluated(folder: Path, buffer: float) -> TrainConfig:
    """Return the training config of a run of six steps, whose held-out loss after step 2 requires an
    `expert_buffer` above 2.4.
    """
    # Both experts of this letter are on one device, which only four times an even share of rows fits.
    (folder / "heldout.txt").write_text("G" * 2000)

    made = config(folder, buffer, eval_every=2, eval_batches=2, total_tokens=6 * 128)
    made.data.heldout_path = str(folder / "heldout.txt")
    return made


def evaluation(folder: Path) -> None:
    """Check that an overflow in the held-out loss makes the buffers of experts grow as one in training
    does.
    """
    large, grown = folder / "evaluated-large", folder / "evaluated-grown"
    train(evaluated(folder, 4.0), large)
    train(evaluated(folder, 2.4), grown)
    assert growths(grown) == [(2, "evaluation", 4.0)] and steps_of(grown) == [2, 6]
    for name in ("train/loss", "val/loss"):
        assert values(grown, name) == values(large, name)
    assert list(values(grown, "val/loss")) == [2, 4, 6]

    print("evaluation ok", flush=True)


def interrupted(folder: Path) -> None:
    """Check that a training run continues correctly if it is ended while its expert buffers become larger:
    killed between the checkpoint and the compiling of the larger program, or by a signal while an overflow
    has not been read. Requires the results of `run` and `evaluation` in `folder`.
    """
    expected = values(folder / "large")
    # Killed between the checkpoint and the larger program.
    early, make_program = folder / "early", loop.make_program
    loop.make_program = lambda config, mesh: (
        raising() if config.model.layers["A"].feedforward.expert_buffer == 4 else make_program(config, mesh)
    )  # fmt: skip
    ended_by(Killed, early, config(folder, 2.4))
    loop.make_program = make_program
    assert steps_of(early) == [2]
    train(config(folder, 2.4), early)
    assert values(early) == expected

    # A signal arrives while an overflow has not been read: nothing is lost or taken twice.
    stopped = folder / "stopped"
    result = train(config(folder, 2.4), stopped, on_report=stop_at(2))
    assert result.interrupted is not None and result.step == 2
    train(config(folder, 2.4), stopped)
    assert values(stopped) == expected
    # Killed while the held-out loss is computed with the larger buffers: it is computed when the run continues.
    killed = folder / "evaluated-killed"
    sums = TrainLoop._heldout_sums
    TrainLoop._heldout_sums = lambda self, *given: (
        raising() if self.buffers.growths else sums(self, *given)
    )
    ended_by(Killed, killed, evaluated(folder, 2.4))
    TrainLoop._heldout_sums = sums
    assert not values(killed, "val/loss")
    train(evaluated(folder, 2.4), killed)
    for name in ("train/loss", "val/loss"):
        assert values(killed, name) == values(folder / "evaluated-large", name)
    print("interrupted ok", flush=True)


def one_step(made: TrainConfig, rows, params, overflow: int | None = None):
    """Take one training step from these parameters; returns (number of choices of experts that did not fit,
    whether the state changed).
    """
    mesh = make_mesh(made.mesh, jax.devices()[: made.mesh.expert * made.mesh.pipeline])
    with jax.set_mesh(mesh):
        program = make_program(made, mesh)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(program.init))
        before = dataclasses.replace(zeros, params=params)
        state = jax.device_put(before, program.shardings)
        given = None if overflow is None else jnp.int32(overflow)
        placed = place_batch(rows, token_sharding(mesh), len(rows["tokens"]))
        state, metrics = program.train_step(state, placed, None, given)
        after = jax.tree.map(np.asarray, state)
    same = jax.tree.map(np.array_equal, before, after)
    assert len(set(jax.tree.leaves(same.params))) == 1
    changed = not all(jax.tree.leaves(same))
    assert int(after.step) == changed and int(after.skipped) == 0
    return int(metrics[OVERFLOW]), changed


def steps(folder: Path) -> None:
    """Check that a training step in which choices of experts do not fit into the buffers changes no
    parameter, and counts all such choices: over the pieces of an accumulated batch, and over the
    microbatches of a pipeline.
    """
    mesh = MeshConfig(data=1, expert=4)
    made = run_of("linear_attention+moe", mesh=mesh)
    made.model.num_layers = 2
    experts = dataclasses.replace(made.model.layers["A"].feedforward, expert_buffer=0.5)
    made.model.layers["A"].feedforward = experts
    rows, params = batch(), params_of(Decoder(made.model, rngs=nnx.Rngs(0)))
    params = jax.tree.map(np.asarray, params)
    halves = [
        one_step(made, {name: x[half::2] for name, x in rows.items()}, params)[0] for half in (0, 1)
    ]
    assert min(halves) > 0
    pieces = dataclasses.replace(made, accumulation_steps=2)
    assert one_step(pieces, rows, params) == (sum(halves), False)

    # An overflow of the previous step makes this step change nothing.
    large = dataclasses.replace(made, model=dataclasses.replace(made.model, layers=dict(
        A=dataclasses.replace(made.model.layers["A"], feedforward=dataclasses.replace(experts, expert_buffer=4.0))
    )))  # fmt: skip
    assert one_step(large, rows, params, 0) == (0, True)
    assert one_step(large, rows, params, 7) == (7, False)

    pipeline = dataclasses.replace(made, mesh=MeshConfig(data=1, expert=2, pipeline=2))
    pieces = dataclasses.replace(pieces, mesh=MeshConfig(data=1, expert=2))
    count, changed = one_step(pipeline, rows, params)
    expected, _ = one_step(pieces, regrouped(rows, 2, 2), params)
    assert count == expected > 0 and not changed
    print("steps ok", flush=True)


def text(folder: Path) -> None:
    """Check that a run of 64 experts on BPE text without a balance loss trains all its steps, although
    choices of experts do not fit into its buffers at first.
    """
    made = config(folder, 1.25, total_tokens=10 * 1024)
    made.data = benchmark_text.data_config(128, 512, folder=folder / "bpe", max_bytes=400_000)
    made.model.vocab_size = 512
    made.model.layers["A"].feedforward = MoEConfig(
        expert_size=8, balance_scale=0.0, expert_buffer=1.25
    )
    assert train(made, folder / "bpe-run").step == 10
    losses, counts = values(folder / "bpe-run"), values(folder / "bpe-run", OVERFLOW)
    assert len(losses) == 10 and losses[10] < losses[1] and counts[10] > 0
    print("text ok", growths(folder / "bpe-run"), counts[10], flush=True)


def published(folder: Path) -> None:
    """Check that `configs/linear_moe.py:tiny`, which ended at step 21 in release 0.1, trains on as its
    buffers of experts grow, with the losses of larger buffers.
    """

    def tiny(buffer):
        made = linear_moe.get_config("tiny")
        made.mesh, made.total_tokens = MeshConfig(data=1, expert=4), 60 * made.tokens_per_step
        made.log_every, made.eval_every = 1, 0
        made.model.layers["L"].feedforward.expert_buffer = buffer
        return made

    results = []
    for buffer in (2.0, 4.0):
        train(tiny(buffer), folder / f"tiny-{buffer}", on_report=stop_at(25))
        results.append(list(values(folder / f"tiny-{buffer}").values()))
    assert ExpertBuffers(tiny(2.0), folder / "tiny-2.0").growths[0]["step"] > 1
    # In bfloat16 sums over buffers of other sizes are rounded differently.
    np.testing.assert_allclose(*results, rtol=2e-4)
    assert len(results[0]) > 24
    print("published ok", flush=True)


def main(folder: str, *names: str) -> None:
    path = Path(folder)
    write_text(path / "text")
    for name in names:
        began = time.perf_counter()
        globals()[name](path)
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
