"""Tests of the versions of the delta rule's forward pass on Hopper: the inverse by single warps' blocks, the scan with another warpgroup for the
outputs, and rows that begin with an empty memory. They run in Mosaic GPU's interpreter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import races_found
from pallas_kernels.delta_rule.cases import (
    GRADIENT_TOLERANCE,
    HOPPER_INTERPRETED,
    OUTPUT_TOLERANCE,
)
from pallas_kernels.delta_rule.hopper import scalar_decay, scan, split_scan
from pallas_kernels.hopper import block_inverse, unit_inverse, warp_products
from pallas_kernels.hopper.warp_products import Emulated, from_blocks, product, to_blocks
from tests.kernels.test_delta_rule_gpu import by_token, choose_plans, fused, make
from tests.kernels.test_linear_attention_gpu import assert_alike, error, with_two_memories
from tests.kernels.test_scalar_scan_gpu import results_and_gradients

CASES = {case.name: case for case in HOPPER_INTERPRETED}
FAST = "decay", "alike"


def slow_but(fast, names):
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


def choose(monkeypatch, inverse="doubled", forward="joint"):
    monkeypatch.setattr(unit_inverse, "METHOD", inverse)
    monkeypatch.setattr(scan, "FORWARD", forward)


def count_calls(monkeypatch, module, name):
    """Make `module.name` store its calls, and return the list that will have the arguments of each of them."""
    function, calls = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *x, **o: calls.append(x) or function(*x, **o))
    return calls


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_blocks_and_the_split_scan_equal_the_recurrence(name, monkeypatch):
    """Both together, in every case that the default is tested in; with a decay per key channel only the inverse is another."""
    case = CASES[name]
    choose_plans(case, monkeypatch)
    if case.many:
        monkeypatch.setattr(split_scan, "PROCESSORS", 1)
    choose(monkeypatch, "blocks", "split")
    splits = count_calls(monkeypatch, split_scan, "split_scan_forward")
    blocks = count_calls(monkeypatch, unit_inverse, "block_inverse")
    inputs = make(*case.dims, documents=case.documents, **case.options)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs | dict(run=None))
    run = inputs.pop("run")
    del widened["run"]
    options = dict(run=run, erase=case.erase)
    assert_alike(
        lambda x: fused(**x, **options), inputs, lambda x: by_token(**x, **options), widened,
        output=OUTPUT_TOLERANCE, gradient=GRADIENT_TOLERANCE,
    )  # fmt: skip
    assert not races_found()
    split = case.key_dim <= 128 and case.checkpoints is None and "channel" not in case.decay
    assert blocks and bool(splits) == split


@pytest.mark.parametrize("length", [40, 100])
def test_rows_of_one_and_two_chunks_equal_the_recurrence(length):
    """The default computes shorter rows than the scan has buffers, without a derivative and with one."""
    inputs = make(length, 1, 1, 1, 64, 64, documents=False, decay=True)
    run = inputs.pop("run")
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    wanted = by_token(**widened, run=run)
    for got, exact in zip(fused(**inputs, run=run), wanted, strict=True):
        assert error(got, exact) < OUTPUT_TOLERANCE
    assert_alike(
        lambda x: fused(**x, run=run), inputs, lambda x: by_token(**x, run=run), widened,
        output=OUTPUT_TOLERANCE, gradient=GRADIENT_TOLERANCE,
    )  # fmt: skip
    assert not races_found()


@pytest.mark.parametrize(
    "name, blocks, split",
    [("decay", True, True), ("parts", True, False), ("plain", True, True), ("undecayed-strong", False, False),
     ("many-deep-wide", True, False), ("deep", False, False), ("queries-share", False, False)],
)  # fmt: skip
def test_the_default_is_what_a_card_has_run(name, blocks, split, monkeypatch):
    """The inverse by blocks has a decayed erase and equal heads and channels; the split scan also requires rows in one part."""
    case = CASES[name]
    choose_plans(case, monkeypatch)
    splits = count_calls(monkeypatch, split_scan, "split_scan_forward")
    inverses = count_calls(monkeypatch, unit_inverse, "block_inverse")
    inputs = make(*case.dims, documents=False, **case.options)
    inputs.pop("run")
    jax.eval_shape(lambda x: fused(**x, run=None, erase=case.erase), inputs)
    assert (bool(inverses), bool(splits)) == (blocks, split)


@pytest.mark.parametrize("name", slow_but((), ("decay", "queries-share", "many", "alike")))
@pytest.mark.parametrize("version", [("blocks",), ("doubled", "split")], ids=str)
def test_each_version_alone_is_near_the_default(name, version, monkeypatch):
    case, found = CASES[name], []
    choose_plans(case, monkeypatch)
    inputs = make(*case.dims, documents=case.documents, **case.options)
    run = inputs.pop("run")
    for chosen in ((), version):
        choose(monkeypatch, *chosen)
        found.append(results_and_gradients(lambda x: fused(**x, run=run), inputs))
        assert not races_found()
    for wanted, got in zip(*map(jax.tree.leaves, found), strict=True):
        wanted, got = (np.asarray(x, np.float64) for x in (wanted, got))
        assert np.linalg.norm(got - wanted) < GRADIENT_TOLERANCE * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", slow_but(("decay",), (
    "decay", "plain", "queries-share", "memories-share-wide", "strong", "many", "many-wide", "undecayed-strong", "parts", "checkpoints", "deep",
)))  # fmt: skip
@pytest.mark.parametrize("memories", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_scores_in_the_scan_are_those_of_the_solve(name, memories, monkeypatch):
    """Without a derivative and where the split scan fits, no scores are stored, and results are to the bit the same."""
    case = CASES[name]
    choose_plans(case, monkeypatch)
    if case.many:
        monkeypatch.setattr(split_scan, "PROCESSORS", 1)
    inputs = make(*case.dims, documents=case.documents, **case.options)
    inputs = inputs if memories == 1 else with_two_memories(inputs)
    solves = count_calls(monkeypatch, scalar_decay, "chunk_forward")
    found = []
    for forward in ("split", "scored"):
        choose(monkeypatch, "blocks", forward)
        found.append(fused(**inputs, erase=case.erase))
        assert not races_found()
    jax.tree.map(np.testing.assert_array_equal, *found)
    fits = (
        case.key_dim <= 128 and case.checkpoints is None and (case.parts is None or memories == 2)
    )
    assert [x[0] is None for x in solves] == [False, fits]


@pytest.mark.parametrize("memories", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_split_scan_has_the_bits_of_two_thread_blocks(memories, monkeypatch):
    """Two warpgroups carry two halves of the value channels, and the row has one or two memories."""
    choose(monkeypatch, forward="split")
    inputs = make(192, 2, 1, 1, 64, 128, documents=False, decay=True)
    inputs = inputs if memories == 1 else with_two_memories(inputs)
    run, found = inputs.pop("run"), []
    for processors in (132, 1):
        monkeypatch.setattr(split_scan, "PROCESSORS", processors)
        found.append(fused(**inputs, run=run))
        assert not races_found()
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_the_split_scan_is_causal_to_the_bit(monkeypatch):
    choose(monkeypatch, "blocks", "split")
    inputs = make(128, 1, 1, 1, 64, 64, documents=False, decay=True)
    changed = dict(inputs)
    for name in ("q", "k", "v", "beta", "log_decay"):
        changed[name] = inputs[name].at[:, 77:].multiply(0.5)
    before, after = (fused(**x)[0][:, :77] for x in (inputs, changed))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("name", slow_but(("plain",), ("plain", "decay", "memories-share-wide", "deep", "parts", "checkpoints")))  # fmt: skip
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("forward", ["joint", "split"])
def test_an_empty_memory_is_no_array(name, final, forward, monkeypatch):
    """Without an initial memory, and without a gradient of the final one, results and gradients are to the bit those of zeros."""
    case = CASES[name]
    choose_plans(case, monkeypatch)
    choose(monkeypatch, forward=forward)
    inputs = make(*case.dims, documents=case.documents, **case.options)
    run, zeros = inputs.pop("run"), jnp.zeros_like(inputs.pop("initial"))
    wanted, gradients = results_and_gradients(
        lambda x: fused(**x, run=run, initial=zeros), inputs, () if final else (zeros,)
    )
    count = 1 + final
    got = results_and_gradients(lambda x: fused(**x, run=run, initial=None)[:count], inputs)
    jax.tree.map(np.testing.assert_array_equal, got, (wanted[:count], gradients))
    assert not races_found()


def test_sizes_that_the_split_scan_accepts():
    sizes = [(k, v) for k in (64, 128, 256) for v in (64, 128, 256) if split_scan.fits(k, v)]
    assert sizes == [(k, v) for k in (64, 128) for v in (64, 128, 256)]


def system(kind: str, seed: int = 0) -> np.ndarray:
    """Return the strictly lower triangular system [64, 64] of a chunk with keys of norm 1."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(64, 128)) + ("alike" in kind) * 2 * rng.normal(size=(1, 128))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = (1 + ("large" in kind)) / (1 + np.exp(-rng.normal(size=64)))
    return (np.tril(k @ k.T, -1) * beta).astype(np.float32)


def inverse(strict, *, upper: bool = False) -> np.ndarray:
    """Return the inverse by blocks, computed by the emulated operations."""
    blocks = to_blocks(-jnp.asarray(strict))
    blocks = block_inverse.inverse_of_blocks(Emulated(), blocks, upper=upper)
    return np.asarray(from_blocks(blocks), np.float64)


@pytest.mark.parametrize("kind, most", [("", 2e-4), ("alike", 1e-3), ("alike, large", 2.5e-3)])
def test_the_inverse_by_blocks_is_as_exact_as_its_operands(kind, most):
    """Operands have 10 bits of mantissa, and the result is stored with 8."""
    for seed in range(5):
        strict = system(kind, seed)
        wanted = np.linalg.inv(np.eye(64) + strict.astype(np.float64))
        found = inverse(strict)
        assert np.linalg.norm(found - wanted) < most * np.linalg.norm(wanted)
        np.testing.assert_array_equal(np.triu(found, 1), 0)
        np.testing.assert_array_equal(np.diag(found), 1)


def test_the_inverse_by_blocks_is_exact_for_small_integers():
    rng = np.random.default_rng(0)
    strict = np.tril(rng.integers(-1, 2, size=(64, 64)) * (rng.random((64, 64)) < 0.05), -1)
    wanted = np.linalg.inv(np.eye(64) + strict)
    assert np.abs(wanted).max() < 1024  # the operands' 11 bits represent it
    strict = strict.astype(np.float32)
    np.testing.assert_array_equal(inverse(strict), np.round(wanted))
    np.testing.assert_array_equal(inverse(strict.T, upper=True), np.round(wanted).T)


def test_what_overflows_is_in_no_row_of_an_earlier_warp():
    strict = system("")
    strict[40:] *= 1e30
    found = inverse(strict)
    assert not np.isfinite(found[48:]).all()
    np.testing.assert_array_equal(found[:32], inverse(system(""))[:32])
    found = inverse(strict[::-1, ::-1], upper=True)
    assert not np.isfinite(found[:16]).all() and np.isfinite(found[32:]).all()


def test_blocks_of_a_tile_are_those_of_the_warps():
    """The places of a thread's numbers, and the product of blocks with its parts."""
    tile = jnp.arange(64.0 * 64).reshape(64, 64)
    blocks = to_blocks(tile)
    np.testing.assert_array_equal(from_blocks(blocks), tile)
    # Thread 4 g + t of warp w has in block b, as number 4 n + 2 h + e, row 16 w + 8 h + g and column 16 b + 8 n + 2 t + e.
    w, g, t, b, n, h, e = 2, 5, 3, 1, 1, 0, 1
    assert blocks[b][4 * n + 2 * h + e][w, 4 * g + t] == tile[16 * w + 8 * h + g, 16 * b + 8 * n + 2 * t + e]  # fmt: skip
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-8, 9, size=(64, 64)).astype(np.float32) for _ in range(2))
    left, right = to_blocks(jnp.asarray(x)), to_blocks(jnp.asarray(y))
    got = from_blocks([product(Emulated(), left[0], right[1])] * 4)
    lower = from_blocks([product(Emulated(), left[0], right[1], ((0, 0), (1, 1)))] * 4)
    for warp in range(4):
        rows = slice(16 * warp, 16 * warp + 16)
        a, b = x[rows, :16], y[rows, 16:32].T
        np.testing.assert_array_equal(got[rows, :16], a @ b)
        halves = [a[:, s] @ b[s, s] for s in (slice(8), slice(8, 16))]
        np.testing.assert_array_equal(lower[rows, :16], np.concatenate(halves, axis=1))


def test_operands_are_rounded_to_the_nearest():
    x = jnp.asarray(np.float32([1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 3.0]))
    np.testing.assert_array_equal(
        Emulated().rounded(x), np.float32([1 + 2**-10, 1, -1 - 2**-10, 3])
    )
    assert warp_products.VALUES * warp_products.LANES == warp_products.SIDE**2
