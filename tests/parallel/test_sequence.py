"""Tests of rows whose tokens are divided over devices: every op and every method has the results of one
device, and sends no more bytes than expected.

Each case compiles two programs, so not every combination is tested. Each class of update is tested with each
kind of call and on each number of devices, in one form only: the forms of an op differ in what one device
computes, which other tests compare. Each method is tested as a layer on each number of devices, and one
method per class with its heads sharded. One hybrid model is tested.
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

# One case of each class of update, with documents, masked tokens and an initial state.
FAST = (
    "4:linear_memory-key_decay-heads112:chunk:state",
    "4:delta_memory-decay-heads112:chunk:state",
    "4:selective_memory-decay-complex-D-zoh:chunk:state",
    "4:short_convolution-bias:None:state",
)
CLASSES = (
    "linear_memory",
    "linear_memory-constant_decay",
    "linear_memory-decay-input_gate-normalize",  # with a stabiliser
    "linear_memory-key_decay-value_decay-bonus-normalize",
    "delta_memory-decay-heads112",
    "dplr_memory-key_decay-any_ab",
    "selective_memory-decay-complex-D-zoh",
    "slot_memory-slot_decay-heads112",
    "online_memory-decay-norm-bias-mini_batch_4",  # computed on one device after another
    "attention",
    "attention-forget-heads412-window",
    "short_convolution-bias",
    "token_shift",
)
STORED_TOKENS = (
    "path_attention-forget-heads412",
    "path_attention-heads422",
    "block_attention-heads422",
    "native_sparse_attention-heads412",
)
CALLS = (("2", "plain"), ("4", "segments"), ("8", "state"))
MODELS = (*METHODS, "mom-gated_deltanet", "mom-rwkv6")
HEADS = ("gla", "mamba2", "gated_deltanet", "rwkv7", "ttt_linear", "softmax", "fox")


def ran(module: str, *arguments: str) -> None:
    """Run a module of `tests.parallel` on eight devices, and assert that it prints "ok" for each argument."""
    command = "-m", f"tests.parallel.{module}", *arguments
    lines = run_with_devices(8, *command, as_users="traffic" in module).splitlines()
    assert len(lines) >= len(arguments) and all(line.endswith("ok") for line in lines), lines


def plan_of(block: int, held: int = 0) -> attention_sequence.Plan:
    """Return the settings by which devices that share a row divide attention without a window over packed
    documents, in blocks of `block` queries; `held` is the number of blocks of keys that a state adds
    before the row.
    """
    exact = dict(scale=1.0, dtype=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    return attention_sequence.Plan(block, held, window=None, one_document=False, **exact)


@pytest.mark.slow
def test_what_is_sent_for_a_layer():
    """A layer on rows that devices share has one all-gather forward and one backward, whose bytes do not
    depend on the length.

    Rematerialization does not repeat them, and matrix products can run in parallel with them. Convolutions
    send their last tokens by one permutation in each direction, for packed rows, too.
    """
    ran("sequence_traffic")


def test_convolutions_of_documents_without_gaps():
    ran("sequence_shift")


@pytest.mark.slow
def test_what_is_sent_for_a_model():
    """The bytes that devices send for a model on shared rows do not depend on the length: no array of
    tokens is sent.
    """
    ran("sequence_traffic", "gated_deltanet", "mom-gla")


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FAST])
def test_rows_that_devices_share(cases):
    ran("sequence", *cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_update(name):
    """An op with each class of update has, on rows divided over two, four and eight devices, the results that
    it has on one device: with plain rows, with one state per segment, and with an initial state, documents
    and masks.
    """
    (case,) = (case for case in CASES if case.name == name)
    ran("sequence", *(f"{devices}:{name}:{case.forms[0]}:{kind}" for devices, kind in CALLS))


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED_TOKENS)
def test_attention_to_stored_tokens(name):
    """PaTH, MoBA and NSA have, by chunks and token by token, the results of one device with packed documents, also where heads
    are divided, with masks, with one state per segment, and from a state.
    """
    calls = ("2x2:{}:chunk:documents", "8:{}:chunk:masked", "4:{}:chunk:segments", "8:{}:chunk:state", "2:{}:recurrent:state")  # fmt: skip
    ran("sequence", *(call.format(name) for call in calls))


@pytest.mark.slow
def test_what_is_gathered_for_attention_to_stored_tokens():
    ran("sequence_gathers", "path", "moba", "nsa")


@pytest.mark.slow
def test_packed_memories_of_rows_that_devices_share():
    """A packed Mixture-of-Memories on rows divided over devices has the outputs, gradients and final states
    of one device, for several inner mixers, also if the heads are sharded and if it continues from a
    state.
    """
    ran("sequence_mom", "4:gated_deltanet", "2:rwkv6", "2x2:gla", "4:titans", "2x2:row_conv")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", "masked"])
def test_other_calls(kind):
    """On rows divided over devices, with sharded heads too, three ops have the results of one device in calls
    that have only documents (`kind` "documents") or only masks ("masked").
    """
    names = ("linear_memory-decay-heads422-normalize", "delta_memory-key_decay-heads412", "attention-heads422")  # fmt: skip
    forms = ("associative", "chunk", "None")
    ran("sequence", *(f"2x2:{name}:{form}:{kind}" for name, form in zip(names, forms, strict=True)))


@pytest.mark.slow
def test_phase_and_time_invariant_rows():
    """On rows divided over devices, cumulative sums of angles, time-invariant memories, document numbers and
    positions equal those of one device; see `tests.parallel.sequence_extras`.
    """
    ran("sequence_extras")


@pytest.mark.slow
def test_attention_by_a_kernel():
    """On four devices, each of which computes two separate parts of a row's queries, attention by a kernel
    has the outputs, states and gradients of one device, with gates, documents and windows. Backends that
    do not support divided rows raise an error.
    """
    ran("sequence_kernel")


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("form", ["kernel", "blocks"])
def test_causal_attention_is_divided_evenly(form, devices, monkeypatch):
    """Causal attention on rows divided over devices is divided evenly: each device computes the same number
    of pairs of query and key.

    In place of attention, the test's function returns, for the queries that a device computes, the sum of the
    numbers of keys up to each query: once from the queries' values, which are their positions in the row, and
    once from the positions that the device receives.
    """
    tokens = 8  # of a device
    row = jnp.arange(tokens * devices, dtype=jnp.int32)
    places, one = row[None], jnp.ones((1, row.size), jnp.int32)
    keys = attention_sequence.Keys(
        k=one[..., None, None], v=one[..., None, None], sums=None,
        document=one, rank=places, written=one > 0,
    )  # fmt: skip

    def count(q, positions):
        seen = jnp.stack([jnp.sum(q + 1), jnp.sum(positions + 1)])
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
    got = jax.vmap(of_device, axis_name="sequence")(row.reshape(devices, 1, tokens, 1, 1))
    even = row.size * (row.size + 1) // 2 // devices
    np.testing.assert_array_equal(got, np.full((devices, 1, tokens, 1, 2), even))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("held", [0, 3])
def test_attention_skips_masked_blocks(devices, held):
    """Devices that share a causal row have equal numbers of steps of attention; a step is one block of
    queries with one block of keys.
    """
    pairs = 2
    blocks = 2 * devices * pairs  # of a row
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
    """A layer of each method has the outputs and gradients of one device when the tokens of each row are
    divided over two, four and eight devices; on four devices rows are packed with documents.
    """
    cases = [f"2:{name}", f"4:{name}:packed", f"8:{name}"]
    ran("sequence_models", *cases, *([f"2x2:{name}:packed"] if name in HEADS else []))


@pytest.mark.slow
def test_a_hybrid_model():
    """A hybrid model on shared rows equals one device: three linear layers and one of softmax attention,
    scanned and rematerialised, with packed documents.
    """
    ran("sequence_models", "8:gla/gla/gla/softmax:packed")
