"""Compare packed Mixtures-of-Memories on rows that devices share with one device: outputs, every gradient and the final state.

`test_sequence` runs it in a process of eight devices: `python -m tests.parallel.sequence_mom DEVICES:METHOD ...`.
`time:DEVICES:METHOD` prints the time of a forward and backward pass in each form instead.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lsm_jax import mixers
from lsm_jax.mixers import mom
from lsm_jax.parallel import token_sharding
from tests.mixers.conftest import run, stir
from tests.parallel.meshes import WIDTH, compare, mixer
from tests.parallel.sequence_models import mesh_of

BATCH, LENGTH = 2, 48


def layer_of(config: mixers.MoMConfig, width: int = WIDTH, scale: float = 0.2):
    """Return a Mixture-of-Memories layer as (function of (parameters, x, state) -> (output, state,
    gradients), parameters).
    """
    depth = dict(layer=1, num_layers=2)
    module = mixers.build(config, width, rngs=nnx.Rngs(0), init_std=scale, **depth)
    stir(module)
    graph, params = nnx.graphdef(module), nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def loss(floats, state):
        params, x = floats
        y, after, aux = run(nnx.merge(graph, params), x, state=state)
        total = jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))
        return total + sum(v for k, v in aux.items() if k.endswith("_loss")), (y, after)

    def both(params, x, state):
        (_, (y, after)), gradients = jax.value_and_grad(loss, has_aux=True)((params, x), state)
        return y, after, gradients

    return module, both, params


def check(name: str, devices: str) -> None:
    """Assert that a Mixture-of-Memories on a row whose tokens are divided over devices has the results of one
    device: for one call on all tokens, and for two calls on a half each. `row_conv` is one around GLA with both kinds of
    short convolutions.
    """
    inner = mixer("gla", conv_size=3) if name == "row_conv" else mixer(name)
    config = mixers.MoMConfig(
        mixer=inner, balance_scale=0.1, row_conv_size=4 if name == "row_conv" else 1
    )
    module, both, params = layer_of(config)
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))

    def calls():
        results, half = [jax.jit(lambda *a: both(*a))(params, x, None)], LENGTH // 2
        state = module.init_state(BATCH, LENGTH, jnp.float32)
        for part in (x[:, :half], x[:, half:]):
            results.append(jax.jit(lambda *a: both(*a))(params, part, state))
            state = results[-1][1]
        return jax.tree.map(np.asarray, results)

    expected = calls()
    laid_out = mock.Mock(side_effect=mom.pack_by_device)
    with jax.set_mesh(mesh_of(devices)), mock.patch.object(mom, "pack_by_device", laid_out):
        got = calls()
    assert laid_out.call_count >= 3, "rows are packed on each device"
    for a, b in zip(got, expected, strict=True):
        for part, wanted in zip(a, b, strict=True):
            compare(name, part, wanted)


def measure(name: str, devices: str) -> None:
    """Print the milliseconds of a Mixture-of-Memories' forward and backward pass of one row of 8,192
    tokens, width 256, in each form.
    """
    width, length = 256, 8192
    inner = mixers.METHODS[name].config.for_width(width)
    config = mixers.MoMConfig(mixer=inner, num_memories=8, top_k=2)
    mesh = mesh_of(devices)
    x = jax.random.normal(jax.random.key(1), (1, length, width))
    for execution in ("masked", "packed"):
        form = dataclasses.replace(config, execution=execution)
        _, both, params = layer_of(form, width, 0.02)
        with jax.set_mesh(mesh):
            rows = jax.device_put(x, token_sharding(mesh))
            step = jax.jit(lambda p, x, both=both: both(p, x, None)[::2])
            jax.block_until_ready(step(params, rows))
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(step(params, rows))
                seconds.append(time.perf_counter() - start)
        print(f"{name} {devices} devices, {execution}: {1e3 * min(seconds):.0f} ms", flush=True)


def main(*cases: str) -> None:
    """Compare Mixtures-of-Memories on shared rows with one device for each case DEVICES:METHOD, and measure
    times for each case time:DEVICES:METHOD.
    """
    for case in cases:
        *timed, devices, name = case.split(":")
        (measure if timed else check)(name, devices)
        print(case, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
