"""Compare this checkout with the commit before the redesign, number by number: `python -m scripts.compare_release`.

Both trees run the same five sections on this machine's CPU, and every difference is printed:

    ops       outputs, final states and gradients of every case of tests/ops, in every form, in float32
    mixers    outputs, states and gradients of every method and of Mixture-of-Memories, and one decoding step
    kernels   the jaxpr of every fused kernel, forward and backward, for Hopper and for TPU: equal jaxprs compile to equal code,
              so that spilled registers and speed are the reference's too
    runs      the losses of a tiny training run of each configuration family
    resume    the reference's runs, cut back to their middle and continued by this checkout

Numbers are compared as SHA-256 of their bytes. The reference tree is a git worktree in `--folder`, where its results are kept: a
second comparison runs this checkout alone. Exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "a5b7204"
SECTIONS = ("ops", "mixers", "kernels", "runs", "resume")
# As in tests/conftest.py: both trees compile alike, and in a fraction of the time.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1",
}

# ------------------------------------------------------------------------------------------------------------ what is compared


def digest(tree: Any) -> str:
    """SHA-256 of a pytree's leaves: their shapes, dtypes and bytes, in order."""
    import jax
    import numpy as np

    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        total.update(f"{array.shape} {array.dtype} ".encode() + array.tobytes())
    return total.hexdigest()[:24]


def collect_ops() -> Iterator[tuple[str, str]]:
    """Every case of the table of ops, in every form, from a state and with packed documents."""
    import jax
    import jax.numpy as jnp

    from tests.ops.cases import CASES, make_inputs, make_state
    from tests.ops.test_ops import gradients, settings

    def narrow(x):
        return x.astype(jnp.float32) if jnp.result_type(x) == jnp.float64 else x

    for case in CASES:
        for form in case.forms:
            for kind in ("documents", "segments"):
                with jax.enable_x64(True):
                    given = settings(kind, case)
                    state = given.pop("state")
                    if form in ("recurrent", None) and kind == "segments":
                        state, given = make_state(case), {}
                    inputs, state = jax.tree.map(narrow, (make_inputs(case), state))
                result = gradients(case, form, inputs, state, **given)
                yield f"{case.name} {form} {kind}", digest(result)


def collect_mixers() -> Iterator[tuple[str, str]]:
    """Every method's mixer at a small width, and Mixture-of-Memories around each that can be inside it."""
    import jax
    import jax.numpy as jnp

    from lsm_jax import mixers
    from tests.mixers import mom_cases
    from tests.mixers.conftest import BATCH, LENGTH, Small

    ids = jnp.asarray([[1] * 4 + [2] * 5 + [0], [3] * 2 + [0] + [3] * 3 + [7] * 4])
    for name, method in mixers.METHODS.items():
        small = Small(method, stirred=True)
        gradients, (y, state) = small.gradient(small.mixer, small.x)
        yield f"{name} gradients", digest(gradients)
        yield f"{name} output", digest(y)
        yield f"{name} state", digest(state)
        yield f"{name} documents", digest(small(segment_ids=ids))
        y, state = small(small.x[:, :-1], state=small.state())
        yield f"{name} prefill", digest((y, state))
        yield f"{name} decoding", digest(small(small.x[:, -1:], state=state))
    del BATCH, LENGTH
    for name in mom_cases.INNER:
        mixer = mom_cases.made(name)
        yield f"mom of {name}", digest(mom_cases.gradient(mixer, mom_cases.X))
        ids = jnp.asarray([[1] * 5 + [2] * 6, [1] * 3 + [0] * 2 + [2] * 6])
        yield (
            f"mom of {name} documents",
            digest(mom_cases.call(mixer, mom_cases.X, segment_ids=ids)),
        )
        jax.clear_caches()


# What a kernel's jaxpr prints of Python: names of functions and files, which moving code changes.
_NAMES = (
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (
        re.compile(
            r"\b(name|fun_jaxpr|call_jaxpr|debug_info|jaxpr|fun|name_and_src_info|tag)=[^\s\]]+"
        ),
        "",
    ),
    (re.compile(r"<function [^>]*>"), "<function>"),
    (re.compile(r"(let |in )?\b_?[A-Za-z_][\w.<>]*( = \{ lambda)"), r"\2"),
    (re.compile(r"\S+\.py:\d+(:\d+)?"), ""),
)


def kernels_of(function: Callable, *arguments: Any) -> list[str]:
    """The fused kernels in a function's jaxpr as text, without the names of Python functions, in the order they are called."""
    import jax

    found: list[str] = []
    seen: set[int] = set()

    def text(equation) -> str:
        parts = [equation.primitive.name]
        for name, value in sorted(equation.params.items()):
            if name not in ("debug_info", "name", "name_and_src_info", "metadata"):
                parts.append(f"{name}: {value}")
        whole = "\n".join(parts)
        for pattern, replacement in _NAMES:
            whole = pattern.sub(replacement, whole)
        return whole

    def walk(jaxpr) -> None:
        if id(jaxpr) in seen:
            return
        seen.add(id(jaxpr))
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("pallas_call", "core_map", "mpmd_map", "run_state"):
                found.append(text(equation))
                continue
            for value in equation.params.values():
                for item in value if isinstance(value, (tuple, list)) else [value]:
                    inner = getattr(item, "jaxpr", item)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def _kernel_calls() -> Iterator[tuple[str, Callable, tuple]]:
    """Name, function and arguments of calls of every fused kernel, forward and backward."""
    import jax
    import jax.numpy as jnp

    from lsm_jax import ops
    from tests.kernels import test_aot as aot
    from tests.kernels import test_selective_scan_gpu as scans

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def inputs_of(case, length):
        op, (heads, key_heads, memories), key_dim, value_dim, given = case
        given = given.split()
        tokens = functools.partial(array, 2, length)
        shapes = (heads, key_dim), (key_heads, key_dim), (memories, value_dim)
        inputs = {n: tokens(*s, dtype=jnp.bfloat16) for n, s in zip("qkv", shapes, strict=True)}
        if op == "delta_memory":
            inputs["beta"] = tokens(memories)
        if op == "dplr_memory":
            inputs |= dict(a=inputs["k"], b=inputs["k"])
        if "log_decay" in given:
            inputs["log_decay"] = tokens(memories, *([key_dim] * ("channel" in given)))
        if "value_log_decay" in given:
            inputs["value_log_decay"] = tokens(memories, value_dim)
        if "bonus" in given:
            inputs["bonus"] = array(memories, key_dim)
        if "slots" in given:
            inputs |= dict(s=tokens(memories, 64), log_decay=tokens(memories, 64))
        if "log_forget" in given:
            inputs["log_forget"] = tokens(heads)
        marks = {n: tokens(dtype=jnp.int32) for n in ("segment_ids", "update_mask") if n in given}
        return inputs, marks, dict(window=200) if "window" in given else {}

    rows = [(c[:5], "mosaic_gpu") for c in aot.ON_HOPPER]
    rows += [(c, "mosaic_tpu") for c in aot.ON_TPU]
    for case, implementation in rows:
        for length in (1024, 8192) if case[1][2] <= 4 else (1024,):
            inputs, marks, options = inputs_of(case, length)

            def both(inputs, marks, op=case[0], options=options, name=implementation):
                def call(x):
                    return getattr(ops, op)(**x, **marks, **options, implementation=name)[0]

                output, pull = jax.vjp(call, inputs)
                return output, pull(output)

            yield f"{implementation} {case} T={length}", both, (inputs, marks)

    # Called from numbers: the masks that these cases hold are made while tracing.
    for implementation in ("mosaic_gpu", "mosaic_tpu"):
        for states in (16, 8, 0):
            arrays, marks = scans.make(scans.Case(300, 256, states, True))
            like = jax.eval_shape(
                functools.partial(scans.call, implementation="xla"), arrays, marks
            )

            def scan(arrays, marks, like, name=implementation):
                return scans.both(arrays, marks, name, like)

            yield f"{implementation} selective scan of {states}", scan, (arrays, marks, like)

    x = array(2, 300, 512, dtype=jnp.bfloat16)
    weight = array(4, 512, dtype=jnp.bfloat16)

    def convolve(x, weight):
        def call(x, weight):
            return ops.short_convolution(
                x, weight, silu=True, head_dim=64, implementation="mosaic_gpu"
            )[0]

        output, pull = jax.vjp(call, x, weight)
        return output, pull(output)

    yield "mosaic_gpu short convolution", convolve, (x, weight)

    one = functools.partial(array, 2, 1)
    for name, more in (
        ("linear_memory", dict(log_decay=one(4, 64))),
        ("delta_memory", dict(beta=one(4), log_decay=one(4))),
        ("dplr_memory", dict(a=one(4, 64), b=one(4, 64), log_decay=one(4, 64))),
    ):
        given = dict(q=one(4, 64), k=one(4, 64), v=one(4, 64)) | more

        def step(given, op=name):
            return getattr(ops, op)(**given, implementation="mosaic_gpu")

        yield f"mosaic_gpu one token of {name}", step, (given,)


def collect_kernels() -> Iterator[tuple[str, str]]:
    """The jaxprs of every fused kernel."""
    import jax

    folder = os.environ.get("COMPARE_TEXTS")
    for name, function, arguments in _kernel_calls():
        texts = kernels_of(function, *arguments)
        if not texts:
            raise RuntimeError(f"{name}: no kernel found in its jaxpr")
        for number, text in enumerate(texts):
            key = f"{name} #{number}"
            if folder:  # to look at what differs
                Path(folder, re.sub(r"[^\w.=]+", "_", key) + ".txt").write_text(text)
            yield key, hashlib.sha256(text.encode()).hexdigest()[:24]
        yield f"{name} count", str(len(texts))
        jax.clear_caches()


# One run a configuration family: 8 steps of some hundred tokens.
_COMMON = (
    "--config.total_tokens=2048 --config.batch_size=4 --config.data.sequence_length=64 --config.log_every=1 "
    "--config.checkpoint_every=4 --config.keep_last=4 --config.eval_every=0 --config.optimizer.warmup_tokens=512"
).split()
_TEXT = ["--config.data.path=TEXT"]
_SMALL = (
    "--config.model.hidden_size=32 --config.model.num_layers=2 --config.model.vocab_size=257 --config.model.dtype=float32"
).split()
RUNS: dict[str, list[str]] = {
    "lm": ["--config=configs/lm.py:gated_deltanet-tiny,pattern=LN", *_COMMON, *_TEXT, *_SMALL],
    "lm-mamba2": ["--config=configs/lm.py:mamba2-tiny", *_COMMON, *_TEXT, *_SMALL],
    "fox": [
        "--config=configs/fox.py:pro-125m", *_COMMON, *_TEXT, *_SMALL, "--config.data.tokenizer=bytes",
        "--config.data.json_escape=False", "--config.model.layers.L.mixer.num_heads=2",
        "--config.model.layers.L.mixer.head_dim=16",
    ],
    "mom": ["--config=configs/mom.py:tiny,hybrid=0", *_COMMON, *_TEXT, *_SMALL],
    "linear_moe": ["--config=configs/linear_moe.py:tiny,mixer=gla,pattern=LN", *_COMMON, *_TEXT, *_SMALL],
    "liger": [
        "--config=configs/liger.py:auto,source=SOURCE,data=text", *_COMMON, *_TEXT, "--config.model.dtype=float32",
    ],
    "mqar": ["--config=configs/mqar.py:gla,width=32,suite=tiny", "--config.epochs=1"],
}  # fmt: skip


def _train(name: str, tree: Path, workdir: Path, text: Path) -> None:
    source = _llama(text.parent / "llama")
    given = [a.replace("TEXT", str(text)).replace("SOURCE", str(source)) for a in RUNS[name]]
    command = [sys.executable, "train.py", *given, f"--workdir={workdir}"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} in {tree}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def _losses(workdir: Path) -> str:
    """All losses of a run as text, or a recall sweep's result."""
    result = workdir / "result.json"
    if result.is_file():
        members = json.loads(result.read_text())["members"]
        return json.dumps([[m["learning_rate"], m["accuracy"]] for m in members])
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: [r["train/loss"], r["train/grad_norm"]] for r in rows if "train/loss" in r}
    if not losses:
        raise RuntimeError(f"{workdir}: no losses in metrics.jsonl")
    return json.dumps(losses)


def _text(folder: Path) -> Path:
    """A few short documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(12):
        line = "to be or not to be, that is the question. "
        (folder / f"{i}.txt").write_text(f"document {i}: " + line * (20 + i))
    return folder


def _llama(folder: Path) -> Path:
    """A pretrained transformer of random weights, with a tokenizer of bytes."""
    if folder.is_dir():
        return folder
    import tokenizers

    from tests.linearize.conftest import write_llama

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    write_llama(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def collect_runs(tree: Path, folder: Path, text: Path) -> Iterator[tuple[str, str]]:
    """Tiny runs by `train.py`; they stay in `folder`."""
    for name in RUNS:
        workdir = folder / name
        shutil.rmtree(workdir, ignore_errors=True)
        _train(name, tree, workdir, text)
        yield name, _losses(workdir)


def collect_resume(
    tree: Path, reference: Path, folder: Path, text: Path
) -> Iterator[tuple[str, str]]:
    """The reference's runs without the second half's checkpoint, continued by `tree`."""
    for name in RUNS:
        if not (reference / name / "checkpoints").is_dir():
            continue
        workdir = folder / name
        shutil.rmtree(workdir, ignore_errors=True)
        # In the same place, since a config holds its paths.
        shutil.copytree(reference / name, workdir)
        shutil.rmtree(workdir / "checkpoints" / "8")
        _train(name, tree, workdir, text)
        yield name, _losses(workdir)


# ---------------------------------------------------------------------------------------------------------------- the comparison


def _collect_in(tree: Path, section: str, folder: Path) -> dict[str, str]:
    """A section of a tree, in a process of its own."""
    output = folder / f"{section}.json"
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(tree)}
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        f"--collect={section}",
        f"--output={output}",
    ]
    command += [f"--tree={tree}", f"--folder={folder.parent}"]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    return json.loads(output.read_text())


def _collect(section: str, tree: Path, folder: Path, output: Path) -> None:
    text = _text(folder / "text")
    collectors: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "ops": collect_ops,
        "mixers": collect_mixers,
        "kernels": collect_kernels,
        "runs": lambda: collect_runs(tree, output.parent / "runs", text),
        "resume": lambda: collect_resume(
            tree, folder / "reference/runs", output.parent / "resumed", text
        ),
    }
    rows: dict[str, str] = {}
    for name, value in collectors[section]():
        rows[name] = value
        if sys.stderr.isatty():
            print(f"\r{section}: {len(rows)} {name[:90]:90s}", end="", file=sys.stderr, flush=True)
    output.write_text(json.dumps(rows, indent=0))


def compare(section: str, expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """What differs, a line each; rows that only `found` has are new, and no difference."""
    lines = []
    for name, value in expected.items():
        if found.get(name) != value:
            lines.append(f"{section}: {name}: {value} -> {found.get(name, 'missing')}")
    return lines


def main() -> None:
    """Read the command line, collect both trees, print the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, with commas")
    parser.add_argument("--reference", default=REFERENCE, help="a commit")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/compare_release")
    parser.add_argument("--only-reference", action="store_true", help="collect the reference alone")
    parser.add_argument("--collect", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.collect:
        _collect(args.collect, args.tree, args.folder, args.output)
        return
    sections = args.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        sys.exit(
            f"--sections={args.sections}: unknown: {', '.join(unknown)}; accepted are {', '.join(SECTIONS)}"
        )
    folder = args.folder.absolute()
    tree, stored, new = folder / "tree", folder / "reference", folder / "checkout"
    for path in (stored, new):
        path.mkdir(parents=True, exist_ok=True)
    if not tree.is_dir():
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), args.reference], cwd=ROOT, check=True
        )
    lines: list[str] = []
    for section in sections:
        if section != "resume":
            path = stored / f"{section}.json"
            expected = (
                json.loads(path.read_text())
                if path.is_file()
                else _collect_in(tree, section, stored)
            )
        else:
            runs = json.loads((stored / "runs.json").read_text())
            expected = {
                k: v for k, v in runs.items() if (stored / "runs" / k / "checkpoints").is_dir()
            }
        if args.only_reference:
            continue
        differences = compare(section, expected, _collect_in(ROOT, section, new))
        print(f"{section}: {len(expected)} rows, {len(differences)} differ")
        lines += differences
    print("\n".join(lines))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
