"""Sample texts from the model of a run during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lsm_jax.data.decoding import decode
from lsm_jax.data.sources import tokenizer_of
from lsm_jax.files import write_atomically
from lsm_jax.models import abstract, sample
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.training.config import TrainConfig
from lsm_jax.training.failures import writing


class Samples:
    """Continue the prompts of a run's config (`samples`) with its model.

    The parameters are copied to each device, and the first process samples on its first device while the others wait.

    Args:
        config: the config of the run.
        mesh: the mesh on which the run trains.

    Raises:
        ValueError: a prompt is empty and documents begin with no BOS token, or has ids outside the model's vocabulary.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh):
        self.config, self._mesh = config, mesh
        self._tokenizer = tokenizer_of(config.data)
        bos_id = self._tokenizer.bos_id if config.data.bos_id is None else config.data.bos_id
        self._bos_id = bos_id if config.data.add_bos else None
        first = [] if self._bos_id is None else [self._bos_id]
        self._prompts = [[*first, *self._tokenizer.encode(p)] for p in config.samples.prompts]
        vocabulary = config.model.vocab_size
        for prompt, ids in zip(config.samples.prompts, self._prompts, strict=True):
            if not ids:
                raise ValueError(
                    f"samples.prompts: {prompt!r} has no token, and data.add_bos is False; accepted are texts with a token"
                )
            if max(ids) >= vocabulary:
                raise ValueError(
                    f"samples.prompts: {prompt!r} has the token id {max(ids)}; the model's vocabulary has {vocabulary}"
                )
        self._graph = nnx.graphdef(abstract(config.model.for_inference()))
        self._replicate = jax.jit(
            lambda params: params, out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def __call__(self, params: dict[str, Any]) -> list[str]:
        """Return each prompt with its continuation; `params` are all parameters of the model. The result is empty in all
        processes but the first."""
        complete = self._replicate(params)
        if jax.process_index() != 0:
            return []
        local = jax.tree.map(lambda x: x.addressable_data(0), complete)
        config, device = self.config.samples, jax.local_devices()[0]
        texts = []
        with jax.set_mesh(make_mesh(MeshConfig(), [device])):
            model = nnx.merge(self._graph, local)
            for prompt, ids in zip(config.prompts, self._prompts, strict=True):
                tokens = sample(
                    model,
                    jnp.asarray([ids], jnp.int32),
                    num_tokens=config.num_tokens,
                    key=jax.random.key(config.seed),
                    temperature=config.temperature,
                    stop_token=self._bos_id,
                )
                texts.append(prompt + self._text(np.asarray(tokens)[0]))
        return texts

    def _text(self, tokens: np.ndarray) -> str:
        """Return the text of sampled ids up to the end of the document."""
        ends = [] if self._bos_id is None else np.flatnonzero(tokens == self._bos_id).tolist()
        return decode(self._tokenizer, tokens[: ends[0]] if ends else tokens)


def write_samples(workdir: Path, prompts: tuple[str, ...], texts: list[str], step: int) -> None:
    """Write the texts of a step to samples/STEP.txt in a run's directory, each after a line with its number and its prompt.

    Raises:
        WriteError: the file cannot be written.
    """
    parts = [
        f"--- step {step}, sample {number}, prompt {prompt!r}\n{text}\n"
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1)
    ]
    path = workdir / "samples" / f"{step}.txt"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, "\n".join(parts))
