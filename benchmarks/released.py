"""Shapes of released models with random weights on one card: compiled programs of prefill, decoding and a step of adapters, and their
times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.registry import UsageError
from benchmarks.timing import program_bytes
from lsm_jax import ops
from lsm_jax.convert.cards import described_model
from lsm_jax.convert.families import FAMILIES
from lsm_jax.data import DataConfig
from lsm_jax.mixers import LoRAConfig
from lsm_jax.mixers.softmax import SoftmaxConfig
from lsm_jax.models import Decoder, ModelConfig, abstract, sampling
from lsm_jax.ops.backends.registry import backends_of, names_of_ops, register, unregister
from lsm_jax.ops.backends.select import clear_choices
from lsm_jax.parallel import MeshConfig, make_mesh
from lsm_jax.parallel.mesh import token_sharding
from lsm_jax.training import TrainConfig
from lsm_jax.training.partition import in_frozen_dtype, is_matrix, leaves_of, split
from lsm_jax.training.step import make_program, params_of

QWEN3_5_4B = dict(
    model_type="qwen3_5_text", vocab_size=248320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
    num_attention_heads=16, num_key_value_heads=4, rope_theta=1e7, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
QWEN3_NEXT = dict(
    model_type="qwen3_next", vocab_size=151936, hidden_size=2048, intermediate_size=5120, num_hidden_layers=48,
    num_attention_heads=16, num_key_value_heads=2, rope_theta=1e7, moe_intermediate_size=512, num_experts=512,
    shared_expert_intermediate_size=512, num_experts_per_tok=10, decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[],
    dtype="bfloat16",
)  # fmt: skip
GRANITE_SMALL = dict(
    model_type="granitemoehybrid", vocab_size=100352, hidden_size=4096, intermediate_size=768, num_hidden_layers=40,
    num_attention_heads=32, num_key_value_heads=8, layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    position_embedding_type="nope", attention_multiplier=0.0078125, embedding_multiplier=12, residual_multiplier=0.22,
    logits_scaling=16, rms_norm_eps=1e-5, mamba_expand=2, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_n_heads=128,
    num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536, router_aux_loss_coef=0.0,
    tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3.5-4b": (QWEN3_5_4B, 32),
    "granite-4.0-h-small": (GRANITE_SMALL, 30),
    "qwen3-next": (QWEN3_NEXT, 16),
}
"""The fields of config.json by model, and the depth that fits on a card of 80 GB."""
TINY: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, num_experts=4,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=2, num_local_experts=4,
    shared_intermediate_size=16, mamba_d_head=16, mamba_n_heads=4, mamba_d_state=16,
)  # fmt: skip
"""The values that `--tiny` has in place of a model's own, of the fields that it has, for a run on a CPU."""
OF_QWEN = ("head_dim", *(name for name in TINY if name.startswith("linear_")))
"""Fields of `TINY` that Qwen's models have, too, where `MODELS` relies on their defaults."""
EXPERTS = (
    "grouped_product", "segment_product", "grouped_swiglu", "grouped_product_fp8", "grouped_swiglu_fp8",
)  # fmt: skip


def fields_of(name: str, layers: int | None, *, tiny: bool = False) -> dict[str, Any]:
    """Return the fields of config.json of a model of `MODELS`, of so many layers from the first on, or as many as fit."""
    fields, default = MODELS[name]
    qwen = fields["model_type"].startswith("qwen")
    fields = dict(fields)
    if tiny:
        fields |= {n: v for n, v in TINY.items() if n in fields or (qwen and n in OF_QWEN)}
    most, layers = fields["num_hidden_layers"], layers or default
    if not 1 <= layers <= most:
        raise UsageError(f"--layers {layers}: {name} has {most}")
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    return fields | dict(num_hidden_layers=layers)


def model_config(name: str, layers: int | None, *, tiny: bool = False) -> ModelConfig:
    """Return the config of a model of `MODELS`, or of the config.json at the path `name`, of so many layers from the first on.

    Raises:
        UsageError: there is no such model, or it has fewer layers.
    """
    if layers is not None and layers < 1:
        raise UsageError(f"--layers {layers}: accepted are numbers from 1")
    if name in MODELS:
        fields = fields_of(name, layers, tiny=tiny)
        return FAMILIES[fields["model_type"]].described(fields, name)
    try:
        config = described_model(name)
    except (ValueError, OSError) as error:
        raise UsageError(f"--models {name}: accepted are {', '.join(MODELS)}, and the path of a config.json; {error}") from error  # fmt: skip
    if tiny:
        raise UsageError(
            f"--tiny: accepted with {', '.join(MODELS)}, not with the config of {name}"
        )
    if layers is not None and layers > config.num_layers:
        raise UsageError(
            f"--layers {layers}: accepted are 1 to {config.num_layers}, the layers of {name}"
        )
    letters = config.letters()[:layers]
    return dataclasses.replace(config, num_layers=len(letters), pattern=letters)


@contextlib.contextmanager
def without_kernels(*names: str) -> Iterator[None]:
    """Return a context in which the ops of these names have the backend "xla" alone; without names every op but experts'
    products.
    """
    names = names or tuple(op for op in names_of_ops() if op not in EXPERTS)
    before = {op: backends_of(op) for op in names}
    for op, backends in before.items():
        unregister(op, *(b for b in backends if b.name != "xla"))
    try:
        yield
    finally:
        for op, backends in before.items():
            unregister(op, *backends_of(op))
            register(op, *backends)


def draw_params(config: ModelConfig, shardings: Any = None) -> dict[str, Any]:
    """Return random parameters of a model, drawn on the device: matrices in bfloat16, all others in float32 as the model
    initialises them.

    All matrices of a stack of layers or experts are equal, since values do not change the time of a step. Nothing larger than
    the largest parameter exists besides them.

    Args:
        config: the model.
        shardings: a tree of the parameters' shardings; None leaves them where JAX puts new arrays.
    """
    shapes = in_frozen_dtype(params_of(abstract(config)), "bfloat16_matrices")

    @jax.jit
    def initial():  # what is not returned is not computed
        drawn = leaves_of(params_of(Decoder(config, rngs=nnx.Rngs(0))))
        return {name: leaf for name, leaf in drawn.items() if not is_matrix(name)}

    def matrix(key, shape):
        drawn = 0.02 * jax.random.normal(key, shape[-2:], jnp.bfloat16)
        return jnp.broadcast_to(drawn, shape)

    others, keys = initial(), iter(jax.random.split(jax.random.key(0), len(leaves_of(shapes))))

    def make(path, leaf, sharding=None):
        name, key = jax.tree_util.keystr(path, simple=True, separator="."), next(keys)
        if not is_matrix(name):
            return others[name] if sharding is None else jax.device_put(others[name], sharding)
        return jax.jit(matrix, static_argnums=1, out_shardings=sharding)(key, leaf.shape)

    trees = (shapes,) if shardings is None else (shapes, shardings)
    return jax.tree_util.tree_map_with_path(make, *trees)


def in_parts(params: dict[str, Any]) -> dict[str, Any]:
    """Return a model's parameters with a tuple of arrays, one for each period of layers, in place of each stack. Each stack is freed
    as soon as it is copied, so that a model which fills most of a card can be decoded in unrolled layers.
    """

    def parts(stack: jax.Array) -> tuple[jax.Array, ...]:
        taken = jax.block_until_ready(tuple(stack[i] for i in range(len(stack))))
        stack.delete()
        return taken

    return params | {"periods": jax.tree.map(parts, params["periods"])}


def in_stacks(params: dict[str, Any], *, delete: bool = False) -> dict[str, Any]:
    """Return the parameters from which `in_parts` made `params`; `delete` frees the parts."""

    def stack(parts: tuple[jax.Array, ...]) -> jax.Array:
        stacked = jnp.stack(parts)
        if delete:
            jax.block_until_ready(stacked)
            for part in parts:
                part.delete()
        return stacked

    is_parts = lambda x: isinstance(x, tuple)  # noqa: E731
    return params | {"periods": jax.tree.map(stack, params["periods"], is_leaf=is_parts)}


@dataclasses.dataclass
class Inference:
    """The compiled programs that read prompts of one length and decode tokens after them.

    Attributes:
        start: (parameters) -> the state before the first token.
        read: (parameters, tokens [B, N], state) -> the likeliest next token [B, 1], and the state; donates the state.
        decode: (parameters, token [B, 1], state) -> the last token and the state after `count` further ones; donates it.
        unstack: (state after `read`) -> the state that `decode` requires, with the parameters as `in_parts` returns them; None:
            `decode` requires both as `read` does.
        pieces: number of calls of `read` that read a prompt.
        piece: tokens of a prompt that one call reads, N.
        count: tokens that one call of `decode` decodes.
        choices: by which backends ops run, for "prefill" and "decode".
    """

    start: Future
    read: Future
    decode: Future
    unstack: Callable | None
    pieces: int
    piece: int
    count: int
    choices: dict[str, dict[str, str]]


def lower_inference(
    config: ModelConfig,
    rows: int,
    length: int,
    piece: int,
    count: int,
    submit: Callable,
    *,
    unrolled: bool = False,
) -> Inference:
    """Trace the programs of inference with prompts of `length` tokens, and give them to `submit`, which compiles them; `unrolled`
    says that one token passes through layers with parameters of their own (`lsm_jax.models.sample`).
    """
    model = abstract(config)
    graph, shapes = nnx.graphdef(model), in_frozen_dtype(params_of(model), "bfloat16_matrices")
    capacity = length + 2 * count  # of two calls of `decode`

    def start(params):
        return nnx.merge(graph, params).init_state(rows, capacity)

    def read(params, tokens, state):
        return after(nnx.merge(graph, params), None, tokens, state)

    def after(model, periods, tokens, state):
        hidden, state, _ = model.hidden(tokens, state=state, periods=periods)
        logits = model.logits(hidden[:, -1:])
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), state

    def decode(params, token, state):
        model = nnx.merge(graph, in_stacks(params) if unrolled else params)
        periods = model.unstack_periods() if unrolled else None

        def body(carry, _):
            return after(model, periods, *carry), None

        return jax.lax.scan(body, (token, state), length=count)[0]

    state = jax.eval_shape(start, shapes)
    piece, choices, programs = min(piece, length), {}, []
    for name, function, width in (("prefill", read, piece), ("decode", decode, 1)):
        jax.clear_caches()  # an op that was traced before would not record its backend again
        clear_choices()
        tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        given, given_state, options = shapes, state, None
        if unrolled and name == "decode":
            part = lambda x: (jax.ShapeDtypeStruct(x.shape[1:], x.dtype),) * x.shape[0]  # noqa: E731
            given = shapes | {"periods": jax.tree.map(part, shapes["periods"])}
            given_state = jax.eval_shape(model.unstack_state, state)
            options = sampling.compiler_options(rows, unrolled)
        jitted = jax.jit(function, donate_argnums=2, compiler_options=options)
        programs.append(submit(jitted.lower(given, tokens, given_state)))
        choices[name] = ops.choices()
    started = submit(jax.jit(start).lower(shapes))
    unstack = jax.jit(model.unstack_state) if unrolled else None
    return Inference(started, *programs, unstack, length // piece, piece, count, choices)


def time_inference(programs: Inference, params: Any, rows: int, vocab: int) -> dict[str, Any]:
    """Return a row's times of prefill and decoding, and its memory."""
    start, read, decode = (f.result() for f in (programs.start, programs.read, programs.decode))
    draws = np.random.default_rng(0)
    shape = rows, programs.piece
    pieces = [
        jnp.asarray(draws.integers(0, vocab, shape), jnp.int32) for _ in range(programs.pieces)
    ]
    token, state = read(params, pieces[0], start(params))  # a warm-up
    del token, state
    state = jax.block_until_ready(start(params))
    began, token = time.perf_counter(), None
    for piece in pieces:
        token, state = read(params, piece, state)
    jax.block_until_ready((token, state))
    prefill, seconds = time.perf_counter() - began, 0.0
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    if programs.unstack is not None:
        params |= in_parts(params)  # in place: the caller's stacks are freed
    try:
        state = state if programs.unstack is None else programs.unstack(state)
        for _ in range(2):  # the first call is a warm-up
            began = time.perf_counter()
            token, state = jax.block_until_ready(decode(params, token, state))
            seconds = time.perf_counter() - began
    finally:
        if programs.unstack is not None:
            params |= in_stacks(params, delete=True)
    count = programs.pieces * programs.piece
    return dict(
        prefill_ms=round(1e3 * prefill, 2),
        prefill_tokens_per_second=round(rows * count / prefill),
        decode_ms=round(1e3 * seconds / programs.count, 3),
        decode_tokens_per_second=round(rows * programs.count / seconds, 1),
        state_gib=round(size / 2**30, 4),
        gib=round(max(map(program_bytes, (read, decode))) / 2**30, 4),
        prefill_gib=round(program_bytes(read) / 2**30, 4),
        decode_gib=round(program_bytes(decode) / 2**30, 4),
        piece=programs.piece,
        implementations=programs.choices,
    )


@dataclasses.dataclass
class Tuning:
    """The compiled training step of a model's adapters.

    Attributes:
        mesh: the mesh of one device.
        init: () -> the train state.
        step: (state, batch, frozen parameters) -> (state, metrics); donates the state.
        frozen: the shardings of the frozen parameters.
        choices: by which backends ops run.
    """

    mesh: Any
    init: Future
    step: Future
    frozen: Any
    choices: dict[str, str]


def lower_tuning(
    config: ModelConfig, rows: int, length: int, unrolled: bool, submit: Callable
) -> Tuning:
    """Trace a training step of adapters with rows of `length` tokens, and give it to `submit`, which compiles it."""
    adapters = LoRAConfig(targets=("all",), rank=16, alpha=32.0)
    train = TrainConfig(
        name="lora", model=dataclasses.replace(config, lora=adapters, unroll_layers=unrolled),
        data=DataConfig(sequence_length=length), batch_size=rows, total_tokens=10**9, trainable=("lora",),
        init_from="random", frozen_dtype="bfloat16_matrices",
    )  # fmt: skip
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    jax.clear_caches()
    clear_choices()
    with jax.set_mesh(mesh):
        program = make_program(train, mesh)
        _, shardings = split(program.param_shardings, train.trainable)
        _, frozen = split(params_of(abstract(train.model)), train.trainable)
        frozen = in_frozen_dtype(frozen, train.frozen_dtype)
        place = token_sharding(mesh)
        shaped = functools.partial(jax.ShapeDtypeStruct, (rows, length), sharding=place)
        batch = dict(tokens=shaped(jnp.int32), labels=shaped(jnp.int32), loss_mask=shaped(jnp.float32))  # fmt: skip
        step = program.train_step.lower(jax.eval_shape(program.init), batch, frozen)
        choices = ops.choices()
        return Tuning(mesh, submit(program.init.lower()), submit(step), shardings, choices)


def time_tuning(
    tuning: Tuning, config: ModelConfig, rows: int, length: int, repeats: int = 3
) -> dict[str, Any]:
    """Return a row's times of a training step of adapters, and its memory."""
    init, step = tuning.init.result(), tuning.step.result()
    with jax.set_mesh(tuning.mesh):
        frozen = draw_params(config, tuning.frozen)
        draws = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length + 1))
        batch = dict(tokens=draws[:, :-1], labels=draws[:, 1:], loss_mask=np.ones((rows, length)))
        types = dict(tokens=jnp.int32, labels=jnp.int32, loss_mask=jnp.float32)
        batch = {
            n: jax.device_put(x.astype(types[n]), token_sharding(tuning.mesh))
            for n, x in batch.items()
        }
        state, times, metrics = init(), [], {}
        for _ in range(1 + repeats):  # the first is a warm-up
            began = time.perf_counter()
            state, metrics = jax.block_until_ready(step(state, batch, frozen))
            times.append(time.perf_counter() - began)
    seconds = float(np.median(times[1:]))
    return dict(
        milliseconds=round(1e3 * seconds, 2),
        tokens_per_second=round(rows * length / seconds),
        loss=round(float(metrics["train/loss"]), 4),
        gib=round(program_bytes(step) / 2**30, 4),
        implementations={"step": tuning.choices},
    )


def with_attention(config: ModelConfig, name: str | None) -> ModelConfig:
    """Return a model's config whose softmax attention runs on the backend `name`; None changes nothing."""
    if name is None:
        return config
    layers = {
        letter: dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.mixer, implementation=name)
        )
        if isinstance(layer.mixer, SoftmaxConfig)
        else layer
        for letter, layer in config.layers.items()
    }
    return dataclasses.replace(config, layers=layers)
