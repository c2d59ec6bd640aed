"""Tests of the profile of a compiled program: its instructions, their device times, and their names in the
source code.
"""

import jax
import jax.numpy as jnp

from benchmarks.profile import by_kernel


def test_a_product_in_a_loop_is_found_with_its_launches_and_source():
    @jax.jit
    def f(x):
        with jax.named_scope("powers"):
            return jax.lax.fori_loop(0, 5, lambda _, y: y @ x, x)

    x = jnp.eye(128)
    compiled = f.lower(x).compile()
    compiled(x).block_until_ready()
    rows = by_kernel(lambda: compiled(x), compiled.as_text(), calls=3)
    assert [row["milliseconds"] for row in rows] == sorted(
        (row["milliseconds"] for row in rows), reverse=True
    )
    product = next(row for row in rows if row["source"].endswith("dot_general"))
    assert product["launches"] == 5
    assert product["result"] == "f32[128,128]"
    assert "powers" in product["source"]
