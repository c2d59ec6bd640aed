"""Execute the notebooks and store their outputs, which the documentation's site shows: `python -m scripts.run_notebooks`.

With names, such as `python -m scripts.run_notebooks ablation`, only these are executed. Each runs in a process of its
own on the CPU, in a temporary folder. With `--no-store` (`make notebooks`) the files stay as they are, and only the
seconds of each are printed.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
# Set for tests; users do not have them.
_TESTS_ONLY = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")


def read(name: str) -> Any:
    """Return the notebook of this name; ValueError if it is not a valid one."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def execute(notebook: Any, *, timeout: int = 600) -> float:
    """Run all cells of a notebook in a new process on the CPU and store their outputs in it; return the seconds that it took.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _TESTS_ONLY}
    paths = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=environment)
    return time.perf_counter() - began


def smaller(picture: str) -> str:
    """Return a PNG in base64 with at most 256 colours, which is about a third as long."""
    stored = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(stored, "png", optimize=True)
    return base64.b64encode(stored.getvalue()).decode()


def tidy(notebook: Any) -> None:
    """Remove from a notebook what differs from run to run without a meaning: times of cells, the progress that programs
    print to standard error, addresses of objects, the text of pictures and the colours of terminals. What a cell prints becomes one output."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        kept: list[Any] = []
        for output in cell.outputs:
            data = output.get("data", {})
            if output.output_type == "stream":
                if output.name == "stderr":
                    continue
                output.text = re.sub(r"\x1b\[[0-9;]*m", "", output.text)  # terminals' colours
                if kept and kept[-1].output_type == "stream":
                    kept[-1].text += output.text
                    continue
            elif "image/png" in data:
                output.data = {"image/png": smaller(data["image/png"])}
            elif re.search(r" at 0x[0-9a-f]+>", data.get("text/plain", "")):
                continue
            kept.append(output)
        cell.outputs = kept
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def main() -> None:
    """Execute the notebooks that the arguments name, all by default, print their times and store them with their outputs."""
    parser = argparse.ArgumentParser(prog="python -m scripts.run_notebooks", description=__doc__)
    known = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", default=known, choices=known, metavar="NAME")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that a cell may take")
    parser.add_argument("--no-store", action="store_true", help="leave the files as they are")
    given = parser.parse_args()
    for name in given.names:
        notebook = read(name)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = execute(notebook, timeout=given.timeout)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        path = FOLDER / f"{name}.ipynb"
        if not given.no_store:
            tidy(notebook)
            nbformat.write(notebook, path)
        print(
            f"{name}: {seconds:.0f} s, of the cores {computed:.0f} s, {path.stat().st_size / 1000:.0f} kB",
            flush=True,
        )


if __name__ == "__main__":
    main()
