"""Tests of the choice of Triton kernels by the card's compute capability, with cards that this machine does not have."""

import logging

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.ops.backends import select
from lsm_jax.ops.linear import backends as linear
from pallas_kernels.triton import launch
from scripts import kernels_table


@pytest.fixture
def choose(monkeypatch):
    """A function that traces a call of an op as on an NVIDIA card, with or without the packages of the Triton kernels, and returns the
    names of the selected backends, the text of `ops.choices()` and the messages of the log.
    """

    def choose(capability, op="linear_memory", installed=True, **options):
        cards = frozenset() if capability is None else frozenset([capability])
        for module in (select, linear):
            monkeypatch.setattr(module, "compute_capabilities", lambda: cards)
        monkeypatch.setattr(launch, "usable", lambda: installed)
        seen = []
        monkeypatch.setattr(
            select.Selection, "function", lambda self, of: seen.append(self) or _traced(self, of)
        )
        jax.clear_caches()
        select.clear_choices()
        jax.eval_shape(lambda: _call(op, **options))
        chosen = {tuple(b.name for b in selection.backends) for selection in seen}
        if op == "comba":  # the layer's norm is an op too, which has no kernel of Triton
            op, chosen = "delta_memory", chosen - {("xla",)}
        (names,) = chosen
        return names, ops.choices()[op]

    yield choose
    jax.clear_caches()
    select.clear_choices()


def _traced(selection, of):
    """Return the function of the backend for all platforms: kernels are not traced."""
    return of(selection.backends[-1])


def _call(
    op, dtype=jnp.bfloat16, length=64, rows=8, decay=None, segments=None, implementation=None
):
    q = jnp.zeros((rows, length, 2, 64), dtype)
    decays = dict(token=(rows, length, 2), channel=(rows, length, 2, 64))
    log_decay = None if decay is None else jnp.zeros(decays[decay])
    u, scores = jnp.zeros((1, length, 64), dtype), jnp.zeros((1, length, 16))
    calls = dict(
        linear_memory=lambda: ops.linear_memory(
            q, q, q, log_decay, **_states(rows, length, segments), implementation=implementation
        ),
        selective_memory=lambda: ops.selective_memory(
            u, u, jnp.zeros((64, 16)), scores, scores, implementation=implementation
        ),
        comba=lambda: mixers.build("comba", 1024, rngs=nnx.Rngs(0))(
            jnp.zeros((1, length, 1024), dtype)
        )[0],
        delta_memory=lambda: ops.delta_memory(q, q, q, q[..., 0], implementation=implementation),
        short_convolution=lambda: ops.short_convolution(
            u, jnp.zeros((4, 64)), implementation=implementation
        ),
    )
    return calls[op]()


def _states(rows, length, segments):
    """Return the arguments for one state per segment, `segments` in each row; none for None."""
    if segments is None:
        return {}
    state = ops.linear_state(rows, 2, 64, 64, num_segments=segments)
    ids = jnp.broadcast_to(1 + jnp.arange(length) * segments // length, (rows, length))
    return dict(initial_state=state, segment_ids=ids)


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "12.0"])
def test_is_automatic_on_8_and_12(capability, choose):
    names, text = choose(capability)
    assert names == ("triton", "xla")
    assert "triton on NVIDIA 8.0 8.6 8.9 12.0, xla, chunk form elsewhere" in text
    assert f"mosaic_gpu requires an NVIDIA card of compute capability 9.0, not {capability}" in text


@pytest.mark.parametrize("op", ["selective_memory", "short_convolution"])
def test_other_ops_have_the_same_cards(op, choose):
    assert choose("8.9", op)[0] == ("triton", "xla")
    assert choose("8.9", op, installed=False)[0] == ("xla",)
    assert choose("9.0", op)[0][0] != "triton"
    assert choose("10.0", op)[0] == ("xla",)


def test_one_token_has_a_kernel_of_its_own(choose):
    names, text = choose("8.9", "delta_memory", length=1)
    assert names == ("triton", "xla")
    assert "triton decode_step on NVIDIA 8.0 8.6 8.9 12.0" in text
    # XLA is as fast for a linear memory that is not one layer of a stack.
    names, text = choose("8.9", length=1)
    assert names == ("xla",)
    assert "triton decode_step not used: this memory is not one layer of a stack" in text


def test_comba_at_340m_is_fused_on_an_a100(choose):
    """Its keys read the undecayed memory, and its heads have 256 key and 512 value channels."""
    names, text = choose("8.0", "comba")
    assert names == ("triton", "xla")
    assert "triton on NVIDIA 8.0 8.6 8.9 12.0, xla, chunk form elsewhere" in text


def test_is_not_automatic_on_hopper_and_blackwell(choose):
    assert choose("9.0")[0] == ("mosaic_gpu", "xla")
    names, text = choose("10.0")
    assert names == ("xla",)
    assert "triton not used: by name only on compute capability 10.0" in text
    names, text = choose("9.0", dtype=jnp.float16)  # which Hopper's kernel does not accept
    assert names == ("xla",)
    assert "triton not used: by name only on compute capability 9.0" in text
    assert choose("10.0", implementation=("triton", "xla"))[0] == ("triton", "xla")


@pytest.mark.parametrize("decay", [None, "token"])
def test_on_hopper_few_memories_in_short_rows_are_by_triton(decay, choose):
    few = dict(rows=4, decay=decay)
    names, text = choose("9.0", **few)
    assert names == ("triton", "xla")
    assert "triton for few memories on NVIDIA 9.0, xla, chunk form elsewhere" in text
    others = [dict(rows=5), dict(length=4096), dict(decay="channel"), dict(installed=False)]
    for other in [*others, dict(rows=1, segments=5)]:
        names, text = choose("9.0", **few | other)
        assert names == ("mosaic_gpu", "xla")
        assert "triton" not in text
    assert choose("9.0", implementation="mosaic_gpu", **few)[0] == ("mosaic_gpu",)
    assert choose("8.0", **few)[1].startswith("triton on NVIDIA 8.0")


def test_is_not_automatic_where_the_cards_are_unknown(choose):
    names, text = choose(None)
    assert names == ("mosaic_gpu", "xla")
    assert "triton" not in text


def test_one_line_says_how_to_install_it(choose, caplog):
    select._suggest_triton.cache_clear()
    with caplog.at_level(logging.WARNING, "absl"):
        choose("9.0", installed=False)
        choose("8.9", installed=False, dtype=jnp.float32)  # which needs tf32 in any case
        choose("10.0", installed=False)
        assert not caplog.messages
        for _ in range(2):
            names, text = choose("8.9", installed=False)
            assert names == ("xla",)
            assert "triton requires the packages jax-triton and triton (extra [triton]" in text
    (message,) = caplog.messages
    assert "pip install 'lsm_jax[cuda13,triton]'" in message
    assert "8.9" in message


def test_the_table_of_cards_has_every_capability_and_backend():
    cards = kernels_table.CARDS
    assert tuple(card for card, _, _ in cards) == launch.CAPABILITIES
    lines = kernels_table.cards_table().splitlines()
    (ada,) = (line for line in lines if line.startswith("| 8.9 "))
    (blackwell,) = (line for line in lines if line.startswith("| 10.0 "))
    default, by_name, ran, compiled = (x.strip() for x in ada.split("|")[4:8])
    assert default.startswith("`triton`: `linear_memory`")
    assert (by_name, ran, compiled) == ("none", "none", "`triton`")
    assert blackwell.split("|")[4].strip() == "none"
    assert "`linear_memory`" in blackwell.split("|")[5]
