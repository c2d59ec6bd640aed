"""Export runs of this library as checkpoints that flash-linear-attention (FLA) or transformers loads.

    python -m lsm_jax.convert.released_export --workdir=runs/gla --out=gla-340m
    python -m lsm_jax.convert.released_export --workdir=runs/tuned --out=tuned --source=gla-1.3B-100B

The folder has config.json, model.safetensors and the run's tokenizer.json. GLA, RetNet, DeltaNet, Gated DeltaNet, KDA, HGRN, HGRN2,
GSA, ABC, LightNet, linear attention, RWKV-6, RWKV-7, Gated DeltaProduct, Comba, the preconditioned delta rules, MesaNet and
Mixture-of-Memories are written for FLA, also with layers of softmax attention, and PaTH attention, MoBA, NSA, multi-head latent
attention and Mamba-3 without; Mamba, Mamba-2, mLSTM, RG-LRU, hybrids of Mamba-2 or of short convolutions, Gated DeltaNet with gated
attention or OLMo's attention, and KDA with multi-head latent attention for transformers. Adapters (LoRA) are merged. With the
checkpoint that the run was imported from (`--source`), the folder has its config, files, dtypes and tokenizer: an unchanged model is
exported byte for byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lsm_jax import mixers, programs
from lsm_jax.convert.checkpoint import FLOATS
from lsm_jax.convert.families import FAMILIES, Family
from lsm_jax.convert.folder import export, new_files, write_index
from lsm_jax.convert.new_folder import check_new, new_folder
from lsm_jax.convert.tokenizer import tokenizer_files
from lsm_jax.data.tokenizers import tokenizer_path
from lsm_jax.models import ModelConfig
from lsm_jax.training import load_run

# The families that may have a mixer, in the order in which they are tried.
_METHODS: dict[type, tuple[str, ...]] = {
    mixers.GLAConfig: ("gla",),
    mixers.RetNetConfig: ("retnet",),
    mixers.DeltaNetConfig: ("delta_net",),
    mixers.GatedDeltaNetConfig: ("gated_deltanet", "olmo_hybrid"),
    mixers.KDAConfig: ("kda",),
    mixers.HGRN2Config: ("hgrn2",),
    mixers.GSAConfig: ("gsa",),
    mixers.LinearAttentionConfig: ("linear_attn",),
    mixers.MoMConfig: ("mom",),
    mixers.RWKV6Config: ("rwkv6",),
    mixers.RWKV7Config: ("rwkv7",),
    mixers.MambaConfig: ("mamba",),
    mixers.Mamba2Config: ("mamba2", "granitemoehybrid", "bamba", "nemotron_h"),
    mixers.ParallelConfig: ("falcon_h1",),
    mixers.ShortConvConfig: ("lfm2",),
    mixers.MLSTMConfig: ("xlstm",),
    mixers.GatedDeltaProductConfig: ("gated_deltaproduct",),
    mixers.CombaConfig: ("comba",),
    mixers.PrecondGatedDeltaNetConfig: ("precond_gated_deltanet",),
    mixers.PrecondKDAConfig: ("precond_kda",),
    mixers.MesaNetConfig: ("mesa_net",),
    mixers.PaTHConfig: ("path_attn",),
    mixers.MoBAConfig: ("moba",),
    mixers.NSAConfig: ("nsa",),
    mixers.MLAConfig: ("mla",),
    mixers.RGLRUConfig: ("recurrent_gemma",),
    mixers.HGRNConfig: ("hgrn",),
    mixers.LightNetConfig: ("lightnet",),
    mixers.ABCConfig: ("abc",),
    mixers.Mamba3Config: ("mamba3",),
    mixers.Mamba3MIMOConfig: ("mamba3",),
    mixers.LogLinearMamba2Config: ("log_linear_mamba2",),
}
_GATED = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
)  # of Gated DeltaNet with gated attention
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def family_for(
    config: ModelConfig, norm_eps: float | None = None
) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """Return the family of released models that a model belongs to, the model's config with the epsilon `norm_eps` if there is
    one, and the contents of config.json that describe it.

    Raises:
        ValueError: there is none.
    """
    kinds = {type(config.layers[letter].mixer) for letter in config.letters()}
    known = [_METHODS[kind] for kind in kinds if kind in _METHODS]
    if kinds == {mixers.GatedDeltaNetConfig, mixers.GatedAttentionConfig}:
        known = [_GATED]
    elif kinds == {mixers.KDAConfig, mixers.MLAConfig}:
        known = [("kimi_linear", "bailing_hybrid")]
    elif len(known) != 1 or kinds - set(_METHODS) - {mixers.SoftmaxConfig}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        accepted = ", ".join(kind.__name__ for kind in _METHODS)
        raise ValueError(
            f"the model has mixers of {names}; accepted is one of {accepted}, alone or with SoftmaxConfig, "
            "GatedDeltaNetConfig with GatedAttentionConfig, or KDAConfig with MLAConfig"
        )
    errors = []
    for name in known[0]:
        family, described = FAMILIES[name], config
        try:
            if norm_eps is not None:
                described = family.with_epsilon(config, norm_eps)
            return family, described, family.describe_model(described)
        except ValueError as error:
            errors.append(str(error))
    message = "; ".join(dict.fromkeys(errors))
    if norm_eps is None and "norm_eps=" in message:
        message += (
            f"; with norm_eps (--norm_eps={config.norm_eps:g}) the written model has one epsilon for all norms, "
            "and outputs that differ slightly from the run's"
        )
    raise ValueError(message)


def export_released(
    params: dict[str, Any],
    config: ModelConfig,
    out_folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    tokenizer: str | os.PathLike[str] | None = None,
    norm_eps: float | None = None,
) -> Path:
    """Write a model's parameters as a checkpoint that flash-linear-attention or transformers loads.

    Args:
        params: the parameters of `config`'s model, a pure dict.
        config: the model.
        out_folder: the folder to write; it must be empty or not exist.
        dtype: "float32", "bfloat16" or "float16", of all tensors.
        tokenizer: a tokenizer.json or its folder, or RWKV's vocabulary, a .txt file, which is copied; None is none.
        norm_eps: epsilon of the norms of the written model. FLA has one for the norms of blocks and of mixers; with None, a model
            with several is refused.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the folder is not empty; or the library has no such model, and the message says what differs.
    """
    out = Path(out_folder).expanduser()
    check_new(out, "out_folder")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}; accepted are {', '.join(_DTYPES)}")
    if config.lora is not None:
        raise ValueError(
            "model.lora: the model has adapters; accepted is a model into which they are merged"
        )
    family, config, fields = family_for(config, norm_eps)
    fields |= dict(torch_dtype=dtype)
    layout = family.layout(fields, config, "the exported config")
    files = {}
    if tokenizer is not None:
        path = Path(tokenizer).expanduser()
        files = tokenizer_files(path if path.is_dir() else path.parent, path)
    write, kind = layout.writer(params), FLOATS[_DTYPES[dtype]]
    dtypes = dict.fromkeys(layout.shapes, np.dtype(kind))
    with new_folder(out, "out_folder") as folder:
        folder.write_json("config.json", dict(sorted(fields.items())))
        for file, names in new_files(layout.shapes, dtypes).items():
            folder.write_tensors(file, {n: write(n, kind) for n in names}, {"format": "pt"})
        write_index(folder, layout.shapes, dtypes)
        for name, content in files.items():
            folder.write(name, content)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Export the run --workdir as a checkpoint of flash-linear-attention or transformers, in the folder --out; return the exit
    status."""
    program = "lsm_jax.convert.released_export"
    parser = argparse.ArgumentParser(
        prog=programs.shown_name(f"python -m {program}"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", required=True, help="directory of the run")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--source", help="the checkpoint that the run was imported from")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32)")
    parser.add_argument(
        "--norm_eps", type=float, help="epsilon of all norms, if the run's norms have several"
    )
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parsed = parser.parse_args(arguments)
    try:
        given = [n for n in ("dtype", "norm_eps") if getattr(parsed, n) is not None]
        if parsed.source is not None and given:
            raise ValueError(
                f"--{given[0]} with --source: accepted is one of them; the export has the dtypes and the config of the source"
            )
        run = load_run(parsed.workdir, step=parsed.step)
        name = run.config.data.tokenizer
        params = mixers.merge_adapters(run.params, run.config.model.lora)
        model = dataclasses.replace(run.config.model, lora=None)
        if parsed.source is not None:
            out = export(params, model, parsed.source, parsed.out)
        else:
            tokenizer = None if name in ("bytes", "gpt2") else tokenizer_path(name)
            dtype = parsed.dtype or "float32"
            options = dict(dtype=dtype, tokenizer=tokenizer, norm_eps=parsed.norm_eps)
            out = export_released(params, model, parsed.out, **options)
    except (ValueError, OSError) as error:
        print(f"{programs.shown_name(program)}: {error}", file=sys.stderr)
        return 1
    print(f"wrote the checkpoint of {run.config.name} to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
