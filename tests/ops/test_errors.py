"""Tests that ops check their arguments before they compute: errors name the argument, what was given and what
is accepted.
"""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import pytest

from lsm_jax import ops
from tests.ops.cases import CASES, FAMILIES, call, make_inputs, make_state

LENGTH = 9
OPS = {op: next(c for c in CASES if c.op == op) for op in FAMILIES}
SCALED = ("linear_memory", "delta_memory", "dplr_memory", "slot_memory", "attention")


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def refuse(op, message, inputs=None, **options):
    case = OPS[op]
    inputs = make_inputs(case, length=LENGTH) if inputs is None else inputs
    with pytest.raises(ValueError, match=f"^{op}: {re.escape(message)}"):
        call(case, inputs, form=case.forms[0], **options)


@pytest.mark.parametrize("op", OPS)
def test_one_state_per_segment_requires_segment_ids(op):
    state = make_state(OPS[op], num_segments=3)
    first = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(state)[0][0])
    shape = jax.tree.leaves(state)[0].shape
    refuse(
        op,
        f"initial_state{first} has shape {shape}, one state per segment, and segment_ids=None; acc",
        initial_state=state,
    )
    ids = jnp.ones((2, LENGTH), jnp.int32)
    inputs = make_inputs(OPS[op], length=LENGTH)
    jax.eval_shape(lambda: call(OPS[op], inputs, initial_state=state, segment_ids=ids))


@pytest.mark.parametrize("op", OPS)
def test_states_of_other_types_are_refused(op):
    state = make_state(OPS[op])
    kind = type(state).__name__
    for other in (tuple(state), state._asdict(), {}, jnp.zeros(3)):
        name = type(other).__name__
        refuse(op, f"initial_state is a {name}; accepted are {kind} and None", initial_state=other)
    refuse(op, "initial_state holds ", initial_state=state._replace(segment_id=None))
    ids = jnp.zeros(2, jnp.float32)
    refuse(
        op,
        "initial_state.segment_id has dtype float32; accepted with these arguments are integer",
        initial_state=state._replace(segment_id=ids),
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("segments", [None, 3])
def test_every_array_of_a_state_has_its_shape(op, segments):
    """An op refuses an initial state in which one array has a wrong shape; the message names the array."""
    state = make_state(OPS[op], num_segments=segments)
    leaves, tree = jax.tree.flatten(state)
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    ids = {} if segments is None else {"segment_ids": jnp.ones((2, LENGTH), jnp.int32)}
    for i, name in enumerate(names):
        wrong = jnp.concatenate([leaves[i], leaves[i][..., :1]], axis=-1)
        refuse(
            op,
            f"initial_state{name} has shape {wrong.shape}; accepted is ",
            initial_state=jax.tree.unflatten(tree, [*leaves[:i], wrong, *leaves[i + 1 :]]),
            **ids,
        )


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].forms != (None,)])
@pytest.mark.parametrize("size", [16.0, True, 0, 48, "16"])
def test_chunk_sizes(op, size):
    accepted = f"chunk_size={size!r}; accepted are powers of two"
    refuse(op, accepted, chunk_size=size)


@pytest.mark.parametrize("op", SCALED)
def test_scales_are_finite_python_numbers(op):
    for scale in (float("nan"), True, "1"):
        refuse(op, f"scale={scale!r}; accepted are finite Python numbers", scale=scale)
    inputs = make_inputs(OPS[op], length=LENGTH)
    with pytest.raises(ValueError, match=rf"^{op}: scale=.*accepted are finite Python numbers"):
        jax.jit(lambda scale: call(OPS[op], inputs, scale=scale))(0.5)


@pytest.mark.parametrize("op", [*SCALED, "online_memory"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_no_axis_is_empty(op, name):
    inputs = make_inputs(OPS[op], length=LENGTH)
    for which in ("q", "k") if name in "qk" else ("v",):
        inputs[which] = inputs[which][..., :0]
    empty = "v" if name == "v" else "q"
    shape = inputs[empty].shape
    refuse(op, f"{empty} has shape {shape}; no axis may be empty", inputs)


def test_other_empty_axes():
    x = jnp.zeros((2, 3, 4))
    nothing = jnp.zeros((4, 0))
    with pytest.raises(ValueError, match=r"A has shape \(4, 0\); no axis may be empty"):
        ops.selective_memory(x, x, nothing, nothing, nothing)
    with pytest.raises(ValueError, match=r"A has shape \(4, 0\); no axis may be empty"):
        ops.time_invariant_memory(x, x[0, 0], nothing, nothing, nothing)
    with pytest.raises(ValueError, match=r"s has shape \(2, 3, 4, 0\); no axis may be empty"):
        ops.slot_memory(x[..., None], x[..., None], x[..., None], x[..., None][..., :0])
    for op in (ops.token_shift, ops.cumulative_phase):
        with pytest.raises(ValueError, match=r" has shape \(2, 3, 0\); no axis may be empty"):
            op(x[..., :0])


def test_number_arguments_of_single_ops():
    for normalize in (-1.0, float("inf"), "1"):
        refuse("linear_memory", f"normalize={normalize!r}; accepted are ", normalize=normalize)
    for window in (2.5, True, 0):
        refuse("attention", f"window={window!r}; accepted are None and", window=window)
    angle, ids = jnp.zeros((2, 3, 1)), jnp.ones((2, 3), jnp.int32)
    with pytest.raises(ValueError, match="num_segments=2 with segment_ids None; accepted are"):
        ops.cumulative_phase(angle, num_segments=2)
    with pytest.raises(ValueError, match=r"num_segments=2.0 with segment_ids given; accepted are"):
        ops.cumulative_phase(angle, num_segments=2.0, segment_ids=ids)
    case = OPS["online_memory"]
    arguments = FAMILIES["online_memory"].pack(case, make_inputs(case, length=LENGTH))
    for change, message in (
        ({"mini_batch": 5.0}, "mini_batch=5.0; accepted are integers from 1"),
        ({"mini_batch": True}, "mini_batch=True; accepted are integers from 1"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0; accepted are finite Python numbers from 0"),
    ):
        with pytest.raises(ValueError, match=f"^online_memory: {message}"):
            ops.online_memory(**arguments | change)


def test_no_kernel_supports_x64():
    """With 64-bit types enabled, `implementation=None` selects XLA, and a kernel's name raises an error,
    since Mosaic's indices have 32 bits.
    """
    q = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    gate, channels = -q[..., 0], -q
    calls = {
        "linear_memory": lambda **o: ops.linear_memory(q, q, q, gate, **o),
        "delta_memory": lambda **o: ops.delta_memory(q, q, q, gate, channels, **o),
        "dplr_memory": lambda **o: ops.dplr_memory(q, q, q, q, q, channels, **o),
        "attention": lambda **o: ops.attention(q, q, q, log_forget=gate, **o),
    }
    for name, run in calls.items():
        assert jax.eval_shape(run)[0].dtype == q.dtype, name
        with pytest.raises(NotImplementedError, match="jax_enable_x64 off"):
            run(implementation="mosaic_gpu")


@pytest.mark.parametrize("name", ["u", "delta", "D"])
def test_complex_arrays_that_must_be_real(name):
    arrays = dict(u=jnp.ones((1, 4, 2)), delta=jnp.ones(2), D=jnp.ones(2))
    arrays[name] = arrays[name] + 1j
    full = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=rf"{name} has dtype complex\d+; accepted are real dtypes"):
        ops.time_invariant_memory(A=-full, B=full, C=full, **arrays)


LOGARITHMS = {
    "linear_memory": ("log_decay", "value_log_decay"),
    "delta_memory": ("log_decay",),
    "dplr_memory": ("log_decay",),
    "slot_memory": ("log_decay",),
    "online_memory": ("log_momentum", "log_decay"),
    "attention": ("log_forget",),
}


@pytest.mark.parametrize("op", LOGARITHMS)
def test_positive_logarithms_are_refused_where_their_values_are_known(op):
    for name in LOGARITHMS[op]:
        case = next(
            c for c in CASES if c.op == op and make_inputs(c, length=9).get(name) is not None
        )
        inputs = make_inputs(case, length=9)
        call(case, {**inputs, name: 0 * inputs[name]}, form=case.forms[0])
        inputs[name] = inputs[name] * 0 + 0.5
        with pytest.raises(
            ValueError, match=f"^{op}: {name} has values up to 0.5; accepted are at"
        ):
            call(case, inputs, form=case.forms[0])
        jax.eval_shape(lambda x, c=case: call(c, x, form=c.forms[0]), inputs)  # not known inside


def test_heads_in_front_of_tokens_are_noticed():
    def zeros(*shape):
        return {n: jax.ShapeDtypeStruct((2, *shape, 8), jnp.float32) for n in "qkv"}

    words = "linear_memory: q has shape .*: 4 tokens and 3. heads. If heads are in front of tokens, swap"
    for op, heads in ((ops.linear_memory, 30), (jax.jit(ops.linear_memory), 31)):
        with pytest.warns(UserWarning, match=words) as told:
            jax.eval_shape(op, **zeros(4, heads))
    assert told[0].filename == __file__
    gates = dict.fromkeys("oifz", jax.ShapeDtypeStruct((2, 4, 30, 8), jnp.float32))
    recurrent = jax.ShapeDtypeStruct((30, 8, 4, 8), jnp.float32)
    with pytest.warns(UserWarning, match="slstm_memory: z has shape"):
        jax.eval_shape(ops.slstm_memory, **gates, recurrent=recurrent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(ops.linear_memory, **zeros(30, 4))
        jax.eval_shape(ops.linear_memory, **zeros(1, 30))  # a decoding step
        one = jax.ShapeDtypeStruct((2, 4, 1, 8), jnp.float32)
        jax.eval_shape(ops.attention, **zeros(4, 30) | dict(k=one, v=one))  # keys with one head
    arrays = {n: jnp.zeros((2, 300, 4, 8), jnp.float32) for n in "qkv"}
    gates = jnp.zeros((2, 4, 300))
    end = r".*; heads are in front of tokens: jnp.swapaxes\(array, 1, 2\)$"
    for function, name in ((ops.linear_memory, "log_decay"), (ops.attention, "log_forget")):
        with pytest.raises(ValueError, match=name + end):
            function(**arrays, **{name: gates})
    with pytest.raises(ValueError, match="v has shape" + end):
        ops.linear_memory(arrays["q"], arrays["k"], jnp.zeros((2, 4, 300, 8)))


def test_the_memory_that_keys_read_is_named():
    x, beta = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 2, 1))
    with pytest.raises(ValueError, match="erase='before'; accepted are 'decayed', 'undecayed'"):
        ops.delta_memory(x, x, x, beta, -beta, erase="before")
