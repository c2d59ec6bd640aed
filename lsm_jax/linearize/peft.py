"""Read and write adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

    python -m lsm_jax.linearize.peft --source=iter_2400 --base=liger_gla_base --workdir=runs/liger

makes a run whose trained parameters are the adapters in --source and whose frozen parameters are those of --base. The run can be
evaluated, and another run can start from it. --base is a pretrained transformer (`--method=liger --gate=gla` replaces its softmax
attention by Liger's; `--method=softmax`, the default, does not) or a folder of Liger's authors, whose config.json names the model
(`lsm_jax.linearize.released`).

`python -m lsm_jax.linearize.export --format=peft` writes the adapters of a run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from lsm_jax.convert.checkpoint import Checkpoint, Tensors
from lsm_jax.convert.fields import check_fields, listed, shown
from lsm_jax.convert.huggingface import published_name, tokenizer_data
from lsm_jax.convert.load import StoredRows, layers_of, load_tree
from lsm_jax.convert.new_folder import new_folder
from lsm_jax.convert.recipe import FILE as RECIPE
from lsm_jax.convert.recipe import recipe_of, with_recipe
from lsm_jax.convert.runs import command, name_of, new_run, new_workdir, save_run
from lsm_jax.convert.tokenizer import check_companions, tokenizer_files
from lsm_jax.hub import local_path, reference_of
from lsm_jax.linearize.pretrained import Pretrained
from lsm_jax.linearize.recipes import base_model, liger_model
from lsm_jax.linearize.released import WINDOW, Released, open_pretrained, whole_number
from lsm_jax.mixers import LoRAConfig
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training import TrainConfig
from lsm_jax.training.partition import split
from lsm_jax.training.step import params_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {"a": "lora_A", "b": "lora_B"}
# Fields for which one value is supported; null and an absent field are accepted too.
_ONLY: dict[str, Any] = dict(
    peft_type="LORA", task_type="CAUSAL_LM", bias="none", fan_in_fan_out=False, use_rslora=False, use_dora=False,
)  # fmt: skip
_READ = {"r", "lora_alpha", "target_modules", *_ONLY}
# Fields about the start of training, the files' origin and regularisation, which do not change what trained adapters compute.
_HARMLESS = {
    "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "lora_dropout", "megatron_core", "peft_version",
    "runtime_config", "qalora_group_size", "init_lora_weights",
}  # fmt: skip
# Values of init_lora_weights with which the adapters are added to the unchanged weights of the base; others change these.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


class Adapters(Checkpoint):
    """A folder of adapters (LoRA) in the format of Hugging Face's PEFT, opened for reading. `config` has the contents
    of the folder's adapter_config.json."""

    config_file, single_file = CONFIG, TENSORS


def lora_config(adapters: Adapters) -> LoRAConfig:
    """Return the config (rank, alpha, adapted projections) of the adapters in a folder that PEFT wrote.

    Raises:
        ValueError: a field of adapter_config.json is missing, unknown, or has a value that is not supported, such as those of
            DoRA and rsLoRA; the message names the field.
    """
    given, where = adapters.config, adapters.config_path
    check_fields(given, where, dict(r="size", lora_alpha="positive", target_modules="texts"))
    for name, value in _ONLY.items():
        if given.get(name) not in (None, value):
            raise ValueError(f"{where}: {name}={shown(given[name])}; accepted is {value!r}")
    if (start := given.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise ValueError(
            f"{where}: init_lora_weights={shown(start)}, which changes the weights of the base; accepted are "
            f"{', '.join(map(repr, _PLAIN_STARTS))}"
        )
    empty = (None, False, [], {}, "")
    unknown = {k: v for k, v in given.items() if k not in _READ | _HARMLESS and v not in empty}
    if unknown:
        named = listed(f"{name}={shown(value)}" for name, value in sorted(unknown.items()))
        raise ValueError(f"{where}: fields that are not supported: {named}")
    if missing := [n for n in ("r", "lora_alpha", "target_modules") if given.get(n) is None]:
        raise ValueError(f"{where}: missing fields: {', '.join(missing)}")
    rank, alpha, modules = given["r"], given["lora_alpha"], given["target_modules"]
    if not modules:
        raise ValueError(
            f"{where}: target_modules=[]; accepted is a list of names, such as ['q_proj', 'v_proj']"
        )
    largest = max((min(shape) for shape in adapters.shapes.values()), default=0)
    if rank > largest:
        raise ValueError(
            f"{where}: r={rank}, but the largest rank of the stored matrices is {largest}"
        )
    if given.get("lora_dropout"):
        logging.warning(
            "%s: lora_dropout=%s is ignored: dropout acts only in training, where this library has none",
            where, shown(given["lora_dropout"]),
        )  # fmt: skip
    targets = tuple(dict.fromkeys(m.rpartition(".")[2] for m in modules))
    return LoRAConfig(targets=targets, rank=rank, alpha=float(alpha))


def load_adapters(adapters: Adapters, model: ModelConfig) -> dict[str, Any]:
    """Load the adapters in a folder of PEFT as parameters of a model, in float32.

    Args:
        adapters: the folder of the adapters, opened.
        model: the config of the model that has the adapters; its `lora` is `lora_config(adapters)`.

    Returns:
        The adapters' parameters, a pure dict with the same paths as in the model's parameters.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; the message names them.
    """
    target = _adapters_of(params_of(abstract(model)))
    expected = {name: shape for name, shape, *_ in _tensors(target, model)}
    adapters.check(expected)
    adapters.verify()
    return load_tree(
        adapters,
        target,
        lambda keys, layer: (((), StoredRows(_name(keys, layer), transposed=True)),),
        num_blocks=len(model.period()),
    )


def write_adapters(
    params: dict[str, Any],
    model: ModelConfig,
    out: str | os.PathLike[str],
    *,
    base: str = "",
    described: ModelConfig | None = None,
) -> Path:
    """Write the adapters of a model as a folder that PEFT loads, in float32. If the model is a linearised one, the folder has its
    recipe too (`lsm_jax.convert.recipe`), which `import_adapters` reads.

    Args:
        params: the parameters of the model, of which only the adapters are written.
        model: the config of the model.
        out: the folder to write; it must not exist yet.
        base: path or name of the pretrained model, for adapter_config.json.
        described: the config of the pretrained model; None is the softmax model from which `model` was made.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the model has no adapters, or adapters for modules that transformers does not have; or the folder `out` exists.
    """
    target = Path(out).expanduser().absolute()
    if target.exists():
        raise ValueError(f"out={str(out)!r} exists already; accepted is a new folder")
    if model.lora is None:
        raise ValueError("format='peft' requires adapters; the model has none (model.lora=None)")
    lora = model.lora
    arrays = {}
    for name, _, leaf, row in _tensors(_adapters_of(params), model):
        values = np.asarray(jax.device_get(leaf if row is None else leaf[row]), np.float32)
        arrays[name] = np.ascontiguousarray(values.T)
    names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in arrays}
    modules = list(lora.targets) if names == set(lora.targets) else sorted(names)
    config = dict(
        alpha_pattern={}, auto_mapping=None, base_model_name_or_path=base, bias="none", fan_in_fan_out=False,
        inference_mode=True, init_lora_weights=True, layers_pattern=None, layers_to_transform=None,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha, lora_dropout=0.0, modules_to_save=None,
        peft_type="LORA", r=lora.rank, rank_pattern={}, revision=None, target_modules=modules,
        task_type="CAUSAL_LM", use_dora=False, use_rslora=False,
    )  # fmt: skip
    recipe = recipe_of(model, base_model(model) if described is None else described)
    with new_folder(target, "out") as folder:
        folder.write_tensors(TENSORS, arrays, {"format": "pt"})
        folder.write_json(CONFIG, config)
        if recipe is not None:
            folder.write_json(RECIPE, recipe)
    return target


def _adapters_of(params: dict[str, Any]) -> dict[str, Any]:
    return split(params, ("lora",))[0]


def _name(keys: list[str], layer: int) -> str:
    """Return the name of the tensor in PEFT's format for one of the two matrices of an adapter.

    Args:
        keys: the matrix's path inside a layer's parameters, which ends in "lora" and "a" or "b".
        layer: the number of the layer, from 0.
    """
    module = published_name([*keys[:-2], "kernel"], layer).removesuffix(".weight")
    if not module:
        raise ValueError(
            f"format='peft': adapters of {'.'.join(keys[:-2])}, for which a transformer has no module; accepted is "
            "format='huggingface', which merges them"
        )
    return f"{_PREFIX}{module}.{_PARTS[keys[-1]]}.weight"


def _tensors(
    adapters: dict[str, Any], model: ModelConfig
) -> list[tuple[str, tuple[int, ...], Any, int | None]]:
    """Return a tuple (name, shape, parameter, period) for every tensor that a model's adapters have in PEFT's format.

    The parameter is the array of `adapters` that contains the tensor's transpose: at the index `period` of its first axis
    if it is stacked over the periods of the pattern; as the complete array if `period` is None.
    """
    size, tensors = len(model.period()), []
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapters):
        for keys, layer in layers_of(path, leaf.shape, size):
            row, shape = (None, leaf.shape) if layer < 0 else (layer // size, leaf.shape[1:])
            tensors.append((_name(keys, layer), shape[::-1], leaf, row))
    return tensors


def import_adapters(
    source: str | os.PathLike[str],
    base: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    *,
    method: str | None = None,
    window: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> TrainConfig:
    """Make a run from a folder of PEFT's adapters and the pretrained model to which they belong.

    Args:
        source: the folder of the adapters.
        base: the pretrained model, a Hugging Face folder or a .gguf file, which the run reads again whenever it is opened, so
            that its path must not change.
        workdir: the directory of the new run; it must not contain a run.
        method: "softmax", which leaves the transformer unchanged, or "liger", which replaces its attention by Liger's; None is the
            model of the recipe that an export writes beside adapters, or softmax without one. If `base` is a checkpoint of Liger's
            authors, the method is always liger, and `fields` must be empty.
        window: with Liger, tokens that a query of the attention branch sees, itself included; None is 65 for a checkpoint of
            Liger's authors, and 64 for other models.
        tokenizer: a tokenizer.json or its folder, to use instead of the base's tokenizer.
        fields: values of fields of `LigerConfig` for `method="liger"`, such as gate, by name.

    Returns:
        The run's config.

    Raises:
        ValueError: the adapters or the base are not supported, or do not belong together; or `method`, `window` or `fields` are not
            those of the recipe.
    """
    new_workdir(workdir)  # raises if a run is there
    adapters = Adapters(local_path(source))
    opened, lora = open_pretrained(base), lora_config(adapters)
    check_companions(opened)
    files = tokenizer_files(opened, tokenizer)
    found = reference_of(opened.folder)
    pretrained = Pretrained(path=str(found or Path(base).expanduser().absolute()))
    model = _model(adapters, opened, pretrained.config(), method, window, fields)
    model.lora = lora
    try:
        params = load_adapters(adapters, model)
    except ValueError as error:
        raise ValueError(
            f"source={str(source)!r} does not fit base={str(base)!r}: {error}"
        ) from error
    with new_run(workdir) as target:
        data = tokenizer_data(opened, target, files)
        name = name_of(adapters.folder)
        config = TrainConfig(
            name=name, model=model, data=data, base=pretrained, trainable=("lora",)
        )
        config.validate()
        save_run(target, config, params, adapters.folder)
        return config


def _model(
    adapters: Adapters,
    opened: Tensors,
    described: ModelConfig,
    method: str | None,
    window: int | None,
    fields: dict[str, Any],
) -> ModelConfig:
    """Return the config of the model to which adapters belong; the arguments are those of `import_adapters`, the pretrained model
    opened for reading, and the model that its config.json describes."""
    released = isinstance(opened, Released)
    if isinstance(opened, Released):
        if fields:
            raise ValueError(
                f"{', '.join(fields)}: base={str(opened.folder)!r} names its gate itself; accepted are no fields"
            )
        fields = opened.fields
    if method not in (None, "softmax", "liger"):
        raise ValueError(f"method={method!r}; accepted are softmax, liger")
    stored = with_recipe(adapters, described)
    if stored != described and (method, window) == (None, None) and (released or not fields):
        return stored
    if method != "liger" and not released and (fields or window is not None):
        given = [*fields, *(["window"] if window is not None else [])]
        raise ValueError(f"{', '.join(given)}: requires method='liger'")
    model = described
    if method == "liger" or released:
        default = WINDOW if released else 64
        model = liger_model(described, window=default if window is None else window, **fields)
    if stored != described and recipe_of(stored, model) is not None:
        raise ValueError(
            f"method={method!r}, window={window}, {fields}: {adapters.folder / RECIPE} describes another model; accepted is what it "
            "says, or none of these arguments"
        )
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Import the adapters that the command line names, and return the exit status."""

    def make(source: str, workdir: str, base: str | None, **options: str | None) -> TrainConfig:
        if base is None:
            raise ValueError(
                "--base is required: the pretrained model to which the adapters belong"
            )
        window = options.pop("window")
        given = {name: value for name, value in options.items() if value is not None}
        tokens = None if window is None else whole_number("window", window, WINDOW)
        return import_adapters(source, base, workdir, window=tokens, **given)

    options = dict(
        base="the pretrained model: a Hugging Face folder, one of Liger's authors, a .gguf file, or an id of the hub",
        method="softmax or liger (default: the exported model's, or softmax)",
        gate="the gate with --method=liger (default: gla)",
        window="tokens in the window with --method=liger",
        tokenizer="a tokenizer.json, if the base has none",
    )
    return command(
        "lsm_jax.linearize.peft",
        __doc__,
        "the folder of the adapters, or their id on the hub",
        make,
        arguments,
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
