"""Say on which NVIDIA cards, and how many, a released model fits: from its config.json alone, without weights.

    python -m lsm_jax.plan --source=config.json
    python -m lsm_jax.plan --source=Qwen3-Next-80B-A3B-Instruct --length=131072 --train_length=4096

Prints a table: for each card the smallest number of cards, a power of two, that the model fits on, the GiB that each card then
needs, and the mesh. The accounting is that of the memory plans of `lsm_jax.training`:

    inference   one row of --length tokens: parameters (matrices in bfloat16), the state of all layers, and a layer that reads
                2048 tokens. It is the need of the model on a mesh; eval.py has a copy of the parameters on each card.
    LoRA        adapters of rank 16 on every dense layer, the other parameters in bfloat16, and one row of --train_length
                tokens on each card
    full        all parameters in float32 with AdamW, and the same rows

The meshes that are tried have the axes "fsdp" and "expert". A card's memory is what NVIDIA's driver reports, in GiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lsm_jax.convert.families import MODEL_TYPES, family_of
from lsm_jax.convert.fields import shown
from lsm_jax.data import DataConfig
from lsm_jax.files import MEGABYTE, parse_json, read_bytes
from lsm_jax.hub import config_path
from lsm_jax.mixers import LoRAConfig
from lsm_jax.models import ModelConfig, count_parameters
from lsm_jax.parallel import MeshConfig
from lsm_jax.training import TrainConfig, memory_plan
from lsm_jax.training.inference_plan import inference_plan

CARDS = {"L40S 48 GB": 45.0, "H100 80 GB": 79.6, "H200 141 GB": 140.4, "B200 180 GB": 179.1}
"""GiB of memory of each card."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
USES = ("inference", "LoRA", "full")


@dataclasses.dataclass(frozen=True)
class Need:
    """The memory that one of several cards requires, on the mesh of so many cards on which it requires least.

    Attributes:
        count: number of cards.
        gib: GiB on each.
        mesh: the mesh's axes, as text.
    """

    count: int
    gib: float
    mesh: str


def described_model(source: str) -> ModelConfig:
    """Return the config of a released model, in bfloat16.

    Args:
        source: the path of a config.json or its folder, or the id of a model on the Hugging Face hub.

    Raises:
        ValueError: the file cannot be read, or the model is none of `MODEL_TYPES`, or one of its fields is not supported.
    """
    path = config_path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--source={source}: {str(path)!r} is no file; accepted is a config.json or its folder")  # fmt: skip
    given = parse_json(read_bytes(path, max_bytes=16 * MEGABYTE), path)
    family = family_of(given)
    if family is None:
        raise ValueError(
            f"{path}: model_type={shown(given.get('model_type'))}; accepted are {', '.join(MODEL_TYPES)}"
        )
    return dataclasses.replace(family.described(given, path), dtype="bfloat16")


def needs(model: ModelConfig, *, length: int, train_length: int) -> dict[str, list[Need]]:
    """Return for each use of `USES` what a card needs, for each number of cards of `COUNTS` for which a mesh is valid, up to the
    first with which the model fits on every card of `CARDS`.

    Args:
        model: the model.
        length: tokens of the row of inference.
        train_length: tokens of the rows of training.
    """
    known: dict[str, dict[Any, Any]] = {use: {} for use in USES}

    def of_inference(mesh: MeshConfig, count: int) -> Any:
        return inference_plan(model, mesh, count, length=length, known=known["inference"])

    def of_training(use: str, mesh: MeshConfig, count: int) -> Any:
        fields: dict[str, Any] = dict(model=model)
        if use == "LoRA":
            adapters = LoRAConfig(targets=("all",), rank=16, alpha=32.0)
            fields = dict(
                model=dataclasses.replace(model, lora=adapters), trainable=("lora",), init_from="released",
                frozen_dtype="bfloat16_matrices",
            )  # fmt: skip
        config = TrainConfig(
            name=use, data=DataConfig(sequence_length=train_length), mesh=mesh, batch_size=count,
            total_tokens=10**9, **fields,
        )  # fmt: skip
        return memory_plan.plan(config, count, known[use])

    plans: dict[str, Callable[[MeshConfig, int], Any]] = {"inference": of_inference}
    plans |= {use: functools.partial(of_training, use) for use in USES[1:]}
    found: dict[str, list[Need]] = {use: [] for use in USES}
    for use, needed in found.items():
        for count in COUNTS:
            need = _least(plans[use], count)
            needed += [] if need is None else [need]
            if need is not None and need.gib <= min(CARDS.values()):
                break
    return found


def _least(plan: Callable[[MeshConfig, int], Any], count: int) -> Need | None:
    """Return what a card needs on the best mesh of so many cards; None if no mesh is valid."""
    best = None
    for expert in (n for n in COUNTS if n <= count):
        try:
            made = plan(MeshConfig(data=1, fsdp=count // expert, expert=expert), count)
        except ValueError:
            if count == 1:
                raise  # not for the mesh
            continue  # something is not divisible by this mesh
        if best is None or made.total < best.total:
            best = made
    if best is None:
        return None
    axes = [f"{axis}={size}" for axis, size in best.sizes.items() if size > 1]
    return Need(count, best.total / 2**30, " ".join(axes))


def table(found: dict[str, list[Need]]) -> list[str]:
    """Return a table in Markdown of the cards on which a model fits, as lines; `found` is what `needs` returned."""
    heads = [f"{card} ({gib:g} GiB)" for card, gib in CARDS.items()]
    lines = [f"| use | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for use, listed in found.items():
        cells = []
        for gib in CARDS.values():
            first = next((need for need in listed if need.gib <= gib), None)
            mesh = f", {first.mesh}" if first and first.mesh else ""
            cells.append(f"{first.count}: {first.gib:.1f} GiB each{mesh}" if first else f"more than {COUNTS[-1]}")  # fmt: skip
        lines.append(f"| {use} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of the model that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lsm_jax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", required=True, help="config.json of a released model, its folder, or an id of the hub")  # fmt: skip
    parser.add_argument("--length", type=int, default=32768, help="tokens of the row of inference (default: %(default)s)")  # fmt: skip
    parser.add_argument("--train_length", type=int, default=4096, help="tokens of the rows of training (default: %(default)s)")  # fmt: skip
    parsed = parser.parse_args(arguments)
    try:
        for name in ("length", "train_length"):
            if not 1 <= getattr(parsed, name) < 2**31:
                raise ValueError(
                    f"--{name}={getattr(parsed, name)}: accepted are numbers from 1 to 2^31 - 1"
                )
        model = described_model(parsed.source)
        counts = count_parameters(model)
        found = needs(model, length=parsed.length, train_length=parsed.train_length)
    except (ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    print(
        f"{counts['total'] / 1e9:.2f} billion parameters, {counts['active'] / 1e9:.2f} for each token; inference of a row of "
        f"{parsed.length:,} tokens, training with a row of {parsed.train_length:,} on each card\n"
    )
    print("\n".join(table(found)))
    return 0
