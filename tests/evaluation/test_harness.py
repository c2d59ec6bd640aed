"""lm-evaluation-harness: the adapter returns the model's probabilities, and local tasks run without a
network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_eval.api.instance import Instance

from lsm_jax.evaluation import HarnessConfig, Request, run_harness
from lsm_jax.evaluation.harness_model import HarnessModel
from lsm_jax.evaluation.request import run_bos_id, run_tokenizer
from lsm_jax.models import sample

ROOT = Path(__file__).resolve().parents[2]
BOS = 256


def instances(*arguments: tuple) -> list[Instance]:
    return [Instance("loglikelihood", {}, args, i) for i, args in enumerate(arguments)]


def adapter(run, **changes) -> HarnessModel:
    options = dict(max_length=32, max_gen_tokens=8, bos_id=BOS, batch_size=3)
    return HarnessModel(run.model, run_tokenizer(run), **{**options, **changes})


def log_probabilities(run, ids: list[int]) -> np.ndarray:
    """Return [2, n - 1] for the n tokens `ids`, computed by a run's model: the log-probability of every
    token after the first, and whether it is the most likely token.
    """
    logits, _, _ = run.model(jnp.asarray([ids[:-1]]))
    table = jax.nn.log_softmax(logits[0], axis=-1)
    of_tokens = np.asarray(table)[np.arange(len(ids) - 1), ids[1:]]
    return np.stack([of_tokens, np.asarray(table.argmax(-1)) == ids[1:]])


def test_likelihoods_equal_the_models(run):
    model = adapter(run)
    pairs = [("def ", "f(x):"), ("", "import os"), ("x" * 60, " = 1"), ("return ", "é")]
    for (before, end), (logprob, greedy) in zip(
        pairs, model.loglikelihood(instances(*pairs), disable_tqdm=True), strict=True
    ):
        # A blank that ends the context belongs to the continuation.
        blanks = len(before) - len(before.rstrip())
        end, before = before[len(before) - blanks :] + end, before.rstrip()
        tail = list(end.encode())
        head = list(before.encode())[-(32 - len(tail)) :]
        expected, likeliest = log_probabilities(run, [BOS, *head, *tail])[:, -len(tail) :]
        assert logprob == pytest.approx(expected.sum(), rel=1e-5)
        assert greedy == bool(likeliest.all())
    assert model.notes() == ["1 texts were cut on their left to 32 tokens"]


def test_greedy_continuations_are_recognised(run):
    ids = [BOS, *b"class "]
    drawn = sample(
        run.model, jnp.asarray([ids]), num_tokens=3, key=jax.random.key(0), temperature=0
    )
    tail = bytes(np.asarray(drawn)[0].astype(np.uint8))
    if max(np.asarray(drawn)[0]) > 127:
        pytest.skip("the tiny model drew no ASCII")
    text = tail.decode()
    model = adapter(run)
    greedy = model._loglikelihood_tokens([(("class ", text), ids, list(tail))])
    other = model._loglikelihood_tokens([(("class ", text), ids, [(tail[0] + 1) % 128])])
    assert greedy[0][1] and not other[0][1]


@pytest.mark.slow
def test_every_window_of_a_long_text_begins_with_bos(run):
    text = "def f(x):\n    return x + 1\n" * 4  # 108 bytes, windows of 16
    (logprob,) = adapter(run, max_length=16).loglikelihood_rolling(instances((text,)))
    ids, expected, done = list(text.encode()), 0.0, 0
    first = log_probabilities(run, [BOS, *ids[:15]])[0]
    expected, done = first.sum(), 15
    while done < len(ids):
        end = min(done + 15, len(ids))
        window = [BOS, *ids[end - 16 : end]]
        expected += log_probabilities(run, window)[0][-(end - done) :].sum()
        done = end
    assert logprob == pytest.approx(expected, rel=1e-5)


def test_generation_equals_sampling_and_stops_at_until(run):
    model = adapter(run)
    prompts = ["def ", "import os\nimport sys\n", "x = "]
    requests = instances(*((p, {"until": [], "max_gen_toks": 6}) for p in prompts))
    texts = model.generate_until(requests)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = jnp.asarray([[BOS, *prompt.encode()]])
        drawn = np.asarray(
            sample(
                run.model, ids, num_tokens=6, key=jax.random.key(0), temperature=0, stop_token=BOS
            )
        )[0]
        assert text == run_tokenizer(run).decode(drawn)
    letter = texts[0][2]
    (cut,) = model.generate_until(instances((prompts[0], {"until": letter, "max_gen_toks": 6})))
    assert cut == texts[0][: texts[0].index(letter)]


def test_longbench_prompts_lose_their_middle_and_other_texts_their_left(run):
    model = adapter(run)
    text = "".join(chr(33 + i) for i in range(90))
    options = {"max_gen_toks": 8}
    _, middle, _ = model._parse_request(text, options, cut_middle=True)
    assert bytes(middle[1:]).decode() == text[:12] + text[-11:] and middle[0] == BOS
    _, left, _ = model._parse_request(text, options)
    assert bytes(left[1:]).decode() == text[-23:] and len(left) == len(middle) == 32 - 8
    _, short, _ = model._parse_request(text[:23], options, cut_middle=True)
    assert bytes(short[1:]).decode() == text[:23]
    assert [note[:9] for note in model.notes()] == ["1 texts w", "1 prompts"]
    (answer,) = adapter(run, first_line=True).generate_until(instances(("def ", options)))
    (whole,) = adapter(run).generate_until(instances(("def ", options)))
    assert answer == whole.lstrip("\n").split("\n")[0]


def test_invalid_requests_are_refused(run):
    with pytest.raises(ValueError, match="max_gen_toks=32: accepted are 1 to 31"):
        adapter(run).generate_until(instances(("a", {"max_gen_toks": 32})))
    with pytest.raises(ValueError, match="max_length=32: a continuation has 40 tokens"):
        adapter(run).loglikelihood(instances(("a", "b" * 40)), disable_tqdm=True)
    with pytest.raises(ValueError, match="lm_eval.tasks is empty"):
        run_harness(run, run_tokenizer(run), HarnessConfig(), bos_id=BOS, batch_size=2)
    for field, value in (("limit", 0), ("max_length", 1), ("num_fewshot", -1)):
        with pytest.raises(ValueError, match=f"lm_eval.{field}={value}"):
            Request(lm_eval=HarnessConfig(**{field: value})).validate()
    with pytest.raises(ValueError, match="lm_eval.include_path='nowhere' is not a folder"):
        Request(lm_eval=HarnessConfig(include_path="nowhere")).validate()


def write_tasks(folder: Path) -> None:
    data = folder / "data.jsonl"
    rows = [{"text": "def f(x):", "choices": [" return x", " zq"], "label": 0} for _ in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
    (folder / "choice.yaml").write_text(
        f"""task: local_choice
{common}output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
    )
    (folder / "words.yaml").write_text(
        f"""task: local_words
{common}output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
"""
    )
    (folder / "answer.yaml").write_text(
        f"""task: local_answer
{common}output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""
    )


@pytest.mark.slow
def test_local_tasks_run_through_eval_with_no_network(run, workdir, tmp_path):
    write_tasks(tmp_path)
    offline = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "eval.py"),
            f"--workdir={workdir}",
            "--tasks=lm_eval",
            "--lm_eval.tasks=local_choice,local_words,local_answer",
            f"--lm_eval.include_path={tmp_path}",
            "--lm_eval.trust",
            "--output=harness",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **offline},
    )
    assert done.returncode == 0, done.stderr
    assert "byte_perplexity" in done.stdout and "acc_norm" in done.stdout
    results = json.loads((workdir / "eval" / "harness" / "lm_eval-1.json").read_text())
    assert results["num_documents"] == dict(local_choice=3, local_words=3, local_answer=3)
    per_byte = log_probabilities(run, [BOS, *b"def f(x):"])[0].mean()
    rolling = results["results"]["local_words"]["byte_perplexity,none"]
    assert rolling == pytest.approx(np.exp(-per_byte), rel=1e-5)
    assert 0 <= results["results"]["local_choice"]["acc,none"] <= 1
    assert results["max_length"] == 32 and run_bos_id(run, run_tokenizer(run)) == BOS


def test_a_task_file_that_the_harness_cannot_use_is_named(run, tmp_path):
    write_tasks(tmp_path)
    path = tmp_path / "choice.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("metric_list")]
    path.write_text("\n".join([*lines, "metric_list: 5"]) + "\n")
    config = HarnessConfig(tasks="local_choice", include_path=str(tmp_path), trust=True)
    with pytest.raises(
        ValueError, match="cannot use a field of a task file of local_choice: TypeError"
    ):
        run_harness(run, run_tokenizer(run), config, bos_id=BOS, batch_size=2)


def test_unknown_harness_tasks_are_refused(run, tmp_path):
    write_tasks(tmp_path)
    config = HarnessConfig(tasks="local_chioce", include_path=str(tmp_path), trust=True)
    with pytest.raises(ValueError, match="'local_chioce' does not exist; near it are local_choice"):
        run_harness(run, run_tokenizer(run), config, bos_id=BOS, batch_size=2)
