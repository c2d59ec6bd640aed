"""Tests of the choice of an op's backend for each platform, while tracing under a mesh of known devices, or
when the program is lowered.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.models.periods import rematerialized
from lsm_jax.ops.attention import cudnn as attention_cudnn
from lsm_jax.ops.backends import registry
from lsm_jax.ops.core.platforms import by_platform
from lsm_jax.parallel import AXES

KINDS = {"gpu": "NVIDIA H200", "tpu": "TPU v5e", "cpu": "cpu"}


def mesh_of(platform: str, *axes: str, kind: str = "") -> AbstractMesh:
    """Return an abstract mesh of devices of another machine (such as GPUs), with two devices along each of
    `axes`.
    """
    device = AbstractDevice(device_kind=kind or KINDS[platform], num_cores=None, platform=platform)
    sizes = tuple(2 if name in axes else 1 for name in AXES)
    kinds = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(sizes, AXES, axis_types=kinds, abstract_device=device)


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [("gpu", "", "cuda"), ("gpu", "AMD Instinct MI300X", "else"), ("tpu", "", "else"), ("cpu", "", "cpu")],
)  # fmt: skip
def test_a_mapped_mesh_determines_the_platform(platform, kind, expected):
    ran = []

    def branch(name):
        return lambda x: ran.append(name) or x

    def by_branches(x):
        branches = {name: branch(name) for name in ("cuda", "cpu")}
        return by_platform(x, default=branch("else"), **branches)

    with use_abstract_mesh(mesh_of(platform, "fsdp", kind=kind)):
        rows = PartitionSpec("fsdp")
        jax.jit(jax.shard_map(by_branches, in_specs=rows, out_specs=rows)).trace(jnp.ones(2))
    assert ran == [expected]


def test_an_unmapped_mesh_leaves_the_platform_to_lowering():
    q = jax.ShapeDtypeStruct((4, 256, 4, 64), jnp.bfloat16)
    with use_abstract_mesh(mesh_of("gpu")):
        traced = jax.jit(lambda q: ops.linear_memory(q, q, q)[0]).trace(q)
        texts = {
            name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")
        }
    assert "mosaic_gpu" in texts["cuda"] and "mosaic_gpu" not in texts["cpu"]


def test_without_a_mesh_lowering_determines_the_platform():
    result = jax.jit(lambda x: by_platform(x, default=lambda x: x, cpu=lambda x: 2 * x))(1.0)
    assert result == (2 if jax.default_backend() == "cpu" else 1)


@pytest.fixture
def with_cudnn(monkeypatch):
    """Fixture: ops select their backends as on a machine with an NVIDIA GPU and cuDNN."""
    jax.clear_caches()  # programs that were selected without cuDNN
    monkeypatch.setattr(attention_cudnn, "has_cudnn", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_, **__: True)


@pytest.mark.parametrize("axes", [("fsdp",), ("tensor",), ("fsdp", "tensor"), ("data", "expert")])
def test_attention_by_cudnn_is_lowered_for_several_cards(axes, with_cudnn):
    """On a mesh of several GPUs, attention by cuDNN is lowered inside a `jax.shard_map` over all axes of the
    mesh: XLA's compiler crashes at jax's custom partitioning of it, and at empty arrays that such a map
    returns.
    """
    q = jax.ShapeDtypeStruct((8, 512, 4, 64), jnp.bfloat16)

    @jax.checkpoint
    def attend(q, k, v):
        return ops.attention(q, k, v)[0]

    def step(q, k, v):
        return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    with use_abstract_mesh(mesh_of("gpu", *axes)):
        text = jax.jit(step).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text
    assert "CustomSPMDPartitioning" not in text
    mapped = re.findall(
        r"^( *)%\S+ = sdy\.manual_computation\(.*?^\1(} : .*?)$", text, re.DOTALL | re.MULTILINE
    )
    assert len(mapped) == text.count("sdy.manual_computation") > 1
    assert not any("tensor<0x" in types for _, types in mapped)


def test_cudnn_attends_with_heads_of_256_on_hopper(with_cudnn):
    """cuDNN computes attention with heads of 256 channels, and its gradient, on a Hopper card, and none on a newer card."""
    q = jax.ShapeDtypeStruct((1, 64, 2, 256), jnp.bfloat16)
    gradient = jax.grad(lambda q: ops.attention(q, q, q)[0].astype(jnp.float32).sum())
    with use_abstract_mesh(mesh_of("gpu")):
        text = jax.jit(gradient).trace(q).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text
    with use_abstract_mesh(mesh_of("gpu", kind="NVIDIA B200")):
        with pytest.raises(NotImplementedError, match=r"9.0 up to 256\), not 256 and 256"):
            jax.eval_shape(lambda q: ops.attention(q, q, q, implementation="cudnn")[0], q)


@pytest.mark.parametrize(("keys", "values"), [(192, 128), (64, 128)])
def test_cudnn_attends_with_unequal_channels(keys, values, with_cudnn, monkeypatch):
    """cuDNN computes attention with other key channels than value channels, and its gradient. Values and gradients are XLA's where
    XLA computes what cuDNN is called with.
    """
    shapes = [(2, 16, 4, keys), (2, 16, 2, keys), (2, 16, 2, values)]
    drawn = zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    inputs = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in drawn]

    def gradients(*inputs, **options):
        def total(q, k, v):
            y, _ = ops.attention(q, k, v, window=9, **options)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*inputs)

    with use_abstract_mesh(mesh_of("gpu")):
        text = jax.jit(gradients).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text
    call = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *x, **o: call(*x, **o | {"implementation": "xla"})
    )
    monkeypatch.setattr(attention_cudnn, "compute_capabilities", lambda: {"9.0"})
    backends = [dataclasses.replace(b, platforms=()) for b in registry.backends_of("attention")]
    monkeypatch.setitem(registry._BACKENDS, "attention", tuple(backends))
    got, wanted = (
        gradients(*inputs, implementation="cudnn"),
        gradients(*inputs, implementation="xla"),
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 2e-2 * np.abs(b).max()


@pytest.mark.parametrize(("remat", "calls"), [("full", 2), ("dots", 1), ("none", 1)])
def test_attention_by_cudnn_runs_once_where_results_of_kernels_are_saved(remat, calls, with_cudnn):
    q = jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)

    @functools.partial(rematerialized, policy=remat)
    def attend(q):
        return ops.attention(q, q, q)[0].astype(jnp.float32) ** 2

    with use_abstract_mesh(mesh_of("gpu", "fsdp")):
        text = str(jax.make_jaxpr(jax.grad(lambda q: attend(q).sum()))(q))
    assert text.count("dot_product_attention_fwd_wrapper[") == calls
    assert text.count("dot_product_attention_bwd_wrapper[") == 1


def test_a_partly_mapped_mesh_excludes_cudnn(with_cudnn):
    """cuDNN is not selected for attention with three heads on a mesh with an axis for rows and one for
    heads: the rows can be split over two GPUs, but not the heads.
    """
    q = jax.ShapeDtypeStruct((8, 512, 3, 64), jnp.bfloat16)
    with use_abstract_mesh(mesh_of("gpu", "fsdp", "tensor")):
        step = jax.jit(lambda q: ops.attention(q, q, q)[0])
        text = step.trace(q).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" not in text
    with use_abstract_mesh(mesh_of("gpu", "fsdp", "tensor")):
        step = jax.jit(lambda q: ops.attention(q, q, q, implementation="cudnn")[0])
        with pytest.raises(NotImplementedError, match="heads that divide over the devices"):
            step.trace(q)


def test_shared_rows_run_by_the_kernel():
    """On a mesh of GPUs that divides rows, attention runs on Hopper's kernel, with and without padding and
    with a window, but not for rows of a length that the kernel does not support; `ops.choices()` then
    names the requirement that is not met.
    """
    for length, window, expected in ((1024, None, True), (1000, 300, True), (320, None, False)):
        q = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
        with use_abstract_mesh(mesh_of("gpu", "sequence")):
            traced = jax.jit(lambda q, w=window: ops.attention(q, q, q, window=w)[0]).trace(q)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("mosaic_gpu" in text) == expected, (length, window)
    assert "or halves of the queries, and keys, in multiples" in ops.choices()["attention"]
