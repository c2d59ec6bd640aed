"""Compare the speed of kernels and training steps in two trees on one GPU: `python -m scripts.compare_speed --old FOLDER --output FOLDER`.

The rows of `benchmarks kernels` and `benchmarks model_step` are measured alternately in the old tree and in this one, the kernels
`--turns` times. The ratio of the smallest times of each row is printed; the exit status is 1 if a ratio exceeds `--limit`. The old
tree is a copy of the files of a commit (`git archive COMMIT | tar -x -C FOLDER`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("op", "shape", "variant", "length", "mixer", "size", "segments")


def run(tree: Path, name: str, arguments: list[str], rows: Path, seconds: float) -> None:
    """Run a benchmark in a tree, which appends its rows to a file; if it fails or is stopped, its finished rows remain.

    Args:
        tree: root of the source tree whose code is measured.
        name: name of the benchmark.
        arguments: further command-line arguments of the benchmark.
        rows: the JSONL file to which the tree's rows are appended.
        seconds: after this time the benchmark is stopped.
    """
    package = (tree / "benchmarks" / "__main__.py").is_file()
    module = ["benchmarks", name] if package else [f"benchmarks.{name}"]
    command = [sys.executable, "-m", *module, *arguments, f"--output={rows}"]
    environment = os.environ | {"PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=seconds, capture_output=True, text=True
        )
        output = done.stdout[-1500:] if done.returncode == 0 else done.stderr[-1500:]
    except subprocess.TimeoutExpired:
        output = f"stopped after {seconds:.0f} s"
    print(f"--- {tree.name} {name} {' '.join(arguments)}\n{output}", flush=True)


def times(path: Path) -> dict[str, list[float]]:
    """Return the smallest measured times [ms forward, ms forward and backward] of each benchmarked case, by a
    text that identifies the case (op, shape, and so on).

    `path` is a JSONL file with the rows that the benchmarks wrote; a training step has one time, the
    microseconds per token.
    """
    smallest: dict[str, list[float]] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        row = json.loads(line)
        name = " ".join(str(row[key]) for key in KEYS if key in row)
        value = row.get("kernel") or ([1e6 / row["tokens_per_second"]] if "tokens_per_second" in row else None)  # fmt: skip
        if value:
            best = smallest.setdefault(name, list(value))
            smallest[name] = [min(a, b) for a, b in zip(best, value, strict=True)]
    return smallest


def main() -> None:
    """Read the command line, measure both source trees alternately, and print the ratios of their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, required=True, help="root of the old tree")
    parser.add_argument("--output", type=Path, required=True, help="folder for the rows")
    parser.add_argument(
        "--shapes",
        default="8x4096x16x128,8x2048x32x256,2x16384x16x128",
        help="of benchmarks kernels; empty: no kernels",
    )
    parser.add_argument(
        "--variants",
        default="gla-340m,gated_deltanet-340m,mamba2-340m",
        help="of benchmarks model_step; empty: no training steps",
    )
    parser.add_argument("--turns", type=int, default=2, help="measurements of the kernels per tree")
    parser.add_argument("--limit", type=float, default=1.02, help="largest accepted ratio")
    parser.add_argument("--seconds", type=float, default=540, help="time limit of all measurements")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    trees = {"old": args.old.absolute(), "new": ROOT}
    jobs = [("kernels", ["--shapes", args.shapes])] * args.turns if args.shapes else []
    if args.variants:
        jobs += [("model_step", ["--variants", args.variants, "--lengths", "2048"])]
    for name, arguments in jobs:
        for label, tree in trees.items():
            left = end - time.monotonic()
            if left > 20:
                run(tree, name, arguments, args.output.absolute() / f"{label}.jsonl", left)
    old, new = (times(args.output / f"{label}.jsonl") for label in trees)
    slower = 0
    for name in old:
        if name in new:
            ratios = [b / a for a, b in zip(old[name], new[name], strict=True)]
            slower += any(ratio > args.limit for ratio in ratios)
            shown = " / ".join(f"{a:.4g}" for a in old[name]), " / ".join(f"{b:.4g}" for b in new[name])  # fmt: skip
            print(f"{name:45s} old {shown[0]:>18s}  new {shown[1]:>18s}  ratio {' '.join(f'{r:.3f}' for r in ratios)}")  # fmt: skip
    print(f"{len(old)} old rows, {len(new)} new rows, {slower} slower than {args.limit}")
    sys.exit(slower > 0 or not new)


if __name__ == "__main__":
    main()
