"""Every mixer checks the fields of its config and the arguments of its call before it computes anything."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.feedforward import FEEDFORWARDS
from lsm_jax.mixers import METHODS
from tests.marks import slow_after
from tests.mixers.conftest import WIDTH

CONFIGS = {name: m.config.for_width(256) for name, m in METHODS.items()} | {
    name: config.for_width(256, 64) for name, (config, _) in FEEDFORWARDS.items()
}
WRONG = {
    int: (1.5, 2.0, True, float("nan")),
    float: (float("nan"), float("inf"), "1", True),
    bool: (2, "yes", None),
    str: (3, True),
    mixers.RopeScaling: (8.0, "llama3"),
    mixers.OpConfig: ("chunk", None),
    tuple: (1.0, (1.0, 2.0), ("1", 1.0, 1.0, 1.0, 1.0)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_of_another_kind_are_refused(name):
    config = CONFIGS[name]
    config.validate(256)
    for field, hint in typing.get_type_hints(type(config)).items():
        union = isinstance(hint, types.UnionType)
        kinds = set(typing.get_args(hint) if union else (hint,)) - {type(None)}
        (kind,) = {typing.get_origin(kind) or kind for kind in kinds}
        for value in WRONG[kind]:
            words = re.escape(f"{type(config).__name__}.{field}={value!r}: it must be ")
            with pytest.raises(ValueError, match=words):
                dataclasses.replace(config, **{field: value}).validate(256)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(form=3), "op.form=3: it must be a string"),
        (dict(form="parallel"), "op.form='parallel': accepted are 'recurrent', 'chunk'"),
        (dict(chunk_size=48), "op.chunk_size=48: accepted are None and powers of two"),
        (dict(chunk_size=True), "op.chunk_size=True: it must be an integer or None"),
        (dict(implementation=""), "op.implementation='': accepted are None, a name, or names"),
        (dict(implementation=("xla", 3)), r"op.implementation=\('xla', 3\): accepted are None"),
    ],
)
def test_an_op_that_does_not_exist_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"GLAConfig.{message}"):
        dataclasses.replace(CONFIGS["gla"], op=mixers.OpConfig(**fields)).validate(256)


def test_every_config_has_an_op_of_its_own():
    config = CONFIGS["gla"]
    other = dataclasses.replace(config, num_heads=2)
    other.op.form = "recurrent"
    assert config.op.form == "chunk"
    several = mixers.OpConfig(implementation=("mosaic_gpu", "xla"))
    assert several.arguments() == mixers.OpConfig(implementation="mosaic_gpu,xla").arguments()
    dataclasses.replace(config, op=several).validate(256)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
@pytest.mark.parametrize("count", [0, -4])
def test_value_heads_must_exist(name, count):
    config = dataclasses.replace(CONFIGS[name], num_value_heads=count)
    with pytest.raises(ValueError, match=f"num_value_heads={count}: it must be greater than 0"):
        config.validate(256)


def test_a_width_is_whole_despite_rounding():
    """A mixer's width of 1.15 * 100, which is 114.99999999999999 in floats, counts as 115."""
    config = mixers.RetNetConfig(num_heads=5, expand_k=1.0, expand_v=1.15)
    assert config.head_dims(100) == (20, 23)
    for config in (mixers.GatedDeltaNetConfig, mixers.KDAConfig):
        config = config(num_heads=1, head_dim=100, expand_v=1.15)
        config.validate(100)
        assert config.value_dim() == 115
    with pytest.raises(ValueError, match="expand_v=1.155 times hidden_size=100 is 115.5"):
        mixers.RetNetConfig(num_heads=1, expand_k=1.0, expand_v=1.155).validate(100)


def test_s4d_refuses_an_implementation_it_would_not_ask():
    with pytest.raises(ValueError, match="implementation='nonsense': accepted are None, 'xla'"):
        mixers.S4DConfig(op=mixers.OpConfig(implementation="nonsense")).validate(256)


def abstract(name: str, width: int = WIDTH):
    """Return the mixer of the method `name` with shapes in place of arrays, so that nothing is computed."""
    config = METHODS[name].config.for_width(width)
    return nnx.eval_shape(lambda: mixers.build(config, width, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", slow_after(3, list(METHODS)))
def test_no_layer_warns_of_a_prompt_that_is_shorter_than_its_heads(name):
    mixer = abstract(name, 1024)
    graph, params = nnx.split(mixer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*heads are in front of tokens")
        for length in (2, 3):
            x = jax.ShapeDtypeStruct((1, length, 1024), np.float32)
            jax.eval_shape(lambda params, x: nnx.merge(graph, params)(x)[0], params, x)


X = np.zeros((2, 6, WIDTH), np.float32)
CALLS = [
    (dict(x=X[..., :-1]), f"x has shape (2, 6, {WIDTH - 1}); accepted is [B, T, D] = [*, *, {WIDTH}]"),
    (dict(x=X[0]), f"x has shape (6, {WIDTH}); accepted is [B, T, D]"),
    (dict(x=X[:, :0]), f"x has shape (2, 0, {WIDTH}); no axis may be empty"),
    (dict(x=X[:0]), f"x has shape (0, 6, {WIDTH}); no axis may be empty"),
    (dict(x=X.astype(np.int32)), "x has dtype int32; accepted are floating ones"),
    (dict(segment_ids=np.ones((2, 5), np.int32)), "segment_ids has shape (2, 5); accepted is [B, T] = [2, 6]"),
    (dict(segment_ids=np.ones(6, np.int32)), "segment_ids has shape (6,); accepted is [B, T] = [2, 6]"),
    (dict(segment_ids=np.ones((2, 6))), "segment_ids has dtype float64; accepted are integers"),
    (dict(update_mask=np.ones((2, 5))), "update_mask has shape (2, 5); accepted is [B, T] = [2, 6]"),
    (dict(positions=np.ones((2, 5), np.int32)), "positions has shape (2, 5); accepted is [B, T] = [2, 6]"),
    (dict(positions=np.ones((2, 6))), "positions has dtype float64; accepted are integers"),
    (dict(state=()), "state is a tuple; accepted are None and a MixerState"),
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_call_names_the_argument_before_any_compute(name, monkeypatch):
    mixer = abstract(name)
    for part in ("read", "write", "apply", "finish"):
        monkeypatch.setattr(type(mixer), part, None)  # a call of `any` would raise a TypeError
    kind = type(mixer).__name__
    for change, words in CALLS:
        with pytest.raises(ValueError, match=re.escape(f"{kind}: {words}")):
            mixer(**dict(x=X) | change)
    state = jax.eval_shape(lambda: mixer.init_state(3, 6, jnp.float32))
    with pytest.raises(ValueError, match=f"{kind}: state.* has shape .3, .*accepted are 2 rows"):
        mixer(X, state=state)
    state = jax.eval_shape(lambda: mixer.init_state(2, 6, jnp.float32))
    with pytest.raises(ValueError, match=r"state holds tails \['other'\] and .* clock; accepted"):
        mixer(X, state=state._replace(tails={"other": X}))
    clock = None if mixer.uses_positions else mixers.fresh_clock(2)
    with pytest.raises(ValueError, match="clock; accepted are tails"):
        mixer(X, state=state._replace(clock=clock))


def test_a_method_s_name_builds_it():
    layer = mixers.build("gla", WIDTH)
    assert layer.config == mixers.GLAConfig.for_width(WIDTH)
    assert layer(X)._fields == ("y", "state", "aux")
    same = mixers.build(mixers.GLAConfig.for_width(WIDTH), WIDTH, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X + 1)[0], same(X + 1)[0])
    with pytest.raises(ValueError, match="method='glo' does not exist; .*did you mean 'gla'"):
        mixers.build("glo", WIDTH)


@pytest.mark.parametrize("name", METHODS)
def test_the_arguments_of_the_op_are_those_of_a_call(name, monkeypatch):
    mixer, given = abstract(name), {}

    def apply(self, query, written, **call):
        given.update(q=query, **written)
        raise StopIteration

    x = jnp.asarray(X)
    arguments = nnx.eval_shape(lambda mixer, x: mixer.op_arguments(x), mixer, x)
    monkeypatch.setattr(type(mixer), "apply", apply)
    with contextlib.suppress(StopIteration):
        nnx.eval_shape(lambda mixer, x: mixer(x), mixer, x)
    if name not in ("liger", "lolcats"):  # whose layers compute more than one op
        assert jax.tree.map(jnp.shape, arguments) == jax.tree.map(jnp.shape, given)


def test_the_matrix_of_a_state_is_its_memory():
    def state_of(method):
        return jax.eval_shape(lambda: abstract(method, 64).init_state(2, 6, jnp.float32))

    state = state_of("gla")
    assert state.matrix is state.memory.memory and state.matrix.shape[0] == 2
    with pytest.raises(AttributeError, match="accepted are the fields of state.memory: k"):
        _ = state_of("softmax").matrix


def test_a_state_of_another_width_is_refused():
    state = jax.eval_shape(lambda: abstract("gla", 64).init_state(2, 6, jnp.float32))
    with pytest.raises(ValueError, match="initial_state.memory has shape"):
        jax.eval_shape(lambda mixer, state: mixer(jnp.asarray(X), state=state), abstract("gla"), state)  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_parameters_are_float32_whatever_the_default(name):
    """A mixer's parameters are float32 even under `jax_enable_x64`, where arrays without a dtype would be
    float64. Layers after the first are tested too, since some initialise parameters in another way.
    """
    config = METHODS[name].config.for_width(WIDTH)
    with jax.enable_x64(True):
        build = lambda: mixers.build(config, WIDTH, rngs=nnx.Rngs(0), layer=1, num_layers=2)  # noqa: E731
        mixer = nnx.eval_shape(build)
        for path, param in nnx.to_flat_state(nnx.state(mixer, nnx.Param)):
            assert param.get_value().dtype == jnp.float32, path


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_s4d_runs_in_both_widths(dtype):
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((1, 3, WIDTH), dtype)
        mixer = abstract("s4d")
        y, state, _ = jax.eval_shape(lambda mixer, x: mixer(x), mixer, x)
        assert y.dtype == dtype
        assert state.memory.memory.dtype == dict(float32="complex64", float64="complex128")[dtype]
