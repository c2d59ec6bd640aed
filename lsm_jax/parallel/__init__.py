"""The mesh, the rule table of logical axes, and what runs over it."""

from lsm_jax.parallel.collectives import constrain, over_batch
from lsm_jax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    RULES,
    MeshConfig,
    batch_sharding,
    make_mesh,
    param_sharding,
    partition_spec,
)

__all__ = [
    "AXES",
    "BATCH_AXES",
    "RULES",
    "MeshConfig",
    "batch_sharding",
    "constrain",
    "make_mesh",
    "over_batch",
    "param_sharding",
    "partition_spec",
]
