"""What a run takes on a mesh, on paper: `python -m lsm_jax.plan --config=FILE.py:VARIANT --devices=256 --hbm=80`.

Prints GiB of memory and of communication on each device, and whether it fits; needs no device, and compiles nothing. Fields of the
config are overridden as in train.py: `--config.mesh.fsdp=64 --config.batch_size=512`. `--search` tries every mesh of powers of
two and prints those that fit, the least communication first.
It counts what NVIDIA Hopper's fused kernels keep; `--nokernels` what XLA keeps on CPUs and other GPUs, which is much more (a TPU is
between the two: its memory updates are XLA's, its experts' products are not those of a CPU).
Where no mesh is given and rows do not divide over the devices, rows go over fsdp and their tokens over sequence; what divides
neither goes over data and tensor, or rows are filled up.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app, flags, logging
from ml_collections import config_flags

from lsm_jax.parallel.mesh import largest_divisor

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file("config", None, "FILE.py:VARIANT, as train.py's.", lock_config=True)
flags.DEFINE_integer("devices", 1, "How many there are.", lower_bound=1)
flags.DEFINE_float("hbm", 80.0, "GiB of memory of each.")
flags.register_validator(
    "hbm", lambda gib: 0 < gib < math.inf, "accepted are finite numbers of GiB above 0"
)
flags.DEFINE_boolean("kernels", True, "For NVIDIA Hopper; else as XLA alone has it.")
flags.DEFINE_boolean("search", False, "Try every mesh of powers of two.")
flags.mark_flag_as_required("config")


def meshes(config: Any, devices: int) -> list[Any]:
    """Every mesh config that gives each axis a power of two of the devices, data what is left."""
    axes = ("fsdp", "sequence", "tensor", "expert", "pipeline")
    powers = [2**i for i in range(devices.bit_length()) if devices % 2**i == 0]
    return [
        dataclasses.replace(config.mesh, data=-1, microbatches=0, rounds=1, **dict(zip(axes, sizes, strict=True)))
        for sizes in itertools.product(powers, repeat=len(axes))
        if devices % math.prod(sizes) == 0
    ]  # fmt: skip


def chosen(config: Any, devices: int) -> list[Any]:
    """The config's mesh; or, where it gives none and rows do not divide over the devices, meshes to try, the best first: rows over
    fsdp, and over data where widths do not divide; their tokens over sequence, and heads over tensor where tokens do not divide,
    or filled-up rows over sequence.
    """
    rows = math.gcd(config.batch_size // config.accumulation_steps, devices)
    if config.mesh != type(config.mesh)() or rows == devices:
        return [config.mesh]
    # As many rows as can be, then tokens: heads are cut into the fewest parts.
    even = math.gcd(config.data.sequence_length, devices // rows)
    return [
        dataclasses.replace(
            config.mesh, data=rows // fsdp, fsdp=fsdp, sequence=sequence,
            tensor=devices // rows // sequence,
        )
        for sequence in dict.fromkeys((even, devices // rows))
        for fsdp in range(rows, 0, -1)
        if rows % fsdp == 0
    ]  # fmt: skip


def plan_of_chosen(config: Any, devices: int, **how: Any) -> Any:
    """The plan on the first mesh of `chosen` that the config divides over.

    Raises:
        ValueError: the config's own mesh does not fit, or none was found.
    """
    from lsm_jax.training import memory_plan as planning

    tried = chosen(config, devices)
    if tried == [config.mesh]:
        return planning.plan(config, devices, **how)
    rows, length = config.batch_size // config.accumulation_steps, config.data.sequence_length
    why = None
    for mesh in tried:
        try:
            made = planning.plan(dataclasses.replace(config, mesh=mesh), devices, **how)
        except ValueError as error:
            why = error
            continue
        sizes = ", ".join(f"{axis}={size}" for axis, size in made.sizes.items() if size > 1)
        print(f"plan: {rows} rows do not divide over {devices} devices; {sizes}")
        return made
    raise ValueError(
        f"no mesh of --devices={devices} was found for this config, of {rows} rows of {length} tokens ({why}); take another "
        f"number, as --devices={largest_divisor(rows * length, devices)}, or other --config.batch_size and --config.mesh.*"
    )


def parse(argv: list[str]) -> list[str]:
    """Parse flags; tell what is wrong with them in one line."""
    from lsm_jax.training.command import parse_config

    rest = parse_config(FLAGS, argv, "plan", workdir=False)
    if len(rest) > 1:
        sys.exit(f"plan: unknown arguments: {' '.join(rest[1:])}")
    if not hasattr(FLAGS.config, "mesh"):
        sys.exit(
            "plan: --config makes no run on a mesh; accepted is one of train.py's of a language model"
        )
    return rest


def main(argv: list[str]) -> None:
    """Print the plan, or those of a search."""
    logging.set_verbosity(logging.WARNING)
    # `parallel` stands below `training`; only this command looks up.
    from lsm_jax.training import memory_plan as planning

    config = FLAGS.config
    try:
        dataclasses.replace(config, mesh=type(config.mesh)()).validate(on_paper=True)
    except ValueError as error:
        sys.exit(f"plan: {error}")
    if not FLAGS.search:
        try:
            made = plan_of_chosen(config, FLAGS.devices, kernels=FLAGS.kernels)
            print(made.report(FLAGS.hbm))
        except ValueError as error:
            sys.exit(f"plan: {error}")
        return
    found, known = [], {}
    for mesh in meshes(config, FLAGS.devices):
        try:
            other = dataclasses.replace(config, mesh=mesh)
            found.append(planning.plan(other, FLAGS.devices, known, kernels=FLAGS.kernels))
        except ValueError:
            continue  # a mesh that cuts what does not divide
    if not found:
        sys.exit("plan: no mesh of powers of two fits the config")
    fitting = [p for p in found if p.total <= FLAGS.hbm * 2**30]
    print(f"{len(found)} meshes, of which {len(fitting)} fit into {FLAGS.hbm:g} GiB")
    shown = sorted(fitting, key=lambda p: sum(p.communication.values()))[:10]
    if not fitting:
        shown = [min(found, key=lambda p: p.total)]
        print("the smallest:")
    for p in shown:
        mesh = " ".join(f"{axis}={size}" for axis, size in p.sizes.items() if size > 1) or "one device"  # fmt: skip
        sent = sum(p.communication.values()) / 2**30
        print(f"{p.total / 2**30:8.2f} GiB, {sent:8.2f} GiB sent  {mesh}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
