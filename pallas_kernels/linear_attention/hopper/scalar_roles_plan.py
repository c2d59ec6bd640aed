"""How `scalar_roles` divides columns and shared memory: tiles, and numbers of buffers; and which scans it computes in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.compat import PROCESSORS, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper.scalar_plan import BLOCK, Call

_SMEM = 226 * 1024  # bytes of a thread block's tiles, of 227 KiB; barriers have the rest
_F32 = jnp.float32


class Plan(NamedTuple):
    """The numbers of buffers in shared memory: of the loaded inputs, of weights, and of each of memories, written values and outputs."""

    loaded: int
    weights: int
    others: int


# The best first. A third buffer of inputs is worth most: an input arrives a microsecond after another one is released.
_PLANS = Plan(3, 2, 2), Plan(3, 2, 1), Plan(3, 1, 1), Plan(2, 2, 2), Plan(2, 2, 1), Plan(2, 1, 1)


def tiles_of(call: Call) -> tuple[int, int]:
    """Return into how many tiles a thread block divides its columns, and the columns of each: one tile, or that of each of two heads."""
    return (2, BLOCK) if call.paired else (1, call.groups * BLOCK)


def scaled(call: Call) -> bool:
    """Return whether the values that are written are not z itself."""
    return call.write_scale != 1 or "cum" in call.streams or "write_decay" in call.streams


def _tile_shapes(call: Call) -> dict[str, tuple[int, int]]:
    """Return the shapes of the tiles that warpgroups load (x, y, z), hand on to each other, or store (out), by name; of z for all tiles of a
    thread block together.
    """
    count, width = tiles_of(call)
    keys, values = (CHUNK, call.depth), (CHUNK, width)
    shapes = dict(y=keys, z=(CHUNK, count * width))
    if scaled(call):
        shapes["written"] = values
    if "x" in call.streams:
        shapes |= dict(x=keys, weights=(CHUNK, CHUNK), memory=(call.depth, width), out=values)
    elif call.save_states:
        shapes["memory"] = call.depth, width
    return shapes


def _buffers(name: str, plan: Plan) -> int:
    """Return the number of buffers of a kind of tiles."""
    return plan.loaded if name in "xyz" else plan.weights if name == "weights" else plan.others


def plan_of(call: Call) -> Plan | None:
    """Return the best plan for which shared memory has room; None if it has none."""
    count, shapes = tiles_of(call)[0], _tile_shapes(call)

    def size(plan: Plan) -> int:
        bytes_of = {name: 2 * rows * columns for name, (rows, columns) in shapes.items()}
        tiles = (
            _buffers(name, plan) * (1 if name in "xyz" else count) * size
            for name, size in bytes_of.items()
        )
        vectors = sum(name not in "xyz" for name in call.streams)
        return sum(tiles) + plan.loaded * vectors * count * CHUNK * 4

    return next((plan for plan in _PLANS if size(plan) <= _SMEM), None)


def smem_of(call: Call, dtype: Any) -> dict[str, Any]:
    """Return the types of a thread block's buffers and barriers in shared memory, by name."""
    plan, count = plan_of(call), tiles_of(call)[0]
    assert plan is not None
    smem: Any = plgpu.SMEM
    found: dict[str, Any] = dict(
        # Each copy arrives, and the warpgroup that has computed the sums of decays.
        loaded=plgpu.Barrier(
            num_arrivals=len(call.loads) + bool(call.sums), num_barriers=plan.loaded
        ),
        used=plgpu.Barrier(num_arrivals=3 if "x" in call.streams else 2, num_barriers=plan.loaded),
    )
    for name, shape in _tile_shapes(call).items():
        number = _buffers(name, plan)
        tiles = (number, *shape) if name in "xyz" else (number, count, *shape)
        found[name] = smem(tiles, dtype=dtype, transforms=wg.TILED)
        if name in ("written", "weights", "memory"):
            found[f"{name} ready"] = plgpu.Barrier(num_barriers=number)
            found[f"{name} used"] = plgpu.Barrier(num_barriers=number)
    for name in call.streams:
        if name == "run":
            found[name] = smem((plan.loaded, CHUNK), jnp.int32)
        elif name not in "xyz":
            vector = (2, CHUNK) if call.paired else (CHUNK,)
            found[name] = smem((plan.loaded, *vector), _F32)
    return found


class Scan(NamedTuple):
    """A call of `scalar_scan` and its arrays.

    Attributes:
        call: its sizes and options.
        inputs: arrays by name; None are left out. Of paired heads, z has two in one.
        outputs: shapes by name; None are left out.
        by_roles: whether `scalar_roles` computes it.
    """

    call: Call
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    by_roles: bool

    def smem(self) -> dict[str, Any]:
        """Return the types of a thread block's buffers in shared memory, by name."""
        return smem_of(self.call, self.inputs["z"].dtype)

    def blocks(self) -> int:
        """Return the number of thread blocks."""
        return math.prod(self.grid.values())

    @property
    def grid(self) -> dict[str, int]:
        """The numbers of thread blocks by axis."""
        return self.call.grid(self.outputs["last"].shape[0])


def fit_together(scans: Sequence[Scan]) -> bool:
    """Return whether `roles_scans` can compute the scans in one launch, each with thread blocks of its own, all of which run at once."""
    first, *others = ((x.grid, _tile_shapes(x.call), plan_of(x.call)) for x in scans)
    return sum(x.blocks() for x in scans) <= PROCESSORS and all(x == first for x in others)


def share_smem(scans: Sequence[Scan]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return the types of the buffers, by name, of a thread block that computes one of several scans, and for each scan a dictionary from the
    names of its buffers to theirs. Scans share buffers of one name and type.
    """
    types: dict[str, Any] = {}
    places: list[dict[str, str]] = [{} for _ in scans]
    for n, scan in enumerate(scans):
        for name, kind in scan.smem().items():
            place = name if types.setdefault(name, kind) == kind else f"{name} {n}"
            types[place], places[n][name] = kind, place
    return types, places
