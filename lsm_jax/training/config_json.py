"""Convert configs to JSON and back, list the fields in which two configs differ, and suggest names for unknown
fields."""

from __future__ import annotations

import dataclasses
import importlib
import json
import numbers
import types
import typing
from typing import Any

from lsm_jax import mixers
from lsm_jax.names import did_you_mean

# Fields that may change when a run is resumed.
_MAY_CHANGE = {
    "name", "mesh", "accumulation_steps", "model.remat", "model.unroll_layers", "model.loss_chunk_size",
    "log_every", "eval_every", "eval_batches", "checkpoint_every", "keep_last", "keep_every",
    "best_metric", "best_mode", "keep_best", "samples", "grad_norms", "wandb",
    "max_bad_steps", "profile_start", "profile_steps",
    "data.num_threads", "data.prefetch", "data.cache_dir",
}  # fmt: skip


def to_dict(value: Any) -> Any:
    """Convert a config to a dict of JSON values; each dataclass in it becomes an object with its class as
    "type"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = _name_of(type(value))
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": kind, **fields}
    if isinstance(value, dict):
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(item) for item in value]
    return value


def _name_of(kind: type) -> str:
    """Return the name of a config class in JSON: "module:class" of this library's, "method:NAME" of a registered method's,
    whose module has the name that the program gave to the file.
    """
    if kind.__module__.partition(".")[0] != "lsm_jax":
        for name, method in (mixers.METHODS | mixers.WRAPPERS).items():
            config = method.config
            # A file that was run twice has two classes.
            outside = config.__module__.partition(".")[0] != "lsm_jax"
            if config is kind or (outside and config.__qualname__ == kind.__qualname__):
                return f"method:{name}"
    return f"{kind.__module__}:{kind.__qualname__}"


# Modules of config classes that were renamed in release 0.2: old name -> new name.
_MOVED_MODULES = {
    "lsm_jax.data.recall": "lsm_jax.data.recall_task",
    "lsm_jax.models.recall": "lsm_jax.models.recall_model",
}


def _moved_fields(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config of class `kind`, read from JSON, as release 0.2 names them: if it is a mixer's
    config that release 0.1 wrote, fields of the op move into the field `op`; other configs are unchanged."""
    if not issubclass(kind, mixers.RecurrentConfig) or "op" in fields:
        return fields
    same = {name: value for name, value in fields.items() if name not in MOVED_FIELDS}
    moved = {name: value for name, value in fields.items() if name in MOVED_FIELDS}
    window = "window_implementation"
    attention = dict(implementation=moved.pop(window)) if window in moved else {}
    return same | attention | dict(op=dataclasses.replace(kind().op, **moved))


def _class_of(kind: str) -> type:
    """Return the config class that a JSON config names as `kind`; see `_name_of`.

    Raises:
        ValueError: the class is neither in this library nor the config of a registered method.
    """
    methods = mixers.METHODS | mixers.WRAPPERS
    module, _, name = kind.partition(":")
    if module == "method" and name in methods:
        return methods[name].config
    if module == "method":
        raise ValueError(
            f"config: the method {name!r} is not registered; run the file that registers it first, such as by --method_file"
        )
    for method in methods.values():
        if kind == f"{method.config.__module__}:{method.config.__qualname__}":
            return method.config
    if module.partition(".")[0] != "lsm_jax":
        raise ValueError(
            f"config: type {kind!r} is not one of lsm_jax's; accepted are its classes and configs of methods given to mixers.register"
        )
    return getattr(importlib.import_module(_MOVED_MODULES.get(module, module)), name)


# Fields of mixer configs that were renamed in release 0.2: old name -> new name.
MOVED_FIELDS = {
    "form": "op.form",
    "implementation": "op.implementation",
    "chunk_size": "op.chunk_size",
    "window_implementation": "implementation",
}


def from_dict(value: Any) -> Any:
    """Convert a dict of JSON values, the result of `to_dict`, back to the config.

    Raises:
        ValueError: a class that a "type" names is neither in this library nor the config of a registered
            method, or it does not have a field of the dict.
    """
    if isinstance(value, dict) and "type" in value:
        kind = _class_of(value["type"])
        name = kind.__name__
        fields = {key: from_dict(item) for key, item in value.items() if key != "type"}
        fields = _moved_fields(kind, fields)
        unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(kind)})
        if unknown:
            accepted = ", ".join(f.name for f in dataclasses.fields(kind))
            raise ValueError(f"config: {name} has no field {', '.join(unknown)}; it has {accepted}")
        for field in dataclasses.fields(kind):
            if isinstance(fields.get(field.name), list):
                fields[field.name] = tuple(fields[field.name])
        return kind(**fields)
    if isinstance(value, dict):
        return {key: from_dict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_dict(item) for item in value]
    return value


def check_types(config: Any, prefix: str = "") -> None:
    """Check that the fields of a config, and of the configs in it, have the types of their annotations; numbers are not
    compared with their ranges.

    Raises:
        ValueError: a field has another type; the message has its dotted name, which begins with `prefix`.
    """
    if isinstance(config, dict):
        for key, item in config.items():
            check_types(item, f"{prefix}{key}.")
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return
    for field, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, field, None)
        if not _has_type(value, hint):
            accepted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ValueError(f"{prefix}{field}={value!r}: accepted is {accepted}"[:300])
        check_types(value, f"{prefix}{field}.")


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an annotation, as far as the annotation has only types that configs use."""
    kinds = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, kind) for kind in kinds)
    if origin is tuple and len(kinds) == 2 and kinds[1] is Ellipsis:
        return isinstance(value, tuple | list) and all(_has_type(v, kinds[0]) for v in value)
    if origin is dict and len(kinds) == 2:
        return isinstance(value, dict) and all(_has_type(v, kinds[1]) for v in value.values())
    if hint is float or hint is int:
        kind = numbers.Real if hint is float else numbers.Integral
        return isinstance(value, kind) and not isinstance(value, bool)
    if hint in (bool, str, type(None)) or dataclasses.is_dataclass(hint):
        return isinstance(value, hint)
    return True


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return all values of a config as a dict by dotted field name, such as "optimizer.peak_lr"."""
    if not isinstance(value, dict):
        value = to_dict(value)
    rows = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        rows |= flatten(item, f"{name}.") if isinstance(item, dict) else {name: item}
    return rows


def differences(old: Any, new: Any) -> list[str]:
    """Return the fields in which two training configs differ and which change the training, as lines "name:
    old -> new"."""

    def may_change(name: str) -> bool:
        last = name.rpartition(".")[2]
        return last in ("expert_buffer", "exchange") or any(
            name == other or name.startswith(other + ".") for other in _MAY_CHANGE
        )

    # Through JSON, so that tuples and lists compare equal.
    a, b = (json.loads(json.dumps(flatten(c))) for c in (old, new))
    names = [n for n in dict.fromkeys([*a, *b]) if not may_change(n)]
    missing = "(absent)"
    return [
        f"{n}: {a.get(n, missing)} -> {b.get(n, missing)}"
        for n in names
        if a.get(n, missing) != b.get(n, missing)
    ]


def suggest(config: Any, name: str) -> str:
    """Return the error message for a dotted field name that the config does not have, such as
    "optimizer.lr"; it lists the fields that the inner config (here "optimizer") has."""
    *path, last = name.split(".")
    holder = config
    for part in path:
        inner = holder.get(part) if isinstance(holder, dict) else getattr(holder, part, None)
        if inner is None:
            fields = holder if isinstance(holder, dict) else vars(holder)
            if part in fields:
                return f"{part} is None here, which has no fields"
            last = part
            break
        holder = inner
    if isinstance(holder, dict):
        known = sorted(holder)
    elif dataclasses.is_dataclass(holder):
        known = [f.name for f in dataclasses.fields(holder)]
    else:
        return f"{'.'.join(path)} is a value and has no fields"
    if last in MOVED_FIELDS and isinstance(holder, mixers.RecurrentConfig):
        return f"{type(holder).__name__} has no field {last!r}; since release 0.2 it is {MOVED_FIELDS[last]!r}"
    computed = getattr(type(holder), last, None)
    if isinstance(computed, property):
        meaning = " ".join((computed.__doc__ or "").split())
        return f"{type(holder).__name__} has no field {last!r}, which it computes. {meaning}"
    hint = did_you_mean(last, known)
    return f"{type(holder).__name__} has no field {last!r}{hint or '.'} It has: {', '.join(known)}"
