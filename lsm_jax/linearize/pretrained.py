"""A pretrained transformer as what a run starts from, and where its frozen parameters are."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax

from lsm_jax.convert import load_params, model_config
from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.huggingface import open_source
from lsm_jax.linearize.recipes import base_model
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.config_json import flatten
from lsm_jax.training.partition import like
from lsm_jax.training.step import params_of


@dataclasses.dataclass(kw_only=True)
class Pretrained:
    """A pretrained transformer on disk; `TrainConfig.base` takes it.

    Attributes:
        path: a folder as Hugging Face's transformers writes it, or a .gguf file.
    """

    path: str = ""

    def config(self) -> ModelConfig:
        """The model it holds.

        Raises:
            ValueError: no path, or one that is refused (`lsm_jax.convert.model_config`).
        """
        if not self.path:
            raise ValueError(
                "base.path is empty; it takes a pretrained model's Hugging Face folder or .gguf file "
                "(configs/liger.py:<model>,source=PATH sets it, with the tokenizer)"
            )
        return model_config(self._opened())

    def _opened(self) -> Tensors:
        path = Path(self.path).expanduser()
        if not path.exists():
            raise ValueError(
                f"base.path={self.path!r} does not exist; a pretrained model's Hugging Face folder or .gguf file is "
                "accepted. Of a run whose base has moved, change base.path and data.tokenizer in its config.json"
            )
        return _open(str(path), path.stat().st_mtime_ns if path.exists() else 0)

    def validate(self, model: ModelConfig) -> None:
        """Raise ValueError unless it holds the softmax model that `model` was made of."""
        theirs, ours = self.config(), base_model(model)
        wrong = [
            f"{name}: {getattr(theirs, name)} there, {getattr(ours, name)} here"
            for name in ("vocab_size", "hidden_size", "num_layers", "tie_embeddings", "norm_eps")
            if getattr(theirs, name) != getattr(ours, name)
        ]
        if not wrong:
            for place, (a, b) in enumerate(zip(theirs.letters(), ours.letters(), strict=True)):
                wrong = _differences(theirs.layers[a], ours.layers[b])
                if wrong:
                    wrong = [f"layer {place}: {line}" for line in wrong]
                    break
        if wrong:
            raise ValueError(
                f"base.path={self.path!r} holds another model than this config's:\n  "
                + "\n  ".join(wrong)
            )

    def load(self, model: ModelConfig, target: dict[str, Any]) -> dict[str, Any]:
        """Its parameters into the dtypes and shardings of `target`, the parameters of `model`; those it lacks are left out.

        Raises:
            ValueError: tensors that are missing, surplus or of another shape; they are named.
        """
        base = base_model(model)
        wanted = like(target, params_of(abstract(base)))
        return load_params(
            self._opened(),
            base,
            shardings=jax.tree.map(lambda leaf: leaf.sharding, wanted),
            dtype=jax.tree.map(lambda leaf: leaf.dtype, wanted),
        )


@functools.lru_cache(maxsize=1)
def _open(path: str, changed: int) -> Tensors:
    """Kept, since a .gguf file takes seconds to open; `changed` is when it last did."""
    return open_source(path)


def _differences(theirs: Any, ours: Any) -> list[str]:
    """Fields that change what the pretrained layer computes."""
    free = (
        "window",
        "implementation",
        "multiple_of",
        "hidden_ratio",
    )  # the latter give way to intermediate_size
    a, b = flatten(theirs), flatten(ours)
    return [
        f"{name}: {a.get(name)} there, {b.get(name)} here"
        for name in dict.fromkeys([*a, *b])
        if name.rpartition(".")[2] not in free and a.get(name) != b.get(name)
    ]
