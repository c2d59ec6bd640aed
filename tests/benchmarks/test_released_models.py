"""The benchmark of released models' shapes: its models, what `--kernels off` removes, and rows of tiny models."""

from __future__ import annotations

import argparse
import json
import sys
import time

import pytest

from benchmarks import registry, released
from benchmarks.__main__ import main
from benchmarks.cases import released_models
from benchmarks.cases.released_models import worker_rows
from lsm_jax.ops.backends.registry import backends_of, names_of, names_of_ops
from tests.convert.test_cards import QWEN
from tests.convert.test_hybrid_configs import GRANITE


def test_the_models_are_the_released_ones_of_a_given_depth(tmp_path):
    for name, fields in (("qwen3-next", QWEN), ("granite-4.0-h-small", GRANITE)):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        ours = released.model_config(name, fields["num_hidden_layers"])
        theirs = released.model_config(str(tmp_path), None)
        theirs.init_std = ours.init_std
        assert ours == theirs
    granite = released.model_config("granite-4.0-h-small", 20)
    assert granite.period() == "LLLLLNLLLL" and granite.num_layers == 20
    small = released.model_config("qwen3.5-4b", 4, tiny=True)
    assert (small.letters(), small.hidden_size, small.layers["N"].mixer.head_dim) == ("LLLN", 32, 16)  # fmt: skip
    with pytest.raises(registry.UsageError, match="--layers 49: qwen3-next has 48"):
        released.model_config("qwen3-next", 49)
    with pytest.raises(registry.UsageError, match="--models qwen4: accepted are qwen3.5-4b, "):
        released.model_config("qwen4", None)


def test_every_backend_but_those_of_experts_is_removed_for_a_while():
    before = {op: backends_of(op) for op in names_of_ops()}
    with released.without_kernels():
        for op in names_of_ops():
            assert (names_of(backends_of(op)) == ("xla",)) == (op not in released.EXPERTS), op
    assert before == {op: backends_of(op) for op in names_of_ops()}


def test_rows_of_a_peer_come_one_by_one_and_within_a_time():
    code = (
        "import json, sys, time\n"
        "print('a warning', flush=True)\n"
        "print(json.dumps(dict(tokens=1, prefill_ms=2.0)), flush=True)\n"
        "time.sleep(float(sys.argv[1])); sys.exit('out of luck')"
    )
    cases = [dict(model="a", tokens=tokens) for tokens in (1, 2, 3)]
    first = dict(model="a", tokens=1, prefill_ms=2.0)
    began = time.monotonic()
    rows = worker_rows([sys.executable, "-c", code, "600"], cases, 300)
    assert next(rows) == first  # before the process ends
    rows.close()  # which ends it
    rows = list(worker_rows([sys.executable, "-c", code, "0"], cases, 300))
    assert rows[0] == first and [row["error"] for row in rows[1:]] == ["out of luck"] * 2
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    rows = list(worker_rows(silent, cases, 0.1))
    assert [row["error"] for row in rows] == ["no row within 0.1 s"] * 3
    assert time.monotonic() - began < 300


def test_each_backend_of_attention_is_a_case_of_its_own():
    parser = argparse.ArgumentParser()
    released_models.add_arguments(parser)
    command = "--tiny --models qwen3.5-4b --lengths 16 --lora 16 --kernels on,off --attention mosaic_gpu,xla"
    cases = released_models.cases(parser.parse_args(command.split()))
    assert [(c["work"], c["kernels"], c.get("attention")) for c in cases] == [
        ("inference", "on", "mosaic_gpu"), ("inference", "on", "xla"), ("inference", "off", None),
        ("lora", "on", None), ("lora", "off", None),
    ]  # fmt: skip
    for name in ("mosaic_gpu", "xla"):
        config = released.with_attention(released.model_config("qwen3.5-4b", 4, tiny=True), name)
        config.validate()
        assert config.layers["N"].mixer.implementation == name
    with pytest.raises(SystemExit):
        parser.parse_args(["--attention", "mosaic"])


@pytest.mark.slow
@pytest.mark.parametrize("model", released.MODELS)
def test_fused_kernels_serve_every_linear_layer_on_hopper(model):
    """The programs of one period of the pattern, traced in the released sizes; nothing is compiled."""
    layers = 10 if model.startswith("granite") else 4
    config = released.model_config(model, layers)
    op = "linear_memory" if model.startswith("granite") else "delta_memory"
    traced = released.lower_inference(config, 1, 8192, 4096, 8, lambda lowered: lowered)
    assert traced.choices["prefill"][op].startswith("mosaic_gpu on NVIDIA 9.0")
    assert traced.choices["decode"][op].startswith("decode_step on NVIDIA 9.0")
    with released.without_kernels():
        traced = released.lower_inference(config, 1, 8192, 4096, 8, lambda lowered: lowered)
    assert all(choices[op].startswith("xla") for choices in traced.choices.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", released.MODELS)
def test_rows_of_a_tiny_model(model, tmp_path, capsys):
    output, layers = tmp_path / "rows.jsonl", 10 if model.startswith("granite") else 4
    command = (
        f"released_models --tiny --models {model} --layers {layers} --lengths 16 --piece 8 --tokens 2 --lora 16 --kernels on "
        f"--output {output}"
    )
    main(command.split())
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["work"] for row in rows] == ["inference", "lora"]
    assert sum(rows[0]["mixers"].values()) == layers
    op = "linear_memory" if model.startswith("granite") else "delta_memory"
    for row in rows:
        assert all("xla" in choices[op] for choices in row["implementations"].values())
        assert row["model"] == f"{model}-tiny" and row["gib"] > 0
    assert set(rows[0]["implementations"]) == {"prefill", "decode"}
    assert rows[0]["prefill_ms"] > 0 and rows[0]["decode_ms"] > 0 and rows[1]["milliseconds"] > 0
    assert 3 < rows[1]["loss"] < 6  # log 64 is 4.2
    capsys.readouterr()
    main(command.split())
    assert "2 of 2 cases have a row" in capsys.readouterr().err
