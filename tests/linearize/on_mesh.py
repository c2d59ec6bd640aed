"""Tune Liger's adapters on meshes of four devices, in a process that `test_runs` starts.

python -m tests.linearize.on_mesh LLAMA ALPACA.jsonl FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from lsm_jax.parallel import MeshConfig
from lsm_jax.training import train
from tests.linearize.conftest import config_of

MESHES = {
    "rows": MeshConfig(data=2, fsdp=2),
    "heads": MeshConfig(data=1, fsdp=2, tensor=2),
}


def main(llama: str, data: str, folder: str) -> None:
    """Tune Liger's adapters of a pretrained Llama on each of several meshes of four devices: one training run
    for each mesh, in a folder of `folder`. `llama` is the model's folder, `data` the file of instructions.
    """
    for name, mesh in MESHES.items():
        train(config_of(Path(llama), Path(data), mesh=mesh), Path(folder) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
