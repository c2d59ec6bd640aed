"""Read and describe the checkpoints of Liger's authors: Hugging Face folders whose model_type is one of `RELEASED`.

    python -m lsm_jax.linearize.released --source=Liger-GLA-8B --workdir=runs/liger-8b

makes a run, which can be evaluated (`eval.py --workdir=runs/liger-8b`) and from which other runs can start. The tensors have the
names of the pretrained transformer. The model is that of github.com/OpenSparseLLMs/Linearization at 0b364eb: window and memory
weigh 0.5 each, the gate's logarithm is divided by 16 (GLA, GSA), and a query sees 65 tokens, since the attention of the
transformers that the authors used (4.47.1) counts a window of 64 without the query. `--window=64` is what later versions compute,
and what the paper states. Their code rounds the sum of both branches to bfloat16 in every dtype; here only bfloat16 models do.

`python -m lsm_jax.linearize.export --format=liger` writes a run as a folder of this format. The released adapters are read by
`lsm_jax.linearize.peft`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lsm_jax.convert import import_huggingface
from lsm_jax.convert.checkpoint import Checkpoint, Tensors
from lsm_jax.convert.fields import check_auto_map, check_fields, shown
from lsm_jax.convert.huggingface import Source, open_source, published_config
from lsm_jax.convert.published import ARCHITECTURES
from lsm_jax.convert.recipe import FILE as RECIPE
from lsm_jax.convert.recipe import recipe_of, with_recipe
from lsm_jax.convert.runs import command
from lsm_jax.hub import local_path
from lsm_jax.linearize.recipes import base_model, liger_model
from lsm_jax.mixers import LigerConfig
from lsm_jax.models import ModelConfig
from lsm_jax.training import TrainConfig


@dataclasses.dataclass(frozen=True)
class Kind:
    """The model of a checkpoint that Liger's authors released: a pretrained transformer with a kind of gate.

    Attributes:
        base: model_type of the transformer that has the same tensors, such as "llama".
        architecture: name of the class in the authors' code that computes the model.
        gate: the kind of gate, a value of `LigerConfig.gate`.
    """

    base: str
    architecture: str
    gate: str


RELEASED = {
    "liger_gla": Kind("llama", "LigerGLAForCausalLM", "gla"),
    "liger_gsa": Kind("llama", "LigerGSAForCausalLM", "gsa"),
    "liger_hgrn2": Kind("llama", "LigerHGRN2ForCausalLM", "hgrn2"),
    "liger_mistral_gla": Kind("mistral", "LigerMistralGLAForCausalLM", "gla"),
    "liger_qwen2_gla": Kind("qwen2", "LigerQwen2GLAForCausalLM", "gla"),
}
WINDOW = 65
_DEFAULT_SLOTS = 64  # pool_size of the authors' config class
_ONLY = dict(expand_k=1, expand_v=1)
_UNUSED = ("hidden_ratio", "pool_size", *_ONLY, "auto_map")  # pool_size is read for GSA alone


class Released(Checkpoint):
    """A checkpoint that Liger's authors released, opened for reading.

    Attributes:
        config: the contents of config.json, translated to the transformer that has the same tensors.
        fields: the values of those fields of `LigerConfig` that the checkpoint's model_type and config.json determine.

    Raises:
        ValueError: the folder is no released checkpoint, or a field has a value that the authors' code does not implement.
    """

    fields: dict[str, Any]

    def __init__(self, folder: Any):
        super().__init__(folder)
        given, where = self.config, self.config_path
        check_fields(given, where, dict(model_type="text", architectures="texts", pool_size="size"))
        check_auto_map(given, where)
        name = given.get("model_type")
        if name not in RELEASED:
            raise ValueError(
                f"{where}: model_type={shown(name)}; accepted are {', '.join(RELEASED)}"
            )
        kind = RELEASED[name]
        named = given.get("architectures") or [kind.architecture]
        if named != [kind.architecture]:
            raise ValueError(
                f"{where}: architectures={shown(named)}; accepted is [{kind.architecture!r}]"
            )
        for field, value in _ONLY.items():
            if given.get(field, value) != value:
                raise ValueError(f"{where}: {field}={shown(given[field])}; accepted is {value!r}")
        self.config = {k: v for k, v in given.items() if k not in _UNUSED}
        self.config |= dict(model_type=kind.base, architectures=[ARCHITECTURES[kind.base]])
        self.fields = dict(gate=kind.gate)
        if kind.gate == "gsa":
            slots = given.get("pool_size", _DEFAULT_SLOTS)
            model = published_config(self)
            (head_dim,) = {x.mixer.dim(model.hidden_size) for x in model.layers.values()}
            if slots is None or head_dim % slots:
                raise ValueError(
                    f"{where}: pool_size={slots}; accepted are divisors of the {head_dim} channels of a head"
                )
            self.fields["num_slots"] = slots

    def model(self, window: int | None = None) -> ModelConfig:
        """Return the config of the Liger model that the checkpoint contains; in its attention branches each query sees
        `window` tokens, itself included. None is the window of the folder's recipe (`lsm_jax.convert.recipe`), or 65.

        Raises:
            ValueError: the recipe is of another model than config.json.
        """
        base = published_config(self)
        stored = with_recipe(self, base)
        if window is None and stored != base:
            window = next(iter(stored.layers.values())).mixer.window
        model = liger_model(base, window=WINDOW if window is None else window, **self.fields)
        if stored != base:
            described = copy.deepcopy(stored)
            for layer in described.layers.values():
                layer.mixer.window = window
            if recipe_of(described, model) is not None:
                raise ValueError(
                    f"{self.folder / RECIPE} and {self.config_path} are of different models; remove the one that is wrong"
                )
        return model


def open_pretrained(source: Source) -> Tensors:
    """Open the config and tensors of a pretrained transformer for reading: a Hugging Face folder or a .gguf file. A
    checkpoint of Liger's authors is opened as the transformer that has the same tensors (`Released`).

    Raises:
        ValueError: the source cannot be read.
    """
    opened = open_source(source)
    kind = opened.config.get("model_type")
    if type(opened) is Checkpoint and isinstance(kind, str) and kind.startswith("liger_"):
        return Released(opened.folder)
    return opened


def describe(model: ModelConfig, base_type: str) -> dict[str, Any]:
    """Return the fields of config.json (model_type, architectures, pool_size) with which the code of Liger's authors
    computes a Liger model of this library.

    Args:
        model: the config of the Liger model.
        base_type: model_type of the transformer from which the model was made, such as "llama".

    Raises:
        ValueError: the authors' code does not compute the model; the message says why.
    """
    mixers = {letter: model.layers[letter].mixer for letter in sorted(set(model.pattern))}
    others = [f"{x}: {type(m).__name__}" for x, m in mixers.items() if type(m) is not LigerConfig]
    if others or len(mixers) > 1:
        raise ValueError(
            f"format='liger': layers {', '.join(others or mixers)}; the released code has the same Liger layer everywhere"
        )
    (mixer,) = mixers.values()
    kinds = {(k.base, k.gate): name for name, k in RELEASED.items()}
    name = kinds.get((base_type, mixer.gate))
    if name is None:
        accepted = ", ".join(f"{gate} of {base}" for base, gate in kinds)
        raise ValueError(
            f"format='liger': gate={mixer.gate!r} of model_type={base_type!r}; accepted are {accepted}"
        )
    if mixer.window not in (WINDOW - 1, WINDOW):
        raise ValueError(
            f"format='liger': window={mixer.window}; the released code has 64, or 65 with old versions of transformers"
        )
    slots = dict(num_slots=mixer.num_slots) if mixer.gate == "gsa" else {}
    computed = liger_model(base_model(model), gate=mixer.gate, window=mixer.window, **slots)
    theirs = next(iter(computed.layers.values())).mixer
    same = ("op", "implementation")
    for field in dataclasses.fields(mixer):
        ours, value = getattr(mixer, field.name), getattr(theirs, field.name)
        if field.name == "gate_temperature":
            ours, value = mixer.temperature(), theirs.temperature()
        if field.name not in same and ours != value:
            raise ValueError(
                f"format='liger': {field.name}={ours}; the released code computes {value}"
            )
    if mixer.qk_norm:
        raise ValueError(
            "format='liger': qk_norm=True; the released code has no norms of queries and keys"
        )
    fields = dict(model_type=name, architectures=[RELEASED[name].architecture])
    if mixer.gate == "gsa":
        fields["pool_size"] = mixer.gate_size(model.hidden_size)
    return fields


def transformer_type(config: dict[str, Any]) -> str:
    """Return the model_type of the transformer that has the same tensors as a checkpoint, given the content `config`
    of its config.json: "llama" for Liger's "liger_gla"; any other model_type is returned unchanged."""
    kind = str(config.get("model_type"))
    return RELEASED[kind].base if kind in RELEASED else kind


def import_released(
    source: Any,
    workdir: Any,
    *,
    window: int | None = None,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainConfig:
    """Make a run from a checkpoint that Liger's authors released: the run's only checkpoint has its parameters, so
    that the run can be evaluated and other runs can start from it.

    Args:
        source: the folder of the released checkpoint.
        workdir: the directory of the new run; it must not contain a run.
        window: tokens that a query of the attention branch sees, itself included; None is the window of the folder's recipe, or 65.
        tokenizer: a tokenizer.json or its folder, to use instead of the source's tokenizer.
        progress: called while parameters are loaded, with (number of entries loaded so far, number of all entries); or None.

    Returns:
        The run's config.

    Raises:
        ValueError: the source is no released checkpoint, or `workdir` contains a run.
    """
    opened = Released(local_path(source))
    return import_huggingface(
        opened, workdir, tokenizer=tokenizer, model=opened.model(window), progress=progress
    )


def whole_number(name: str, text: str | None, default: int) -> int:
    """Return the value of the command-line option `--name`, which must be a whole number from 1 on; `text` is its value
    on the command line, or None if it was not given, which returns `default`.

    Raises:
        ValueError: the text is no whole number from 1 on.
    """
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--{name}={text}; accepted is a whole number from 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Import the checkpoint of Liger's authors that the command line names, and return the exit status."""

    def make(source: str, workdir: str, window: str | None, tokenizer: str | None) -> TrainConfig:
        tokens = None if window is None else whole_number("window", window, WINDOW)
        return import_released(source, workdir, window=tokens, tokenizer=tokenizer)

    options = dict(
        window=f"tokens that a query of the window sees (default: that of the export, or {WINDOW})",
        tokenizer="a tokenizer.json, if the source has none",
    )
    return command(
        "lsm_jax.linearize.released",
        __doc__,
        "the checkpoint's folder, or its id on the hub",
        make,
        arguments,
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
