"""Tests of Hopper's scan with a scalar decay or none in Mosaic GPU's interpreter: what it leaves out, and how thread blocks divide it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_interpreter, plgpu, races_found
from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.cases import HOPPER_INTERPRETED, Case
from pallas_kernels.linear_attention.hopper import (
    scalar_decay,
    scalar_plan,
    scalar_roles_plan,
    scalar_scan,
)
from pallas_kernels.linear_attention.hopper.decay_gradient import decay_gradient
from pallas_kernels.linear_attention.hopper.decay_sums import decay_sums
from pallas_kernels.linear_attention.hopper.scalar_chunks import chunk_gradients
from tests.kernels.test_linear_attention_gpu import (
    assert_alike,
    by_token,
    error,
    fused,
    make,
    make_case,
    with_two_memories,
)


def results_and_gradients(function, inputs, zeros: tuple[Any, ...] = ()):
    """Return the results of a function of `inputs`, and its gradients by random cotangents, followed by the given ones of the last results."""
    results, pull = jax.vjp(function, inputs)
    rng, drawn = np.random.default_rng(1), results[: len(results) - len(zeros)]
    cotangents = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in drawn]
    return results, pull((*cotangents, *zeros))[0]


SCALAR = "decay", "plain-queries-share", "documents", "memories-share-wide-keys", "deep"


@pytest.mark.parametrize(
    "name", [*SCALAR[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in (*SCALAR[2:], "parts", "channels"))]
)  # fmt: skip
@pytest.mark.parametrize("final", [False, True])
def test_an_empty_memory_is_no_array(name, final, monkeypatch):
    """Without an initial memory, and without a gradient of the final one, results and gradients are to the bit those of zeros."""
    if name.endswith("parts"):
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    inputs = make_case(HOPPER_INTERPRETED[name])
    run, zeros = inputs.pop("run"), jnp.zeros_like(inputs.pop("initial"))
    wanted, gradients = results_and_gradients(
        lambda x: fused(**x, run=run, initial=zeros), inputs, () if final else (zeros,)
    )
    count = 1 + final
    got = results_and_gradients(lambda x: fused(**x, run=run)[:count], inputs)
    jax.tree.map(np.testing.assert_array_equal, got, (wanted[:count], gradients))
    assert not races_found()


@pytest.mark.parametrize("documents", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_warpgroups_of_a_thread_block_have_the_bits_of_two_thread_blocks(
    documents, monkeypatch
):
    inputs = make(65, 1, 1, 2, 64, 128, documents=documents, decay="token")
    run, found = inputs.pop("run"), []
    for processors, groups in ((132, 1), (1, 2)):
        monkeypatch.setattr(scalar_plan, "PROCESSORS", processors)
        assert scalar_plan.count_groups(2, 2) == groups
        found.append(results_and_gradients(lambda x: fused(**x, run=run), inputs))
        assert not races_found()
    jax.tree.map(np.testing.assert_array_equal, *found)


# Rows of enough chunks that each buffer is used again.
ROLES = {
    "two-blocks-of-values": Case((1, 1, 1), 128, 128, 400, False, "token"),
    "documents": Case((1, 1, 1), 64, 128, 400, True, "token"),
    "documents-in-parts": Case((1, 1, 1), 64, 64, 600, True, "token"),
    "no-decay-queries-share": Case((2, 1, 1), 64, 64, 400, False, None),
    "no-decay-documents": Case((1, 1, 2), 64, 64, 300, True, None),
    "deep-strong": Case((1, 1, 1), 256, 64, 300, True, "token", strong=True),
    "wide": Case((1, 1, 1), 64, 256, 300, False, "token"),
    "memories-of-documents": Case((1, 1, 1), 64, 128, 320, False, "token"),
    "writes": Case((2, 1, 1), 64, 128, 300, True, "token"),
    "writes-of-pairs": Case((1, 1, 2), 128, 64, 300, False, "token"),
    "writes-of-pairs-by-head": Case((1, 1, 2), 64, 64, 300, True, "token"),
    "writes-of-pairs-documents": Case((1, 1, 2), 64, 64, 400, True, "token"),
    "writes-of-pairs-in-parts": Case((1, 1, 2), 64, 64, 256, True, "token"),
    "rank": Case((1, 1, 1), 64, 64, 300, False, "token"),
}


@pytest.mark.parametrize(
    "name, plan",
    [("two-blocks-of-values", None), *(pytest.param(n, None, marks=pytest.mark.slow) for n in list(ROLES)[1:]),
     *(pytest.param("two-blocks-of-values", p, marks=pytest.mark.slow) for p in ((2, 1, 1), (2, 2, 1), (3, 2, 2))),
     pytest.param("writes-of-pairs-documents", (2, 1, 1), marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_scan_by_roles_has_the_bits_of_the_scan_by_columns(name, plan, monkeypatch):
    """Results and gradients are to the bit the same whichever way the warpgroups divide a chunk, with each number of buffers."""
    if name.endswith("parts"):
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    if plan is not None:
        monkeypatch.setattr(scalar_roles_plan, "_PLANS", (scalar_roles_plan.Plan(*plan),))
        monkeypatch.setattr(scalar_roles_plan, "_SMEM", 2**30)
    if name.endswith("by-head"):
        monkeypatch.setattr(scalar_decay, "GRADIENTS_OF_PAIRS", False)
    monkeypatch.setattr(scalar_plan, "PROCESSORS", 1)  # two blocks of columns in a thread block
    inputs = make_case(ROLES[name])
    if name.startswith("memories"):
        inputs = with_two_memories(inputs)
    run, rng = inputs.pop("run"), np.random.default_rng(2)
    shape = inputs["v"].shape[:3]
    if name.startswith("writes"):
        inputs["log_write"] = (
            jnp.asarray(rng.normal(size=shape) - 1, jnp.float32).at[:, 7].set(-1e3)
        )
        inputs["skip"] = jnp.asarray(rng.normal(size=shape[2]), jnp.float32)
    rank = 4 if name == "rank" else 1
    if rank > 1:
        inputs["log_decay"] = jnp.where(
            jnp.arange(shape[1])[:, None] % rank == 0, inputs["log_decay"], 0
        )
    kernel, names, found = plgpu.kernel, [], []
    monkeypatch.setattr(
        plgpu, "kernel", lambda body, **o: names.append(body.__name__) or kernel(body, **o)
    )
    for roles in (False, True):
        names.clear()
        monkeypatch.setattr(scalar_scan, "ROLES", roles)
        call = lambda x: fused(**x, run=run, **(dict(rank=rank) if rank > 1 else {}))  # noqa: E731
        found.append(results_and_gradients(call, inputs))
        assert not races_found()
        assert f"linear_attention_scalar_{'roles' if roles else 'scan'}" in names
        assert f"linear_attention_scalar_{'scan' if roles else 'roles'}" not in names
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("length", [40, 100])
def test_rows_of_one_and_two_chunks_are_scanned_by_roles(length, monkeypatch):
    """Shorter rows than the scan has buffers, which the default scans by roles, have the bits of the scan by columns."""
    inputs = make(length, 1, 1, 1, 64, 64, documents=False, decay="token")
    run, found, kernel, names = inputs.pop("run"), [], plgpu.kernel, []
    monkeypatch.setattr(
        plgpu, "kernel", lambda body, **o: names.append(body.__name__) or kernel(body, **o)
    )
    for roles in (False, None):
        names.clear()
        monkeypatch.setattr(scalar_scan, "ROLES", roles)
        found.append(results_and_gradients(lambda x: fused(**x, run=run), inputs))
        assert not races_found()
        assert ("linear_attention_scalar_roles" in names) == (roles is None)
        assert ("linear_attention_scalar_scan" in names) == (roles is False)
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    "name", ["documents", "no-decay-queries-share", "deep-strong", "wide", "memories-of-documents"]
)
def test_other_calls_are_scanned_by_columns(name, monkeypatch):
    """Calls that no card has run by roles."""
    inputs, kernel, names = make_case(ROLES[name]), plgpu.kernel, []
    inputs = with_two_memories(inputs) if name.startswith("memories") else inputs
    monkeypatch.setattr(
        plgpu, "kernel", lambda body, **o: names.append(body.__name__) or kernel(body, **o)
    )
    run = inputs.pop("run")
    jax.eval_shape(lambda x: results_and_gradients(lambda y: fused(**y, run=run), x), inputs)
    assert "linear_attention_scalar_scan" in names and "linear_attention_scalar_roles" not in names


def test_sums_of_decays_are_products():
    """The kernel of sums has float32's precision, also of sums whose terms differ by six orders of magnitude."""
    rng = np.random.default_rng(0)
    x = -np.abs(rng.normal(size=(128, 64))) * rng.choice([1e-5, 1, 30], size=(128, 64))
    x = x.astype(np.float32)
    cum, after = decay_sums(jnp.asarray(x), interpret=gpu_interpreter())
    wanted = np.cumsum(x, axis=1, dtype=np.float64)
    np.testing.assert_allclose(cum, wanted, rtol=5e-7)
    later = np.cumsum(x[:, :0:-1], axis=1, dtype=np.float64)[:, ::-1]
    np.testing.assert_allclose(after, np.exp(np.pad(later, [(0, 0), (0, 1)])), rtol=1e-4, atol=1e-7)
    assert not races_found()


@pytest.mark.parametrize("documents", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sums_by_products_give_the_results_of_sums_by_xla(documents, monkeypatch):
    inputs = make(2048, 1, 1, 2, 64, 64, documents=documents, decay="token")
    run, found = inputs.pop("run"), []
    kernel, names = plgpu.kernel, []
    monkeypatch.setattr(
        plgpu, "kernel", lambda body, **o: names.append(body.__name__) or kernel(body, **o)
    )
    for products in (False, True):
        monkeypatch.setattr(scalar_decay, "SUMS_BY_PRODUCTS", products)
        found.append(fused(**inputs, run=run))
        assert ("linear_attention_decay_sums" in names) == products
    for got, wanted in zip(*found, strict=True):
        assert error(got, wanted) < 2e-4


# Calls that can have few launches: the scan by roles, its sums, and the gradients of q and v in one launch.
FEW = {
    "eight-heads": Case((8, 8, 8), 64, 64, 200, False, "token"),
    "one-chunk": Case((8, 8, 8), 64, 64, 40, False, "token"),
    "strong": Case((8, 8, 8), 64, 64, 250, False, "token", strong=True),
    "steep": Case((8, 8, 8), 64, 64, 130, False, "token", strong=40),
    "two-blocks-of-values": Case((8, 8, 8), 128, 128, 130, False, "token"),
    "more-heads": Case((16, 16, 16), 64, 64, 100, False, "token"),
}
KERNELS = {
    "roles": "linear_attention_scalar_roles",
    "sums": "linear_attention_decay_sums",
    "gradient": "linear_attention_decay_gradient",
    "chunks": "linear_attention_scalar_chunks",
}


def record_launches(monkeypatch) -> list[tuple[str, tuple[int, ...]]]:
    """Return a list to which the names and grids of Mosaic GPU's kernels are added when they are called."""
    kernel, launches = plgpu.kernel, []
    monkeypatch.setattr(
        plgpu, "kernel", lambda body, **o: launches.append((body.__name__, o["grid"])) or kernel(body, **o)
    )  # fmt: skip
    return launches


def few_case(name: str, final: bool):
    """Return the inputs of a case of `FEW`, the call of the kernels, and that of the recurrence; unless `final`, without an initial memory, and
    without the final one among the results.
    """
    inputs, start = make_case(FEW[name]), {}
    run, count = inputs.pop("run"), 1 + final
    if not final:
        start = dict(initial=jnp.zeros_like(inputs.pop("initial")))
    call = lambda x: fused(**x, run=run)[:count]  # noqa: E731
    return inputs, call, lambda x: by_token(**x, **start, run=run)[:count]


@pytest.mark.parametrize(
    "name, final, wide",
    [*(pytest.param("eight-heads", *x, marks=pytest.mark.slow) for x in ((False, False), (True, False), (False, True))),
     *(pytest.param(n, False, False, marks=pytest.mark.slow) for n in list(FEW)[1:]),
     pytest.param("two-blocks-of-values", True, True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_few_launches_have_the_results_of_many(name, final, wide, monkeypatch):
    """Results and gradients are those of the recurrence, and nearly to the bit those of the default; with and without an initial memory and a
    gradient of the final one, with one block of value channels in a thread block, and, if `wide`, with two if there are two.
    """
    monkeypatch.setattr(scalar_plan, "PROCESSORS", 1 if wide else 132)
    launches, found = record_launches(monkeypatch), []
    inputs, call, reference = few_case(name, final)
    for launched in ("never", "always"):
        launches.clear()
        monkeypatch.setattr(scalar_decay, "FEW_LAUNCHES", launched)
        found.append(results_and_gradients(call, inputs))
        assert not races_found()
    names = [name for name, _ in launches]
    assert names.count(KERNELS["roles"]) == 3 and KERNELS["sums"] not in names
    assert (KERNELS["gradient"] in names) != final and len(names) == (3 if final else 4)
    together = [grid for _, grid in launches if len(grid) == 4]
    assert [grid[0] for grid in together] == [2] and len(launches[0][1]) == 3
    for few, many in zip(*map(jax.tree.leaves, found[::-1]), strict=True):
        assert error(few, many) < 1e-3
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    assert_alike(call, inputs, reference, widened)


@pytest.mark.parametrize(
    "name, final",
    [("steep", True),  # the one case of few launches that the default run has, too
     *(pytest.param(*x, marks=pytest.mark.slow) for x in (
         ("eight-heads", False), ("eight-heads", True), ("one-chunk", False), ("one-chunk", True), ("strong", False), ("more-heads", True)))],
)  # fmt: skip
def test_gradients_of_all_chunks_at_once(name, final, monkeypatch):
    """Results are nearly to the bit those of few launches, and gradients those of the recurrence; with and without an initial memory and a
    gradient of the final one. The two scans of writes have one launch.
    """
    launches, found = record_launches(monkeypatch), []
    inputs, call, reference = few_case(name, final)
    for launched in ("short", "chunks"):
        launches.clear()
        monkeypatch.setattr(scalar_decay, "FEW_LAUNCHES", launched)
        found.append(results_and_gradients(call, inputs))
        assert not races_found()
    names = [name for name, _ in launches]
    assert names == [KERNELS["roles"]] * 2 + [KERNELS["chunks"]]
    assert len(launches[1][1]) == 4 and launches[1][1][0] == 2
    for few, chunks in zip(*(jax.tree.leaves(x[0]) for x in found), strict=True):
        np.testing.assert_array_equal(few, chunks)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    assert_alike(call, inputs, reference, widened)


@pytest.mark.parametrize(
    "channels, kernels", [(64, ["roles", "roles", "chunks"]), (128, ["roles"] * 3 + ["gradient"])]
)
def test_short_rows_of_64_channels_have_gradients_of_all_chunks_at_once_by_default(channels, kernels, monkeypatch):  # fmt: skip
    """Where rows begin with an empty memory."""
    launches = record_launches(monkeypatch)
    q = jax.ShapeDtypeStruct((2, 128, 8, channels), jnp.bfloat16)
    decay = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    call = lambda q, decay: fused(q, q, q, decay, initial=None, run=None)[0]  # noqa: E731

    def gradient(q, decay):
        output, pull = jax.vjp(call, q, decay)
        return pull(output)

    jax.eval_shape(gradient, q, decay)
    assert [name for name, _ in launches] == [KERNELS[name] for name in kernels]


@pytest.mark.parametrize("decay_gradient", [True, False])
def test_gradients_of_chunks_read_nothing_of_other_chunks(decay_gradient):
    """A chunk's gradients are to the bit the same whatever its neighbours and other heads have."""
    rng = np.random.default_rng(0)
    tokens, memories = (1, 192, 2, 64), (1, 2, 3, 64, 64)
    arrays = [
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in [tokens] * 4 + [memories] * 2
    ]
    decays = jnp.asarray(-rng.uniform(size=(1, 2, 3, 64)), jnp.float32)
    cum = jnp.cumsum(decays, -1)
    sums = [x.reshape(1, 2, 192) for x in (cum, jnp.exp(cum[..., -1:] - cum))]
    options = dict(scale=0.25, decay_gradient=decay_gradient, interpret=gpu_interpreter())
    whole = chunk_gradients(*arrays[:4], *sums, *arrays[4:], **options)
    one = chunk_gradients(
        *(x[:, 64:128, 1:] for x in arrays[:4]), *(x[:, 1:, 64:128] for x in sums),
        *(x[:, 1:, 1:2] for x in arrays[4:]), **options,
    )  # fmt: skip
    assert not races_found()
    assert ("d_decay" in whole) == decay_gradient and whole.keys() == one.keys()
    for name, x in one.items():
        assert x.any()
        np.testing.assert_array_equal(x, whole[name][:, 64:128, 1:])


OTHERS = {
    "documents": Case((8, 8, 8), 64, 64, 130, True, "token"),
    "memories-of-documents": Case((8, 8, 8), 64, 64, 130, False, "token"),
    "queries-share": Case((16, 8, 8), 64, 64, 130, False, "token"),
    "keys-share": Case((8, 4, 8), 64, 64, 130, False, "token"),
    "few-heads": Case((4, 4, 4), 64, 64, 130, False, "token"),
    "wide": Case((8, 8, 8), 64, 128, 130, False, "token"),
    "deep": Case((8, 8, 8), 256, 256, 130, False, "token"),
    "no-decay": Case((8, 8, 8), 64, 64, 130, False, None),
    "parts": Case((8, 8, 8), 64, 64, 512, False, "token"),
    "writes": Case((8, 8, 8), 64, 64, 130, False, "token"),
    "rank": Case((8, 8, 8), 64, 64, 130, False, "token"),
}


@pytest.mark.parametrize("launched", ["always", "chunks"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_keep_their_launches(name, launched, monkeypatch):
    """Calls whose decays the scan by roles does not add."""
    if name == "parts":
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    inputs, launches, more = make_case(OTHERS[name]), record_launches(monkeypatch), {}
    inputs = with_two_memories(inputs) if name.startswith("memories") else inputs
    if name == "writes":
        inputs |= dict(log_write=inputs["log_decay"], skip=jnp.ones(8))
    if name == "rank":
        more = dict(rank=2)
    monkeypatch.setattr(scalar_decay, "FEW_LAUNCHES", launched)
    run = inputs.pop("run")
    jax.eval_shape(
        lambda x: results_and_gradients(lambda y: fused(**y, run=run, **more), x), inputs
    )
    names = [name for name, _ in launches]
    assert not {KERNELS["gradient"], KERNELS["chunks"]} & {*names}
    assert all(len(grid) < 4 for _, grid in launches)
    assert (KERNELS["sums"] in names) == (name != "no-decay")


@pytest.mark.parametrize("which", ["short", "automatic", "chunks"])
@pytest.mark.parametrize("batch, derivative", [(8, True), (9, True), (16, False), (17, False)])
def test_short_rows_are_those_with_a_processor_for_each_thread_block(batch, derivative, which, monkeypatch):  # fmt: skip
    """There are 132 processors, and a thread block for each of 8 heads; with a derivative two scans have to fit by default, and where chunks have
    their gradients at once.
    """
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(scalar_decay, "FEW_LAUNCHES", which)
    q = jax.ShapeDtypeStruct((batch, 128, 8, 64), jnp.bfloat16)
    decay = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    call = lambda q, decay: fused(q, q, q, decay, initial=None, run=None)[0]  # noqa: E731
    jax.eval_shape((lambda *x: jax.vjp(call, *x)[0]) if derivative else call, q, decay)
    few = batch * 8 * (1 + (derivative and which != "short")) <= 132
    assert len(launches) == (1 if few else 2)


@pytest.mark.parametrize("sizes", [(1, 8, 1, 4, 1, 64), (2, 16, 2, 3, 3, 128), (1, 8, 2, 6, 3, 64)])
def test_the_gradient_of_decays_is_summed_in_one_kernel(sizes):
    """It has float32's precision, for intervals of four, one and two chunks."""
    batch, heads, terms, count, intervals, depth = sizes
    rng = np.random.default_rng(0)
    shape = batch, heads, terms, count * 64
    q, k = (rng.normal(size=shape).astype(np.float32) for _ in "qk")
    products = rng.normal(size=(batch, heads, terms, intervals, depth)).astype(np.float32)
    got = decay_gradient(*map(jnp.asarray, (q, k, products)), interpret=gpu_interpreter())
    rows = (q.astype(np.float64) - k).sum(2).reshape(batch, heads, intervals, -1)
    wanted = np.cumsum(rows[..., ::-1], axis=-1)[..., ::-1].copy()
    wanted[:, :, :-1] += products.astype(np.float64).sum((2, 4))[:, :, 1:, None]
    wanted = np.moveaxis(wanted.reshape(batch, heads, -1), 1, 2)
    np.testing.assert_allclose(got, wanted, atol=1e-6 * np.abs(wanted).max())
    assert not races_found()
