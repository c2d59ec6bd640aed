"""Walk a newcomer's path and time it: `python -m scripts.newcomer` clones this repository and runs what its pages show.

In a fresh clone: `make demo`; then the five commands of docs/index.md on text of one's own; the method in one file of
docs/new_method.md, trained and evaluated by that page's commands; and the layer in one's own optax loop of docs/layers.md. The
commands and files are read from the pages of the clone. Only git, make and Python are needed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.doc_blocks import ROOT, blocks


def write_folder(texts: Path) -> Path:
    """Write a folder of text files, the modules of this Python's `email`, `json` and `http`; return the value of
    `data.path`."""
    texts.mkdir()
    for package in ("email", "json", "http"):
        for path in (Path(os.__file__).parent / package).glob("*.py"):
            (texts / f"{package}-{path.stem}.txt").write_text(path.read_text())
    return texts


# The kinds of text of one's own: each function writes the data at the given path, and returns the value of `data.path`.
SOURCES: dict[str, Callable[[Path], Path]] = {"folder": write_folder}


def page_commands(clone: Path, page: str, word: str) -> list[str]:
    """Return the lines of the block of commands of a page that is the first to contain a word."""
    block = next(b for b in blocks(clone / page) if b.language == "indented" and word in b.text)
    return block.text.splitlines()


def page_python(clone: Path, page: str) -> list[str]:
    """Return the blocks of Python of a page of the clone."""
    return [b.text for b in blocks(clone / page) if b.language == "python"]


def walk(folder: Path, sources: Sequence[str], *, demo: bool) -> list[tuple[str, float]]:
    """Walk the path in a new folder; return what was done and the seconds that it took.

    Args:
        folder: an empty folder, in which the repository is cloned and data are written.
        sources: names in `SOURCES`.
        demo: whether `make demo` is run.

    Raises:
        subprocess.CalledProcessError: a command failed.
        FileNotFoundError: a command did not write what its page says.
    """
    clone, times = folder / "lsm_jax", []

    def run(what: str, command: str | list[str]) -> None:
        print(f"$ {command if isinstance(command, str) else ' '.join(command)}", flush=True)
        path = f"{clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "JAX_PLATFORMS": "cpu"}
        env.pop("PYTHONPATH", None)
        start, where = time.monotonic(), clone if clone.exists() else folder
        shell = isinstance(command, str)
        subprocess.run(command, shell=shell, cwd=where, env=env, check=True)
        times.append((what, time.monotonic() - start))

    run("clone", ["git", "clone", "--quiet", str(ROOT), str(clone)])
    run("install (make .venv/.base)", ["make", ".venv/.base"])
    if demo:
        run("make demo", ["make", "demo"])
    for source in sources:
        data = SOURCES[source](clone / "my_texts")
        for number, line in enumerate(page_commands(clone, "docs/index.md", "my_texts"), 1):
            command = line.replace("my_texts", os.path.relpath(data, clone))
            run(f"{source}: command {number}, {' '.join(line.split()[:2])}", command)
        expect(clone, "runs/gla/eval/*/loss_by_position.png", "runs/gla/eval/*/sample.txt", "runs/gla/plots/training.png", "comparison.png")  # fmt: skip
    (clone / "leaky.py").write_text(page_python(clone, "docs/new_method.md")[0])
    for line in page_commands(clone, "docs/new_method.md", "lsm train"):
        run(f"a method in one file: {' '.join(line.split()[:2])}", line)
    expect(clone, "runs/leaky/eval/*/results.json")
    (clone / "loop.py").write_text("\n".join(page_python(clone, "docs/layers.md")))
    run("a layer in one's own optax loop", "python loop.py")
    return times


def expect(clone: Path, *patterns: str) -> None:
    """Raise FileNotFoundError unless each pattern names a file of the clone that is not empty."""
    for pattern in patterns:
        if not any(path.stat().st_size for path in clone.glob(pattern)):
            raise FileNotFoundError(f"no command wrote {pattern}")


def main() -> None:
    """Walk the path, and print a table of what was done and the seconds that it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="an empty or new folder, kept afterwards")
    parser.add_argument("--sources", nargs="+", choices=sorted(SOURCES), default=sorted(SOURCES))
    parser.add_argument("--nodemo", action="store_true", help="leave out `make demo`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            sys.exit(f"newcomer.py: --folder={folder} is not empty")
        times = walk(folder, options.sources, demo=not options.nodemo)
    print()
    for what, seconds in [*times, ("all", sum(seconds for _, seconds in times))]:
        print(f"{seconds:7.0f} s  {what}")


if __name__ == "__main__":
    main()
