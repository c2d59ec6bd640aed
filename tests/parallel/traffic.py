"""Count what devices send in programs whose collectives are known; `test_traffic` runs it in a process of eight devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lsm_jax.parallel import Transfer, transfers
from tests.parallel.stages import made_up


def main() -> None:
    """Assert that each collective of `jax.lax` is counted with the bytes of a ring, alone and in a loop of three rounds, and
    those of a pipeline that is cut at layers; its values and gradients are checked, too.
    """
    mesh = jax.make_mesh((2, 4), ("rows", "parts"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((8, 12, 16), jnp.float32)  # on a device [4, 12, 16], 3,072 bytes
    ring = [(i, (i + 1) % 4) for i in range(4)]
    parts = {
        "all-gather": (lambda x: jax.lax.all_gather(x, "parts").sum(0), 3 * 3072),
        "all-reduce": (lambda x: jax.lax.psum(x, "parts"), 2 * 3072 * 3 // 4),
        "reduce-scatter": (
            lambda x: jnp.tile(jax.lax.psum_scatter(x, "parts", scatter_dimension=1, tiled=True), (1, 4, 1)),
            3072 * 3 // 4,
        ),
        "all-to-all": (
            lambda x: jax.lax.all_to_all(x, "parts", split_axis=1, concat_axis=2, tiled=True).reshape(x.shape),
            3072 * 3 // 4,
        ),
        "collective-permute": (lambda x: jax.lax.ppermute(x, "parts", ring), 3072),
    }  # fmt: skip

    def looped(part):
        return lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(part(x)), x)

    for kind, (part, size) in parts.items():
        devices = 2 if kind == "collective-permute" else 4
        for function, times in ((part, 1), (looped(part), 3)):
            spec = PartitionSpec("rows")
            run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            found = transfers(jax.jit(run).lower(x).compile())
            assert found == [Transfer(kind, devices, times, times * size)], (kind, found)
        print(kind, "ok")
    # Pipeline stages that are not whole periods: entries of 4 and 16 numbers, two and one for each stage, and their gradients.
    assert made_up() == 2 * (2 * 4 + 16) * 4 // 2
    print("pipeline ok")


if __name__ == "__main__":
    main()
