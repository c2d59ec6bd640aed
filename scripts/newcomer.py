"""Walk a newcomer's path and time it: `python -m scripts.newcomer` clones this repository and runs what its pages show.

In a fresh clone: `make demo`; the five commands of docs/index.md on text of one's own, which is a folder, then a parquet file
and a data set of a hub on the loopback address; the method in one file of docs/new_method.md, trained and evaluated by that
page's commands; and the layer in one's own optax loop of docs/layers.md. The commands and files are read from the pages of the
clone; only the trainings on the parquet file and the data set are shortened. Only git, make and Python are needed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.doc_blocks import ROOT, blocks
from tests.hub_server import Hub

HUB_ID = "someone/texts"
# 10 steps of training; the folder's 100 show that the commands are complete.
SHORTENED = " --config.total_tokens=40960"
# Reads a folder of texts and writes a parquet file with the column `text`; run by the clone's Python, which has pyarrow.
WRITE_PARQUET = """
import pathlib, sys
import pyarrow, pyarrow.parquet
texts = [path.read_text() for path in sorted(pathlib.Path(sys.argv[1]).iterdir())]
pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sys.argv[2])
"""


def write_folder(texts: Path) -> None:
    """Write a folder of text files, the modules of this Python's `email`, `json` and `http`."""
    texts.mkdir()
    for package in ("email", "json", "http"):
        for path in (Path(os.__file__).parent / package).glob("*.py"):
            (texts / f"{package}-{path.stem}.txt").write_text(path.read_text())


def page_commands(clone: Path, page: str, word: str) -> list[str]:
    """Return the lines of the block of commands of a page that is the first to contain a word."""
    block = next(b for b in blocks(clone / page) if b.language == "indented" and word in b.text)
    return block.text.splitlines()


def page_python(clone: Path, page: str) -> list[str]:
    """Return the blocks of Python of a page of the clone."""
    return [b.text for b in blocks(clone / page) if b.language == "python"]


class Walk:
    """The commands that were run in a clone, and the seconds of each.

    Args:
        folder: an empty folder, in which the repository is cloned, data are written and caches lie.
        hub: the server of data sets of the Hugging Face hub.
    """

    def __init__(self, folder: Path, hub: Hub):
        self.clone, self.hub, self.times = folder / "lsm_jax", hub, []
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._env = kept | {
            "PATH": f"{self.clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "hub"),
            "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def run(self, what: str, command: str | list[str]) -> None:
        """Run a command, or a line of a shell, in the clone; `what` names it in the table of times.

        Raises:
            subprocess.CalledProcessError: the command failed.
        """
        shown = command if isinstance(command, str) else " ".join(command[:4])
        print(f"$ {shown}", flush=True)
        start = time.monotonic()
        subprocess.run(
            command, shell=isinstance(command, str), env=self._env, check=True,
            cwd=self.clone if self.clone.exists() else self.clone.parent,
        )  # fmt: skip
        self.times.append((what, time.monotonic() - start))

    def expect(self, *patterns: str) -> None:
        """Raise FileNotFoundError unless each pattern names a file of the clone that is not empty."""
        for pattern in patterns:
            if not any(path.stat().st_size for path in self.clone.glob(pattern)):
                raise FileNotFoundError(f"no command wrote {pattern}")

    def own_text(self, source: str, data: str, *, end: str = "") -> None:
        """Run the five commands of the home page on data; `end` is added to the commands that train.

        Raises:
            subprocess.CalledProcessError: a command failed.
            FileNotFoundError: a command did not write what the page says.
        """
        runs, picture = f"runs/{source}", f"{source}.png"
        for number, line in enumerate(page_commands(self.clone, "docs/index.md", "my_texts"), 1):
            line = line.replace("my_texts", data).replace("runs/", f"{runs}/")
            line = line.replace("comparison.png", picture)
            words = line.split()
            self.run(f"{source}: {number}, {' '.join(words[:2])}", line + end * (words[1] == "train"))  # fmt: skip
        for model in ("gla", "softmax"):
            self.expect(
                f"{runs}/{model}/eval/*/loss_by_position.png", f"{runs}/{model}/eval/*/results.json",
                f"{runs}/{model}/eval/*/sample.txt", f"{runs}/{model}/plots/training.png",
            )  # fmt: skip
        self.expect(picture)


def walk_path(folder: Path, hub: Hub, *, demo: bool = True) -> list[tuple[str, float]]:
    """Walk the path in an empty folder; return what was done and the seconds that it took.

    Args:
        folder: the folder.
        hub: a server of data sets, to which a data set is added.
        demo: whether `make demo` is run.

    Raises:
        subprocess.CalledProcessError: a command failed.
        FileNotFoundError: a command did not write what its page says.
    """
    walk = Walk(folder, hub)
    clone = walk.clone
    walk.run("clone", ["git", "clone", "--quiet", str(ROOT), str(clone)])
    walk.run("install (make .venv/.base)", ["make", ".venv/.base"])
    if demo:
        for line in page_commands(clone, "docs/index.md", "make demo"):
            walk.run(line.partition("#")[0].strip(), line)

    write_folder(clone / "my_texts")
    walk.own_text("folder", "my_texts")
    (install,) = page_commands(clone, "docs/index.md", "[datasets]")
    walk.run("install [datasets]", install)
    parquet = clone / "my_texts.parquet"
    subprocess.run([clone / ".venv/bin/python", "-c", WRITE_PARQUET, clone / "my_texts", parquet], check=True)  # fmt: skip
    walk.own_text("parquet", parquet.name, end=SHORTENED)
    hub.add("datasets", HUB_ID, {"train.parquet": parquet.read_bytes()})
    walk.own_text("hub", HUB_ID, end=SHORTENED)
    if not any(HUB_ID in request for request in hub.requests):
        raise FileNotFoundError(f"nothing was requested of {HUB_ID} on the hub at {hub.url}")

    (clone / "leaky.py").write_text(page_python(clone, "docs/new_method.md")[0])
    for line in page_commands(clone, "docs/new_method.md", "lsm train"):
        walk.run(f"a method in one file: {' '.join(line.split()[:2])}", line)
    walk.expect("runs/leaky/eval/*/results.json")
    (clone / "loop.py").write_text("\n".join(page_python(clone, "docs/layers.md")))
    walk.run("a layer in one's own optax loop", "python loop.py")
    return walk.times


def main() -> None:
    """Walk the path, and print a table of what was done and the seconds that it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="an empty or new folder, kept afterwards")
    parser.add_argument("--nodemo", action="store_true", help="leave out `make demo`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            sys.exit(f"newcomer.py: --folder={folder} is not empty")
        hub = Hub()
        try:
            times = walk_path(folder, hub, demo=not options.nodemo)
        finally:
            hub.close()
    print()
    for what, seconds in [*times, ("all", sum(seconds for _, seconds in times))]:
        print(f"{seconds:7.0f} s  {what}")


if __name__ == "__main__":
    main()
