"""Tests of the papers' evaluation suites on made-up data: prompts contain the answers, scores and averages
are right, and nothing is read from the network.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from rich.console import Console

from lsm_jax.data import ByteTokenizer, NeedleConfig, load_tokenizer
from lsm_jax.evaluation import TASKS, HarnessConfig, Request, recall_data, run_harness, suites
from lsm_jax.evaluation.harness import check_harness, harness_table, write_results
from lsm_jax.evaluation.request import run_tokenizer
from lsm_jax.evaluation.suites import recall, ruler
from lsm_jax.evaluation.suites.local import find_splits, load_local
from tests.evaluation import make_suites
from tests.evaluation.oracles import CopyOracle

BOS = 256
BYTES = ByteTokenizer()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_suites.make_suites(tmp_path_factory.mktemp("suites"))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def test_the_made_up_needle_prompt_is_accepted(data):
    NeedleConfig(prompt=str(data / "needle_prompt.json"), judge="requests").validate()


def settings(**changes) -> suites.SuiteSettings:
    return suites.SuiteSettings(BYTES, **{"bos_id": BOS, "max_length": 2100, **changes})


def harness(run, data, tasks, batch_size=4, **changes):
    config = HarnessConfig(tasks=tasks, data=str(data), **changes)
    return run_harness(run, run_tokenizer(run), config, bos_id=BOS, batch_size=batch_size)


def needs_extra(*packages):
    for package in packages:
        pytest.importorskip(package, reason="the extra [lm-eval-long]")


# Recall.


@pytest.mark.parametrize("place", [0.0, 0.01, 0.3, 0.5, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("max_length", [300, 2048, 5000])
def test_the_answer_is_in_the_window_wherever_it_is_in_the_document(place, max_length):
    text = "Lorem ipsum dolor sit amet. " * 400
    at = int(len(text) * place)
    context = (text[:at] + " Blue Harbour Ltd " + text[at:]).strip()
    question = ". Name of the company:"
    chosen = settings(max_length=max_length)
    window = recall.cut_context(context, ["blue harbour ltd"], question, chosen)
    assert "Blue Harbour Ltd" in window and window in context
    limit = max_length - recall.ANSWER_TOKENS
    assert chosen.count(window + question) <= limit
    size = min(recall.WINDOW, limit - chosen.count(question))
    assert len(window) <= size
    before = window.index("Blue Harbour Ltd")
    if size // 2 < at:
        assert size // 2 - 4 <= before <= size // 2  # white space at the window's ends is removed
    else:
        assert before == context.index("Blue")
    if at + size < len(text):
        assert len(window) >= size - 4


def test_a_short_context_is_not_cut_and_the_second_answer_counts():
    context = "The door is amber. The roof is grey."
    window = recall.cut_context(context, ["violet", "AMBER"], ". The door is", settings())
    assert window == context.strip(".")


def test_a_window_that_cuts_characters_of_several_bytes():
    context = "é" * 3000 + " Blue Harbour " + "é" * 3000
    window = recall.cut_context(context, ["Blue Harbour"], ". Name:", settings(max_length=901))
    assert "Blue Harbour" in window and set(window) == set("é Blue Harbour")


@pytest.mark.parametrize("kind", ["bpe", "json"])
@pytest.mark.parametrize("place", [0.0, 0.4, 0.97])
def test_windows_of_other_tokenizers_fit_and_contain_the_answer(kind, place, tmp_path):
    text = 'She said "no".\n\nRain fell on the roofs; naïve clocks struck two. ' * 200
    if kind == "json":
        tokenizer = ByteTokenizer(json_escape=True)
    else:
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet)
        bpe.train_from_iterator([text], trainer)
        bpe.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    at = int(len(text) * place)
    context = f"{text[:at]} Blue Harbour {text[at:]}".strip()
    for max_length in (200, 3000):
        chosen = suites.SuiteSettings(tokenizer, bos_id=1, max_length=max_length)
        window = recall.cut_context(context, ["blue harbour"], ". Name:", chosen)
        assert "Blue Harbour" in window
        tokens = chosen.count(window + ". Name:") + recall.ANSWER_TOKENS
        assert tokens <= max_length
        if place == 0.4:
            assert tokens > min(max_length, recall.WINDOW) - 60


def test_an_absent_answer_and_a_small_window_name_the_row(tmp_path):
    row = {"id": "7", "context": "The door is amber.", "question": ". Colour:", "answers": ["grey"]}
    make_suites.write_rows(tmp_path / "recall" / "fda.jsonl", [{**row, "answers": ["amber"]}, row])
    with pytest.raises(ValueError, match=r"fda.jsonl, row 2 \(7\): none of the answers \['grey'\]"):
        recall.load("fda", settings(data=tmp_path))
    with pytest.raises(
        ValueError, match=r"row 1 \(7\): a window of .* lm_eval.max_length=60 is too small"
    ):
        recall.load("fda", settings(data=tmp_path, max_length=60))
    make_suites.write_rows(tmp_path / "recall" / "nq.jsonl", [{**row, "answers": "amber"}])
    with pytest.raises(ValueError, match="row 1 .*: answers='amber'; accepted is a list of texts"):
        recall.load("nq", settings(data=tmp_path))
    with pytest.raises(ValueError, match="has no file recall/drop.jsonl; make it with python -m"):
        recall.load("drop", settings(data=tmp_path))


def test_scores_are_containment_that_ignores_case():
    doc = {"answers": ["Blue (1)", "red"]}
    assert recall.score(doc, ["it is blue (1), I think"]) == {"contains": 1}
    assert recall.score(doc, ["it is blue 1"]) == {"contains": 0}


@pytest.mark.parametrize("task", recall_data.TASKS)
def test_the_converter_makes_the_authors_prompts(task):
    rows = make_suites.public_recall_rows(task)
    converted, short, absent = recall_data.convert_rows(task, rows)
    assert (len(converted), short, absent) == (3, 0, 0)
    for public, row in zip(rows, converted, strict=True):
        prompt = row["context"].strip().strip(".") + row["question"]
        if task == "squad":
            assert prompt == public["text"]
        elif task in ("fda", "swde"):
            context = public["text"].split("\n")[0].strip(".")
            assert prompt == f"{context}. {public['key']}:"
        else:
            assert prompt == public["context"].strip(".") + ". " + public["question"]
        assert row["answers"][0] in row["context"] and row["id"] == public["doc_id"]


def test_the_converter_refuses_other_rows_by_name(tmp_path):
    squad = {"id": "5", "context": "A. B.", "question": "B?", "answers": {"text": ["A"]}}
    with pytest.raises(
        ValueError, match=r"squad, row 1 \(5\): no column value, text; it has id, context"
    ):
        recall_data.convert_rows("squad", [squad])
    absent = {"doc_id": "x", "context": "Nothing here", "question": "Who", "answers": ["Ada"]}
    with pytest.raises(ValueError, match=r"nq, row 1 \(x\): none of the answers \['Ada'\]"):
        recall_data.convert_rows("nq", [absent])
    assert recall_data.convert_rows("nq", [absent], drop_absent=True) == ([], 0, 1)
    assert recall_data.convert_rows("nq", [{**absent, "answers": ["A"]}]) == ([], 1, 0)
    with pytest.raises(ValueError, match=r"nq, row 1 \(x\): answers='Ada'; accepted is a list of"):
        recall_data.convert_rows("nq", [{**absent, "answers": "Ada"}])
    with pytest.raises(ValueError, match="fda, row 1 .1.: value=1990; accepted is a text"):
        recall_data.convert_rows("fda", [{"key": "Year", "value": 1990, "text": "Year: 1990"}])
    with pytest.raises(ValueError, match="squad, row 1 .*: its text has one sentence only"):
        recall_data.convert_rows("squad", [{"text": "One sentence", "value": "One"}])


@pytest.mark.slow
def test_recall_runs_and_a_model_that_copies_finds_every_answer(run, data):
    copying = dataclasses.replace(run, model=CopyOracle())
    results = harness(copying, data, "recall", max_length=1200)
    assert results["averages"]["recall"] == {"average": 1, "average without FDA": 1}
    assert results["notes"] == []  # no prompt was cut by the model
    assert results["num_documents"] == {f"recall_{task}": 3 for task in recall_data.TASKS}
    # The last tokens alone, which the harness keeps of a long prompt, have one answer of the three.
    rows = [
        row
        for task in recall_data.TASKS
        for row in recall_data.convert_rows(task, make_suites.public_recall_rows(task))[0]
    ]
    ends = [(row["context"] + row["question"])[-1152:] for row in rows]
    assert sum(row["answers"][0] in end for row, end in zip(rows, ends, strict=True)) == 6


# RULER.


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "niah_multikey_3" else pytest.mark.slow)
        for name in ruler._FORMS
    ],
)
def test_needle_prompts_contain_their_values_and_fit(name, data):
    needs_extra("wonderwords")
    chosen = settings(data=data, max_length=4096, lengths=(2048, 4096), num_samples=3)
    docs = ruler.load(name, chosen)["test"]
    assert [doc["max_length"] for doc in docs] == [2048] * 3 + [4096] * 3
    form = ruler._FORMS[name]
    for doc in docs:
        assert len(doc["outputs"]) == form.num_queries * form.num_values
        assert all(value in doc["input"] for value in doc["outputs"])
        prompt = f"{doc['input']} {doc['gen_prefix']}"
        assert chosen.count(prompt) + 128 == doc["length"] <= doc["max_length"]
        assert doc["length"] > 0.9 * doc["max_length"]
        pattern = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
        assert all(re.fullmatch(pattern[form.values], value) for value in doc["outputs"])
    assert len({tuple(doc["outputs"]) for doc in docs}) == 3  # the same needles at every length
    docs_again = ruler.load(name, chosen)["test"]
    assert docs_again[5] == docs[5]


@pytest.mark.parametrize("name", sorted(set(ruler.NEW_TOKENS) - set(ruler._FORMS)))
def test_other_prompts_of_ruler_contain_their_answers_and_fit(name, data):
    if name == "ruler_cwe":
        needs_extra("wonderwords")
    lengths = (8192, 16384) if name == "ruler_cwe" else (2048, 4096)  # its example is long in bytes
    chosen = settings(data=data, max_length=16384, lengths=lengths, num_samples=3)
    docs = ruler.load(name, chosen)["test"]
    assert [doc["max_length"] for doc in docs] == [lengths[0]] * 3 + [lengths[1]] * 3
    number = {
        "ruler_vt": 5,
        "ruler_cwe": 10,
        "ruler_fwe": 3,
        "ruler_qa_squad": 2,
        "ruler_qa_hotpot": 1,
    }
    for doc in docs:
        assert len(doc["outputs"]) == number[name] and doc["outputs"][0] in doc["input"]
        prompt = f"{doc['input']} {doc['gen_prefix']}"
        assert chosen.count(prompt) + ruler.NEW_TOKENS[name] == doc["length"] <= doc["max_length"]
        if "qa" not in name:  # the made-up files have few documents
            assert doc["length"] > 0.9 * doc["max_length"]
    if name == "ruler_fwe":
        counts = Counter(docs[0]["input"].split())
        words = [word for word, _ in counts.most_common(8) if len(word) == 6 and word.isalpha()]
        assert words[:3] == docs[0]["outputs"]
    if name == "ruler_vt":
        value = re.search(r"value (\d+) in", docs[0]["input"].split("\n\n\n\n")[1])[1]
        assert f"VAR {docs[0]['outputs'][0]} = {value}" in docs[0]["input"]


def test_questions_count_one_answer_and_other_files_are_refused(tmp_path, data):
    doc = {"outputs": ["keeper 00", "the keeper"], "max_length": 2048}
    assert ruler.score_any(doc, ["It is Keeper 00."])["2048"] == 1
    with pytest.raises(ValueError, match="has no file ruler/dev-v2.0.json"):
        ruler.load("ruler_qa_squad", settings(data=tmp_path))
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "dev-v2.0.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="no field 'data'; accepted are SQuAD's dev-v2.0.json"):
        ruler.load("ruler_qa_squad", settings(data=tmp_path))


def test_ruler_scores_and_errors(data, tmp_path):
    needs_extra("wonderwords")
    doc = {"outputs": ["123", "456"], "max_length": 2048}
    scores = ruler.score(doc, ["it is 123"])
    assert scores["2048"] == 0.5 and scores["1024"] == -1
    assert ruler.mean([-1, 0.5, 1]) == 0.75 and ruler.mean([-1]) == -1
    with pytest.raises(ValueError, match="lm_eval.lengths=1000: accepted are 1024, 2048"):
        ruler.load("niah_single_1", settings(lengths=(1000,)))
    with pytest.raises(
        ValueError, match="would lose its first tokens; give --lm_eval.max_length=4096"
    ):
        ruler.load("niah_single_1", settings(lengths=(4096,)))
    with pytest.raises(ValueError, match="has no text for the haystack"):
        ruler.load("niah_single_2", settings(data=tmp_path))
    crowded = settings(data=data, lengths=(1024,))
    crowded.count = lambda text: 3 * len(text)
    with pytest.raises(
        ValueError, match="lm_eval.lengths=1024: too small for prompt 0 of niah_mult"
    ):
        ruler.load("niah_multivalue", crowded)


@pytest.mark.slow
def test_s_niah_runs(run, data):
    needs_extra("wonderwords")
    results = harness(run, data, "s_niah", max_length=1024, num_samples=1, batch_size=1)
    for task in ("niah_single_1", "niah_single_3", "s_niah"):
        values = {k: v for k, v in results["results"][task].items() if isinstance(v, float)}
        assert list(values) == ["1024,none"] and 0 <= values["1024,none"] <= 1
    assert results["notes"] == []


@pytest.mark.slow
def test_all_of_ruler_runs(run, data):
    needs_extra("wonderwords")
    results = harness(
        run, data, "ruler", max_length=8192, lengths=(8192,), num_samples=1, batch_size=1
    )
    assert len(results["num_documents"]) == 13
    values = [results["results"][task]["8192,none"] for task in results["num_documents"]]
    assert results["results"]["ruler"]["8192,none"] == pytest.approx(np.mean(values))


# LongBench.


def test_longbench_runs_and_cuts_prompts_in_their_middle(run, data):
    needs_extra("jieba", "fuzzywuzzy", "rouge")
    results = harness(run, data, "longbench_trec,longbench_lcc", max_length=300, first_line=True)
    assert results["notes"] == [
        "2 prompts were cut in their middle, so that they and the answer have 300 tokens"
    ]
    assert 0 <= results["results"]["longbench_trec"]["score,none"] <= 1


@pytest.mark.slow
def test_all_english_tasks_of_longbench_run(run, data):
    needs_extra("jieba", "fuzzywuzzy", "rouge")
    results = harness(run, data, "longbench_english", max_length=700)
    assert set(results["num_documents"]) == {f"longbench_{name}" for name in make_suites.LONGBENCH}
    assert 0 <= results["results"]["longbench_english"]["score,none"] <= 1


# Commonsense and MMLU.


def test_commonsense_is_zero_shot_with_the_papers_metrics(run, data):
    results = harness(run, data, "commonsense", max_length=200)
    assert set(results["num_fewshot"].values()) == {0}
    metrics = dict.fromkeys(("piqa", "arc_easy", "winogrande"), "acc")
    metrics |= dict.fromkeys(("arc_challenge", "hellaswag"), "acc_norm")
    values = [results["results"][task][f"{metric},none"] for task, metric in metrics.items()]
    average = results["averages"]["commonsense"]["average"]
    assert average == pytest.approx(np.mean(values))
    console = Console(width=120, file=io.StringIO())
    console.print(harness_table(results))
    assert re.search(rf"commonsense .* average .*{average:.4f}", console.file.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "count"), [("commonsense_mom", 6), ("commonsense_fox", 10)])
def test_commonsense_of_mom_and_fox_runs_offline(run, data, suite, count):
    results = harness(run, data, suite, max_length=200)
    assert "word_perplexity,none" in results["results"]["wikitext"]
    accuracies = suites.SUITES[suite].averages["average"]
    values = [results["results"][task][f"{metric},none"] for task, metric in accuracies.items()]
    assert len(values) == count
    assert results["averages"][suite]["average"] == pytest.approx(np.mean(values))


@pytest.mark.slow
def test_mmlu_is_five_shot_and_joins_commonsense(run, data):
    results = harness(run, data, "commonsense_mmlu", max_length=400, log_samples=True)
    assert results["num_fewshot"]["mmlu_anatomy"] == 5 and results["num_fewshot"]["piqa"] == 0
    averages = results["averages"]["commonsense_mmlu"]
    without = averages["average without MMLU"]
    expected = (5 * without + results["results"]["mmlu"]["acc,none"]) / 6
    assert averages["average"] == pytest.approx(expected)
    prompt = results["samples"]["mmlu_anatomy"][0]["arguments"][0][0]
    assert prompt.count("Answer:") == 6


# Options and files.


def test_samples_and_results_are_never_overwritten(run, data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # no checkout, about which the harness's git would complain
    config = HarnessConfig(
        tasks="recall_fda",
        data=str(data),
        max_length=400,
        log_samples=True,
        gen_kwargs="max_new_tokens=4",
    )
    for _ in range(2):
        TASKS["lm_eval"](run, Request(lm_eval=config), tmp_path)
    assert "not a git repository" not in capfd.readouterr().err
    content = [json.loads((tmp_path / f"lm_eval-{n}.json").read_text()) for n in (1, 2)]
    assert content[0]["results"] == content[1]["results"]
    assert content[1]["samples"] == {"recall_fda": "lm_eval-2/recall_fda.jsonl"}
    rows = (tmp_path / "lm_eval-2" / "recall_fda.jsonl").read_text().splitlines()
    first = json.loads(rows[0])
    assert all(
        len(answer.encode()) <= 4 * 3 for row in rows for (answer,) in json.loads(row)["resps"]
    )
    assert len(rows) == 3 and first["doc"]["id"] == "fda-0" and first["contains"] in (0, 1)
    (tmp_path / "other").mkdir()
    name = write_results(tmp_path / "other", {"results": {}}).name
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    assert name == "lm_eval-1.json" and f"| `{name}`" in page.read_text()


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "rouge" else True)
    with pytest.raises(ValueError) as error:
        check_harness(HarnessConfig(tasks="piqa,longbench_trec"))
    assert str(error.value).endswith("needs rouge: pip install 'lsm_jax[lm-eval-long]'")
    assert "\n" not in str(error.value)


def test_local_data_has_the_hubs_layouts(data, tmp_path):
    assert list(find_splits(data, "cais/mmlu", "anatomy")) == ["dev", "test"]
    assert list(find_splits(data, "Rowan/hellaswag", None)) == ["validation"]
    assert list(find_splits(data, "Xnhyacinth/LongBench", "trec")) == ["test"]
    assert find_splits(data, "allenai/ai2_arc", "ARC-Hard") == {}
    assert load_local(data, "no/such", None) is None
    row = load_local(data, "Xnhyacinth/LongBench", "trec")["test"][0]
    assert row["question"] == "What colour is the door?"
    with pytest.raises(ValueError, match="cais/mmlu has no split 'validation', only dev, test"):
        load_local(data, "cais/mmlu", "anatomy")["validation"]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "test.jsonl").write_text("")
    with pytest.raises(ValueError, match="test.jsonl has no rows"):
        load_local(tmp_path, "x", None)


def test_data_that_is_nowhere_is_named(run, tmp_path):
    with pytest.raises(ValueError, match="the data of baber/piqa is not available; lm_eval.data="):
        harness(run, tmp_path, "commonsense")
