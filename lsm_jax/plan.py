"""Estimate the memory and the communication that a training run on a mesh of devices requires.

    python -m lsm_jax.plan --config=configs/lm.py:gla-340m
    python -m lsm_jax.plan --config=configs/lm.py:gla-340m --nokernels --hbm=16 --config.accumulation_steps=64
    python -m lsm_jax.plan --config=configs/linear_moe.py:a1b-7b --devices=256 --hbm=80 --search
    python -m lsm_jax.plan --source=config.json

With --source it says on which cards a released model fits (`lsm_jax.convert.cards`; `--source=config.json --help` lists its flags).
Otherwise it prints the GiB of memory that each device needs, the GiB that it sends per step, and whether the run fits. No
accelerator is needed, and nothing is compiled. Fields of the config are overridden as in train.py:
`--config.mesh.fsdp=64 --config.batch_size=512`. `--search` tries every mesh whose axes are powers of two, and
prints those that fit, with the least communication first.

The estimate is for NVIDIA Hopper's fused kernels, or with `--nokernels` for XLA alone on CPUs and other GPUs,
which needs much more memory. A TPU is between the two: it computes memory updates by XLA, but experts'
products better than a CPU does.

If the config has no mesh and its rows are not divisible by the devices, the plan shards rows over fsdp and
tokens over sequence. What neither can divide is sharded over data and tensor, or rows are padded.
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
config_flags.DEFINE_config_file(
    "config", None, "FILE.py:VARIANT, as in train.py.", lock_config=True
)
flags.DEFINE_integer("devices", 1, "The number of devices.", lower_bound=1)
flags.DEFINE_float("hbm", 80.0, "GiB of memory per device.")
flags.register_validator(
    "hbm", lambda gib: 0 < gib < math.inf, "accepted are finite numbers of GiB above 0"
)
flags.DEFINE_boolean("kernels", True, "Plan for NVIDIA Hopper's kernels; otherwise for XLA alone.")
flags.DEFINE_boolean("search", False, "Try every mesh whose axes are powers of two.")
flags.mark_flag_as_required("config")


def meshes(config: Any, devices: int) -> list[Any]:
    """Return the config of every mesh of this number of devices in which all axes except "data" are powers of two;
    "data" is the number of devices divided by the sizes of all other axes."""
    axes = ("fsdp", "sequence", "tensor", "expert", "pipeline")
    powers = [2**i for i in range(devices.bit_length()) if devices % 2**i == 0]
    return [
        dataclasses.replace(
            config.mesh,
            data=-1,
            microbatches=0,
            rounds=1,
            **dict(zip(axes, sizes, strict=True)),
        )
        for sizes in itertools.product(powers, repeat=len(axes))
        if devices % math.prod(sizes) == 0
    ]


def candidate_meshes(config: Any, devices: int) -> list[Any]:
    """Return the configs of the meshes to try for a run on this number of devices, the best first: only
    `config.mesh`, unless it is the default mesh and the devices do not divide the rows of a batch.

    The meshes that are tried then shard rows over the axis "fsdp", and tokens over "sequence". If widths are not
    divisible, "data" replaces a factor of "fsdp"; if tokens are not divisible, "tensor", which shards heads,
    replaces a factor of "sequence", or, in the last meshes, rows are padded.
    """
    rows = math.gcd(config.batch_size // config.accumulation_steps, devices)
    if config.mesh != type(config.mesh)() or rows == devices:
        return [config.mesh]
    # First as many shards of rows as possible, then of tokens, so that heads are divided into the fewest
    # parts.
    even = math.gcd(config.data.sequence_length, devices // rows)
    return [
        dataclasses.replace(
            config.mesh,
            data=rows // fsdp,
            fsdp=fsdp,
            sequence=sequence,
            tensor=devices // rows // sequence,
        )
        for sequence in dict.fromkeys((even, devices // rows))
        for fsdp in range(rows, 0, -1)
        if rows % fsdp == 0
    ]


def plan_first_valid(config: Any, devices: int, **options: Any) -> Any:
    """Return the memory plan (estimated bytes of memory and communication per device) of the first of the meshes
    of `candidate_meshes` that is valid for the config. `options` are keyword arguments of `memory_plan.plan`.

    Raises:
        ValueError: none of these meshes is valid for the config.
    """
    from lsm_jax.training import memory_plan

    candidates = candidate_meshes(config, devices)
    if candidates == [config.mesh]:
        return memory_plan.plan(config, devices, **options)
    rows, length = config.batch_size // config.accumulation_steps, config.data.sequence_length
    reason = None
    for mesh in candidates:
        try:
            plan = memory_plan.plan(dataclasses.replace(config, mesh=mesh), devices, **options)
        except ValueError as error:
            reason = error
            continue
        sizes = ", ".join(f"{axis}={size}" for axis, size in plan.sizes.items() if size > 1)
        print(f"plan: {rows} rows are not divisible by {devices} devices; the mesh is {sizes}")
        return plan
    raise ValueError(
        f"--devices={devices}: no mesh was found for {rows} rows of {length} tokens ({reason}); use another number, such as "
        f"--devices={largest_divisor(rows * length, devices)}, or set --config.batch_size or --config.mesh.*"
    )


def parse(argv: list[str]) -> list[str]:
    """Parse the flags of `python -m lsm_jax.plan`; a wrong flag ends the process with a message of one line."""
    from lsm_jax.training.command import parse_config

    rest = parse_config(FLAGS, argv, "plan", workdir=False)
    if len(rest) > 1:
        sys.exit(f"plan: unknown arguments: {' '.join(rest[1:])}; accepted are flags (--help)")
    if not hasattr(FLAGS.config, "mesh"):
        sys.exit(
            f"plan: --config makes a {type(FLAGS.config).__name__}, which has no mesh; accepted is the config of a language model, "
            "such as configs/lm.py:gla-340m"
        )
    return rest


def main(argv: list[str]) -> None:
    """Print the estimated memory and communication of the training run that `--config` describes: on the mesh of
    the config, or with `--search` on the best meshes of `--devices` devices."""
    logging.set_verbosity(logging.WARNING)
    config = FLAGS.config
    try:
        dataclasses.replace(config, mesh=type(config.mesh)()).validate(on_paper=True)
        if not FLAGS.search:
            plan = plan_first_valid(config, FLAGS.devices, kernels=FLAGS.kernels)
            print(plan.report(FLAGS.hbm))
            return
    except ValueError as error:
        sys.exit(f"plan: {error}")
    _search(config)


def _search(config: Any) -> None:
    """Print the memory and communication estimates of the ten meshes that communicate least among those on which
    the run fits into memory; if it fits on none, those of the mesh that needs the least memory."""
    from lsm_jax.training import memory_plan

    plans, traces = [], {}
    for mesh in meshes(config, FLAGS.devices):
        try:
            candidate = dataclasses.replace(config, mesh=mesh)
            plans.append(memory_plan.plan(candidate, FLAGS.devices, traces, kernels=FLAGS.kernels))
        except ValueError:
            continue  # something is not divisible by this mesh
    if not plans:
        sys.exit("plan: no mesh whose axes are powers of two is valid for this config")
    fitting = [p for p in plans if p.total <= FLAGS.hbm * 2**30]
    print(f"{len(plans)} meshes, of which {len(fitting)} fit into {FLAGS.hbm:g} GiB")
    shown = sorted(fitting, key=lambda p: sum(p.communication.values()))[:10]
    if not fitting:
        shown = [min(plans, key=lambda p: p.total)]
        print("the smallest:")
    for p in shown:
        sizes = [f"{axis}={size}" for axis, size in p.sizes.items() if size > 1]
        sent = sum(p.communication.values()) / 2**30
        print(
            f"{p.total / 2**30:8.2f} GiB, {sent:8.2f} GiB sent  {' '.join(sizes) or 'one device'}"
        )


if __name__ == "__main__":
    if any(argument.partition("=")[0] in ("--source", "-source") for argument in sys.argv[1:]):
        from lsm_jax.convert import cards

        sys.exit(cards.main())
    app.run(main, flags_parser=parse)
