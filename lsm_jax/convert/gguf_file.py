"""Read GGUF files (github.com/ggml-org/ggml, docs/gguf.md) of Llama, Qwen2 and Qwen3 models, with transformers' tensor names.

Quantised tensors are converted to float32 by the `gguf` package. llama.cpp stores the rows of a Llama's query and key
projections with the two halves of each head interleaved; they are returned in transformers' order.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.checksums import check_sum, read_sums
from lsm_jax.convert.fields import check_fields, listed, shown
from lsm_jax.convert.gguf_reader import read_gguf
from lsm_jax.convert.published import ARCHITECTURES

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REQUIRED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "context_length": "max_position_embeddings",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "attention.key_length": "head_dim",
}
_KINDS = {
    "attention.layer_norm_rms_epsilon": "positive",
    "rope.freq_base": "positive",
    "rope.scaling.type": "text",
    "rope.scaling.factor": "positive",
    **dict.fromkeys(
        (
            "block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
            "attention.key_length", "vocab_size", "context_length",
        ),
        "size",
    ),
}  # fmt: skip
_CHECKED = ("attention.value_length", "rope.dimension_count")  # must be the channels of a head
_SCALING = ("rope.scaling.type", "rope.scaling.factor")
# The scalings of Llama 3.1 and 3.2. A file does not name them, but contains the divisors of the frequencies.
_LLAMA3 = [
    dict(rope_type="llama3", factor=f, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    for f in (8.0, 32.0)
]  # fmt: skip


class GGUF(Tensors):
    """The tensors and the metadata of a model in a GGUF file. Each tensor is read from disk when it is
    requested.

    Attributes:
        fields: the file's metadata.

    Raises:
        ValueError: the file cannot be read, or has an unsupported model or an unknown field.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.folder = Path(path).expanduser()
        self.fields, self._stored = read_gguf(self.folder)
        if (parts := self.fields.get("split.count", 1)) not in (0, 1):  # 0: parts that were merged
            raise ValueError(
                f"{self.folder}: split.count={shown(parts)}; accepted is a complete file, such as llama.cpp's "
                "llama-gguf-split --merge makes of the parts"
            )
        self.config = self._config()
        self._names: dict[str, str] = {}
        self.shapes, self.dtypes = {}, {}
        kinds = {"F16": "F16", "BF16": "BF16"}
        for stored, tensor in self._stored.items():
            if stored == "rope_freqs.weight":
                continue
            name = _transformers_name(stored)
            if name in self._names:
                raise ValueError(
                    f"{self.folder}: the tensors {listed([self._names[name], stored])} have the same meaning"
                )
            self._names[name] = stored
            self.shapes[name] = tensor.shape
            self.dtypes[name] = kinds.get(tensor.kind.name, "F32")

    @property
    def config_path(self) -> Path:
        """The file that contains the model's config: the GGUF file."""
        return self.folder

    def label(self, name: str) -> str:
        """Return the name that a field of transformers' config.json has in the file."""
        names = {ours: stored for stored, ours in (_REQUIRED | _OPTIONAL).items()}
        return f"{self.config['model_type']}.{names[name]}" if name in names else name

    def _check_sums(self) -> None:
        path = self.folder
        check_sum(path, path.name, read_sums(path.parent))

    def _config(self) -> dict[str, Any]:
        """Return the GGUF file's metadata as the fields of transformers' config.json."""
        where, kind = self.folder, self.fields.get("general.architecture")
        if kind not in ("llama", "qwen2", "qwen3"):
            raise ValueError(
                f"{where}: general.architecture={shown(kind)}; accepted are llama, qwen2, qwen3"
            )
        model_fields = {
            name.removeprefix(f"{kind}."): value
            for name, value in self.fields.items()
            if name.startswith(f"{kind}.")
        }
        if missing := [f"{kind}.{name}" for name in _REQUIRED if name not in model_fields]:
            raise ValueError(f"{where}: missing fields: {', '.join(missing)}")
        known = {*_REQUIRED, *_OPTIONAL, *_CHECKED, *_SCALING}
        if unknown := [f"{kind}.{n}={shown(v)}" for n, v in model_fields.items() if n not in known]:
            raise ValueError(
                f"{where}: unknown fields, which may change what the model computes: {listed(unknown)}"
            )
        check_fields(model_fields, where, _KINDS, lambda name: f"{kind}.{name}")
        names = _REQUIRED | _OPTIONAL
        config = {
            name: model_fields[stored] for stored, name in names.items() if stored in model_fields
        }
        tokens = ("bos_token_id", "eos_token_id")  # which transformers' generate() uses
        kinds = {f"tokenizer.ggml.{name}": "token" for name in tokens}
        check_fields(self.fields, where, kinds)
        for name in tokens:
            if (token := self.fields.get(f"tokenizer.ggml.{name}")) is not None:
                config[name] = token
        # These are float32 in the file; round to the decimal number.
        for name in ("rms_norm_eps", "rope_theta"):
            if name in config:
                config[name] = float(str(np.float32(config[name])))
        if "token_embd.weight" not in self._stored:
            raise ValueError(f"{where}: the tensor token_embd.weight is missing from the file")
        embedding = self._stored["token_embd.weight"].shape
        if config.get("vocab_size", embedding[0]) != embedding[0]:
            raise ValueError(
                f"{where}: {kind}.vocab_size={config['vocab_size']}, but token_embd.weight has {embedding[0]} rows"
            )
        config["vocab_size"] = embedding[0]
        heads = config["num_attention_heads"]
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", config["hidden_size"] // heads)
        for name in _CHECKED:
            if model_fields.get(name, config["head_dim"]) != config["head_dim"]:
                raise ValueError(
                    f"{where}: {kind}.{name}={shown(model_fields[name])}; accepted is {config['head_dim']}, "
                    "the number of channels of a head"
                )
        scaling = model_fields.get("rope.scaling.type", "none")
        if scaling != "none":
            config["rope_scaling"] = dict(
                rope_type=scaling, factor=model_fields.get("rope.scaling.factor", 1.0)
            )
        if "rope_freqs.weight" in self._stored:
            config["rope_scaling"] = self._llama3_scaling(config)
        return config | dict(
            model_type=kind,
            architectures=[ARCHITECTURES[kind]],
            tie_word_embeddings="output.weight" not in self._stored,
            hidden_act="silu",
        )

    def _llama3_scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the scaling of the rotary frequencies of Llama 3.1 or 3.2 as the field `rope_scaling` of
        config.json: the known one whose divisors of the frequencies are those of the GGUF file's tensor
        rope_freqs.weight."""
        tensor = self._stored["rope_freqs.weight"]
        stored = tensor.data.astype(np.float32)
        half = config["head_dim"] // 2
        # Checked first: a damaged head_dim may be huge.
        if stored.shape == (half,) and tensor.data.dtype.kind == "f":
            base = config.get("rope_theta", 10000.0)
            turns = 8192 * base ** (-np.arange(half) / half) / (2 * np.pi)
            for scaling in _LLAMA3:
                unscaled = np.clip(
                    (turns - 1) / 3, 0, 1
                )  # share of the frequency that is not divided
                divisors = 1 / (unscaled + (1 - unscaled) / scaling["factor"])
                if np.allclose(stored, divisors, rtol=1e-4):
                    return scaling
        raise ValueError(
            f"{self.folder}: rope_freqs.weight is not that of Llama 3.1 or 3.2 (factors 8 and 32 over 8192 tokens)"
        )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of a tensor of the GGUF file: float16 and bfloat16 as stored, all
        others in float32."""
        from gguf.quants import dequantize

        tensor = self._stored[self._names[name]]
        index: Any = slice(start, stop)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        part = self._names[name].split(".")[-2]
        if self.config["model_type"] == "llama" and part in heads:
            size = self.shapes[name][0] // self.config[heads[part]]
            head, place = np.divmod(np.arange(start, stop), size)
            side, pair = np.divmod(place, size // 2)
            index = head * size + 2 * pair + side
        values = tensor.data[index]
        if values.dtype.kind == "f":
            return values
        if tensor.kind.name.startswith("I") and tensor.kind.name[1:].isdecimal():
            raise ValueError(
                f"{self.folder}: {listed([self._names[name]])} has type {tensor.kind.name}; accepted are floating-point types"
            )
        try:
            return dequantize(np.ascontiguousarray(values), tensor.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.folder}: {self._names[name]}: {error}") from error


def _transformers_name(stored: str) -> str:
    """Return the name of a GGUF file's tensor in transformers' models; an unknown name is returned
    unchanged, and is later reported as an unexpected tensor."""
    stem, _, kind = stored.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{kind}"
    return stored
