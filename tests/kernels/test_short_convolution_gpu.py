"""Tests of the Hopper kernels of short convolutions: run in Mosaic GPU's interpreter, and lowered for an
H200.
"""

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks.calls.tokens import convolution_inputs as make
from benchmarks.calls.tokens import plain_convolution as plain
from lsm_jax import ops
from lsm_jax.ops.core.segments import read_tokens
from pallas_kernels.compat import gpu_interpreter, plgpu, races_found
from pallas_kernels.short_convolution import short_convolution, unsupported
from pallas_kernels.short_convolution.cases import INTERPRETED, TOLERANCES, Case
from pallas_kernels.short_convolution.hopper import block, tilings
from tests.kernels.test_linear_attention_gpu import error


def fused(arrays, ids, silu, head_dim, contiguous=False, interpreted=True):
    tokens = read_tokens(ids, None, jnp.ones(arrays["x"].shape[0], jnp.int32), None)
    return short_convolution(
        **arrays, run=tokens.run, real=tokens.real, contiguous=contiguous, silu=silu, head_dim=head_dim,
        interpret=gpu_interpreter() if interpreted else False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * bool(i), id=c.id)
        for i, c in enumerate(INTERPRETED)
    ],
)
def test_equals_the_plain_form(case):
    """The value and every gradient of the short convolution's kernel are those of XLA in float32, and there
    are no races.
    """
    compare(case)


# Each: the channels of a thread, tokens of a step, stages, tokens of a block, blocks, warpgroups of a thread block. Blocks have several steps,
# more than there are stages.
TILED = (
    (tilings.Tiling(4, 4, 2, 32, 1), Case(32, 512, 2, False, False, True, None)),
    (tilings.Tiling(4, 8, 2, 32, 1, groups=2), Case(120, 512, 4, True, True, True, 128, contiguous=True)),
    (tilings.Tiling(8, 4, 3, 64, 1), Case(120, 1024, 4, False, False, True, None)),
    (tilings.Tiling(2, 16, 2, 64, 1), Case(128, 256, 3, True, True, True, None, contiguous=True)),
    (tilings.Tiling(4, 8, 3, 32, 1, groups=4), Case(120, 128, 4, True, True, True, None, batch=4, contiguous=True)),
    (tilings.Tiling(8, 4, 3, 32, 1, groups=3), Case(60, 256, 2, False, True, True, 256, batch=4)),
    (tilings.Tiling(4, 4, 2, 16, 1, groups=3), Case(33, 512, 4, True, True, True, 128, contiguous=True)),
    (tilings.REGISTERS, Case(33, 1024, 4, True, True, True, 128, contiguous=True)),
    (tilings.Tiling(4, 4, 0, 32, 1, groups=2), Case(64, 512, 4, False, True, True, 64)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("tiling", "case"),
    [
        pytest.param(*x, marks=[pytest.mark.slow] * bool(i), id=":".join(map(str, x[0])))
        for i, x in enumerate(TILED)
    ],
)
def test_equals_the_plain_form_in_other_tilings(tiling, case, monkeypatch):
    monkeypatch.setattr(tilings, "TILINGS", dict.fromkeys(tilings.TILINGS, tiling))
    compare(case)


@pytest.mark.parametrize(
    "tiling, case", [*TILED, (tilings.Tiling(8, 16, 8, 64, 1, groups=4), TILED[4][1])]
)
def test_counts_the_shared_memory_that_kernels_declare(tiling, case, monkeypatch):
    """The number of stages is the largest whose buffers, as the kernels declare them, have room."""
    declared = []

    def launched(kernel, *, scratch, outputs, **_):
        buffers = [x for x in (scratch or {}).values() if not isinstance(x, plgpu.Barrier)]
        declared.append(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers))
        return {n: jnp.zeros(x.shape, x.dtype) for n, x in outputs.items()}

    layouts = []
    of = block.Layout.of
    monkeypatch.setattr(block.Layout, "of", lambda *a: layouts.append(of(*a)) or layouts[-1])
    monkeypatch.setattr(tilings, "TILINGS", dict.fromkeys(tilings.TILINGS, tiling))
    for name in ("forward", "backward"):
        module = importlib.import_module(f"pallas_kernels.short_convolution.hopper.{name}")
        monkeypatch.setattr(module, "launch", launched)
    arrays, ids = make(
        case.length, case.channels, case.width, documents=case.documents, bias=case.bias, batch=case.batch,
        contiguous=case.contiguous,
    )  # fmt: skip
    y, pull = jax.vjp(
        lambda a: fused(a, ids, case.silu, case.head_dim, case.contiguous, False), arrays
    )
    pull(y)
    assert len(layouts) == len(declared) == 2
    for layout, size in zip(layouts, declared, strict=True):
        assert layout.smem_bytes == size
        assert size <= block.SMEM_BYTES or layout.stages <= 2
        more = layout._replace(stages=layout.stages + 1).smem_bytes
        assert layout.stages in (0, tiling.stages) or more > block.SMEM_BYTES


def test_names_a_tiling_that_is_not_accepted():
    for x in (*tilings.TILINGS.values(), *(x for x, _ in TILED)):
        assert tilings.unaccepted_tiling(*x) is None
    for field, value in dict(channels=3, step=6, stages=1, tokens=48, blocks=0, groups=5).items():
        wrong = tilings.TILINGS["backward"]._replace(**{field: value})
        assert f"not {value}" in str(tilings.unaccepted_tiling(*wrong))


def compare(case):
    length, channels, width, documents, bias, silu, head_dim, batch, contiguous = case
    arrays, ids = make(
        length, channels, width, documents=documents, bias=bias, batch=batch, contiguous=contiguous
    )
    dy = jnp.asarray(np.random.default_rng(1).normal(size=arrays["x"].shape), jnp.bfloat16)
    if ids is not None:
        dy = jnp.where((ids == 0)[..., None], jnp.nan, dy)
    y, pull = jax.vjp(lambda a: fused(a, ids, silu, head_dim, contiguous), arrays)
    (gradients,) = pull(dy)
    assert not races_found()
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    expected, pull = jax.vjp(lambda a: plain(a, ids, silu, head_dim), wide)
    (wanted,) = pull(jnp.nan_to_num(dy).astype(jnp.float32))
    assert error(y, expected) < TOLERANCES["interpreted"]
    for name, got in gradients.items():
        assert got.dtype == jnp.bfloat16
        assert error(got, wanted[name]) < TOLERANCES["interpreted"], name


def test_no_later_token_changes_a_bit():
    arrays, ids = make(36, 256, 4, documents=True, bias=False)
    assert ids is not None
    later = jnp.arange(36) >= 21
    changed = arrays | dict(x=jnp.where(later[:, None], -arrays["x"], arrays["x"]))
    other = jnp.where(later, jnp.where(ids == 0, 9, 0), ids)
    y, z = (fused(a, i, True, 64) for a, i in ((arrays, ids), (changed, other)))
    np.testing.assert_array_equal(y[:, :21], z[:, :21])
    assert jnp.isfinite(y).all() and (y[:, 21:] != z[:, 21:]).any()


@pytest.mark.parametrize(
    ("documents", "contiguous", "channels", "head_dim", "normalizes"),
    [
        (False, False, 1024, 128, True),
        (True, False, 1024, 128, True),
        (False, False, 768, 256, True),
        (True, True, 768, 256, True),
        (True, False, 768, 256, False),
        (False, False, 1024, 512, False),
        (True, True, 128, None, True),
        (False, False, 320, None, True),
    ],
)
def test_the_op_lowers_to_it_on_the_card(documents, contiguous, channels, head_dim, normalizes):
    """Without a named implementation, the op of short convolutions lowers to one kernel forward and one
    backward on a Hopper GPU; with a mask it selects XLA. Heads that are too wide for the kernel, and those that would need an order of each
    row, are normalised by XLA.
    """
    struct = jax.ShapeDtypeStruct
    x, weight = struct((2, 4090, channels), jnp.bfloat16), struct((4, channels), jnp.bfloat16)
    ids = struct((2, 4090), jnp.int32)

    def lowered(mask):
        def step(x, weight, ids):
            def total(x, weight):
                y, state = ops.short_convolution(
                    x, weight, silu=True, head_dim=head_dim, segment_ids=ids if documents else None,
                    contiguous=contiguous, update_mask=jnp.ones(ids.shape) if mask else None,
                )  # fmt: skip
                return jnp.sum(y.astype(jnp.float32)) + jnp.sum(state.tail.astype(jnp.float32))

            return jax.value_and_grad(total, argnums=(0, 1))(x, weight)

        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            return jax.jit(step).trace(x, weight, ids).lower(lowering_platforms=("cuda",)).as_text()

    text = lowered(mask=False)
    assert text.count("custom_call @mosaic_gpu") == 2
    assert ("stablehlo.rsqrt" not in text) == normalizes
    assert "mosaic_gpu" not in lowered(mask=True)


def test_names_the_requirement_that_is_not_met():
    arrays, _ = make(64, 256, 4, documents=False, bias=False)
    x, weight = arrays["x"], arrays["weight"]
    assert unsupported(x, weight, 64) is None
    assert unsupported(x, weight, 128) is None
    documents = (
        "not 256 in heads of 128, 1 x 64 tokens, with documents that may have padding inside"
    )
    assert documents in str(unsupported(x, weight, 128, ordered=True))
    assert "not 256 in heads of 128, 1 x 20 tokens" in str(unsupported(x[:, :20], weight, 128))
    wide, narrow = (
        jax.ShapeDtypeStruct((4, 64, 1024), jnp.bfloat16),
        lambda n: jax.ShapeDtypeStruct((4, 64, n), jnp.bfloat16),
    )
    assert "not 1024 in heads of 512" in str(unsupported(wide, weight, 512))
    assert "not 96, 4 x 64 tokens" in str(unsupported(narrow(96), weight, None))
    documents = "not 128, 4 x 64 tokens, with documents that may have padding inside"
    assert documents in str(unsupported(narrow(128), weight, None, ordered=True))
    assert unsupported(narrow(128), weight, None) is None
    assert "2 to 4 rows, not 5" in str(unsupported(x, jnp.ones((5, 256)), None))
    call: Any = dict(weight=weight, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="requires x in bfloat16, not float32"):
        ops.short_convolution(x.astype(jnp.float32), **call)
    with pytest.raises(NotImplementedError, match="requires 64 tokens or more, not 63"):
        ops.short_convolution(x[:, :63], **call)
    with pytest.raises(NotImplementedError, match="requires no update_mask"):
        ops.short_convolution(x, **call, update_mask=jnp.ones(x.shape[:2]))
    with pytest.raises(ValueError, match="implementation='cutile'; accepted are"):
        short_convolution(x, weight, initial=arrays["initial"], silu=True, implementation="cutile")
    with pytest.raises(ValueError, match="head_dim=100; accepted are divisors"):
        ops.short_convolution(x, weight, head_dim=100)
