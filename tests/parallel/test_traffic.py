"""Tests of the count of bytes that devices of a compiled program send."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from lsm_jax.parallel import Transfer, transfers
from tests.parallel.test_parallel import run_with_devices

# The forms in which other compilers write collectives: two halves, of which the first has the operands in its result, and
# a call of a computation.
PROGRAM = """HloModule jit_f, entry_computation_layout={()->f32[]}, num_partitions=8

%inside (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (q: bf16[4,8]) -> bf16[32,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  %start = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%q), replica_groups={}, dimensions={0}
  %done = bf16[32,8]{1,0} all-gather-done(%start)
  %permute = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%z), source_target_pairs={{0,1},{1,0}}
  %alone = f32[100]{0} all-reduce(%z), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %pairs = (f32[100]{0}, s8[8]{0}) all-reduce(%z, %w), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %scatter = ((f32[64]{0}), f32[8]{0}) async-start(%z), calls=%inside
  %axes = f32[10]{0} all-gather(%w), replica_groups=mesh['rows'=2,'heads'=4] {'heads'}, dimensions={0}
  ROOT %result = bf16[32,8]{1,0} copy(%done)
}
"""


def test_collectives_are_read_from_the_text():
    assert transfers(PROGRAM) == [
        Transfer("all-gather", 8, 1, 32 * 8 * 2 * 7 // 8),
        Transfer("collective-permute", 2, 1, 24),
        Transfer("all-reduce", 2, 1, 408),
        Transfer("reduce-scatter", 8, 1, 64 * 4 * 7 // 8),
        Transfer("all-gather", 4, 1, 30),
    ]


def test_one_device_sends_nothing():
    assert transfers(jax.jit(jnp.sin).lower(1.0).compile()) == []


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="compiled begins with 'module @jit_sin.*compile()"):
        transfers(jax.jit(jnp.sin).lower(1.0).as_text())
    loop = PROGRAM.replace("async-start(%z), calls=", "while(%z), condition=%c, body=")
    with pytest.raises(ValueError, match="number of its rounds is not known"):
        transfers(loop)
    known = loop.replace("body=%inside", 'body=%inside, backend_config={"known_trip_count":{"n":"5"}}')  # fmt: skip
    assert transfers(known)[-2] == Transfer("reduce-scatter", 8, 5, 5 * 224)
    unknown = PROGRAM.replace("replica_groups={},", "replica_groups=V1,")
    with pytest.raises(ValueError, match="groups of devices .* cannot be read: %start"):
        transfers(unknown)
    other = PROGRAM.replace("all-gather-start(%q)", "ragged-all-to-all(%q)")
    with pytest.raises(ValueError, match="has a ragged-all-to-all, whose bytes are not known"):
        transfers(other)


def test_each_collective_of_a_program_is_counted():
    lines = run_with_devices(8, "-m", "tests.parallel.traffic").splitlines()
    assert len(lines) == 6 and all(line.endswith("ok") for line in lines)
