"""Tests that the decoder computes the same function with a scan or a loop over layers, in one call or
several, and for packed or separate documents, with every method.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.cases import decode
from lsm_jax import mixers, models, ops
from tests.conftest import AS_USERS
from tests.marks import slow_after
from tests.mixers.test_mixers import close
from tests.models.conftest import Small, small_config


def looped(small: Small) -> jax.Array:
    """Compute the small decoder's logits by a loop over its layers in place of the scan."""
    model, x = small.model, small.model.embedding[...][small.tokens]
    size, shared = len(model.periods.blocks), {}
    for kind in {type(block.mixer) for block in model.periods.blocks}:
        firsts = size * jnp.arange(model.num_periods)
        stacks = [
            (firsts + place, block.mixer)
            for place, block in enumerate(model.periods.blocks)
            if type(block.mixer) is kind
        ]
        shared |= kind.init_shared(x, stacks)
    for period in range(model.num_periods):
        blocks = jax.tree.map(operator.itemgetter(period), model.periods).blocks
        for place, block in enumerate(blocks):
            layer = period * size + place
            y, _, context = block.mixer.run(block.mixer_norm(x), layer=layer, shared=shared)
            x, shared = x + y, context.shared
            if block.feedforward is not None:
                x = x + block.feedforward(block.feedforward_norm(x))[0]
    return model.norm(x) @ model.embedding[...].T


@pytest.mark.classes
def test_scan_equals_loop(small):
    close(small()[0], jax.jit(lambda: looped(small))(), 3e-5)


IN_ONE_CHUNK = ("log_linear_mamba2", "log_linear_gated_deltanet", "gla", "gated_deltanet")


@pytest.mark.parametrize(
    "name",
    [
        *IN_ONE_CHUNK,
        *(pytest.param(n, marks=pytest.mark.slow) for n in mixers.METHODS if n not in IN_ONE_CHUNK),
    ],
)
def test_a_scan_equals_unrolled_layers_in_rows_of_one_chunk(name):
    """In a row of one chunk, XLA knows that the memory before it is 0, and fuses other operations than with several."""
    config = small_config(name, "L")
    if mixers.METHODS[name].forms:
        config.layers["L"].mixer.op.chunk_size = None
    draw = np.random.default_rng(0).standard_normal
    tokens, logits = jnp.arange(20).reshape(2, 10), []
    params: Any = None
    for unroll in (False, True):
        model = models.abstract(dataclasses.replace(config, unroll_layers=unroll))
        graphdef, shapes = nnx.split(model)
        params = params or jax.tree.map(lambda p: 0.2 * draw(p.shape, p.dtype), shapes)
        logits.append(jax.jit(lambda p, g=graphdef: nnx.merge(g, p)(tokens)[0])(params))
    close(*logits, 1e-5)


def test_prefill_then_decoding_equals_one_call(small):
    whole, none = small()
    assert none is None
    logits, state = small(small.tokens[:, :5], state=small.model.init_state(2, 10))
    outputs = [logits]
    for t in range(5, 10):
        before = jax.tree.map(lambda a: (a.shape, a.dtype), state)
        logits, state = small(small.tokens[:, t : t + 1], state=state)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == before
        outputs.append(logits)
    close(jnp.concatenate(outputs, axis=1), whole, 2e-5)


@pytest.mark.classes
def test_packed_and_padded_documents_equal_documents_alone(small):
    """A model gives each document of a packed and padded row the logits that it has alone: a document of 5
    tokens, one of 3, and 2 tokens of padding.
    """
    ids = jnp.tile(jnp.array([1] * 5 + [2] * 3 + [0] * 2, jnp.int32), (2, 1))
    packed, _ = small(segment_ids=ids)
    close(packed[:, :5], small(small.tokens[:, :5])[0], 2e-5)
    padded = jnp.concatenate([small.tokens[:, 5:8], small.tokens[:, :2]], axis=1)
    close(packed[:, 5:8], small(padded)[0][:, :3], 2e-5)
    other, _ = small(small.tokens.at[:, 8:].set(0), segment_ids=ids)
    assert (other[:, :8] == packed[:, :8]).all()


@pytest.mark.classes
def test_causal_to_the_bit(small):
    logits, _ = small()
    for t in (1, 5, 9):
        changed, _ = small(small.tokens.at[:, t].add(1) % small.config.vocab_size)
        assert (changed[:, :t] == logits[:, :t]).all()
        assert (changed[:, t] != logits[:, t]).any()


def test_masked_tokens_change_nothing(gla):
    keep = np.array([1, 1, 0, 1, 0, 1, 1, 0, 0, 0], bool)
    mask = jnp.tile(jnp.array(keep, jnp.int32), (2, 1))
    state = gla.model.init_state(2, 10)
    masked, after = gla(update_mask=mask, state=state)
    alone, final = gla(gla.tokens[:, keep], state=state)
    close(masked[:, keep], alone, 2e-5)
    close(after, final, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", mixers.METHODS)
def test_decoding_is_one_program_on_a_state_of_constant_size(name):
    row = decode.decode(name, tokens=64, window=16)
    assert row["programs"] == 1
    assert row["state_bytes_before"] == row["state_bytes_after"] > 0


def gradients(method="linear_attention", **fields) -> dict:
    small = Small(small_config(method, "L", **fields))

    def loss(model):
        hidden, _, _ = model.hidden(small.tokens)
        head, size = model.head(), small.config.loss_chunk_size
        return models.next_token_loss(hidden, head, small.tokens, chunk_size=size).mean()

    return nnx.to_pure_dict(nnx.state(jax.jit(jax.grad(loss))(small.model), nnx.Param))


@pytest.mark.parametrize("remat", [pytest.param("dots", marks=pytest.mark.slow), "full"])
def test_remat_changes_no_gradient_and_an_untied_head_learns(remat):
    expected = gradients(remat="none", tie_embeddings=False)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(expected)) and "lm_head" in expected
    close(gradients(remat=remat, tie_embeddings=False), expected)


@pytest.mark.parametrize("mixer", slow_after(1, ["mamba2", "gated_deltanet"]))
def test_saved_convolutions_change_no_gradient(mixer):
    """Mamba2 has biases in its convolutions, Gated DeltaNet heads of unit length after them."""
    expected = gradients(mixer, remat="dots")
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(expected))
    close(gradients(mixer, remat="dots_and_convolutions"), expected)


@pytest.mark.parametrize("remat", slow_after(1, ["none", "full"]))
def test_unrolled_layers_change_no_gradient_and_have_no_loop(remat):
    close(gradients(remat=remat, unroll_layers=True), gradients(remat=remat))

    def loops(unroll_layers):
        small = Small(small_config("softmax", "L", remat=remat, unroll_layers=unroll_layers))
        forward = jax.jit(lambda model, tokens: model.hidden(tokens)[0])
        return forward.lower(small.model, small.tokens).as_text().count("stablehlo.while")

    assert loops(unroll_layers=False) == 1 and loops(unroll_layers=True) == 0


def test_a_layer_of_several_in_a_period_hands_on_its_gradients_together():
    """If a period of the pattern has several layers, each layer's parameter gradients pass through one
    optimization barrier together; without it XLA would compute the gradients of all parameters last, and
    store all arrays that they are computed from.
    """

    def barriers(pattern):
        config = small_config("gla", pattern, num_layers=2 * len(pattern), remat="full")
        model = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
        graphdef, params = nnx.split(model)
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

        def total(params, tokens):
            return jnp.sum(nnx.merge(graphdef, params)(tokens)[0])

        text = jax.jit(jax.grad(total)).trace(params, tokens).lower().as_text()
        return text.count("optimization_barrier")

    assert (
        barriers("LLN") - barriers("N") == 3
    )  # both count positions, behind a barrier of their own


def test_params_are_one_pure_dict(gla):
    """A model's parameters are one dict of arrays, which the training loop splits off once and passes to
    `jax.jit`; metadata have the same structure.
    """
    config = gla.config
    build = lambda: models.Decoder(config, rngs=nnx.Rngs(0))  # noqa: E731
    graphdef, _ = nnx.split(nnx.eval_shape(build))
    hash(graphdef)
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build(), nnx.Param)))()
    logits = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t)[0])(params, gla.tokens)
    close(logits, gla()[0])
    axes, mask = models.logical_axes(models.abstract(config)), models.decay_mask(config)
    named = jax.tree.map(lambda p, a: len(a) == p.ndim, params, axes)
    assert jax.tree.all(named)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    block = mask["periods"]["blocks"][0]
    assert block["mixer"]["q_proj"]["kernel"] and not block["mixer"]["norm"]["scale"]
    assert not block["mixer"]["decay_up"]["bias"] and mask["embedding"]
    assert axes["periods"]["blocks"][0]["mixer"]["q_proj"]["kernel"] == ("layers", "embed", "heads")


def test_layers_start_different_and_bfloat16_runs():
    small = Small(small_config("gated_deltanet", "LN", dtype="bfloat16"))
    kernel = small.model.periods.blocks[0].mixer.q_proj.kernel[...]
    assert kernel.shape[0] == 2 and (kernel[0] != kernel[1]).any()
    logits, state = small(state=small.model.init_state(2, 10))
    assert logits.dtype == jnp.float32 and jnp.isfinite(logits).all()
    assert state.layers[0][0].memory.memory.dtype == jnp.float32
    assert state.layers[1][0].memory.keys.dtype == jnp.bfloat16


def test_token_outside_the_vocabulary_is_not_hidden(gla):
    assert jnp.isnan(gla(gla.tokens.at[0, 3].set(50))[0][0, 3:]).all()


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class CountingConfig:
    """The config of `Counting`, a mixer for tests that returns its layer's index."""

    scale: float = 1.0

    @classmethod
    def for_width(cls, hidden_size):
        return cls()

    def validate(self, hidden_size):
        pass

    def flops_per_token(self, hidden_size, seq_len):
        return 4.0 * hidden_size


class Counting(mixers.Mixer):
    """A mixer for tests that adds the first layer's value to that of every layer, and returns its layer's
    index as a statistic.
    """

    op = ops.linear_memory

    def __init__(self, config, hidden_size, *, rngs, init_std):
        super().__init__(config, hidden_size)

    @classmethod
    def init_shared(cls, x, stacks):
        return {"first": jnp.zeros_like(x)}

    def read(self, x, context):
        return x[:, :, None], context

    def write(self, x, context):
        first = jnp.where(context.layer == 0, x, context.shared["first"])
        context = context.add(
            shared={"first": first}, aux={"layer": context.layer, "count_loss": jnp.float32(1)}
        )
        return dict(k=x[:, :, None], v=(x + first)[:, :, None]), context

    def finish(self, o, x, context):
        return o[:, :, 0], context

    def options(self):
        return {}

    def init_memory(self, batch_size, max_length, dtype):
        return ops.linear_state(batch_size, 1, self.hidden_size, self.hidden_size)


def test_a_new_method_is_a_file_and_a_row(monkeypatch):
    """A new method needs one file and one row of the table of methods: a toy method with shared values,
    statistics and the layer's index trains and decodes.
    """
    row = dataclasses.replace(
        mixers.METHODS["gla"], name="counting", config=CountingConfig, module=Counting, forms=()
    )
    monkeypatch.setitem(mixers.METHODS, "counting", row)
    small = Small(small_config("counting", "LL"))
    aux = jax.jit(lambda model, tokens: model.hidden(tokens)[2])(small.model, small.tokens)
    assert aux["layer"].tolist() == [0, 1, 2, 3] and aux["count_loss"] == 4
    whole, _ = small()
    state, steps = small.model.init_state(2, 10), []
    for t in range(10):
        logits, state = small(small.tokens[:, t : t + 1], state=state)
        steps.append(logits)
    close(jnp.concatenate(steps, axis=1), whole, 2e-5)


@pytest.mark.slow
def test_compile_time_does_not_grow_with_depth():
    def seconds(depth):
        config = small_config("gla", "L", num_layers=depth, remat="full")
        build = lambda: models.Decoder(config, rngs=nnx.Rngs(0))  # noqa: E731
        graphdef, state = nnx.split(nnx.eval_shape(build))
        params = nnx.to_pure_dict(state)
        tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)

        def loss(params, tokens):
            model = nnx.merge(graphdef, params)
            hidden, _, _ = model.hidden(tokens)
            return models.next_token_loss(hidden, model.head(), tokens, chunk_size=64).mean()

        times = []
        for _ in range(3):
            jax.clear_caches()
            start = time.perf_counter()
            jax.jit(jax.grad(loss), compiler_options=AS_USERS).lower(params, tokens).compile()
            times.append(time.perf_counter() - start)
        return min(times)

    seconds(6)
    shallow, deep = seconds(6), seconds(24)
    assert deep < 1.3 * shallow, f"{shallow:.2f} s for 6 layers, {deep:.2f} s for 24"
