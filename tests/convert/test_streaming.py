"""An import reads tensor by tensor: besides the parameters the host has one tensor at a time, and stored dtypes are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lsm_jax import mixers
from lsm_jax.convert import load_params, model_config
from lsm_jax.convert.families import FAMILIES
from lsm_jax.convert.huggingface import checkpoint_layout, open_source
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.training.partition import leaves_of
from tests.parallel.test_parallel import run_with_devices

CONSTANT = 96 * 2**20  # bytes that a process needs for compilation and buffers, whatever the model
# A process that loads a checkpoint, and prints the largest anonymous memory that it added, less the parameters.
MEMORY = """
import sys, threading, time
import jax
from lsm_jax.convert.huggingface import checkpoint_layout, load_params, model_config, open_source

def memory():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

def watch():
    while not done:
        peaks.append(memory())
        time.sleep(0.001)

source = open_source(sys.argv[1])
config, done, peaks = model_config(source), [], []
dtypes = checkpoint_layout(source, config).stored_dtypes(source)
jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.ones(8)))
start, thread = memory(), threading.Thread(target=watch)
thread.start()
params = load_params(source, config, dtype=dtypes)
done.append(True)
thread.join()
print(max(peaks) - start - sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def write(folder: Path, *, vocab: int, width: int, inner: int, layers: int) -> dict[str, int]:
    """Write a checkpoint of FLA's GLA whose matrices are bfloat16 but for the second matrix of the gate, which is float32, as are
    norms; return the bytes of each tensor."""
    layer = LayerConfig(
        mixer=mixers.GLAConfig(num_heads=2, norm_eps=1e-5),
        feedforward=SwiGLUConfig(intermediate_size=inner),
    )
    config = ModelConfig(vocab_size=vocab, hidden_size=width, num_layers=layers, layers={"L": layer}, tie_embeddings=False, norm_eps=1e-5)  # fmt: skip
    family = FAMILIES["gla"]
    fields = family.describe_model(config)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in family.layout(fields, config, "test").shapes.items():
        wide = len(shape) == 1 or name.endswith("gk_proj.1.weight")
        values = np.resize(rng.standard_normal(min(math.prod(shape), 4099)), shape)
        tensors[name] = values.astype(np.float32 if wide else ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields | dict(torch_dtype="bfloat16")))
    save_file(tensors, folder / "model.safetensors")
    return {name: value.nbytes for name, value in tensors.items()}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="requires Linux's /proc")
def test_the_host_needs_the_parameters_and_one_tensor(tmp_path):
    sizes = write(tmp_path / "model", vocab=65536, width=512, inner=8192, layers=6)
    total, largest = sum(sizes.values()), max(sizes.values())
    assert total > 290e6 and largest > 0.2 * total
    extra = int(run_with_devices(1, "-c", MEMORY, str(tmp_path / "model")))
    print(
        f"{total / 2**20:.0f} MiB, largest {largest / 2**20:.0f} MiB: {extra / 2**20:.0f} MiB besides the parameters"
    )
    assert extra < largest + CONSTANT


def test_the_stored_dtype_of_each_matrix_is_kept(tmp_path):
    sizes = write(tmp_path / "model", vocab=64, width=32, inner=48, layers=2)
    source = open_source(tmp_path / "model")
    config = model_config(source)
    params = load_params(
        source, config, dtype=checkpoint_layout(source, config).stored_dtypes(source)
    )
    wide = {"decay_up.kernel", "decay_up.bias"}
    for name, leaf in leaves_of(params).items():
        narrow = name.endswith(("kernel", "embedding")) and not name.endswith(tuple(wide))
        assert leaf.dtype == ("bfloat16" if narrow else "float32"), name
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == sum(sizes.values())
