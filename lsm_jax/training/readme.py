"""Write the README.md of a run's directory, which explains every file in it."""

from __future__ import annotations

from pathlib import Path

import jax

from lsm_jax.files import write_atomically
from lsm_jax.models import count_parameters
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.failures import writing

_MARK = "<!-- written by lsm_jax at each start of the run -->"

# Paths inside a run's directory, where `*` stands for a part of a name, and what they are.
FILES = {
    "README.md": "this page",
    "config.json": "the resolved config; a run continues only with the same one, except for fields that do not affect the result",
    "data.json": "names, sizes and metadata of the training data, which must be the same when the run continues",
    "environment.json": "versions of the libraries, and the devices of the last start",
    "implementations.json": "the backend that each op ran as, and why nothing better",
    "frozen.json": "digests of the parameters that do not train, if there are some",
    "expert_buffers.json": "the growths of the buffers between devices with experts, if there were some",
    "metrics.jsonl": "one line of JSON for each logged step (`train/`, `perf/`, `grad_norm/`) and each evaluation (`val/`)",
    "metrics.damaged-*.jsonl": "copies of a metrics.jsonl that had lines that could not be read",
    "tensorboard/": "the same metrics, and sampled texts, as TensorBoard events: `tensorboard --logdir .`",
    "wandb/": "the files of Weights & Biases, if the run sends metrics there; `wandb sync` sends those of an offline run",
    "wandb.json": "the identifier of the run there",
    "checkpoints/*/": "a checkpoint for each saved step: `params` (trained parameters), `ema` (their moving average, if "
    "`ema_decay` is set), `training` (optimizer and counters), `data` (the position in the data)",
    "checksums/*.json": "the checksums of each checkpoint's files, compared when it is read",
    "broken_checkpoints/": "checkpoints that could not be read, if there were some",
    "samples/*.txt": "the texts that were sampled at a step, if `samples.every` is set",
    "plots/training.png": "training and held-out loss by step, drawn when training ends",
    "plots/loss_by_position.npz": "held-out loss and number of tokens at each position in a document, of the last evaluation "
    "during training; of the average if there is one",
    "plots/loss_by_position.png": "its picture, drawn when training ends",
    "profile/": "traces of JAX's profiler, if steps were profiled; `step_times.json` and `step_times.png` have the sums",
    "eval/*/": "results of `eval.py`, by step and data: numbers (`.json`), arrays (`.npz`), pictures, samples",
    "eval/demo-*.json": "the results that `make demo` prints",
    "run.lock": "the process that trains, while it does",
}


def readme(config: TrainConfig, name: str) -> str:
    """Return the README.md of a run with this config, in a directory called `name`."""
    counts = count_parameters(config.model)
    layers = " + ".join(
        type(config.model.layers[letter].mixer).__name__.removesuffix("Config")
        for letter in dict.fromkeys(config.model.pattern)
    )
    average = f", with a moving average of decay {config.ema_decay}" if config.ema_decay else ""
    unit = "bytes" if config.data.tokenizer == "bytes" else "tokens"
    lines = [
        _MARK,
        "",
        f"# {config.name}",
        "",
        f"A training run of lsm_jax: {counts['total']:,} parameters ({layers}; pattern `{config.model.pattern}`, "
        f"{config.model.num_layers} layers), {config.num_steps:,} steps of {config.tokens_per_step:,} {unit}, seed {config.seed}, "
        f"{config.optimizer.name} with the schedule {config.optimizer.schedule}{average}.",
        "",
        "The command that started the run continues it after an interruption, with the same losses. To use it, in the folder "
        f"that contains `{name}`:",
        "",
        f"    lsm eval --workdir={name}",
        f"    lsm compare {name} OTHER_RUN",
        f'    python -c "import lsm_jax; print(lsm_jax.load_run({name!r}).step)"',
        "",
        "| file | content |",
        "|---|---|",
        *(f"| `{path}` | {text} |" for path, text in FILES.items()),
    ]
    return "\n".join(lines) + "\n"


def write_readme(workdir: Path, config: TrainConfig) -> None:
    """Write the README.md of a run's directory, unless it has one that was written by others. Only the first host writes.

    Raises:
        WriteError: the file cannot be written.
    """
    if jax.process_index() != 0:
        return
    path = workdir / "README.md"
    with writing(path):
        if path.is_file() and not path.is_symlink():
            with path.open(encoding="utf-8", errors="replace") as file:
                if not file.readline(len(_MARK)).startswith(_MARK):
                    return
        write_atomically(path, readme(config, workdir.name))
