"""The sizes of the buffers in which devices send tokens to the devices of their experts. Buffers grow if
the tokens' choices of experts do not fit, so that no token is dropped and no step is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lsm_jax.files import bounded_json
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.runs import write_json

FILE = "expert_buffers.json"


class ExpertBuffers:
    """Hold the size `expert_buffer` of the exchange with experts for each layer of a run: the config's at
    first, doubled at each growth. The unit is a device's even share of the rows that it sends.

    The number of devices over which experts are sharded, P, is always enough, so that there are at most
    log2(P / expert_buffer) growths, rounded up. They are recorded in `expert_buffers.json` in the run's directory, and a
    resumed run begins with the buffers that it had reached; config.json does not change. All hosts read the same file
    and the same counts, so that they compile the same program without communication.

    Args:
        config: the config of the run.
        workdir: the run's directory.

    Attributes:
        config: the config with the buffers that the run has reached.
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
        """Whether the run sends tokens to experts through buffers: the mesh shards experts over several
        devices, and a layer has experts that are computed so."""
        return self._devices > 1 and bool(self._sizes)

    @property
    def may_overflow(self) -> bool:
        """Whether the smallest buffer for sending tokens to experts could be too small for some routing."""
        return self.in_use and min(self._sizes.values()) < self._devices

    @property
    def largest(self) -> float:
        """The largest size `expert_buffer` that the layers with experts have reached, as a multiple of an
        even share."""
        return max(self._sizes.values())

    @property
    def overflow_count(self) -> int:
        """How many choices of an expert by a token did not fit into the buffers, summed over all growths of
        the run."""
        return sum(growth["overflow_count"] for growth in self.growths)

    def grow(self, step: int, overflow_count: int, during: str = "training") -> str:
        """Double the buffers for sending tokens to experts, at most to the number of devices, and record
        the growth in the run's directory; return the change in words.

        Raises:
            RuntimeError: all buffers have that size already, which no routing overflows.
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
