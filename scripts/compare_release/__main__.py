"""Compare this checkout with the commit before the redesign, number by number: `python -m scripts.compare_release`.

Each of these sections runs in both trees on this machine's CPU, and every difference is printed:

    ops       outputs, final states and gradients of every case of tests/ops, in every form, in float32
    mixers    outputs, states and gradients of every method and of Mixture-of-Memories, and one decoding step
    kernels   the jaxpr of every fused kernel, forward and backward, for Hopper and for TPU; equal jaxprs compile to equal code,
              so that spilled registers and speed are the same too; their text does not show how many arrivals a barrier counts
    runs      the losses of a tiny training run of each configuration family
    resume    the losses of the reference's runs, cut back to their middle and continued by this checkout

Arrays are compared by the SHA-256 of their bytes. The reference tree is a git worktree in `--folder`. The reference's results are
stored there too, so that a second comparison runs only this checkout. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "a5b7204"
SECTIONS = ("ops", "mixers", "kernels", "runs", "resume")
# As in tests/conftest.py: both trees are compiled with the same options, and faster.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1",
}


def _collect(tree: Path, section: str, folder: Path) -> dict[str, str]:
    """Compute the results of a section (such as "ops") with the code of a source tree, in another process;
    store them in `folder` and return them by name.
    """
    output = folder / f"{section}.json"
    path = f"{tree}{os.pathsep}{ROOT / 'scripts'}"
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "compare_release.collect", section]
    command += [f"--tree={tree}", f"--folder={folder.parent}", f"--output={output}"]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    return json.loads(output.read_text())


def _reference_results(tree: Path, section: str, folder: Path) -> dict[str, str]:
    """Return the reference commit's results of a section (such as "ops") by name; they are computed once
    and then read from `folder`.
    """
    if section == "resume":  # a resumed run must have the losses of the uninterrupted run
        losses = json.loads((folder / "runs.json").read_text())
        return {k: v for k, v in losses.items() if (folder / "runs" / k / "checkpoints").is_dir()}
    path = folder / f"{section}.json"
    return json.loads(path.read_text()) if path.is_file() else _collect(tree, section, folder)


def compare(section: str, expected: dict[str, str], results: dict[str, str]) -> list[str]:
    """Return a line of text for each result that differs from the reference's, for the results of one section
    by name. Results that the reference lacks are new and no difference.
    """
    return [
        f"{section}: {name}: {value} -> {results.get(name, 'missing')}"
        for name, value in expected.items()
        if results.get(name) != value
    ]


def main() -> None:
    """Read the command line, compute the results with this checkout and with the reference commit, and
    print the differences.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="sections to compare, separated by commas"
    )
    parser.add_argument("--reference", default=REFERENCE, help="commit to compare with")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "runs/compare_release",
        help="folder for the reference tree and all results",
    )
    parser.add_argument("--only-reference", action="store_true", help="collect only the reference")
    args = parser.parse_args()
    sections = args.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        sys.exit(
            f"--sections={args.sections}: unknown: {', '.join(unknown)}; accepted are {', '.join(SECTIONS)}"
        )
    folder = args.folder.absolute()
    tree, stored, new = folder / "tree", folder / "reference", folder / "checkout"
    for path in (stored, new):
        path.mkdir(parents=True, exist_ok=True)
    if not tree.is_dir():
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), args.reference], cwd=ROOT, check=True
        )
    lines: list[str] = []
    for section in sections:
        expected = _reference_results(tree, section, stored)
        if args.only_reference:
            continue
        differences = compare(section, expected, _collect(ROOT, section, new))
        print(f"{section}: {len(expected)} rows, {len(differences)} differ")
        lines += differences
    print("\n".join(lines))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
