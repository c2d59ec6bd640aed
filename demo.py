"""From text to a trained model and a sample, on a laptop's CPU.

    python demo.py

Trains configs/demo.py on the standard library of the running interpreter, and compares the model's held-out
bits per byte with three compressors of the same bytes. After an interruption, the same command continues the
run; after the end, it prints the results again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lsm_jax import interrupts

if __name__ == "__main__":
    interrupts.leave_on_signals("demo.py")  # before the slow imports

from absl import flags

from lsm_jax import commands

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/demo", "The run's directory.")
flags.DEFINE_integer(
    "total_tokens", None, "Number of tokens to train on; by default that of configs/demo.py."
)

HELDOUT_TOKENS = 1 << 18  # 15 seconds on two cores
PROMPT = 'def read_lines(path):\n    """'


def measure(workdir: Path) -> dict[str, Any]:
    """Evaluate the demo's finished run in `workdir`: return its perplexity on held-out bytes, a sample of
    text, and the bits per byte of the baselines (simple compressors) on the same bytes.
    """
    import lsm_jax
    from lsm_jax.data.sources import open_store
    from lsm_jax.evaluation import TASKS, Request, byte_baselines, plot_run, store_documents

    run = lsm_jax.load_run(workdir)
    request = Request(
        batch_size=64, max_tokens=HELDOUT_TOKENS, prompt=PROMPT, num_tokens=320, temperature=0.7
    )
    folder = workdir / "eval" / request.folder(run.step)
    perplexity = TASKS["perplexity"](run, request, folder)
    sample = TASKS["generate"](run, request, folder)
    train = store_documents(open_store(run.config.data, heldout=False)[0])
    heldout = store_documents(
        open_store(run.config.data, heldout=True)[0], perplexity["num_sequences"]
    )
    return {
        "heldout_bytes": sum(document.size for document in heldout),
        "bits_per_byte": {
            "model": perplexity["val/bits_per_byte"],
            **byte_baselines(train, heldout),
        },
        "sample": sample.prompt + sample.text,
        "sampling": sample.describe(),
        "loss_by_position": str(folder / "loss_by_position.png"),
        "training_curve": str(plot_run(workdir, run.config.name)),
    }


def main(argv: list[str]) -> None:
    """Run the demo: train its small model, evaluate it, and print the results. `argv` is the program's name
    alone.
    """
    if len(argv) > 1:
        raise ValueError(f"unknown arguments: {' '.join(argv[1:])}; accepted are flags (--help)")
    from rich.console import Console

    from configs.demo import get_config
    from lsm_jax.evaluation import bits_table
    from lsm_jax.training import train

    workdir = Path(FLAGS.workdir)
    config = get_config()
    if FLAGS.total_tokens is not None:
        config.total_tokens = FLAGS.total_tokens
    trained = train(config, workdir)
    if trained.interrupted is not None:
        sys.exit(128 + trained.interrupted)
    results = workdir / "eval" / f"demo-{trained.step}.json"
    if not results.exists():
        report = measure(workdir)
        draft = results.with_suffix(".partial")
        draft.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        draft.replace(results)
    report = json.loads(results.read_text(encoding="utf-8"))

    console = Console(highlight=False, markup=False)
    console.print(f"\n{report['sample']}\n\n{report['sampling']}\n", soft_wrap=True)
    title = f"{report['heldout_bytes']:,} held-out bytes"
    console.print(bits_table(report["bits_per_byte"], model="model", title=title))
    for name in ("loss_by_position", "training_curve"):
        console.print(f"{name.replace('_', ' ')}: {report[name]}", soft_wrap=True)
    console.print(f"run: {workdir}", soft_wrap=True)
    bits = report["bits_per_byte"]
    if bits["model"] >= bits["order-2"]:
        sys.exit(
            f"demo.py: the model has {bits['model']:.4f} bits per byte, not less than the order-2 model's {bits['order-2']:.4f}"
        )


if __name__ == "__main__":
    commands.run("demo.py", main)
