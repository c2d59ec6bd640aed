"""The config of a decoder: its widths, the pattern of its layers, and the kind of layer that each letter of
the pattern stands for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lsm_jax import feedforward, mixers
from lsm_jax.mixers import fp8

DTYPES = ("float32", "bfloat16")
REMAT = ("none", "dots_and_states", "dots_and_inputs", "dots_and_convolutions", "dots", "full")
SAVES_PRODUCTS = ("dots_and_states", "dots_and_inputs", "dots_and_convolutions", "dots")
"""The values of `remat` with which layers save products with weights and the results of kernels."""
MATMUL = ("default", "fp8")
_MOST_LAYERS = 1 << 16
INITS = ("normal", "xavier")
NORMS = ("rms", "layer", "zero_centred_rms")


@dataclasses.dataclass(kw_only=True)
class LayerConfig:
    """The config of one kind of layer, to which a letter of the pattern refers: a mixer and a feedforward.

    Attributes:
        mixer: a mixer's config, of a type in `lsm_jax.mixers.METHODS`.
        feedforward: a feedforward's config, or None for none.
        post_norm: whether the norms follow the mixer and the feedforward, x + norm(mixer(x)), as in OLMo 2, instead of preceding
            them.
        mixer_init: how the mixer's projections are initialised: "normal", with the model's `init_std`, or "xavier", uniform with
            gain 2^-2.5, as in the authors' code of MoM (arXiv 2502.13685). Other parameters are initialised as their method has it.
    """

    mixer: Any = dataclasses.field(default_factory=mixers.GLAConfig)
    feedforward: Any = dataclasses.field(default_factory=feedforward.SwiGLUConfig)
    post_norm: bool = False
    mixer_init: str = "normal"

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if the mixer or the feedforward has a config of an unknown type, or does not fit
        the width.
        """
        mixers.method_of(self.mixer)
        self.mixer.validate(hidden_size)
        if self.mixer_init not in INITS:
            raise ValueError(f"mixer_init={self.mixer_init!r}: accepted are {', '.join(INITS)}")
        if self.feedforward is not None:
            feedforward.check(self.feedforward, hidden_size)


@dataclasses.dataclass(kw_only=True)
class ModelConfig:
    """The config of a decoder, a causal language model: its size, the pattern of its layers, dtypes and initialisation.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: width of the residual stream.
        num_layers: depth, a multiple of the pattern's length.
        pattern: letters naming the layers from the first on, repeated to the depth; "LLLN" is three L and one N.
        layers: the `LayerConfig` (mixer and feedforward) that each letter stands for.
        tie_embeddings: whether the head is the embedding's transpose.
        norm_eps: epsilon of the norms before mixers, feedforwards and head.
        norm: kind of these norms: "rms"; "layer" as in RWKV; or "zero_centred_rms", which multiplies by 1 + the learned scale,
            as in Qwen3-Next.
        norm_bias: whether norms of kind "layer" have biases.
        embedding_norm: whether the embedding is normalised too, before the first layer, as in RWKV.
        head_bias: whether a learned bias is added to the logits.
        embedding_scale: multiplies the tokens' embedding before the first layer.
        residual_scale: multiplies the output of every mixer and feedforward before it is added to the residual stream.
        logits_scale: multiplies the logits, before a bias is added.
        logits_cap: the logits z become cap · tanh(z / cap); None leaves them.
        init_std: standard deviation of the initial embedding, head and projections, except where a method has
            its own.
        scaled_output_init: whether the projections back to the residual stream (`o_proj` of mixers, `down_proj` of feedforwards)
            are initialised smaller by sqrt(2 num_layers), as Megatron does it (Linear-MoE, arXiv 2503.05447, its code).
        dtype: the dtype of activations, "float32" or "bfloat16"; parameters are float32.
        remat: what the backward pass recomputes in each layer: "none", "dots" (all but products with weights, this
            package's kernels of memories and attention, and cuDNN's attention), "dots_and_convolutions" (all but these, short
            convolutions and the kernel of RWKV7's gates), "dots_and_inputs" (all but these, norms of the residual stream and the hidden
            layer of SwiGLU and GeGLU), "dots_and_states" (all but these and the memories before all chunks, of which kernels for
            Hopper that can store them with their outputs do: those of the delta rule, of DPLR, and of decays per key channel; with other
            implementations it is "dots_and_inputs") or "full". "none" recomputes what kernels do not save: these memories.
        unroll_layers: whether the layers are compiled one after the other rather than as a loop over the repetitions of the
            pattern. The loop slices its stacked parameters and copies what it saves for the backward pass; without it the
            program is larger and takes about twice as long to compile. None: a training step on one GPU is unrolled if the
            model has at most 48 layers and no mixer whose layers take minutes to compile so (`Method.in_loop`). Pipeline
            stages of whole periods are always loops, the layers of other pipeline stages never, and the decoding of one
            token as `sample(unroll_layers=...)` says.
        matmul: how dense layers of mixers and feedforwards multiply in training: "default", in the activations' dtype, or
            "fp8" (`lsm_jax.mixers.fp8`).
        head_matmul: how the head multiplies in the loss of training, "default" or "fp8".
        loss_chunk_size: tokens whose logits exist at a time in the loss, on each device.
        lora: low-rank adapters on projections of every layer, or None.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    pattern: str = "L"
    layers: dict[str, LayerConfig] = dataclasses.field(default_factory=dict)
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    norm: str = "rms"
    norm_bias: bool = True
    embedding_norm: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    init_std: float = 0.02
    scaled_output_init: bool = False
    dtype: str = "bfloat16"
    remat: str = "full"
    unroll_layers: bool | None = None
    matmul: str = "default"
    head_matmul: str = "default"
    loss_chunk_size: int = 2048
    lora: mixers.LoRAConfig | None = None

    def period(self) -> str:
        """Return the shortest pattern whose repetition gives the same layers as the config's pattern; the
        model scans over its repetitions.
        """
        letters = self.pattern
        for size in range(1, len(letters) + 1):
            if len(letters) % size == 0 and letters[:size] * (len(letters) // size) == letters:
                return letters[:size]
        return letters

    def letters(self) -> str:
        """Return the letters of all layers in order, one a layer: the pattern, repeated to `num_layers`.

        Each letter names a mixer and a feedforward.
        """
        return self.pattern * (self.num_layers // len(self.pattern))

    def mixers_like(self, config: Any) -> int:
        """Return the number of the model's layers whose mixer's config has the same type as `config`."""
        return [type(self.layers[letter].mixer) for letter in self.letters()].count(type(config))

    def for_inference(self) -> ModelConfig:
        """Return the config of the model that is evaluated and that generates text: this config, except where
        a mixer or a feedforward is trained in another form, and without FP8.

        The config of such a part has a method `for_inference`, as LoLCATs' first stage and experts have. The
        parameters are the same.
        """

        def of(part: Any) -> Any:
            return part.for_inference() if hasattr(part, "for_inference") else part

        layers = {
            n: dataclasses.replace(layer, mixer=of(layer.mixer), feedforward=of(layer.feedforward))
            for n, layer in self.layers.items()
        }
        return dataclasses.replace(self, layers=layers, matmul="default", head_matmul="default")

    def teacher(self) -> ModelConfig | None:
        """Return the config of the model whose outputs this model learns in attention transfer, the first
        stage of a distillation; None if this model learns no other model's outputs.

        The parameters of that model are some of this model's.
        """
        taught = {
            letter: layer.mixer.teacher()
            for letter, layer in self.layers.items()
            if hasattr(layer.mixer, "teacher")
        }
        taught = {letter: mixer for letter, mixer in taught.items() if mixer is not None}
        return self._with_mixers(taught) if taught else None

    def _with_mixers(self, mixers: dict[str, Any]) -> ModelConfig:
        layers = {
            letter: dataclasses.replace(self.layers[letter], mixer=mixer)
            for letter, mixer in mixers.items()
        }
        return dataclasses.replace(self, layers=self.layers | layers) if layers else self

    def validate(self) -> None:
        """Raise ValueError if a field of the model's config is not accepted; nothing is computed or compiled."""
        for name in (
            "vocab_size", "hidden_size", "num_layers", "norm_eps", "init_std", "loss_chunk_size", "embedding_scale",
            "residual_scale", "logits_scale",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}={getattr(self, name)}: it must be greater than 0")
        if self.num_layers > _MOST_LAYERS:  # lists of this length are made
            raise ValueError(
                f"model.num_layers={self.num_layers}: accepted are at most {_MOST_LAYERS}"
            )
        choices = dict(dtype=DTYPES, remat=REMAT, matmul=MATMUL, head_matmul=MATMUL, norm=NORMS)
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r}: accepted are {', '.join(accepted)}"
                )
        known = ", ".join(sorted(self.layers)) or "none"
        if not self.pattern:
            raise ValueError(
                f"model.pattern is empty; its letters are keys of model.layers: {known}"
            )
        unknown = sorted(set(self.pattern) - set(self.layers))
        if unknown:
            raise ValueError(
                f"model.pattern={self.pattern!r} has letters that model.layers lacks: {', '.join(unknown)}; accepted are {known}"
            )
        if self.num_layers % len(self.pattern):
            raise ValueError(
                f"model.num_layers={self.num_layers} is no multiple of the {len(self.pattern)} letters of "
                f"model.pattern={self.pattern!r}"
            )
        if self.logits_cap is not None and not self.logits_cap > 0:
            raise ValueError(
                f"model.logits_cap={self.logits_cap}: accepted are None and numbers above 0"
            )
        if self.lora is not None:
            self.lora.validate()
        for letter in sorted(set(self.pattern)):
            try:
                self.layers[letter].validate(self.hidden_size)
            except ValueError as error:
                raise ValueError(f"model.layers[{letter!r}]: {error}") from error
        self._check_joint_balance()
        memories = [layer.mixer for layer in self.layers.values()]
        if self.matmul == "fp8" and any(isinstance(m, mixers.MoMConfig) for m in memories):
            raise ValueError(
                "model.matmul='fp8': MoM multiplies tokens by memory, for which there is no product in FP8; accepted with MoM "
                "is 'default'"
            )
        if self.head_matmul == "fp8" and (
            self.head_bias or not fp8.fits(self.hidden_size, self.vocab_size)
        ):
            raise ValueError(
                f"model.head_matmul='fp8' with hidden_size={self.hidden_size}, vocab_size={self.vocab_size} and head_bias={self.head_bias}: "
                f"accepted are sizes of at least {fp8.LEAST_SIZE} that are multiples of {fp8.MULTIPLE}, without head_bias; or 'default'"
            )

    def _check_joint_balance(self) -> None:
        """Raise ValueError if a balance loss is computed over the whole model (all layers with routers), but its
        layers' routers differ.
        """
        used = [self.layers[letter] for letter in sorted(set(self.pattern))]
        routers = [layer.mixer for layer in used if isinstance(layer.mixer, mixers.MoMConfig)]
        joint = any(config.balance == "model" for config in routers)
        if joint and any(config != routers[0] for config in routers):
            raise ValueError(
                'balance="model" computes one loss over all Mixture-of-Memories layers; accepted are layers with equal MoMConfigs'
            )
