"""Tests of memory plans: counts that must be exact, and estimates of memory that are compared with XLA's
memory analysis on small meshes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.run import read_rows
from configs import liger, linear_moe
from lsm_jax import mixers, models
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import MoEConfig, SwiGLUConfig
from lsm_jax.models import count_parameters
from lsm_jax.parallel import AXES, MeshConfig, make_mesh, token_sharding
from lsm_jax.training import TrainConfig
from lsm_jax.training.liveness import peak_bytes, result_bytes
from lsm_jax.training.memory_plan import gathered_keys_and_values_bytes, plan
from lsm_jax.training.step import make_program
from tests.marks import slow_after
from tests.mixers.conftest import FEW as FEW_METHODS
from tests.parallel.test_parallel import run_with_devices

ROOT = Path(__file__).resolve().parents[2]
MESHES = (
    dict(fsdp=4), dict(data=2, tensor=2), dict(expert=4), dict(sequence=4), dict(data=2, pipeline=2)
)  # fmt: skip
GATHERED = re.compile(r"= u32\[4,(\d+)\]\S* all-gather(?:-start)?\(")  # by `sequence.gather`
TAILS = re.compile(r"= f32\[(\d+),(\d+),(\d+)\]\S* collective-permute(?:-start)?\(")


def run_of(
    mesh: MeshConfig, *, experts: bool = False, pattern: str = "LN", **changes
) -> TrainConfig:
    """Return the training config of a hybrid model with eight layers of width 512, on 8 rows of 256 tokens,
    on this mesh.
    """
    inner = SwiGLUConfig(intermediate_size=1536)
    if experts:
        inner = MoEConfig(num_experts=8, top_k=2, expert_size=448)
    layers = {
        "D": models.LayerConfig(mixer=mixers.GatedDeltaNetConfig(num_heads=4, head_dim=96), feedforward=inner),
        "L": models.LayerConfig(mixer=mixers.GLAConfig(num_heads=4, expand_k=1.0), feedforward=inner),
        "N": models.LayerConfig(mixer=mixers.SoftmaxConfig(num_heads=4), feedforward=inner),
    }  # fmt: skip
    model = models.ModelConfig(
        vocab_size=4096, hidden_size=512, num_layers=8, pattern=pattern, layers={n: layers[n] for n in set(pattern)}, dtype="float32", tie_embeddings=False
    )  # fmt: skip
    fields = dict(name="plan", model=model, data=DataConfig(sequence_length=256), mesh=mesh, batch_size=8, total_tokens=10**6)  # fmt: skip
    return TrainConfig(**fields | changes)


def peak(function, *shapes):
    args = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return peak_bytes(jax.make_jaxpr(function)(*args).jaxpr, "cpu")


def test_peak_bytes():
    square, item = (64, 64), 64 * 64 * 4
    assert peak(lambda x: (x @ x) @ x, square) == 2 * item
    assert peak(lambda x: jnp.sum(jnp.exp(x) * x + 1), square) == 4
    # An elementwise result that a matrix product reads exists; the one from which it is computed is fused.
    assert peak(lambda x: jnp.exp(x + 1) @ x, square) == 2 * item
    stacked = lambda x: jax.lax.scan(lambda c, _: (c @ c, c), x, length=5)  # noqa: E731
    assert peak(stacked, square) == (1 + 5 + 1) * item
    twice = jax.jit(lambda x: x @ x)
    assert peak(lambda x: twice(x) + twice(x) @ x, square) == 3 * item


def test_parameters_are_counted_by_their_shardings():
    config = run_of(MeshConfig(data=1), experts=True, pattern="N")
    whole = plan(config, 1)
    assert whole.parameters == 4 * count_parameters(config.model)["total"]
    assert (whole.optimizer, whole.gradients) == (2 * whole.parameters, whole.parameters)
    assert not whole.communication
    cut = plan(dataclasses.replace(config, mesh=MeshConfig(fsdp=2, tensor=2, expert=2)), 8)
    experts = 4 * 8 * 3 * 8 * 512 * 448  # bytes: layers, matrices, experts
    assert experts / 8 < cut.parameters < experts / 8 + (whole.parameters - experts) / 2
    assert set(cut.communication) == {
        "gradients summed over expert", "experts, there and back", "parameters gathered", "gradients scattered", "tensor sums",
    }  # fmt: skip
    stages = plan(dataclasses.replace(config, mesh=MeshConfig(pipeline=4)), 4)
    embeddings = 4 * (2 * 4096 * 512 + 512)
    assert stages.parameters == (whole.parameters - embeddings) / 4 + embeddings


def test_gathered_keys_and_accumulated_gradients_are_counted():
    config = run_of(MeshConfig(data=1, sequence=4), pattern="N")
    mixer, rows, length = (
        config.model.layers["N"].mixer,
        config.batch_size,
        config.data.sequence_length,
    )
    per_token = 2 * mixer.kv_heads() * mixer.dim(config.model.hidden_size)
    itemsize = jnp.dtype(config.model.dtype).itemsize
    # Keys and values, and their gradients in float32.
    wanted = rows * length * per_token * (itemsize + 4)
    model, sizes = models.abstract(config.model), config.mesh.shape(4)
    assert gathered_keys_and_values_bytes(config, model, sizes) == wanted
    # PaTH: the row, two copies of it in a line, and the gradients of these; products of matrices, for chunks of 64.
    of_path = dataclasses.replace(
        config.model.layers["N"], mixer=mixers.PaTHConfig(num_heads=4, head_dim=128, rank=32)
    )
    path = dataclasses.replace(
        config, model=dataclasses.replace(config.model, layers={"N": of_path})
    )
    wanted = rows * length * 4 * 128 * (2 + 128 // 64) * 5 * 4
    assert gathered_keys_and_values_bytes(path, models.abstract(path.model), sizes) == wanted
    assert gathered_keys_and_values_bytes(config, model, dict(sizes, sequence=1)) == 0
    pieces = dataclasses.replace(config, accumulation_steps=2)
    assert plan(pieces, 4).gradients == 2 * plan(config, 4).gradients


@pytest.mark.slow
def test_two_layers_are_gathered_at_a_time():
    """A plan counts two layers at a time along "fsdp" with kernels, also where the pattern has no shorter period than the model,
    and all layers of a period without kernels.
    """
    config = run_of(MeshConfig(data=2), pattern="NNNNNNNL")
    blocks = models.abstract(config.model).periods.blocks
    sizes = [sum(x.size for x in jax.tree.leaves(nnx.state(block, nnx.Param))) for block in blocks]
    at_a_time = {True: max(sizes[0] + sizes[1], sizes[6] + sizes[7]), False: sum(sizes)}
    for kernels, count in at_a_time.items():
        whole, cut = (
            plan(dataclasses.replace(config, mesh=mesh), 2, kernels=kernels).working
            for mesh in (MeshConfig(data=2), MeshConfig(data=1, fsdp=2))
        )
        assert cut - whole == 8 * count  # parameters and their gradients, in float32


def test_the_report_says_whether_a_run_fits():
    config = run_of(MeshConfig(data=1, fsdp=2), pattern="N")
    made = plan(config, 2)
    assert "fits into 80 GiB" in made.report(80) and "mesh fsdp=2;" in made.report(80)
    assert "does not fit into 0.1 GiB" in made.report(0.1)
    with pytest.raises(ValueError, match="does not fit 3 devices"):
        plan(config, 3)


def error_of(config: str, *arguments: str) -> str:
    """Return the error message of the command `python -m lsm_jax.plan` for this config, which must be one
    line.
    """
    command = [sys.executable, "-m", "lsm_jax.plan", f"--config={config}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout, done
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("hbm", slow_after(1, ["nan", "inf", "0", "-1"]))
def test_invalid_memory_is_refused(hbm):
    line = error_of("configs/linear_moe.py:tiny", f"--hbm={hbm}")
    assert line.startswith(f"plan: flag --hbm={hbm}")
    assert line.endswith("accepted are finite numbers of GiB above 0")


@pytest.mark.parametrize(
    ("devices", "changes", "mesh"),
    [
        (32, [], "fsdp=16 x sequence=2"),
        # Width 64 is not divisible by 6.
        pytest.param(12, ["batch_size=6"], "data=3 x fsdp=2 x sequence=2", marks=pytest.mark.slow),
        pytest.param(
            128,
            ["batch_size=1", "data.sequence_length=64"],
            "sequence=64 x tensor=2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_default_mesh_divides_the_config(devices, changes, mesh):
    arguments = [f"--devices={devices}", *(f"--config.{change}" for change in changes)]
    command = ["-m", "lsm_jax.plan", "--config=configs/linear_moe.py:tiny", *arguments]
    notice, table, *_ = run_with_devices(1, *command).splitlines()
    assert notice.endswith(f"by {devices} devices; the mesh is {mesh.replace(' x', ',')}")
    assert table.startswith(f"mesh {mesh};")


def test_the_error_without_a_valid_mesh():
    short = "--config.batch_size=1", "--config.data.sequence_length=64"
    line = error_of("configs/linear_moe.py:tiny", "--devices=192", *short)
    assert line.startswith("plan: --devices=192: no mesh was found for 1 rows of")
    assert "use another number, such as --devices=64, or set --config.batch_size" in line
    mesh = "--config.mesh.sequence=65"
    line = error_of("configs/linear_moe.py:tiny", "--devices=65", mesh, *short)
    assert line.startswith("plan: data.sequence_length=64: it must be at least mesh.sequence=65")


@pytest.mark.slow
def test_the_command_line_needs_no_device():
    command = ["-m", "lsm_jax.plan", "--config=configs/linear_moe.py:a1b-7b", "--devices=256", "--hbm=80"]  # fmt: skip
    assert "fsdp=128 x sequence=2" in run_with_devices(1, *command)  # of 128 rows
    out = run_with_devices(1, *command, "--config.mesh.fsdp=8", "--config.batch_size=256")
    assert "mesh data=32 x fsdp=8" in out and "fits into 80 GiB" in out


def test_only_the_branch_of_the_platform_counts():
    """In a memory plan, the residuals of `jax.lax.platform_dependent` are those of the platform's branch."""
    square, item = (64, 64), 64 * 64 * 4
    narrow, wide = (lambda x: jnp.exp(x @ x), lambda x: jnp.exp(jnp.sin(x @ x) @ x) @ x)

    def residual_bytes(platform):
        run = lambda x: jax.lax.platform_dependent(x, cuda=narrow, default=wide)  # noqa: E731
        x = jax.ShapeDtypeStruct(square, jnp.float32)
        return result_bytes(jax.make_jaxpr(lambda x: jax.vjp(run, x)[1])(x).jaxpr, platform)

    assert residual_bytes("cuda") == item
    assert residual_bytes("cpu") == residual_bytes("tpu") == 3 * item


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=() if m in (*FEW_METHODS, "mom") else pytest.mark.slow)
        for m in (*sorted(mixers.METHODS), "mom")
    ],
)
def test_every_method_has_a_plan(method):
    """Every method has a memory plan, both on one device and with the tokens of a row divided over two
    devices. In the second plan, a model with this method and softmax attention in turn sends more bytes
    for states, keys and values than its layers of softmax attention alone.
    """
    kind = mixers.MoMConfig if method == "mom" else mixers.METHODS[method].config
    config = run_of(MeshConfig(data=1))
    config.model.layers["L"].mixer = mixer = kind.for_width(512)
    if getattr(mixer, "window", None):
        mixer.window = min(mixer.window, config.data.sequence_length)
    assert plan(config, 1).working > 0
    cut = plan(dataclasses.replace(config, mesh=MeshConfig(data=1, sequence=2)), 2)
    attention = plan(run_of(MeshConfig(data=1, sequence=2), pattern="N"), 2)
    gathered = "states, or keys and values"
    assert cut.communication[gathered] > attention.communication[gathered] / 2


def test_grouped_products_without_kernels_need_more_memory():
    """A memory plan counts more for a grouped product by XLA, which copies the rows for each group, than
    for one by the kernel.
    """
    config = run_of(MeshConfig(data=1), experts=True, pattern="N", batch_size=64)
    config.model.dtype = "bfloat16"
    assert plan(config, 1, kernels=False).working > 4 * plan(config, 1).working


@pytest.mark.parametrize("pattern, key_dim, errors", [("L", 128, 0), ("D", 64, 1)])
def test_saved_memories_are_counted_for_kernels_that_save_them(pattern, key_dim, errors):
    """With `dots_and_states` each layer saves the bfloat16 memories before its chunks of 64 tokens, and the delta rule its predictions' errors;
    only by kernels for Hopper, which require bfloat16.
    """
    config = run_of(MeshConfig(data=1), pattern=pattern)
    if pattern == "D":
        config.model.layers["D"].mixer = mixers.GatedDeltaNetConfig(num_heads=4, head_dim=64)
    rows, length, heads, value_dim, layers = 8, 256, 4, 128, 8
    numbers = rows * heads * value_dim * (length // 64 * key_dim + errors * length)
    for dtype, expected in (("bfloat16", 2 * layers * numbers), ("float32", 0)):
        saved = []
        for remat in ("dots_and_inputs", "dots_and_states"):
            config.model.dtype, config.model.remat = dtype, remat
            saved.append(plan(config, 1).saved)
        assert saved[1] - saved[0] == expected


@pytest.mark.parametrize(("matmul", "item"), [("default", 2), ("fp8", 1)])
def test_devices_that_gather_or_divide_experts_save_fewer_casts(matmul, item):
    """One device saves a bfloat16 copy, or in FP8 an 8-bit one, of its experts' matrices with `remat=dots`; devices that gather the matrices save none, those that
    divide the experts only their own."""
    saved = {}
    for axis in ("data", "fsdp", "expert"):
        config = run_of(MeshConfig(**dict(data=1) | {axis: 4}), experts=True, pattern="N")
        config.model.dtype, config.model.remat = "bfloat16", "dots"
        config.model.layers["N"].feedforward.matmul = matmul
        saved[axis] = plan(config, 4).saved
    copies = 8 * 8 * 3 * 512 * 448 * item  # layers, experts, matrices, entries, bytes
    assert saved["data"] - saved["fsdp"] == copies
    assert saved["data"] - saved["expert"] >= 3 * copies // 4


def test_files_of_a_pretrained_model_are_not_required():
    assert 22 < plan(liger.get_config("llama3-8b"), 1).total / 2**30 < 24


def rows_of_cards() -> dict[str, dict]:
    """Return rows of docs/linear_moe.jsonl, the last one of each run, with the memory of a training step on
    H200 cards that XLA's analysis reported.
    """
    found = {}
    for row in read_rows(ROOT / "docs" / "linear_moe.jsonl"):
        axes = {axis: n for axis, n in row["mesh"].items() if axis != "exchange"}
        # Four stages were measured when the scan still saved a copy of their parameters for each turn.
        if (
            "gib" in row
            and axes != {"pipeline": 4}
            and not {"without", "experts_matmul"} & row.keys()
        ):
            mesh = " ".join(f"{axis}={n}" for axis, n in axes.items()) or "one"
            mixer = row["variant"].partition("mixer=")[2]
            remat = f" {row['remat']}" if "remat" in row else ""
            found[f"{mixer} {mesh} {row['rows']}x{row['length']}{remat}"] = row | dict(mesh=axes)
    return found


FEW = (
    "gla one 8x2048", "linear_attention fsdp=4 4x2048", "linear_attention sequence=4 1x1572864", "linear_attention pipeline=2 4x2048",
)  # fmt: skip


@pytest.mark.parametrize(
    "row", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in rows_of_cards()]
)  # fmt: skip
def test_within_fifteen_percent_of_an_h200(row):
    measured = rows_of_cards()[row]
    config = linear_moe.get_config(measured["variant"])
    config.mesh = MeshConfig(**dict(data=1) | measured["mesh"])
    config.batch_size, config.data.sequence_length = measured["rows"], measured["length"]
    config.model.remat = measured.get("remat", config.model.remat)
    cards = math.prod(n for axis, n in measured["mesh"].items() if axis in AXES)
    made = plan(config, cards)
    assert abs(made.total / 2**30 / measured["gib"] - 1) < 0.15, made


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_within_fifteen_percent_of_the_compiler(axes):
    found = json.loads(
        run_with_devices(4, "-m", "tests.parallel.test_plan", json.dumps(axes), as_users=True)
    )
    assert abs(found["plan"] / found["xla"] - 1) < 0.15, found
    if "sequence" in axes:  # the plan does not count segment ids
        sent = found["communication"]["states, or keys and values"]
        assert abs(sent / found["sent"] - 1) < 0.01, found


def main(axes: str) -> None:
    """Print, for a training step, the bytes per device that the memory plan estimates, and those of XLA's
    memory analysis (arguments, results that reuse no argument's memory, temporary arrays).
    """
    sizes = dict(data=1) | json.loads(axes)
    pattern = "D" if "sequence" in sizes else "LN"
    config = run_of(MeshConfig(**sizes), experts="expert" in sizes, pattern=pattern)
    count = math.prod(n for axis, n in sizes.items() if axis in AXES)
    mesh = make_mesh(config.mesh, jax.devices()[:count])
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
        state = jax.tree.map(place, jax.eval_shape(program.init), program.shardings)
        shape = (config.batch_size, config.data.sequence_length)
        kinds = dict.fromkeys(("tokens", "labels", "segment_ids", "positions"), jnp.int32)
        rows = {n: jax.ShapeDtypeStruct(shape, t, sharding=token_sharding(mesh)) for n, t in (kinds | {"loss_mask": jnp.float32}).items()}  # fmt: skip
        compiled = program.train_step.lower(state, rows).compile()
    memory = compiled.memory_analysis()
    # A device sends three of four parts on, and tails to one device; each occurs once in the program, in the loop over layers.
    text = compiled.as_text()
    words = 3 * sum(int(n) for n in GATHERED.findall(text))
    words += sum(math.prod(map(int, sizes)) for sizes in TAILS.findall(text))
    sent = 4 * words * config.model.num_layers
    xla = memory.argument_size_in_bytes + memory.output_size_in_bytes
    xla += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    made = plan(config, count, kernels=False)
    assert tuple(made.sizes) == AXES
    print(json.dumps(dict(xla=xla, sent=sent, plan=made.total, **dataclasses.asdict(made))))


if __name__ == "__main__":
    main(sys.argv[1])
