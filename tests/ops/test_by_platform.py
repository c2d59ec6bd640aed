"""What runs on which platform, decided while tracing under a mesh that knows its devices."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.ops.attention import cudnn as attention_cudnn
from lsm_jax.ops.core.platforms import by_platform
from lsm_jax.parallel import AXES

KINDS = {"gpu": "NVIDIA H200", "tpu": "TPU v5e", "cpu": "cpu"}


def mesh_of(platform: str, *axes: str, kind: str = "") -> AbstractMesh:
    """A mesh of devices that are not here, two along each of `axes`."""
    device = AbstractDevice(device_kind=kind or KINDS[platform], num_cores=None, platform=platform)
    sizes = tuple(2 if name in axes else 1 for name in AXES)
    kinds = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(sizes, AXES, axis_types=kinds, abstract_device=device)


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [("gpu", "", "cuda"), ("gpu", "AMD Instinct MI300X", "else"), ("tpu", "", "else"), ("cpu", "", "cpu")],
)  # fmt: skip
def test_a_mapped_mesh_decides(platform, kind, expected):
    ran = []

    def branch(name):
        return lambda x: ran.append(name) or x

    def choose(x):
        branches = {name: branch(name) for name in ("cuda", "cpu")}
        return by_platform(x, default=branch("else"), **branches)

    with use_abstract_mesh(mesh_of(platform, "fsdp", kind=kind)):
        rows = PartitionSpec("fsdp")
        jax.jit(jax.shard_map(choose, in_specs=rows, out_specs=rows)).trace(jnp.ones(2))
    assert ran == [expected]


def test_a_mesh_that_is_not_mapped_leaves_it_to_lowering():
    q = jax.ShapeDtypeStruct((4, 256, 4, 64), jnp.bfloat16)
    with use_abstract_mesh(mesh_of("gpu")):
        traced = jax.jit(lambda q: ops.linear_memory(q, q, q)[0]).trace(q)
        texts = {
            name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")
        }
    assert "mosaic_gpu" in texts["cuda"] and "mosaic_gpu" not in texts["cpu"]


def test_without_a_mesh_lowering_decides():
    found = jax.jit(lambda x: by_platform(x, default=lambda x: x, cpu=lambda x: 2 * x))(1.0)
    assert found == (2 if jax.default_backend() == "cpu" else 1)


@pytest.fixture
def with_cudnn(monkeypatch):
    """As on a machine that has an NVIDIA card."""
    jax.clear_caches()  # programs that were selected without cuDNN
    monkeypatch.setattr(attention_cudnn, "has_cudnn", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_, **__: True)


@pytest.mark.parametrize("axes", [("fsdp",), ("tensor",), ("fsdp", "tensor"), ("data", "expert")])
def test_attention_by_cudnn_is_lowered_for_several_cards(axes, with_cudnn):
    """Mapped over all axes, for jax's own partitioning of it, and empty arrays that cross the border, crash XLA's compiler."""
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
    borders = re.findall(r"^( *)%\S+ = sdy\.manual_computation\(.*?^\1(} : .*?)$", text, re.DOTALL | re.MULTILINE)  # fmt: skip
    assert len(borders) == text.count("sdy.manual_computation") > 1
    assert not any("tensor<0x" in types for _, types in borders)


def test_attention_left_half_to_the_partitioner_is_not_by_cudnn(with_cudnn):
    """Three heads do not divide over two cards, rows do."""
    q = jax.ShapeDtypeStruct((8, 512, 3, 64), jnp.bfloat16)
    with use_abstract_mesh(mesh_of("gpu", "fsdp", "tensor")):
        step = jax.jit(lambda q: ops.attention(q, q, q)[0])
        text = step.trace(q).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" not in text
    with use_abstract_mesh(mesh_of("gpu", "fsdp", "tensor")):
        step = jax.jit(lambda q: ops.attention(q, q, q, implementation="cudnn")[0])
        with pytest.raises(NotImplementedError, match="heads that divide over the devices"):
            step.trace(q)


def test_rows_in_parts_run_by_the_kernel(monkeypatch):
    """On Hopper alone, filled up or not, with a window or without; where it does not serve, it is said."""
    for length, window, expected in ((1024, None, True), (1000, 300, True), (320, None, False)):
        q = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
        with use_abstract_mesh(mesh_of("gpu", "sequence")):
            traced = jax.jit(lambda q, w=window: ops.attention(q, q, q, window=w)[0]).trace(q)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("mosaic_gpu" in text) == expected, (length, window)
    assert "mosaic_gpu requires halves of the queries" in ops.choices()["attention"]
