"""Rows cut over devices: every op and every method as on one device, and what is sent for it.

A case is a pair of programs to compile, so that the table is dealt out. Every class of update meets every kind of call and every
size of the axis, in one form: an op's forms differ in what a device does by itself, which other tests compare. Every method is a
layer on every size and, of every class, on heads cut in two; hybrid models stand for what a model adds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.mixers import METHODS
from lsm_jax.ops.attention import shared_rows as attention_sequence
from tests.ops.cases import CASES
from tests.parallel.test_parallel import run_with_devices

# One of each class of update, with documents, masked tokens and a state to go on from.
FAST = (
    "4:linear_memory-key_decay-heads112:chunk:state",
    "4:delta_memory-decay-heads112:chunk:state",
    "4:selective_memory-decay-complex-D-zoh:chunk:state",
    "4:short_convolution-bias:None:state",
)
CLASSES = (
    "linear_memory",
    "linear_memory-constant_decay",
    "linear_memory-decay-input_gate-normalize",  # kept divided by a stabiliser
    "linear_memory-key_decay-value_decay-bonus-normalize",
    "delta_memory-decay-heads112",
    "dplr_memory-key_decay-any_ab",
    "selective_memory-decay-complex-D-zoh",
    "slot_memory-slot_decay-heads112",
    "online_memory-decay-norm-bias-mini_batch_4",  # handed on in turn
    "attention",
    "attention-forget-heads412-window",
    "short_convolution-bias",
    "token_shift",
)
CALLS = (("2", "plain"), ("4", "segments"), ("8", "state"))
MODELS = (*METHODS, "mom-gated_deltanet", "mom-rwkv6")
HEADS = ("gla", "mamba2", "gated_deltanet", "rwkv7", "ttt_linear", "softmax", "fox")


def ran(module: str, *arguments: str) -> None:
    """Raise unless the module says of each argument that it is as it should be."""
    command = "-m", f"tests.parallel.{module}", *arguments
    lines = run_with_devices(8, *command, as_users="traffic" in module).splitlines()
    assert len(lines) >= len(arguments) and all(line.endswith("ok") for line in lines), lines


def plan_of(block: int, held: int = 0) -> attention_sequence.Plan:
    """Attention without a window, of documents or with `held` blocks of keys ahead."""
    exact = dict(scale=1.0, dtype=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    return attention_sequence.Plan(block, held, window=None, one_document=False, **exact)


def test_what_is_sent_for_a_layer():
    """One all-gather forward, one backward, of as many bytes at any length; kept under remat; products
    that need not wait for either; the last tokens by one permutation each way, of packed rows too."""
    ran("sequence_traffic")


def test_short_memories_of_documents_without_gaps():
    ran("sequence_shift")


@pytest.mark.slow
def test_what_is_sent_for_a_model():
    """As much at any length: no array of tokens travels."""
    ran("sequence_traffic", "gated_deltanet", "mom-gla")


@pytest.mark.parametrize("cases", [FAST])
def test_rows_in_parts(cases):
    ran("sequence", *cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_update(name):
    """Two, four and eight devices; a row of its own, one state a segment, and all there is in a call."""
    (case,) = (case for case in CASES if case.name == name)
    ran("sequence", *(f"{devices}:{name}:{case.forms[0]}:{kind}" for devices, kind in CALLS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", "masked"])
def test_other_calls(kind):
    """What the other kinds hold, alone; here the heads are cut as well."""
    names = ("linear_memory-decay-heads422-normalize", "delta_memory-key_decay-heads412", "attention-heads422")  # fmt: skip
    forms = ("associative", "chunk", "None")
    ran("sequence", *(f"2x2:{name}:{form}:{kind}" for name, form in zip(names, forms, strict=True)))


@pytest.mark.slow
def test_phase_and_time_invariant_rows():
    """What stands in no case: see `settings`."""
    ran("sequence_extras")


def test_attention_by_a_kernel():
    """Two parts of a row a device, with gates, documents and windows; what no kernel does is refused by name."""
    ran("sequence_kernel")


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("form", ["kernel", "blocks"])
def test_attention_shares_causal_work_out_evenly(form, devices, monkeypatch):
    """A query is its place in the row, and its output how many keys are seen by all queries of the device that attends for it:
    counted by the queries themselves, and by the places that their device is told."""
    own = 8  # tokens of a device
    row = jnp.arange(own * devices, dtype=jnp.int32)
    places, one = row[None], jnp.ones((1, row.size), jnp.int32)
    keys = attention_sequence.Keys(
        k=one[..., None, None], v=one[..., None, None], sums=None,
        document=one, rank=places, written=one > 0,
    )  # fmt: skip

    def count(q, told):
        seen = jnp.stack([jnp.sum(q + 1), jnp.sum(told + 1)])
        return jnp.broadcast_to(seen, (*q.shape[:-1], 2))

    def kernel(q, starts):
        return count(q, starts[:, None] + jnp.arange(q.shape[1] // 2))

    def blocks(plan, devices, queries, keys, here):
        return count(queries.q, queries.rank)

    def of_device(q):
        if form == "kernel":
            return attention_sequence.attend_fused("sequence", kernel, q)
        where = (None, one, places)
        return attention_sequence.attend("sequence", plan_of(block=2), q, where, keys)

    monkeypatch.setattr(attention_sequence, "_attend", blocks)
    got = jax.vmap(of_device, axis_name="sequence")(row.reshape(devices, 1, own, 1, 1))
    even = row.size * (row.size + 1) // 2 // devices
    np.testing.assert_array_equal(got, np.full((devices, 1, own, 1, 2), even))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("held", [0, 3])
def test_attention_computes_no_block_that_is_masked(devices, held):
    """A step is a block of queries with one of keys. Each device takes its part of those that a causal row needs, and no other."""
    pairs = 2
    blocks = 2 * devices * pairs  # of the row
    needed = blocks * (blocks + 1) // 2 + blocks * held
    plan, numbers = plan_of(block=2, held=held), jnp.arange(max(devices, pairs))
    for here in numbers[:devices]:
        steps = [
            attention_sequence._steps(plan, devices, pairs, here, pair) for pair in numbers[:pairs]
        ]
        assert all(there.all() for *_, there in steps)
        assert sum(there.size for *_, there in steps) == needed // devices


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_method(name):
    """A layer of each on two, four and eight devices, with packed documents on four."""
    cases = [f"2:{name}", f"4:{name}:packed", f"8:{name}"]
    ran("sequence_models", *cases, *([f"2x2:{name}:packed"] if name in HEADS else []))


@pytest.mark.slow
def test_a_hybrid_model():
    """Three linear layers and one of softmax attention, scanned and rematerialised, with packed documents."""
    ran("sequence_models", "8:gla/gla/gla/softmax:packed")
