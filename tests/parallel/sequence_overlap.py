"""Compare `linear_memory` on rows whose tokens are divided over devices with the op on one device, where a
fused kernel computes each device's tokens from an empty memory, and the reads from the earlier devices'
memory are added to its outputs.

In place of a kernel, the XLA form is registered as a backend under another name, so that values and gradients
are compared in float64. `test_overlap` runs it in a process of eight devices:
`python -m tests.parallel.sequence_overlap DEVICES:CASE:KIND ...`.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax import ops
from lsm_jax.ops.backends.registry import Backend, register
from lsm_jax.ops.linear import shared_rows
from lsm_jax.ops.linear.backends import run_xla
from lsm_jax.parallel import MeshConfig, make_mesh
from tests.ops.cases import CASES
from tests.parallel import sequence
from tests.parallel.sequence_models import mesh_of

KERNEL = Backend(name="kernel", run=run_xla, platforms=("cpu",))


def check_strong_decays(mesh) -> None:
    """Check `linear_memory` on rows divided over the devices of `mesh`, with log decays from 0 to -1e30 and
    -inf: the outputs equal those of one device, and all gradients are finite.
    """
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 32, 2, 4))) for _ in range(3))
    sizes = jnp.asarray([0.0, -1e-12, -0.1, -30.0, -1e5, -1e30])
    log_decay = sizes[rng.choice(6, p=[0.3, 0.3, 0.3, 0.04, 0.03, 0.03], size=(2, 32, 2, 4))]

    def measure(q, log_decay):
        def loss(q, log_decay):
            output, state = ops.linear_memory(q, k, v, log_decay)
            return jnp.sum(jnp.sin(output)) + jnp.sum(state.memory), output

        (_, output), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(q, log_decay)
        return output, grads

    never = log_decay.at[:, 13].set(-jnp.inf)
    for decay in (log_decay, never):
        expected = jax.jit(measure)(q, decay)
        with jax.set_mesh(mesh):
            got = jax.jit(measure)(q, decay)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert jnp.all(jnp.isfinite(a))
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def check_later_tokens(mesh) -> None:
    """Check `linear_memory` in bfloat16 on rows whose tokens are divided over the devices of `mesh`: the
    outputs equal those of one device in float32 up to rounding, and no bit of an output depends on later
    tokens, whether the same or another device has them.
    """
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 64, 2, 8)), jnp.bfloat16) for _ in range(3))
    log_decay = -jnp.asarray(rng.random((1, 64, 2, 8)), jnp.float32)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *x: ops.linear_memory(*x)[0])
        before = run(q, k, v, log_decay)
        for last in (5, 21, 40):
            changed = (x.at[:, last:].multiply(3) for x in (q, k, v, log_decay))
            np.testing.assert_array_equal(run(*changed)[:, :last], before[:, :last])
    assert before.dtype == jnp.bfloat16
    exact = ops.linear_memory(*(x.astype(jnp.float32) for x in (q, k, v)), log_decay)[0]
    np.testing.assert_allclose(before.astype(jnp.float32), exact, rtol=2**-7, atol=2**-7)


def main(*which: str) -> None:
    """Compare `linear_memory` on rows divided over devices with one device for each case DEVICES:CASE:KIND.
    The case "strong" checks strong decays, the case "later" that no output depends on later tokens.
    """
    jax.config.update("jax_enable_x64", True)
    register("linear_memory", KERNEL)
    resumed = []
    resume = shared_rows.resume_from_empty
    shared_rows.resume_from_empty = lambda *args: resumed.append(1) or resume(*args)
    cases = {case.name: case for case in CASES}
    for given in which:
        resumed.clear()
        if given == "strong":
            check_strong_decays(make_mesh(MeshConfig(sequence=4), jax.devices()[:4]))
        elif given == "later":
            check_later_tokens(make_mesh(MeshConfig(sequence=4), jax.devices()[:4]))
        else:
            devices, name, kind = given.split(":")
            sequence.compare(cases[name], "chunk", kind, mesh_of(devices))
        assert resumed, given
        print(given, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
