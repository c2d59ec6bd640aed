"""Training steps compiled for several H200 cards, which need not be present (`make test-aot`).

XLA's compiler has crashed on some of these meshes.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies

from configs import lm
from lsm_jax import ops
from lsm_jax.ops.attention import cudnn as attention_cudnn
from lsm_jax.parallel import MeshConfig, make_mesh, token_sharding
from tests.kernels.test_aot import H200
from tests.step_memory import compiled_memory

pytestmark = pytest.mark.aot

CASES = [
    ("softmax-tiny", dict(fsdp=2)),
    ("softmax-tiny", dict(fsdp=2, pipeline=2)),
    ("softmax-tiny", dict(sequence=2, tensor=2)),
    ("fox-tiny", dict(sequence=2)),
    ("gated_deltanet-tiny", dict(fsdp=2, sequence=2)),
    ("gla-tiny,pattern=LLLN,feedforward=moe", dict(expert=2)),
    ("mamba-tiny", dict(sequence=2, tensor=2)),
    ("gateloop-tiny", dict(fsdp=2, sequence=2)),
]


@pytest.mark.parametrize(("variant", "axes"), CASES, ids=str)
def test_compiles_for_several_cards(variant, axes, monkeypatch):
    monkeypatch.setattr(attention_cudnn, "has_cudnn", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_, **__: True)
    config = lm.get_config(variant)
    config.model.vocab_size, config.model.hidden_size, config.model.dtype = 512, 256, "bfloat16"
    for layer in config.model.layers.values():
        if getattr(layer.mixer, "num_heads", None):
            layer.mixer.num_heads = 4  # of 64 channels, as kernels require
    config = dataclasses.replace(config, mesh=MeshConfig(data=1, **axes))
    memory = compiled_memory(config, 8, 2048, packed=False)
    assert 0 < memory.temp_size_in_bytes < 1 << 31


@pytest.fixture
def optimized():
    """Fixture: compile with all of XLA's optimizations, which `conftest` switches off."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%[\w.-]+ = .*? (all-gather-start|all-gather-done|custom-call)\("
)


def schedule(text: str) -> str:
    """Return the gathers and the kernels of a compiled program in the order of its schedule: "<" where a
    gather starts, ">" where its result is awaited, "k" for a kernel.
    """
    assert "is_scheduled=true" in text
    marks = {"all-gather-start": "<", "all-gather-done": ">", "custom-call": "k"}
    order = []
    for line in text[text.index("\nENTRY") :].splitlines():
        found = INSTRUCTION.match(line)
        if found and (found[1] != "custom-call" or "mosaic_gpu" in line):
            order.append(marks[found[1]])
    return "".join(order)


@pytest.mark.parametrize("cards", [2, 4])
@pytest.mark.parametrize("decay", ["none", "scalar", "channel", "value"])
def test_kernels_run_while_the_updates_are_gathered(decay, cards, optimized):
    """In the schedule of a layer's forward and backward pass, at least one kernel of `linear_memory` runs between
    the start of each of the two gathers and the wait for its result.
    """
    more = {}
    if decay != "none":
        name = "value_log_decay" if decay == "value" else "log_decay"
        more[name] = () if decay == "scalar" else (128,)
    order = order_of("linear_memory", cards, more)
    assert re.fullmatch(r"k*<k+>k*<k+>k*", order), order


def test_the_forward_gather_of_a_delta_rule_follows_its_kernels(optimized):
    """In the schedule of a delta rule's forward pass all kernels run before the gather, whose update they compute; in the
    backward pass at least one kernel runs during the gather of gradients (docs/decisions.md).
    """
    order = order_of("delta_memory", 2, dict(beta=(), log_decay=()))
    assert re.fullmatch(r"k+<>k*<k+>k+", order), order


def order_of(op: str, cards: int, more: dict[str, tuple[int, ...]]) -> str:
    """Return the `schedule` of an op's forward and backward pass, compiled for one row over several H200s, with 4,096 tokens of
    8 heads of 128 on each; `more` has further arguments by name, and the shape of each for a token and head.
    """
    topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology=f"1x1x{cards}")
    mesh = make_mesh(MeshConfig(data=1, sequence=cards), list(topology.devices))
    place = token_sharding(mesh)
    given = {name: ((128,), jnp.bfloat16) for name in "qkv"}
    given |= {name: (shape, jnp.float32) for name, shape in more.items()}
    arrays = {
        name: jax.ShapeDtypeStruct((1, 4096 * cards, 8, *shape), dtype, sharding=place)
        for name, (shape, dtype) in given.items()
    }

    def loss(arrays):
        return jnp.sum(jnp.sin(getattr(ops, op)(**arrays)[0].astype(jnp.float32)))

    with jax.set_mesh(mesh):
        traced = jax.jit(jax.value_and_grad(loss)).trace(arrays)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile({"xla_gpu_autotune_level": 0})
    return schedule(compiled.as_text())
