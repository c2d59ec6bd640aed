"""The pretrained model that a run starts from, and from which it loads its frozen parameters."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from lsm_jax import hub
from lsm_jax.convert import load_params
from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.fields import COMPUTATION
from lsm_jax.convert.huggingface import published_config
from lsm_jax.linearize.recipes import base_model
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.config_json import flatten
from lsm_jax.training.partition import like
from lsm_jax.training.step import params_of

# Fields of the model's config that must be equal in the run and in the pretrained model.
_SAME = (
    "vocab_size", "hidden_size", "num_layers", "tie_embeddings", "norm_eps", "norm", "norm_bias", "embedding_norm", "head_bias",
)  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class Pretrained:
    """A pretrained model on disk from which a run starts, the value of `TrainConfig.base`.

    Attributes:
        path: a Hugging Face folder, of a transformer, of a model of `lsm_jax.convert.families`, or of Liger's authors
            (`lsm_jax.linearize.released`); a .gguf file; a .pth file of RWKV-7's authors; or the id of a model on the Hugging
            Face hub, OWNER/NAME[/FILE][@REVISION], of which a run has the commit in place of a branch.
    """

    path: str = ""

    def config(self) -> ModelConfig:
        """Return the config of the pretrained model as its config.json describes it: of a linearised transformer, the model with
        softmax attention.

        Raises:
            ValueError: the path is empty, or its model is not supported (see `lsm_jax.convert.model_config`).
        """
        if not self.path:
            raise ValueError(
                "base.path is empty; accepted is a pretrained model's Hugging Face folder or .gguf file "
                "(the option source=PATH of configs/liger.py and configs/finetune.py sets it and the tokenizer)"
            )
        return published_config(self._open())

    def _open(self) -> Tensors:
        path = hub.local_path(self.path, "base.path")
        if not path.exists():
            raise ValueError(
                f"base.path={self.path!r} does not exist; accepted is a pretrained model's Hugging Face folder or .gguf "
                "file. If the pretrained model of a run has moved, change base.path and data.tokenizer in its config.json"
            )
        return _open_cached(str(path), path.stat().st_mtime_ns if path.exists() else 0)

    def validate(self, model: ModelConfig) -> None:
        """Check that the parameters of the pretrained model can be loaded into the linearised model with the config
        `model`: that this config was made from the pretrained model's.

        Raises:
            ValueError: the two configs do not fit; the message lists the fields that differ.
        """
        stored, expected = self.config(), base_model(model)
        wrong = [
            f"{name}: {getattr(stored, name)} in base.path, {getattr(expected, name)} in the config"
            for name in _SAME
            if getattr(stored, name) != getattr(expected, name)
        ]
        if not wrong:
            for i, (a, b) in enumerate(zip(stored.letters(), expected.letters(), strict=True)):
                wrong = _differences(stored.layers[a], expected.layers[b])
                if wrong:
                    wrong = [f"layer {i}: {line}" for line in wrong]
                    break
        if wrong:
            raise ValueError(
                f"base.path={self.path!r} is not the pretrained model of this config:\n  "
                + "\n  ".join(wrong)
            )

    def load(self, model: ModelConfig, target: dict[str, Any]) -> dict[str, Any]:
        """Load the parameters of the pretrained model for a linearised model that was made from it.

        Args:
            model: the config of the linearised model.
            target: arrays or abstract arrays of the linearised model's parameters, whose dtypes and shardings the result has.

        Returns:
            The pretrained model's parameters; those that only the linearised model has are absent.

        Raises:
            ValueError: tensors are missing, unexpected or of another shape; the message names them.
        """
        base = base_model(model)
        selected = like(target, params_of(abstract(base)))
        return load_params(
            self._open(),
            base,
            shardings=jax.tree.map(lambda leaf: leaf.sharding, selected),
            dtype=jax.tree.map(lambda leaf: leaf.dtype, selected),
        )


@functools.lru_cache(maxsize=1)
def _open_cached(path: str, modified: int) -> Tensors:
    """Open the config and tensors of a pretrained model for reading; the last result is cached, since opening a
    .gguf file takes seconds.

    Args:
        path: the pretrained model's folder or file.
        modified: the file's modification time, so that a changed file is opened again.
    """
    # Imported here, so that `python -m lsm_jax.linearize.released` does not load that module twice.
    from lsm_jax.linearize.released import open_pretrained

    return open_pretrained(path)


def _differences(stored: Any, expected: Any) -> list[str]:
    """Return a line of text, "field: value in base.path, value in the config", for each field in which the configs of
    two layers differ: `stored`, of the pretrained model, and `expected`, of the softmax model that a run's config implies.

    Differences of the window and of how a layer is computed are allowed, and so are those of multiple_of and hidden_ratio, which
    have no effect if intermediate_size is set.
    """
    ignored = COMPUTATION | {"window", "multiple_of", "hidden_ratio"}
    a, b = flatten(stored), flatten(expected)
    return [
        f"{name}: {a.get(name)} in base.path, {b.get(name)} in the config"
        for name in dict.fromkeys([*a, *b])
        if not ignored & set(name.split(".")) and a.get(name) != b.get(name)
    ]
