"""Count the collectives of compiled programs on rows that devices share, and the sizes of their arrays.

`test_sequence` runs it in a process of eight devices.
"""

from __future__ import annotations

import collections
import re
import sys

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import mixers, models, ops
from lsm_jax.parallel import GATHERED, MeshConfig, make_mesh, token_sharding
from tests.mixers.conftest import run
from tests.parallel.meshes import WIDTH, mixer
from tests.parallel.sequence_models import config_of, measure

COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
COMPUTATION = re.compile(r"\n%(\S+) \([^\n]*\{\n(.*?)\n\}", re.DOTALL)
INSTRUCTION = re.compile(r"\n  (?:ROOT )?%(\S+) = .*? ([a-z-]+)\(([^\n]*)")
KEEP = jax.checkpoint_policies.save_only_these_names(GATHERED)


def compiled(function, *arguments, mesh) -> str:
    """Return the text (HLO) of `function`, compiled for these arguments on a mesh."""
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*arguments).compile().as_text()


def sent(text: str) -> collections.Counter:
    """Return the number of collectives in a compiled program's text, by kind and result type."""
    return collections.Counter(
        re.sub(r"\{.*?\}", "", f"{kind} {shape}") for shape, kind in COLLECTIVE.findall(text)
    )


def check_overlap(text: str) -> None:
    """Assert that each all-gather in a compiled program's text can run in parallel with a matrix product:
    neither depends on the other.
    """
    products = {name for name, body in COMPUTATION.findall(text) if " dot(" in body}
    reads, kinds, fed = {}, {}, collections.defaultdict(list)
    for name, kind, rest in INSTRUCTION.findall(text[text.index("\nENTRY") :]):
        reads[name] = re.findall(r"%([\w.-]+)", rest.split("metadata")[0])
        kinds[name] = "dot" if products.intersection(reads[name]) else kind
        for operand in reads[name]:
            fed[operand].append(name)

    def reached(name, edges):
        seen, todo = set(), [name]
        while todo:
            if (found := todo.pop()) not in seen:
                seen.add(found)
                todo += edges.get(found, [])
        return seen

    gathers = [name for name, kind in kinds.items() if kind.startswith("all-gather")]
    assert gathers
    for name in gathers:
        bound = reached(name, reads) | reached(name, fed)
        assert any(kind == "dot" and other not in bound for other, kind in kinds.items()), name


def layer(name: str, *, packed: bool, remat: bool = False):
    """Return a function (x, gate) -> a number: the sum over the outputs of the op called `name`, on rows
    whose tokens are divided over devices. The gradient of this number has the same collectives as a
    complete layer's gradient.
    """

    def run(x, gate):
        ids = jnp.ones(x.shape[:2], jnp.int32) if packed else None
        if name == "linear_memory":
            return ops.linear_memory(x, x, x, gate, segment_ids=ids)[0]
        if name == "delta_memory":
            return ops.delta_memory(x, x, x, gate + 1, gate, segment_ids=ids)[0]
        flat = x.reshape(*x.shape[:2], -1)
        return ops.short_convolution(flat, jnp.ones((4, flat.shape[-1]), x.dtype))[0]

    if remat:
        run = jax.checkpoint(run, policy=KEEP)
    return lambda x, gate: jnp.sum(jnp.sin(run(x, gate)))


def check(mesh, name: str, length: int, forward: dict, backward: dict, **how) -> None:
    """Assert that the gradient of an op's layer on shared rows has the collectives `forward` and
    `backward`, and no others.
    """
    x = jax.ShapeDtypeStruct((2, length, 2, 8), jnp.float32, sharding=token_sharding(mesh))
    gate = jax.ShapeDtypeStruct((2, length, 2), jnp.float32, sharding=token_sharding(mesh))
    run = layer(name, **how)
    text = compiled(jax.grad(run, (0, 1)), x, gate, mesh=mesh)
    found = sent(text)
    wanted = collections.Counter(forward) + collections.Counter(backward)
    assert found == wanted, (name, length, how, found, wanted)
    if name == "linear_memory":  # nearly all products of a delta rule are part of its update
        check_overlap(text)


def check_layer(mesh, name: str, wanted: dict) -> None:
    """Assert that the gradient of a method's layer on packed rows has exactly the collectives `wanted`, apart
    from sums over devices.
    """
    module = mixers.build(mixer(name), WIDTH, rngs=nnx.Rngs(0), init_std=0.2, layer=1, num_layers=2)
    graph, params = nnx.graphdef(module), nnx.to_pure_dict(nnx.state(module, nnx.Param))
    place = token_sharding(mesh)
    x = jax.ShapeDtypeStruct((2, 128, WIDTH), jnp.float32, sharding=place)
    rows = jax.ShapeDtypeStruct((2, 128), jnp.int32, sharding=place)

    def total(params, x, segment_ids, positions):
        given = dict(segment_ids=segment_ids, positions=positions, contiguous=True)
        return jnp.sum(jnp.sin(run(nnx.merge(graph, params), x, **given)[0]))

    text = compiled(jax.grad(total, (0, 1)), params, x, rows, rows, mesh=mesh)
    found = {what: n for what, n in sent(text).items() if not what.startswith("all-reduce")}
    assert found == wanted, (name, found, wanted)


def check_model(mesh, name: str) -> None:
    """Assert that a model's loss and gradient on shared rows have the same collectives for rows of 128
    tokens as for rows of 256.
    """
    config = config_of(name)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    graph, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def program(length):
        of = {"mask": jnp.float32} | dict.fromkeys(("tokens", "labels", "segment_ids"), jnp.int32)
        place = token_sharding(mesh)
        rows = {n: jax.ShapeDtypeStruct((2, length), t, sharding=place) for n, t in of.items()}
        run = lambda p, r: measure(config, graph, p, r)  # noqa: E731
        return sent(compiled(run, params, rows, mesh=mesh))

    short, long = program(128), program(256)
    assert short == long, (name, short, long)


def main(*names: str) -> None:
    """Check that a layer on rows whose tokens are divided over eight devices has one all-gather in the
    forward and one in the backward pass, whose sizes do not depend on the rows' length.

    `names` are methods; for each of them a complete model is checked, too.
    """
    mesh = make_mesh(MeshConfig(sequence=8))
    # Two rows of two heads: a memory [8, 8] and a decay; for packed rows two segment ids, and whether a
    # document began.
    state, decay, ids = 2 * 2 * 64, 2 * 2, 2 * 3
    gathered = {f"all-gather u32[8,{state + decay + ids}]": 1}
    back = {f"all-gather u32[8,{state}]": 1}
    for length in (64, 512):
        check(mesh, "linear_memory", length, gathered, back, packed=True, remat=True)
    tail = {"collective-permute f32[2,3,16]": 1}
    check(mesh, "short_convolution", 64, tail, tail, packed=False)
    if names:
        gathered = {f"all-gather u32[8,{2 * state + 2}]": 1}  # with an id that is always 0
        check(mesh, "delta_memory", 64, gathered, back, packed=False)
    # Forward: a memory [K, V] per head, its transition, and ids. Backward: the memory's gradient.
    # Convolutions and token shifts send their last tokens in both directions, and once the segment id of the
    # last token.
    id_of_last = {"collective-permute s32[2]": 1}
    sent_by = dict(
        retnet={"all-gather u32[8,270]": 1, "all-gather u32[8,256]": 1},
        mamba2=id_of_last | {"collective-permute f32[2,3,16]": 4, "collective-permute f32[2,3,32]": 2}
        | {"all-gather u32[8,278]": 1, "all-gather u32[8,256]": 1},
        rwkv7=id_of_last | {"collective-permute f32[2,1,16]": 2}
        | {"all-gather u32[8,260]": 1, "all-gather u32[8,128]": 1},
    )  # fmt: skip
    for name, wanted in sent_by.items():
        check_layer(mesh, name, wanted)
    for name in names:
        check_model(mesh, name)
        print(name, "ok", flush=True)
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
