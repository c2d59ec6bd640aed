"""Tests of the Hopper kernels of attention with forget gates: run in Mosaic GPU's interpreter, and lowered
for an H200.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.ops.attention.backends import run_kernel
from lsm_jax.ops.attention.xla import AttentionOptions
from lsm_jax.ops.backends.registry import Call
from lsm_jax.ops.backends.select import clear_choices
from lsm_jax.ops.core.segments import read_tokens
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.forgetting_attention import bounds, forgetting_attention, hopper, unsupported
from pallas_kernels.forgetting_attention.cases import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE
from tests.kernels.test_linear_attention_gpu import error
from tests.ops.test_by_platform import mesh_of

SCALE = 0.2


def make(length, heads, key_heads, dim, *, gates="mild", documents=False, masked=False):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    log_forget = jax.nn.log_sigmoid(jnp.asarray(rng.normal(size=(1, length, heads)) + 2))
    if gates == "strong":
        log_forget = rng.choice([0.0, -1e-3, -30.0], p=[0.5, 0.4, 0.1], size=(1, length, heads))
    exact = np.cumsum(np.asarray(log_forget, np.float64), axis=1)
    high = exact.astype(np.float32)
    starts = np.isin(np.arange(length), [30, 31, 150, 200])
    return dict(
        q=normal(1, length, heads, dim),
        k=normal(1, length, key_heads, dim),
        v=normal(1, length, key_heads, dim),
        sums=(jnp.asarray(high), jnp.asarray(exact - high, jnp.float32)) if gates else None,
        run=jnp.asarray(np.cumsum(starts)[None], jnp.int32) if documents else None,
        written=jnp.asarray(rng.random((1, length)) < 0.8) if masked else None,
    )


def plain(q, k, v, sums, *, run, written, window):
    """Return the output of attention with forget gates, [B, T, H, V], computed by XLA from all scores at
    once, in float32; `sums` are the running sums of the log forget gates, as a high and a low part.
    """
    length, heads = q.shape[1:3]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    scores = SCALE * jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
    if sums is not None:
        of_row, of_column = (
            jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), x) for x in (jax.lax.stop_gradient(sums), sums)
        )  # fmt: skip
        for row, column in zip(of_row, of_column, strict=True):
            scores += row[..., None] - column[:, :, None]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    seen = seen[None] if run is None else seen & (run[:, :, None] == run[:, None])
    seen = (seen if written is None else seen & written[:, None])[:, None]
    top = jnp.max(jnp.where(seen, scores, -1e30), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")


CASES = {
    "gates": dict(dims=(200, 2, 1, 64)),
    "strong-documents": dict(dims=(384, 1, 1, 64), gates="strong", documents=True),
    "window-wide": dict(dims=(256, 1, 1, 128), window=100),
    "masked": dict(dims=(256, 1, 1, 64), documents=True, masked=True),
    "no-gates-masked": dict(dims=(130, 2, 2, 64), gates=None, masked=True),
    "no-gates-window": dict(dims=(256, 1, 1, 64), gates=None, window=70, documents=True),
    # The queries are those of two parts of the row, (first, last + 1); no query sees some of the keys.
    "parts": dict(dims=(768, 2, 1, 64), parts=((128, 256), (512, 640)), masked=True),
    "parts-strong": dict(dims=(896, 1, 1, 128), gates="strong", parts=((0, 256), (640, 896))),
    "parts-documents": dict(dims=(768, 1, 1, 64), documents=True, parts=((128, 256), (512, 640))),
    "parts-window": dict(dims=(768, 1, 1, 64), window=200, parts=((0, 128), (640, 768))),
    "parts-no-gates": dict(dims=(512, 2, 1, 128), gates=None, parts=((128, 256), (256, 384))),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "masked" else pytest.mark.slow) for n in CASES],
)
def test_equals_attention_in_value_and_every_gradient(name):
    options = dict(CASES[name])
    window, parts = options.pop("window", None), options.pop("parts", None)
    inputs = make(*options.pop("dims"), **options)
    places = {n: inputs.pop(n) for n in ("run", "written")} | dict(window=window)

    def cut(x):
        return x if parts is None else jnp.concatenate([x[:, a:b] for a, b in parts], axis=1)

    def fused(x):
        where = None if parts is None else jnp.asarray([a for a, _ in parts], jnp.int32)
        x = x | dict(q=cut(x["q"]))
        return forgetting_attention(
            **x, **places, places=where, scale=SCALE, interpret=gpu_interpreter()
        )

    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    expected, expected_pull = jax.vjp(lambda x: cut(plain(**x, **places)), widened)
    actual, pull = jax.vjp(fused, inputs)
    assert error(actual, expected) < OUTPUT_TOLERANCE
    blind = np.all(np.asarray(expected) == 0, axis=(2, 3))
    np.testing.assert_array_equal(np.asarray(actual, np.float32)[blind], 0)
    rng = np.random.default_rng(1)
    d_output = jnp.asarray(rng.normal(size=actual.shape), actual.dtype)
    (grads,), (wanted,) = pull(d_output), expected_pull(d_output.astype(jnp.float32))
    for field in ("q", "k", "v"):
        assert error(grads[field], wanted[field]) < GRADIENT_TOLERANCE, field
    if inputs["sums"] is not None:
        of_sums = [np.float64(x["sums"][0]) for x in (grads, wanted)]
        assert error(*of_sums) < GRADIENT_TOLERANCE
        # The gradient of a gate is the sum over all later tokens, in which nearly everything cancels.
        assert error(*(x[:, ::-1].cumsum(1) for x in of_sums)) < GRADIENT_TOLERANCE
        np.testing.assert_array_equal(grads["sums"][1], 0)
    assert not races_found()


@pytest.mark.slow
def test_heads_of_256_forward():
    inputs = make(384, 2, 1, 256, gates="strong", documents=True)
    places = {n: inputs.pop(n) for n in ("run", "written")}
    call = lambda x: forgetting_attention(**x, **places, scale=SCALE, interpret=gpu_interpreter())  # noqa: E731
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    assert error(call(inputs), plain(**widened, **places, window=None)) < OUTPUT_TOLERANCE
    assert not races_found()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_what_is_pruned_weighs_nothing(masked, documents):
    """In attention with forget gates, all tiles of keys that pruning skips for a query have together less
    than e^-10 of the query's softmax weights; and the gates of this test are strong enough that some tiles
    are skipped.
    """
    inputs = make(1024, 2, 1, 64, masked=masked)
    q, k, sums, written = (inputs[n] for n in ("q", "k", "sums", "written"))
    run = np.repeat([0, 1], 512)[None] if documents else None
    if documents:  # the bound also holds for sums that restart, which are not accepted as input
        sums = tuple(x.at[:, 512:].add(-x[:, 511:512]) for x in sums)
    gates = tuple(jnp.moveaxis(x, 2, 1) for x in sums)
    rows = bounds.Rows(gates, None if run is None else jnp.asarray(run), written)
    found = bounds.find_bounds(q, k, rows, scale=SCALE, window=None, prune=True)
    scores = SCALE * np.einsum("thd,sd->hts", np.float64(q[0]), np.float64(k[0, :, 0]))
    total = np.float64(gates[0][0]) + np.float64(gates[1][0])
    scores += total[:, :, None] - total[:, None]
    seen = np.tril(np.ones((1024, 1024), bool)) & (True if written is None else np.asarray(written))
    if run is not None:
        seen &= run[0, :, None] == run[0]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    first = np.asarray(found.first_of_query[0])
    hidden = np.arange(1024) // hopper.TILE < first[..., None]
    share = (weights * hidden).sum(-1) / np.maximum(weights.sum(-1), 1e-300)
    assert share.max() < np.exp(-10)
    assert first.max() >= 4 or documents and first.max() >= 2
    by_tile = first.reshape(2, -1, hopper.TILE)
    begins = np.arange(8) // 4 * 4 if documents else 0
    np.testing.assert_array_equal(found.first[0], np.maximum(by_tile.min(-1), begins))
    np.testing.assert_array_equal(found.first_common[0], np.maximum(by_tile.max(-1), begins))
    reach = [
        [m for m in range(8) if found.first[0, h, m] <= n <= m] for h in range(2) for n in range(8)
    ]
    np.testing.assert_array_equal(np.ravel(found.last[0]), [max(r) for r in reach])


@pytest.mark.slow
def test_pruning_changes_nothing_that_matters(monkeypatch):
    """Output and gradients of attention are the same within 1e-4 where pruning skips tiles of keys, and the
    output to the bit where no weight is negligible.
    """
    inputs = make(384, 1, 1, 64, gates="strong")
    inputs = {n: inputs[n] for n in ("q", "k", "v", "sums")}
    rows = bounds.Rows(tuple(jnp.moveaxis(x, 2, 1) for x in inputs["sums"]), None)
    q, k = inputs["q"], inputs["k"]

    def find(prune):
        return bounds.find_bounds(q, k, rows, scale=SCALE, window=None, prune=prune)

    def run(prune):
        call = functools.partial(forgetting_attention, scale=SCALE, interpret=gpu_interpreter())
        return lambda x: call(**x, prune=prune)

    def both(prune):
        output, pull = jax.vjp(run(prune), inputs)
        return jax.tree.leaves((output, pull(output)))

    assert find(True).first.max() > 0
    whole = both(False)
    for a, b in zip(both(True), whole, strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=0, atol=1e-4)
    monkeypatch.setattr(bounds, "LOG_NEGLIGIBLE", -np.inf)
    assert find(True).first_of_query.max() == 0
    for a, b in zip(
        find(True)[:3], find(False)[:3], strict=True
    ):  # the fields that the backward pass uses
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(run(True)(inputs), whole[0])


def test_bounds_do_not_look_ahead():
    inputs = make(512, 1, 1, 64)
    gates = tuple(jnp.moveaxis(x, 2, 1) for x in inputs["sums"])

    def first_of_query(q, k):
        rows = bounds.Rows(gates, None)
        found = bounds.find_bounds(q, k, rows, scale=SCALE, window=None, prune=True)
        return found.first_of_query[..., :300]

    later = [x.at[:, 300:].multiply(50) for x in (inputs["q"], inputs["k"])]
    expected = first_of_query(inputs["q"], inputs["k"])
    np.testing.assert_array_equal(expected, first_of_query(*later))


@pytest.mark.slow
def test_causal_to_the_bit():
    inputs = make(256, 1, 1, 64, gates="strong")
    changed = {n: inputs[n].at[:, 177:].multiply(2) for n in ("q", "k", "v")}
    changed["sums"] = tuple(x.at[:, 177:].multiply(2) for x in inputs["sums"])
    run = lambda x: forgetting_attention(**x, scale=SCALE, interpret=gpu_interpreter())  # noqa: E731
    np.testing.assert_array_equal(run(inputs)[:, :177], run(inputs | changed)[:, :177])


@pytest.mark.parametrize("dim", [64, 128])
def test_lowers_for_the_card(dim):
    struct = jax.ShapeDtypeStruct
    q = struct((1, 300, 2, dim), jnp.bfloat16)
    sums = struct((1, 300, 2), jnp.float32)

    def both(q, k, v, high, low):
        call = lambda *x: forgetting_attention(*x[:3], x[3:], window=200, scale=SCALE)  # noqa: E731
        output, pull = jax.vjp(call, q, k, v, high, low)
        return pull(output)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(both).trace(q, q, q, sums, sums)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 3


def test_names_the_requirement_that_is_not_met():
    x = jnp.ones((1, 128, 2, 64))
    with pytest.raises(NotImplementedError, match="requires q, k and v in bfloat16, not float32"):
        forgetting_attention(x, x, x, scale=1.0)
    with pytest.raises(ValueError, match="implementation='mine'; accepted are"):
        forgetting_attention(x, x, x, scale=1.0, implementation="mine")
    narrow = jax.ShapeDtypeStruct((1, 128, 2, 96), jnp.bfloat16)
    assert "heads of 64, 128 or 256" in str(unsupported("mosaic_gpu", narrow, narrow, narrow))
    wide = jax.ShapeDtypeStruct((1, 128, 2, 256), jnp.bfloat16)
    assert unsupported("mosaic_gpu", wide, wide, wide) is None
    with pytest.raises(
        NotImplementedError, match="the gradient with .* requires heads of 64 or 128"
    ):
        call = lambda x: jnp.sum(forgetting_attention(x, x, x, scale=1.0))  # noqa: E731
        jax.eval_shape(jax.grad(call), wide)
    heads = [jax.ShapeDtypeStruct((1, 128, n, 64), jnp.bfloat16) for n in (2, 3)]
    assert "a divisor" in str(unsupported("mosaic_gpu", heads[0], heads[1], heads[1]))


def test_attention_picks_it_where_cudnn_does_not_serve():
    struct = jax.ShapeDtypeStruct
    q, gates = struct((1, 256, 2, 64), jnp.bfloat16), struct((1, 256, 2), jnp.float32)
    ids = struct((1, 256), jnp.int32)

    def text(call, *inputs):
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            return jax.jit(call).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()

    gated = lambda q, g, **more: ops.attention(q, q, q, log_forget=g, **more)[0]  # noqa: E731
    assert "mosaic_gpu" in text(gated, q, gates)
    assert "mosaic_gpu" in text(lambda q, ids: ops.attention(q, q, q, segment_ids=ids)[0], q, ids)
    assert "mosaic_gpu" not in text(lambda q, g: gated(q, g, implementation="xla"), q, gates)
    with pytest.raises(NotImplementedError, match="requires q in bfloat16, not float32"):
        gated(jnp.ones(q.shape), jnp.zeros(gates.shape), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="no window together with segment_ids"):
        ops.attention(
            *[jnp.ones(q.shape, q.dtype)] * 3, window=9, segment_ids=jnp.ones((1, 256), jnp.int32),
            implementation="mosaic_gpu",
        )  # fmt: skip


def layers(q, ids, implementation=None):
    """Return the output of two layers of attention with residuals, each computed again in the backward pass."""

    def layer(x, _):
        k = x[:, :, :2]
        return x + ops.attention(x, k, k, segment_ids=ids, implementation=implementation)[0], None

    return jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0]


def gradient_of_layers(q, ids, implementation=None):
    return jax.grad(lambda q: jnp.sum(layers(q, ids, implementation).astype(jnp.float32)))(q)


def test_heads_of_256_run_fused_where_nothing_is_differentiated(monkeypatch):
    """Attention with heads of 256 channels, also under `jax.vmap` in a `jax.lax.scan`, calls the Hopper kernel, and
    where it is differentiated is the program of XLA's. `ops.choices()` says both.
    """
    monkeypatch.setattr(  # in place of the kernel, a function with another output
        "pallas_kernels.forgetting_attention.forgetting_attention",
        lambda q, k, v, sums, **more: jnp.full_like(q, 3),
    )
    q = jnp.ones((1, 2, 5, 4, 256), jnp.bfloat16)
    ids = jnp.asarray([[[1, 1, 2, 2, 2], [4, 4, 4, 4, 4]]], jnp.int32)

    def mapped(function, name):
        return jax.vmap(functools.partial(function, implementation=name))

    np.testing.assert_array_equal(mapped(layers, "mosaic_gpu")(q, ids), q + 3 + 3)
    by_kernel, by_xla = (
        str(jax.make_jaxpr(mapped(gradient_of_layers, name))(q, ids))
        for name in ("mosaic_gpu", "xla")
    )
    assert by_kernel == by_xla

    clear_choices()
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jax.eval_shape(layers, q[0], ids[0])
    chosen = ops.choices()["attention"]
    assert chosen.startswith("mosaic_gpu (xla where differentiated) on NVIDIA 9.0, xla elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(), ("fsdp", "tensor"), ("sequence",)])
def test_heads_of_256_are_lowered_for_the_card(axes):
    q = jax.ShapeDtypeStruct((2, 1024, 4, 256), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

    def text(call):
        with use_abstract_mesh(mesh_of("gpu", *axes)):
            return jax.jit(call).trace(q, ids).lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in text(layers)
    assert "mosaic_gpu" not in text(gradient_of_layers)


def test_attentions_sums_go_on_through_documents(monkeypatch):
    """`ops.attention` passes its kernel cumulative sums of log forget gates that run on from one document of
    a row to the next: sums that restart at each document would hide visible keys, or lose digits.
    """
    given = {}
    monkeypatch.setattr(
        "pallas_kernels.forgetting_attention.forgetting_attention",
        lambda q, k, v, sums, **more: given.update(sums=sums, **more) or q,
    )
    q = jnp.ones((1, 6, 2, 64), jnp.bfloat16)
    tokens = read_tokens(jnp.array([[3, 3, 0, 5, 5, 5]]), None, jnp.zeros(1, jnp.int32), None)
    gates = jnp.full((1, 6, 2), -0.5)
    options = AttentionOptions(window=None, scale=1.0, prune=True, no_state=True, unmasked=False)
    arguments = dict(q=q, k=q, v=q, log_forget=gates, tokens=tokens)
    run_kernel("mosaic_gpu", Call("attention", options, arguments))
    high, low = given["sums"]
    np.testing.assert_array_equal(high[0, :, 0], [-0.5, -1, -1, -1.5, -2, -2.5])
    np.testing.assert_array_equal(low, 0)
    assert given["run"][0, 1] < given["run"][0, 3]
