"""The inputs of the campaign's runs: text, a small pretrained Llama, and commands that read them."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "faults" / "configs.py"


def write_text(folder: Path) -> Path:
    """Write twelve short documents to the new folder `folder`, and return it."""
    folder.mkdir(parents=True)
    for i in range(12):
        sentence = "to be or not to be, that is the question. " * (5 + i)
        (folder / f"{i}.txt").write_text(f"document {i}: {sentence}")
    return folder


def write_llama(folder: Path) -> Path:
    """Write a Hugging Face folder with a Llama of two layers and random weights to the new folder `folder`,
    and return it."""
    folder.mkdir(parents=True)
    width, heads, kv_heads, inner, vocabulary, layers = 16, 4, 2, 24, 257, 2
    config = dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        torch_dtype="float32",
        hidden_act="silu",
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    rng, kv = np.random.default_rng(0), kv_heads * width // heads
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (width,),
            f"{at}post_attention_layernorm.weight": (width,),
            f"{at}self_attn.q_proj.weight": (width, width),
            f"{at}self_attn.k_proj.weight": (kv, width),
            f"{at}self_attn.v_proj.weight": (kv, width),
            f"{at}self_attn.o_proj.weight": (width, width),
            f"{at}mlp.gate_proj.weight": (inner, width),
            f"{at}mlp.up_proj.weight": (inner, width),
            f"{at}mlp.down_proj.weight": (width, inner),
        }
    tensors = {n: (0.3 * rng.normal(size=s)).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def train_command(kind: str, folder: Path, workdir: Path) -> list[str]:
    """Return the command that trains the run of one kind (`configs.KINDS`) in `workdir`.

    Args:
        kind: the kind of run.
        folder: the folder of the inputs: text, llama, stores, and the finished run plain.
        workdir: the run's directory.
    """
    command = [sys.executable, str(ROOT / "train.py"), f"--config={CONFIG}:{kind},{folder}"]
    command.append(f"--workdir={workdir}")
    if kind == "init_from":
        command.append(f"--init_from={folder / 'plain'}")
    return command


def tokenize_command(folder: Path, out: Path) -> list[str]:
    """Return the command that writes the stores train.zarr and heldout.zarr of the text in `folder` to `out`."""
    return [
        *(sys.executable, "-m", "lsm_jax.data.tokenize", "--pack", "--tokenizer=bytes"),
        *(f"--input={folder / 'text'}", f"--output={out / 'train.zarr'}"),
        *(f"--heldout={out / 'heldout.zarr'}", "--heldout_fraction=0.3"),
        *("--sequence_length=64", "--num_workers=2", "--overwrite"),
    ]


def environment(kind: str, cache: Path, home: Path) -> list[dict[str, str]]:
    """Return the environment of each process of a run of one kind.

    Args:
        kind: the kind of run; "hosts" has two processes, which connect over a free port.
        cache: folder of compiled programs and of matplotlib's list of fonts, which all processes read and write.
        home: HOME and TMPDIR of the processes, in which a run must write nothing.
    """
    flags = (
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
    if kind == "pipeline":
        flags += " --xla_force_host_platform_device_count=2"
    shared = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    shared |= {
        "HOME": str(home),
        "MPLCONFIGDIR": str(
            cache / "matplotlib"
        ),  # its list of fonts, which it stores in HOME otherwise
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "XLA_FLAGS": flags,
        "NPROC": "2",
    }
    if kind != "hosts":
        return [shared]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2"}
    return [shared | {"JAX_PROCESS_ID": str(i)} for i in range(2)]
