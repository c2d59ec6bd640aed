"""Tests of the Hopper kernel that applies one token to each memory: run in Mosaic GPU's interpreter, and
lowered for an H200.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_kernels.decode_step
from benchmarks.calls.tokens import one_token as run
from benchmarks.calls.tokens import one_token_inputs as make
from lsm_jax import mixers, ops
from lsm_jax.models import Decoder, lm
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.decode_step import Gate, api, decode_step, hopper, unsupported
from pallas_kernels.decode_step.cases import INTERPRETED


@pytest.fixture
def interpreted(monkeypatch):
    """A fixture that makes the ops run the Hopper kernel of one token in the interpreter, where
    `implementation` names it.
    """
    fused = functools.partial(decode_step, interpret=gpu_interpreter())
    monkeypatch.setattr(pallas_kernels.decode_step, "decode_step", fused)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (i > 2), id=c.id)
        for i, c in enumerate(INTERPRETED)
    ],
)
def test_equals_the_recurrent_form(case, interpreted):
    """For one token, the kernel's output and memory of every row are those of the recurrence, other layers'
    memories do not change, two runs are equal to the bit, and there are no races.
    """
    op, heads, key_dim, value_dim, decays, documents, stacked, dtype, batch = case
    arrays = make(op, heads, key_dim, value_dim, decays, documents, dtype, batch)
    fused = functools.partial(run, op, arrays, stacked=stacked, implementation="mosaic_gpu")
    got = fused()
    assert not races_found()
    wanted = run(op, arrays, stacked=stacked, implementation="xla", form="recurrent")
    assert got[0].dtype == dtype and got[1].dtype == jnp.float32
    for x, y, again in zip(got, wanted, fused(), strict=True):
        np.testing.assert_array_equal(x, again)
        tolerance = 1e-2 if x.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=tolerance, atol=tolerance
        )
    if documents:
        kept = got[1][1] if stacked else got[1]
        np.testing.assert_array_equal(kept[:2], arrays["memory"][:2])


def test_derivatives_and_vmap_are_the_xla_forms(interpreted):
    arrays = make("delta", (2, 2, 2), 16, 32, "token", False, jnp.float32)

    def total(implementation, k):
        output, memory = run("delta", arrays | dict(k=k), implementation=implementation)
        return jnp.sum(output**2) + jnp.sum(memory**2)

    for of in (jax.value_and_grad, jax.vmap):
        k = jnp.stack([arrays["k"]] * 2) if of is jax.vmap else arrays["k"]
        got, wanted = (
            of(functools.partial(total, implementation))(k)
            for implementation in ("mosaic_gpu", "xla")
        )
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)


def lowered(function, *arguments) -> str:
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels_of(text: str) -> int:
    return text.count("custom_call @mosaic_gpu")


@pytest.mark.parametrize("method", ["gla", pytest.param("gated_deltanet", marks=pytest.mark.slow)])
def test_the_decoder_lowers_to_it_on_the_card(method):
    """For one token on a Hopper GPU, a decoder's loop over layers contains one kernel, whose argument is the
    stack of all memories. It contains none for two tokens, or with implementation="xla".
    """
    config = lm(method, "tiny", vocab_size=64)
    config.num_layers, config.hidden_size = 3, 128
    mixer = config.layers["L"].mixer = mixers.METHODS[method].config.for_width(128)
    for implementation, length, count in ((None, 1, 1), (None, 2, 0), ("xla", 1, 0)):
        mixer.op.implementation = implementation
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

        def step(params, tokens, graphdef=graphdef):
            model = nnx.merge(graphdef, params)
            return model(tokens, state=model.init_state(*tokens.shape))[1]

        text = lowered(step, params, jax.ShapeDtypeStruct((2, length), jnp.int32))
        assert kernels_of(text) == count
        memory = jax.eval_shape(step, params, jax.ShapeDtypeStruct((2, 1), jnp.int32)).layers[0][0]
        stack = "x".join(map(str, memory.memory.memory.shape))
        line = [x for x in text.splitlines() if "custom_call @mosaic_gpu" in x]
        assert all(f"tensor<{stack}xf32>" in x and "output_operand_alias" in x for x in line)


def test_none_picks_it_where_xla_makes_more_passes():
    """Without a stack of layers, the kernel of one token is selected automatically for a delta rule, but not
    for a memory with only a decay, and not if a form is named.
    """
    for op, form, count in (
        ("delta", "chunk", 1),
        ("delta", "recurrent", 0),
        ("linear", "chunk", 0),
    ):
        arrays = make(op, (2, 2, 2), 64, 64, "token", False, jnp.bfloat16)
        assert kernels_of(lowered(functools.partial(run, op, form=form), arrays)) == count


def test_a_decay_that_rounding_put_above_zero_keeps_the_memory():
    factor = api.decay_factor(jnp.array([6e-8, 0.0, -1e-7], jnp.float32))  # decay - 1
    np.testing.assert_allclose(factor, [0, 0, -1e-7], rtol=1e-6)


@pytest.mark.parametrize("strong", [False, True])
def test_computes_the_decay_from_its_gate(strong):
    """A low-rank gate gives the output and memory of the log decay that it stands for, also of decays near 0 and near 1."""
    batch, memories, keys, values, rank, temperature = 2, 2, 32, 64, 16, 0.5 if strong else 16.0
    arrays = make("linear", (2, 2, 2), keys, values, "", False, jnp.bfloat16, batch)
    q, k, v = (arrays[n][:, 0] for n in "qkv")
    memory = arrays["memory"][:, 0] if arrays["memory"].ndim == 5 else arrays["memory"]
    rng = np.random.default_rng(1)
    down, up = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((batch, rank), (rank, memories * keys)))  # fmt: skip
    bias = jnp.asarray(rng.uniform(-100 if strong else 0, 30, memories * keys), jnp.float32)
    gate = down.astype(jnp.float32) @ up.astype(jnp.float32) + bias
    log_decay = (jax.nn.log_sigmoid(gate) / temperature).reshape(batch, memories, keys)
    call = functools.partial(decode_step, memory, q, k, v, scale=0.25, interpret=gpu_interpreter())
    got = call(gate=Gate(down, up, bias, temperature))
    assert not races_found()
    for a, b in zip(got, call(log_decay=log_decay), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2 if a.dtype == q.dtype else 2e-5, atol=2e-6
        )  # fmt: skip
    for wrong, words in (
        (dict(log_decay=log_decay), "gate is accepted without log_decay"),
        (dict(implementation="triton"), "gate and columns are accepted with implementation='mosaic_gpu'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call(gate=Gate(down, up, bias, temperature), **wrong)


def test_factors_of_decays_lose_no_digits():
    """The kernel's logarithm and exponential near 0 are as exact as float32 is."""
    x = np.concatenate([[0.0], np.logspace(-30, 0, 200)]).astype(np.float32)
    exact = np.log1p(x.astype(np.float64))
    np.testing.assert_allclose(hopper._log1p(jnp.asarray(x)), exact, rtol=3e-7)
    x = -0.5 * x
    np.testing.assert_allclose(hopper._expm1(jnp.asarray(x)), np.expm1(x.astype(np.float64)), rtol=3e-7)  # fmt: skip


def test_names_the_requirement_that_is_not_met():
    arrays = make("linear", (2, 2, 2), 64, 64, "", False, jnp.bfloat16)
    q, v, memory = arrays["q"][:, 0], arrays["v"][:, 0], arrays["memory"]
    assert unsupported(q, v, memory) is None
    assert "not K 24 and V 64" in str(unsupported(q, v, memory[:, :, :24]))
    assert "not K 64 and V 48" in str(unsupported(q, v, memory[..., :48]))
    many = unsupported(jnp.zeros((4, 40, 64)), v, memory)
    assert many == "at most 16 query heads for each memory, not 40 query heads for 2 memories"
    assert "bfloat16 or float32, not float16" in str(unsupported(q.astype(jnp.float16), v, memory))
    with pytest.raises(NotImplementedError, match="requires memory in float32, not bfloat16"):
        decode_step(memory.astype(jnp.bfloat16), q, q, v, scale=1.0)
    with pytest.raises(ValueError, match="implementation='cutile'; accepted are"):
        decode_step(memory, q, q, v, scale=1.0, implementation="cutile")
    with pytest.raises(NotImplementedError, match="requires no normalize"):
        call = dict(implementation="mosaic_gpu", normalize=1.0)
        ops.linear_memory(arrays["q"], arrays["k"], arrays["v"], **call)
