"""The description of a family of released models: the fields of its config.json and the names of its tensors, as tables that
import and export read."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.fields import (
    COMPUTATION,
    check_auto_map,
    check_fields,
    check_sizes,
    listed,
    shown,
)
from lsm_jax.convert.layout import Layout, Names, layout_of
from lsm_jax.feedforward import MoEConfig
from lsm_jax.mixers import (
    KDAConfig,
    Mamba2Config,
    MambaConfig,
    MLAConfig,
    ParallelConfig,
    RWKV7Config,
    SoftmaxConfig,
)
from lsm_jax.models import ModelConfig
from lsm_jax.training.config_json import flatten

HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward
    dtype eos_token_id id2label is_decoder label2id model_type name_or_path output_attentions output_hidden_states pad_token_id
    prefix problem_type return_dict tokenizer_class torch_dtype transformers_version use_cache
    """.split()
)
"""Fields about tokens, caching, returned values and the file's origin, which every family accepts."""
KINDS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"), "size"),
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), "text"),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), "token"),
    "architectures": "texts",
    "initializer_range": "positive",
    "tie_word_embeddings": "flag",
}  # fmt: skip
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers")
# Fields of configs that say how a model is computed, initialised or trained; widths are compared as such.
_COMPUTATION = COMPUTATION | frozenset(
    """
    scaled_output_init mixer_init balance_scale balance z_scale execution expert_buffer exchange hidden_ratio multiple_of
    intermediate_size
    """.split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The models of one `model_type`.

    Attributes:
        model_type: the `model_type` of config.json.
        architecture: name of the class that computes the model, in `architectures` of config.json.
        other_architectures: names that other code has for this class, such as the code in a released folder.
        library: name of the package that has the class.
        kinds: the kind of each further field that is read, as of `fields.check_fields`.
        defaults: values of absent fields, of those that are read.
        only: the accepted values of fields of which the library supports some values alone; the first is the default.
        unused: fields that do not change what the model computes.
        null_is_value: fields in which null is another value than the default.
        renamed: names of fields in other versions or libraries, and the names here.
        required: further fields that must be present.
        sizes: fields and pairs of fields that are sizes, as of `fields.check_sizes`.
        read: returns the contents of config.json with the fields that the other attributes name, where other versions of the
            library have others; raises ValueError if it cannot.
        prefix: what the names of a layer's tensors begin with, before the layer's number.
        ignored: beginnings of the names of tensors that the model does not have; an export copies them. In a beginning {layer} is
            the number of each layer that predicts several tokens, which follow the last one: `num_nextn_predict_layers` of them.
        stored: returns values that follow from the names of the stored tensors, which `names` receives with those of the fields;
            it is called without names for a new checkpoint.
        config: returns the model's config from the values of the fields.
        names: returns the table of a layer (see `layout_of`) from the values of the fields, the model's config, and the layer's
            number.
        describe: returns the values of the fields from the model's config, of `vocab_size`, `hidden_size`, `num_hidden_layers` and
            `tie_word_embeddings` only those that differ from the config's; raises ValueError if there are none.
    """

    model_type: str
    architecture: str
    library: str
    kinds: Mapping[str, str]
    defaults: Mapping[str, Any]
    config: Callable[[dict[str, Any]], ModelConfig]
    names: Callable[[dict[str, Any], ModelConfig, int], Names]
    describe: Callable[[ModelConfig], dict[str, Any]]
    other_architectures: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    null_is_value: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    required: tuple[str, ...] = ()
    sizes: tuple[str | tuple[str, str], ...] = ()
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict
    prefix: str = "model.layers."
    ignored: tuple[str, ...] = ()
    stored: Callable[[Collection[str]], dict[str, Any]] = lambda names: {}

    def values(self, given: Mapping[str, Any], where: object) -> dict[str, Any]:
        """Return the values of the fields that are read, with defaults of absent ones, from the contents of config.json.

        Args:
            given: the contents of config.json.
            where: the file, for error messages.

        Raises:
            ValueError: a field is missing, unknown, of a wrong type, or has a value that this library does not support.
        """
        check_auto_map(dict(given), where)
        try:
            given = self.read({name: _number(value) for name, value in given.items()})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        for old, new in self.renamed.items():
            if old in given:
                value = given.pop(old)
                if given.setdefault(new, value) != value:
                    raise ValueError(
                        f"{where}: {old}={shown(value)}, but {new}={shown(given[new])}; accepted is one of the two fields"
                    )
        kinds = {**KINDS, **self.kinds}
        check_fields(given, where, kinds)
        named = given.get("architectures") or [self.architecture]
        accepted = [[name] for name in (self.architecture, *self.other_architectures)]
        if named not in accepted:
            raise ValueError(
                f"{where}: architectures={shown(named)}; accepted is {' or '.join(map(repr, accepted))}"
            )
        if missing := [n for n in (*_REQUIRED, *self.required) if given.get(n) is None]:
            raise ValueError(f"{where}: missing fields: {', '.join(missing)}")
        for name, accepted in self.only.items():
            if name in given and given[name] not in accepted:
                raise ValueError(
                    f"{where}: {name}={shown(given[name])}; accepted is {' or '.join(map(repr, accepted))}"
                )
        known = {*kinds, *self.only, *self.unused, *self.defaults, *HARMLESS}
        if unknown := sorted(set(given) - known):
            fields = listed(f"{name}={shown(given[name])}" for name in unknown)
            raise ValueError(
                f"{where}: unknown fields, which may change what a {self.model_type} model computes: {fields}"
            )
        for name, default in self.defaults.items():
            null = name in given and given[name] is None and name not in self.null_is_value
            if null and default is not None:
                raise ValueError(f"{where}: {name}=None; accepted is a value, or no such field")
        first = {name: accepted[0] for name, accepted in self.only.items()}
        return {**first, **self.defaults, **given}

    def model(self, source: Tensors) -> ModelConfig:
        """Return the config of the model that the config.json of a checkpoint describes.

        Raises:
            ValueError: as `values`; or a size is larger than the stored tensors.
        """
        where = source.config_path
        values = self.values(source.config, where)
        sizes = ("vocab_size", "hidden_size", *self.sizes)
        check_sizes(values, where, source.shapes, sizes, prefix=self.prefix)
        return self.described(source.config, where)

    def described(self, given: Mapping[str, Any], where: object) -> ModelConfig:
        """Return the config of the model that the contents of a config.json describe, where there are no tensors to compare its
        sizes with; `where` is the file, for error messages.

        Raises:
            ValueError: as `values`.
        """
        values = self.values(given, where)
        try:
            config = self.config(values)
            config.dtype = "float32" if _dtype(values) == "float32" else "bfloat16"
            config.init_std = float(values.get("initializer_range") or 0.02)
            config.validate()
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{where}: {error}") from error
        return config

    def layout(
        self,
        given: Mapping[str, Any],
        config: ModelConfig,
        where: object,
        stored: Collection[str] = (),
    ) -> Layout:
        """Return the layout of a checkpoint.

        Args:
            given: the contents of its config.json.
            config: the model.
            where: the file, for error messages.
            stored: the names of its tensors; none for a new checkpoint.
        """
        values = self.values(given, where) | self.stored(stored)
        names = functools.partial(self.names, values, config)
        return layout_of(config, names, what=self.model_type)

    def ignored_prefixes(self, given: Mapping[str, Any], where: object) -> tuple[str, ...]:
        """Return the beginnings of the names of tensors that the model does not have, from the contents of config.json; `where` is
        the file, for error messages."""
        values = self.values(given, where)
        first, count = values["num_hidden_layers"], values.get("num_nextn_predict_layers") or 0
        return tuple(
            prefix.format(layer=first + i)
            for prefix in self.ignored
            for i in range(count if "{layer}" in prefix else 1)
        )

    def fields_of(self, config: ModelConfig) -> dict[str, Any]:
        """Return the contents of config.json that are closest to a model's config; it may describe another model."""
        return dict(
            architectures=[self.architecture],
            model_type=self.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            tie_word_embeddings=config.tie_embeddings,
            initializer_range=config.init_std,
        ) | self.describe(config)

    def with_epsilon(self, config: ModelConfig, epsilon: float) -> ModelConfig:
        """Return a model's config whose norms have the epsilons that the family's library has if `norm_eps` is `epsilon`."""
        config = copy.deepcopy(config)
        config.norm_eps = epsilon
        theirs = self.config(self.values(self.fields_of(config), "the exported config"))
        letters = dict(zip(config.letters(), theirs.letters(), strict=True))
        for ours, other in letters.items():
            mixers = config.layers[ours].mixer, theirs.layers[other].mixer
            inner = (
                tuple(getattr(m, name, m) for m in mixers) for name in ("mixer", "first", "second")
            )
            for mixer, computed in (mixers, *inner):
                if hasattr(mixer, "norm_eps"):
                    mixer.norm_eps = computed.norm_eps
        return config

    def describe_model(self, config: ModelConfig) -> dict[str, Any]:
        """Return the contents of config.json with which the family's library computes what a model computes.

        Raises:
            ValueError: the library has no such model; the message names the fields that differ.
        """
        fields = self.fields_of(config)
        computed = self.config(self.values(fields, "the exported config"))
        accepted, ours = _described(computed), _described(config)
        different = [
            f"{name}={value!r} (accepted is {accepted.get(name)!r})"
            for name, value in ours.items()
            if name not in accepted or accepted[name] != value
        ]
        if different:
            raise ValueError(
                f"{self.library} has no {self.model_type} model with {listed(different)}"
            )
        return fields


def _dtype(values: Mapping[str, Any]) -> str | None:
    return values.get("dtype") or values.get("torch_dtype")


def _number(value: Any) -> Any:
    """Return a value of config.json in which transformers' notation of infinity is a float."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    return math.inf if value == {"__float__": "Infinity"} else value


def _described(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that define what a model computes, by name; those of layers by the layer's number."""
    rows = flatten(dataclasses.replace(config, layers={}, pattern="L"))
    for number, letter in enumerate(config.letters()):
        layer = config.layers[letter]
        rows |= flatten(layer, f"layer {number}.")
        for name, value in _implied(layer.mixer, config.hidden_size).items():
            rows[f"layer {number}.mixer.{name}"] = value
        if layer.feedforward is not None and hasattr(layer.feedforward, "width"):
            rows[f"layer {number}.feedforward.width"] = layer.feedforward.width(config.hidden_size)
    return {name: v for name, v in rows.items() if not _COMPUTATION & set(name.split("."))}


def _implied(mixer: Any, width: int) -> dict[str, Any]:
    """Return the fields of a mixer's config in which None means another value, with that value."""
    if isinstance(mixer, SoftmaxConfig):
        dim = mixer.dim(width)
        rotated = None if mixer.rope_base is None else mixer.rotary_dim or dim
        scale = dim**-0.5 if mixer.scale is None else mixer.scale
        return dict(num_kv_heads=mixer.kv_heads(), head_dim=dim, rotary_dim=rotated, scale=scale)
    if isinstance(mixer, MLAConfig):
        scale = (mixer.key_dim + mixer.rope_dim) ** -0.5 if mixer.scale is None else mixer.scale
        pairs = None if mixer.rope_base is None else mixer.rope_interleaved
        return dict(scale=scale, rope_interleaved=pairs)
    if isinstance(mixer, Mamba2Config):
        return dict(inner_size=mixer.inner(width))
    if isinstance(mixer, ParallelConfig):
        parts = dict(first=_implied(mixer.first, width), second=_implied(mixer.second, width))
        return {f"{part}.{name}": v for part, values in parts.items() for name, v in values.items()}
    if isinstance(mixer, MambaConfig):
        return dict(step_rank=mixer.rank(width))
    if isinstance(mixer, RWKV7Config):
        ranks = mixer.ranks(width)
        names = dict(decay_rank="w", rate_rank="a", value_rank="v", gate_rank="g")
        return {name: ranks[letter] for name, letter in names.items()}
    heads = dict(num_value_heads=mixer.value_heads()) if hasattr(mixer, "value_heads") else {}
    return heads | (dict(gate_rank=mixer.rank()) if isinstance(mixer, KDAConfig) else {})


def the_mixer(config: ModelConfig, kind: type) -> Any:
    """Return the config of the mixers of one kind in a model.

    Raises:
        ValueError: the model has none of this kind, or several that differ.
    """
    mixers = {letter: config.layers[letter].mixer for letter in config.letters()}
    found = [mixer for mixer in mixers.values() if type(mixer) is kind]
    if not found or any(mixer != found[0] for mixer in found):
        names = ", ".join(sorted(type(m).__name__ for m in mixers.values()))
        raise ValueError(f"model.layers has mixers of {names}; accepted are equal {kind.__name__}s")
    return found[0]


def the_experts(config: ModelConfig) -> MoEConfig:
    """Return the config of the mixtures of experts in a model.

    Raises:
        ValueError: the model has none, or several that differ.
    """
    inner = [config.layers[letter].feedforward for letter in config.letters()]
    found = [x for x in inner if isinstance(x, MoEConfig)]
    if not found or any(x != found[0] for x in found):
        raise ValueError(
            "model.layers has no mixtures of experts, or several; accepted are equal ones"
        )
    return found[0]
