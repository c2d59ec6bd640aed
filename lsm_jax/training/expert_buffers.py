"""The sizes of the buffers in which devices send tokens to the devices of their experts. Buffers grow if
the tokens' choices of experts do not fit, so that no token is dropped and no step is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lsm_jax.files import bounded_json
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.run_files import write_json

FILE = "expert_buffers.json"


class ExpertBuffers:
    """Store and grow the sizes (`expert_buffer`) of the buffers in which devices send tokens to experts, one
    size per pattern letter with experts: the config's size at first, doubled at each growth. A size is a
    multiple of an even load, the choices that a device sends to each device if all experts are chosen equally
    often.

    The size P, the number of devices over which experts are sharded, is always enough, so that there are at
    most log2(P / expert_buffer) growths, rounded up. They are recorded in `expert_buffers.json` in the run's directory, and a
    resumed run begins with the sizes that it had reached; config.json does not change. All hosts read the same file
    and the same counts, so that they compile the same program without communication.

    Args:
        config: the config of the run.
        workdir: the run's directory.

    Attributes:
        config: the config of the run with the present sizes of the buffers.
        growths: for each growth the fields `step`, `during` ("training" or "evaluation"), `overflow_count` (choices
            that did not fit), and `expert_buffer`, the new buffer of each letter of the pattern.

    Raises:
        ValueError: `expert_buffers.json` cannot be read.
    """

    def __init__(self, config: TrainConfig, workdir: Path):
        self._path, self._devices = workdir / FILE, config.mesh.expert
        self.growths = _read_growths(self._path)
        sizes = {
            letter: layer.feedforward.expert_buffer
            for letter, layer in sorted(config.model.layers.items())
            if letter in config.model.pattern
            and hasattr(layer.feedforward, "expert_buffer")
            and layer.feedforward.execution == "grouped"
        }
        for growth in self.growths:
            for letter in sizes:
                sizes[letter] = max(sizes[letter], growth["expert_buffer"].get(letter, 0.0))
        self.config, self._sizes = _with_buffers(config, sizes), sizes

    @property
    def in_use(self) -> bool:
        """Whether the run sends tokens to experts through buffers of fixed size: the mesh shards experts over
        several devices, and a layer's mixture of experts has `execution="grouped"`."""
        return self._devices > 1 and bool(self._sizes)

    @property
    def may_overflow(self) -> bool:
        """Whether tokens could choose experts such that the choices do not fit into the smallest buffer: the
        run uses buffers, and one has a size below the number of devices over which experts are sharded."""
        return self.in_use and min(self._sizes.values()) < self._devices

    @property
    def largest(self) -> float:
        """The largest `expert_buffer` that a layer of the run has reached: the size of the buffers in which
        devices send tokens to experts, as a multiple of an even load."""
        return max(self._sizes.values())

    @property
    def overflow_count(self) -> int:
        """The number of choices of experts by tokens that did not fit into the buffers between devices, summed
        over all growths of these buffers in the run."""
        return sum(growth["overflow_count"] for growth in self.growths)

    def grow(self, step: int, overflow_count: int, during: str = "training") -> str:
        """Double the sizes of the buffers in which devices send tokens to experts, at most to the number of
        devices over which experts are sharded, and record the growth in the run's directory.

        Args:
            step: the training step in which choices of experts did not fit.
            overflow_count: the number of choices that did not fit.
            during: "training" or "evaluation".

        Returns:
            The change in words, such as "expert_buffer 1.25 -> 2.5".

        Raises:
            RuntimeError: all buffers have the largest size already, into which all choices fit.
        """
        if not self.may_overflow:
            raise RuntimeError(
                f"step {step}: {overflow_count} choices of experts did not fit into buffers that fit all; "
                "this is an error in lsm_jax, please report it"
            )
        old, devices = self._sizes, float(self._devices)
        self._sizes = {name: max(size, min(2.0 * size, devices)) for name, size in old.items()}
        self.config = _with_buffers(self.config, self._sizes)
        self.growths.append(
            dict(
                step=step,
                during=during,
                overflow_count=overflow_count,
                expert_buffer=self._sizes,
            )
        )
        write_json(self._path, {"growths": self.growths})
        changes = {name: f"{old[name]:g} -> {size:g}" for name, size in self._sizes.items()}
        if len(set(changes.values())) == 1:
            return f"expert_buffer {next(iter(changes.values()))}"
        return "expert_buffer " + ", ".join(f"of {name} {text}" for name, text in changes.items())


def _with_buffers(config: TrainConfig, sizes: dict[str, float]) -> TrainConfig:
    """Return a copy of the training config in which the layer of each pattern letter in `sizes` has that
    `expert_buffer`, the size of its buffers for sending tokens to experts."""
    layers = dict(config.model.layers)
    for letter, size in sizes.items():
        inner = dataclasses.replace(layers[letter].feedforward, expert_buffer=size)
        layers[letter] = dataclasses.replace(layers[letter], feedforward=inner)
    model = dataclasses.replace(config.model, layers=layers)
    return dataclasses.replace(config, model=model)


def _read_growths(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        growths = bounded_json(path)["growths"]
        for growth in growths:
            int(growth["step"]), int(growth["overflow_count"]), str(growth["during"])
            {letter: float(size) for letter, size in growth["expert_buffer"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a record of growths that this version wrote ({error!r}); correct it, or remove it to begin with the "
            "config's expert_buffer"
        ) from error
    return growths
