"""Compare the memory that a run requires, as the planner estimates it, with the memory of its devices, before anything is
compiled."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import jax

from lsm_jax.mixers import METHODS
from lsm_jax.models import SIZES, lm
from lsm_jax.ops.backends.select import unrecorded
from lsm_jax.parallel import batch_shards
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.memory_plan import plan

_GIB = 2**30
_HOPELESS = (
    2.0  # a run that requires this many times the memory is refused; the estimate is not so wrong
)


def check_memory(config: TrainConfig) -> None:
    """Print a line if the run requires more memory than its devices have, with the number of accumulation steps, if any,
    with which it fits.

    Raises:
        ValueError: a run of one process requires at least twice the memory that there is.
    """
    device, count = jax.local_devices()[0], len(jax.devices())
    available = device_bytes(device)
    if available is None or _most_bytes(config, count) < available:
        return
    kernels = device.platform == "tpu" or str(getattr(device, "compute_capability", "")) == "9.0"
    with unrecorded():
        try:
            required = plan(config, count, kernels=kernels).total
            if required <= available:
                return
            advice = _advice(config, count, kernels, available, required)
        except (ValueError, NotImplementedError):
            return  # the planner does not know this kind of run
    message = (
        f"{config.name} requires about {required / _GIB:.1f} GiB of memory on each device, which has "
        f"{available / _GIB:.1f} GiB; {advice}"
    )
    if required >= _HOPELESS * available and jax.process_count() == 1:
        raise ValueError(message)
    if jax.process_index() == 0:
        print(message, file=sys.stderr, flush=True)


def device_bytes(device: jax.Device) -> int | None:
    """Return the bytes of memory that arrays on a device can have: those that the device states, or for a CPU an equal part
    of the memory of this machine or container; None if they are not known."""
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return int(limit)
    if device.platform != "cpu":
        return None
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
    return total // len(jax.local_devices())


def _most_bytes(config: TrainConfig, count: int) -> int:
    """Return a number of bytes that a run on `count` devices of usual layers does not exceed, without tracing anything, so
    that small runs are not planned."""
    model = config.model
    width, tokens = model.hidden_size, config.tokens_per_step // config.accumulation_steps // count
    experts = max(getattr(model.layers[x].feedforward, "num_experts", 1) for x in model.pattern)
    parameters = 2 * model.vocab_size * width + 40 * experts * model.num_layers * width**2
    logits = 16 * model.vocab_size * min(model.loss_chunk_size, tokens)
    return 24 * parameters + tokens * width * (1000 + 100 * model.num_layers) + logits


def _advice(config: TrainConfig, count: int, kernels: bool, available: int, required: int) -> str:
    """Return the end of the message: the smallest number of accumulation steps with which the run fits, or other ways."""
    shards = batch_shards(config.mesh.shape(count)) * config.mesh.pieces() // config.mesh.pipeline
    rows, least = config.batch_size // shards, config.accumulation_steps
    for steps in range(least + 1, rows + 1):
        # Fewer steps than the excess requires cannot be enough, since only activations become smaller.
        if rows % steps or steps < least * required // available:
            continue
        required_then = plan(
            dataclasses.replace(config, accumulation_steps=steps), count, kernels=kernels
        ).total
        if required_then <= available:
            return f"with --config.accumulation_steps={steps} it requires {required_then / _GIB:.1f} GiB, and computes the same"
    size = _fitting_size(config, count, kernels, available, rows)
    smaller = f"size (at most {size})" if size else "model"
    return (
        f"accumulation_steps is not enough; it fits with shorter rows (data.sequence_length), a smaller {smaller} or more "
        "devices (mesh.fsdp)"
    )


def _fitting_size(config: TrainConfig, count: int, kernels: bool, available: int, rows: int) -> str:
    """Return the largest size of the run's method that is smaller than the run's and fits, computed row by row; "" if there is
    none or the run's name is not one of `configs/lm.py`, METHOD-SIZE."""
    named = re.match(r"(\w+)-(\w[\w.]*)", config.name)
    if named is None or named[1] not in METHODS or named[2] not in SIZES:
        return ""
    model, names = config.model, list(SIZES)
    for size in reversed(names[: names.index(named[2])]):
        try:
            other = lm(named[1], size, model.pattern, vocab_size=model.vocab_size)
            other = dataclasses.replace(other, dtype=model.dtype, remat=model.remat)
            small = dataclasses.replace(config, model=other, accumulation_steps=max(rows, 1))
            if plan(small, count, kernels=kernels).total <= available:
                return size
        except ValueError:  # the pattern or the mesh does not divide a model of this size
            continue
    return ""
