"""Count the instructions of the TPU kernels; no TPU is needed, but libtpu.

    PYTHONPATH=.venv/aot TPU_SKIP_MDS_QUERY=1 python -m benchmarks bundles [--ops kda] [--chips v5e]

A row for each op and chip: the number of heads that one program of the kernels computes, and the bundles
(very long instructions, at best one per cycle) of the forward and of the backward kernel for one head and 64
tokens, prologue included. They are counted in libtpu's last schedule, which it dumps when `LIBTPU_INIT_ARGS`
has the flags below (libtpu 0.0.48, which `make .venv/.aot` installs in a folder of its own; the dumps of one
op and chip have some 250 MB and are deleted after reading). The bundles of a loop would count once, but the
kernels have no loops.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from benchmarks import options
from benchmarks.cases.kernels import OPS, library_call, make_inputs
from benchmarks.registry import ROOT, Benchmark, UsageError
from benchmarks.run import one_by_one
from benchmarks.timing import provenance

BENCHMARK = Benchmark(
    name="bundles",
    summary="instructions of the TPU kernels, counted in libtpu's schedule without a TPU",
    key=("op", "chip", "shape"),
)

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
SHAPE = "2x1024x8x128"
TOKENS = 64  # bundles are those of so many tokens
_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
_TOTAL = re.compile(r"total scheduled bundles:\s+(\d+)")
_KERNEL = re.compile(r"\(100\.00%\): .*custom_call_target=\"tpu_custom_call\"")


def _both(op: str, do, *inputs):
    output, pull = jax.vjp(library_call(op, "mosaic_tpu"), *inputs)
    return output, pull(do)


def _program(op: str, shape: str, **place):
    """Return the jitted function that computes a TPU op's output and gradients, and the shapes and dtypes
    of its inputs.
    """
    arrays = jax.eval_shape(functools.partial(make_inputs, op, shape))
    q, k, v, do, *gates = (jax.ShapeDtypeStruct(x.shape, x.dtype, **place) for x in arrays)
    return jax.jit(functools.partial(_both, op)), (do, q, k, v, *gates)


def build(op: str, chip: str, shape: str) -> None:
    """Compile the forward and backward pass of an op for a TPU chip; run it in a separate process for each,
    since libtpu reads the flags for its dumps once.
    """
    device = topologies.get_topology_desc(CHIPS[chip], "tpu").devices[0]
    function, inputs = _program(op, shape, sharding=SingleDeviceSharding(device))
    abstract = AbstractDevice(device.device_kind, 1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        function.trace(*inputs).lower(lowering_platforms=("tpu",)).compile()


def _kernels(jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                yield from _kernels(inner)


def count(op: str, chip: str, shape: str = SHAPE) -> dict[str, Any]:
    """Return the number of heads of one program, and the numbers of bundles (TPU instruction words) of the forward and the backward
    pass for one head and 64 tokens.

    Raises:
        RuntimeError: the op's forward or backward is not one kernel.
        subprocess.CalledProcessError: it does not compile; the message is on stderr.
    """
    batch, length, heads, _ = map(int, shape.split("x"))
    function, inputs = _program(op, shape)
    grids = [e.params["grid_mapping"].grid for e in _kernels(function.trace(*inputs).jaxpr.jaxpr)]
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAGS.format(folder)}"
        code = f"from benchmarks.cases.bundles import build; build({op!r}, {chip!r}, {shape!r})"
        subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=ROOT,
            env=os.environ | dict(LIBTPU_INIT_ARGS=flags, ALLOW_MULTIPLE_LIBTPU_LOAD="1"), stdout=subprocess.DEVNULL,
        )  # fmt: skip
        texts = [x.read_text() for x in Path(folder).glob("*schedule-analysis_final_bundles.txt")]
    texts = [text for text in texts if _KERNEL.search(text)]
    if len(texts) != 2 or len(grids) != 2:
        raise RuntimeError(
            f"{op}: {len(grids)} kernels in the program and {len(texts)} in libtpu's dumps; there must be 2 in each"
        )
    row: dict[str, Any] = dict(heads=heads // grids[0][1])
    for text in texts:
        row["backward" if "transpose(" in text else "forward"] = int(_TOTAL.findall(text)[0])
    for name, (rows, groups, chunks) in zip(("forward", "backward"), grids, strict=True):
        units = batch // rows * (heads // groups) * (length // chunks) / TOKENS
        row[name] = row[name] / units
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "scalar decay,key decay,gated delta rule,kda,rwkv7"
    parser.add_argument("--ops", type=options.names(OPS), default=default, help=", ".join(OPS))
    parser.add_argument(
        "--chips", type=options.names(CHIPS), default=",".join(CHIPS), help=", ".join(CHIPS)
    )
    parser.add_argument("--shape", default=SHAPE, help="B x T x H x D")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(op=op, chip=chip, shape=args.shape) for op in args.ops for chip in args.chips]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            "libtpu is not installed; `make .venv/.aot` installs it in .venv/aot, for PYTHONPATH=.venv/aot"
        )
    return one_by_one(cases, lambda case: case | count(**case) | provenance(device=False))


def line(row: dict[str, Any]) -> str:
    return f"{row['op']:17} {row['chip']:6} {row['heads']} heads {row['forward']:6.0f} / {row['backward']:.0f}"
