"""How many instructions the TPU kernels are, with no TPU: `PYTHONPATH=.venv/aot TPU_SKIP_MDS_QUERY=1 python -m benchmarks.bundles [--ops kda] [--chips v5e]`.

A row an op and chip: heads that a program of the kernels serves, and the bundles (very long instructions, at best one a cycle) of
the forward's kernel and of the backward's, a head and 64 tokens, prologue included. They are those of libtpu's last schedule, which
the flags of `LIBTPU_INIT_ARGS` below have it dump (libtpu 0.0.48, which `make .venv/.aot` keeps in a folder of its own; some 250 MB
an op and chip, for as long as it is read). A loop's bundles would count once: the kernels have none.
"""

from __future__ import annotations

import argparse
import functools
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

from benchmarks.kernels import OPS, make_inputs, ours

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
SHAPE = "2x1024x8x128"
TOKENS = 64  # a row's unit
_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
_TOTAL = re.compile(r"total scheduled bundles:\s+(\d+)")
_KERNEL = re.compile(r"\(100\.00%\): .*custom_call_target=\"tpu_custom_call\"")


def _both(op: str, do, *inputs):
    output, pull = jax.vjp(ours(op, "mosaic_tpu"), *inputs)
    return output, pull(do)


def _program(op: str, shape: str, **place):
    """The op, forward and backward, and the shapes it is given."""
    arrays = jax.eval_shape(functools.partial(make_inputs, op, shape))
    q, k, v, do, *gates = (jax.ShapeDtypeStruct(x.shape, x.dtype, **place) for x in arrays)
    return jax.jit(functools.partial(_both, op)), (do, q, k, v, *gates)


def build(op: str, chip: str, shape: str) -> None:
    """Compile; where libtpu's dumps go its flags say, which it reads once a process."""
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
    """`heads` of a program, and bundles `forward` and `backward`, a head and 64 tokens.

    Raises:
        RuntimeError: the op's forward or backward is not one kernel.
        subprocess.CalledProcessError: it does not compile; the message is on stderr.
    """
    batch, length, heads, _ = map(int, shape.split("x"))
    function, inputs = _program(op, shape)
    grids = [e.params["grid_mapping"].grid for e in _kernels(function.trace(*inputs).jaxpr.jaxpr)]
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAGS.format(folder)}"
        code = f"from benchmarks.bundles import build; build({op!r}, {chip!r}, {shape!r})"
        subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1],
            env=os.environ | dict(LIBTPU_INIT_ARGS=flags), stdout=subprocess.DEVNULL,
        )  # fmt: skip
        texts = [x.read_text() for x in Path(folder).glob("*schedule-analysis_final_bundles.txt")]
    texts = [text for text in texts if _KERNEL.search(text)]
    if len(texts) != 2 or len(grids) != 2:
        raise RuntimeError(
            f"{op}: {len(grids)} kernels, {len(texts)} of them in libtpu's dumps, not 2"
        )
    found: dict[str, Any] = dict(heads=heads // grids[0][1])
    for text in texts:
        found["backward" if "transpose(" in text else "forward"] = int(_TOTAL.findall(text)[0])
    for name, (rows, groups, chunks) in zip(("forward", "backward"), grids, strict=True):
        served = batch // rows * (heads // groups) * (length // chunks) / TOKENS
        found[name] = found[name] / served
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--ops", default="scalar decay,key decay,gated delta rule,kda,rwkv7")
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--shape", default=SHAPE, help="B x T x H x D")
    options = parser.parse_args()
    ops, chips = options.ops.split(","), options.chips.split(",")
    if unknown := [x for x in ops if x not in OPS] + [x for x in chips if x not in CHIPS]:
        parser.error(f"unknown: {unknown}; accepted are {OPS} and {tuple(CHIPS)}")
    for op in ops:
        for chip in chips:
            row = count(op, chip, options.shape)
            print(f"{op:17} {chip:6} {row['heads']} heads {row['forward']:6.0f} / {row['backward']:.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
