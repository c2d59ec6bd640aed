"""Compare attention by a kernel on rows shared by four devices with attention by XLA on one device.

The kernel is called with two parts of a row per device. `test_sequence` runs it in a process of eight
devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax import ops
from lsm_jax.parallel import MeshConfig, make_mesh
from pallas_kernels import compat, forgetting_attention
from tests.kernels.test_forgetting_attention_gpu import SCALE, plain
from tests.kernels.test_linear_attention_gpu import error

LENGTH, ODD = 1024, 1001  # on four devices, two parts each of one tile


def kernel(q, k, v, sums, *, run, written, places, window, earlier=0, **rest):
    """Compute what the attention kernel returns by XLA, in place of the kernel: Pallas' interpreter could
    only run it inside a map over all mesh axes.
    """
    places = places + earlier
    assert rest == dict(scale=SCALE, prune=True, implementation="mosaic_gpu")
    whole, half = jnp.zeros((*k.shape[:2], *q.shape[2:]), q.dtype), q.shape[1] // 2
    for i, part in enumerate((q[:, :half], q[:, half:])):
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part, places[i], axis=1)
    wide = (x.astype(jnp.float32) for x in (whole, k, v))
    out = plain(*wide, sums, run=run, written=written, window=window).astype(v.dtype)
    parts = [jax.lax.dynamic_slice_in_dim(out, places[i], half, axis=1) for i in range(2)]
    return jnp.concatenate(parts, axis=1)


def main() -> None:
    """Compare the outputs, final states and gradients of attention on a row divided over four devices with
    those of one device. Then check that backends which do not support divided rows raise an error.
    """
    compat.on_hopper = lambda: True
    forgetting_attention.forgetting_attention = kernel
    rng = np.random.default_rng(0)
    shapes = dict(q=(1, LENGTH, 2, 64), k=(1, LENGTH, 1, 64), v=(1, LENGTH, 1, 64))
    inputs = {n: jnp.asarray(rng.normal(size=s), jnp.bfloat16) for n, s in shapes.items()}
    gates = dict(log_forget=jax.nn.log_sigmoid(jnp.asarray(rng.normal(size=(1, LENGTH, 2)) + 3)))
    documents = dict(
        segment_ids=np.sort(rng.integers(0, 4, size=(1, LENGTH)), axis=1),
        update_mask=rng.random((1, LENGTH)) < 0.8,
    )
    weights = jnp.asarray(rng.normal(size=(1, LENGTH, 2, 64)), jnp.float32)
    mesh = make_mesh(MeshConfig(sequence=4), jax.devices()[:4])

    def state(gated):  # of 300 tokens
        before = {n: x[:, :300] for n, x in (inputs | (gates if gated else {})).items()}
        empty = ops.attention_state(
            1, ODD + 300, 1, 64, 64, forget_heads=2 if gated else None, dtype=jnp.bfloat16
        )
        _, stored = ops.attention(**before, initial_state=empty, scale=SCALE, implementation="xla")
        return dict(initial_state=stored)

    def run(inputs, rest, implementation):
        def loss(inputs):
            output, state = ops.attention(
                **inputs, **rest, scale=SCALE, implementation=implementation
            )
            return jnp.sum(weights[:, : output.shape[1]] * output), (output, state)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)

    def cut(tree):  # to a length that is padded on the mesh
        return jax.tree.map(lambda x: x[:, :ODD], tree)

    for given, rest in (
        (inputs | gates, documents), (inputs | gates, {}), (inputs, dict(window=200)), (inputs, {}),
        (cut(inputs), dict(window=200)), (cut(inputs | gates), cut(documents)),
        (cut(inputs | gates), cut(documents) | state(True)), (cut(inputs), state(False)),
        (inputs, dict(window=200) | state(False)),
    ):  # fmt: skip
        expected = run(given, rest, "xla")
        with jax.set_mesh(mesh):
            got = run(given, rest, "mosaic_gpu")
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        errors = [float(error(a, b)) for a, b in pairs if jnp.issubdtype(a.dtype, jnp.inexact)]
        assert max(errors) < 1e-2, errors
        print(*rest, "ok", flush=True)

    for name in ("cudnn", "mosaic_tpu"):
        with jax.set_mesh(mesh):
            try:
                run(inputs, {}, name)
            except NotImplementedError as refusal:
                print(refusal, "ok", flush=True)
            else:
                raise AssertionError(
                    f"the backend {name} accepts rows that devices share, but must raise an error"
                )


if __name__ == "__main__":
    main()
