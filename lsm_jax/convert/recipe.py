"""Write and read the recipe of an exported model: the mixers that its config.json cannot describe.

A Liger model, or a model with attention in a window, is exported in the format of the transformer that it was made from, whose
config.json describes softmax attention. The file lsm_jax.json beside it has the pattern of the layers and the config of each
mixer, so that an import makes the same model.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

from lsm_jax.convert.checkpoint import Checkpoint, Tensors
from lsm_jax.convert.fields import COMPUTATION, listed, shown
from lsm_jax.mixers import SoftmaxConfig
from lsm_jax.models import ModelConfig
from lsm_jax.training.config_json import check_types, flatten, from_dict, to_dict

FILE = "lsm_jax.json"
_FORMAT = 1
# Fields of a softmax mixer that a linearised layer may have with other values: of its own window.
_OWN = ("window", "implementation")


def recipe_of(config: ModelConfig, described: ModelConfig) -> dict[str, Any] | None:
    """Return the contents of the file of a model's recipe; None if its mixers are those of config.json.

    Args:
        config: the model.
        described: the model that config.json describes, with the same feedforwards.
    """
    mixers = [_of(model) for model in (config, described)]
    if mixers[0] == mixers[1]:
        return None
    named = {letter: to_dict(config.layers[letter].mixer) for letter in sorted(set(config.pattern))}
    return dict(format=_FORMAT, pattern=config.pattern, mixers=named)


def _of(config: ModelConfig) -> list[dict[str, Any]]:
    """Return the fields of each layer's mixer that define what it computes, by name."""
    rows = {letter: flatten(config.layers[letter].mixer) for letter in set(config.letters())}
    # Through JSON, so that tuples and lists compare equal.
    return json.loads(json.dumps([_computed(rows[letter]) for letter in config.letters()]))


def _computed(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not COMPUTATION & set(name.split("."))}


def with_recipe(source: Tensors, described: ModelConfig) -> ModelConfig:
    """Return the model that a folder's recipe describes; the model of its config.json if it has none.

    Args:
        source: the folder, opened for reading.
        described: the model of its config.json.

    Raises:
        ValueError: the recipe cannot be read, or was written for another transformer; the message names the field.
    """
    if not isinstance(source, Checkpoint) or not _exists(source):
        return described
    where = source.folder / FILE
    try:
        return _read(source.read_json(FILE), described)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        message = str(error) if str(where) in str(error) else f"{where}: {error}"
        raise ValueError(message) from error


def _exists(source: Checkpoint) -> bool:
    path = source.folder / FILE
    return path.exists() or path.is_symlink()


def _read(given: dict[str, Any], described: ModelConfig) -> ModelConfig:
    """Return the model of a recipe, given the contents of its file and the model of config.json."""
    if unknown := sorted(set(given) ^ {"format", "pattern", "mixers"}):
        raise ValueError(
            f"fields {listed(unknown)}; accepted are exactly format, pattern and mixers"
        )
    if given["format"] != _FORMAT:
        raise ValueError(f"format={given['format']!r}; accepted is {_FORMAT}")
    pattern, mixers = given["pattern"], given["mixers"]
    if not isinstance(mixers, dict) or not isinstance(pattern, str) or set(pattern) != set(mixers):
        raise ValueError(f"pattern={pattern!r}: its letters must be the names of mixers")
    if not pattern or described.num_layers % len(pattern):
        raise ValueError(f"pattern={pattern!r}: the model has {described.num_layers} layers, which its letters do not divide")  # fmt: skip
    _check_kinds(mixers, "mixers")
    config = copy.deepcopy(described)
    config.pattern, config.layers = pattern, {}
    configs = {letter: from_dict(mixer) for letter, mixer in mixers.items()}
    for letter, other in zip(config.letters(), described.letters(), strict=True):
        mixer, layer = configs[letter], described.layers[other]
        _check(letter, mixer, layer.mixer)
        layer = dataclasses.replace(layer, mixer=mixer)
        if config.layers.setdefault(letter, layer) != layer:
            raise ValueError(f"pattern={pattern!r}: layers of {letter} have different feedforwards")
    config.validate()
    return config


def _check_kinds(given: Any, name: str) -> None:
    """Raise ValueError unless every "type" in a recipe is a class of `lsm_jax.mixers`: a folder names nothing else to import."""
    if not isinstance(given, dict):
        return
    kind = given.get("type", "lsm_jax.mixers.")
    if not isinstance(kind, str) or not kind.startswith("lsm_jax.mixers."):
        raise ValueError(f"{name}.type={shown(kind)}; accepted are the configs of lsm_jax.mixers")
    for key, value in given.items():
        _check_kinds(value, f"{name}.{key}")


def _check(letter: str, mixer: Any, described: Any) -> None:
    """Raise ValueError unless a mixer's config is a linearised form of the softmax mixer that config.json describes."""
    if not isinstance(mixer, SoftmaxConfig) or not isinstance(described, SoftmaxConfig):
        kind, theirs = type(mixer).__name__, type(described).__name__
        raise ValueError(
            f"mixers.{letter} is a {kind}, and config.json describes a {theirs}; accepted are softmax attention and its linearised "
            "forms, such as LigerConfig"
        )
    check_types(mixer, f"mixers.{letter}.")
    for field in dataclasses.fields(described):
        if field.name in _OWN:
            continue
        ours, theirs = getattr(mixer, field.name), getattr(described, field.name)
        if ours != theirs:
            raise ValueError(
                f"mixers.{letter}.{field.name}={ours!r}, but config.json says {theirs!r}; the two files are of different models"
            )
