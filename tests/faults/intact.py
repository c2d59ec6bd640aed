"""Write the intact inputs that the campaign damages."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow
import pyarrow.parquet

from tests.faults import configs, inputs

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def digest(tree: Any) -> str:
    """Return a digest of the names, shapes and bytes of all arrays in a tree."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def build(folder: Path) -> None:
    """Write the intact inputs of all `SUBJECTS` to the new folder `folder`, each in a folder of its name."""
    from lsm_jax.convert import export, import_huggingface
    from lsm_jax.convert.huggingface import load_params, model_config
    from lsm_jax.data.tokenize import write_store
    from lsm_jax.linearize.export import export_run
    from lsm_jax.training import train

    source, text = folder / "source", folder / "source" / "text"
    inputs.write_text(text)
    _write_tokenizer(inputs.write_llama(source / "llama"))
    shutil.copytree(source / "llama", folder / "checkpoint")
    _split(folder / "checkpoint", folder / "sharded")
    shutil.copytree(folder / "sharded", folder / "export")
    config = model_config(source / "llama")
    params = load_params(source / "llama", config)
    export(params, config, source / "llama", folder / "exported")
    (folder / "gguf").mkdir()
    shutil.copy(inputs.ROOT / "tests" / "convert" / "goldens" / "llama.gguf", folder / "gguf")
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / "llama" / name, folder / "tokenizer")
    released = folder / "released"
    shutil.copytree(source / "llama", released)
    _change_json(
        released / "config.json", model_type="liger_gla", architectures=["LigerGLAForCausalLM"]
    )
    for name, part in (("train", text), ("heldout", text)):
        write_store(
            [str(part)],
            str(folder / "store" / f"{name}.zarr"),
            tokenizer="bytes",
            sequence_length=64,
            pack=True,
            num_workers=1,
        )
    (folder / "text").mkdir()
    rows = [json.dumps(dict(text=path.read_text())) for path in sorted(text.iterdir())]
    (folder / "text" / "lines.jsonl").write_text("\n".join(rows) + "\n")
    packed = folder / "packed"
    packed.mkdir()
    content = ("\n".join(rows) + "\n").encode()
    (packed / "lines.jsonl.gz").write_bytes(gzip.compress(content))
    (packed / "lines.jsonl.zst").write_bytes(pyarrow.Codec("zstd").compress(content).to_pybytes())
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([json.loads(row) for row in rows]), packed / "rows.parquet"
    )

    run = folder / "run"
    train(small("plain", source), run)
    (folder / "load").mkdir()
    shutil.copytree(run, folder / "load" / "run")
    stopped = folder / "resume"
    train(
        small("plain", source), stopped, on_report=lambda step: _stop(step, 4)
    )  # continues in each case
    (folder / "lora").mkdir()
    train(small("lora", source), folder / "lora" / "run")
    shutil.copytree(source / "llama", folder / "frozen_base")
    export_run(folder / "lora" / "run", folder / "adapters", format="peft")
    (folder / "results").mkdir()
    shutil.copytree(run, folder / "results" / "run")
    evaluate(folder / "results" / "run", "first")
    (folder / "tasks").mkdir()
    _write_tasks(folder / "tasks")
    (folder / "tasks-without-code").mkdir()
    (folder / "tasks-without-code" / "a.yaml").write_text("task: a\ndoc_to_text: text\n")
    import_huggingface(source / "llama", source / "imported")


def small(kind: str, source: Path) -> Any:
    """Return the config of a run of six steps of one of `configs.KINDS`, with a checkpoint after every second
    step."""
    config = configs.get_config(f"{kind},{source}")
    if kind == "plain":
        config.model = dataclasses.replace(config.model, num_layers=1, pattern="L")
    config.total_tokens = 6 * configs.ROWS * configs.LENGTH
    config.checkpoint_every, config.eval_every = 2, 0
    config.data.num_threads = config.data.prefetch = 0
    return config


def _stop(step: int, last: int) -> None:
    if step == last:
        os.kill(os.getpid(), signal.SIGTERM)


def _change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2))


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 256 bytes and BOS to a folder."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(bos_token="<s>", eos_token="<s>", chat_template=TEMPLATE, model_max_length=64)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _split(source: Path, out: Path) -> None:
    """Write a Hugging Face folder with the tensors of another one in two files and an index."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    (out / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = dict(metadata=dict(total_size=1), weight_map=weight_map)
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_tasks(folder: Path) -> None:
    """Write a task of lm-evaluation-harness and its data."""
    rows = [dict(text="to be", choices=[" or not", " zq"], label=0) for _ in range(2)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "choice.yaml").write_text(
        "task: choice\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'data.jsonl'}}}}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        "doc_to_text: '{{text}}'\n"
        "doc_to_choice: '{{choices}}'\n"
        "doc_to_target: label\n"
        "metric_list: [{metric: acc}]\n"
    )


def evaluate(run: Path, output: str) -> None:
    """Run `eval.py --workdir=RUN --output=OUTPUT` in this process, without its sampling."""
    program = _eval_program()
    program.FLAGS.unparse_flags()
    arguments = [f"--workdir={run}", f"--output={output}", "--tasks=perplexity", "--max_tokens=256"]
    program.main(program.FLAGS(["eval.py", *arguments])[:1])


_programs: dict[str, Any] = {}


def _eval_program() -> Any:
    if not _programs:
        spec = importlib.util.spec_from_file_location("eval_program", inputs.ROOT / "eval.py")
        assert spec is not None and spec.loader is not None
        _programs["eval"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_programs["eval"])
    return _programs["eval"]
