"""Shard a model over devices: the mesh, the table from logical axes to mesh axes, and functions that run
over the mesh's devices."""

from lsm_jax.parallel.collectives import (
    TOKENS,
    alone,
    constrain,
    over_batch,
    over_mesh,
    over_tokens,
    sequence_shards,
)
from lsm_jax.parallel.experts import (
    EXCHANGES,
    exchange_options,
    place_on,
    room_for,
    shards_of,
    sum_over,
    to_owners,
)
from lsm_jax.parallel.hosts import (
    Agreement,
    data_shard,
    first_process_text,
    join_hosts,
    launcher,
    place_batch,
)
from lsm_jax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    RULES,
    MeshConfig,
    batch_sharding,
    batch_shards,
    largest_divisor,
    make_mesh,
    mesh_axes,
    param_sharding,
    partition_spec,
    token_sharding,
)
from lsm_jax.parallel.pipeline import pipelined, pipelined_at_layers
from lsm_jax.parallel.sequence import GATHERED
from lsm_jax.parallel.stages import Stages
from lsm_jax.parallel.sums import gather_along, sum_along
from lsm_jax.parallel.traffic import Transfer, transfers

__all__ = [
    "AXES",
    "Agreement",
    "BATCH_AXES",
    "GATHERED",
    "EXCHANGES",
    "RULES",
    "Stages",
    "TOKENS",
    "MeshConfig",
    "Transfer",
    "alone",
    "batch_sharding",
    "batch_shards",
    "constrain",
    "data_shard",
    "exchange_options",
    "first_process_text",
    "gather_along",
    "join_hosts",
    "launcher",
    "largest_divisor",
    "make_mesh",
    "mesh_axes",
    "over_batch",
    "over_mesh",
    "over_tokens",
    "param_sharding",
    "partition_spec",
    "pipelined",
    "pipelined_at_layers",
    "place_batch",
    "place_on",
    "room_for",
    "sequence_shards",
    "shards_of",
    "sum_along",
    "sum_over",
    "to_owners",
    "token_sharding",
    "transfers",
]
