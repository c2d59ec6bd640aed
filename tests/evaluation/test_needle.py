"""Tests of the evaluation task needle in a haystack: its prompts, its scores for two oracles in place of a
model, and the answers of models.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from lsm_jax import mixers, models
from lsm_jax.data import (
    ByteTokenizer,
    DataConfig,
    NeedleConfig,
    NeedleTask,
    haystack_tokens,
    load_tokenizer,
)
from lsm_jax.evaluation import (
    TASKS,
    Answerer,
    Request,
    contains,
    find_needles,
    judge,
    needle_table,
)
from lsm_jax.evaluation.needle import length_notes
from tests.data.stores import write_array
from tests.evaluation.oracles import CopyOracle
from tests.evaluation.test_perplexity import VOCAB, logits_nll, tiny_model

TEXT = "Rain fell on the roofs. Nobody spoke. The clock in the hall struck two, and a dog barked. "
CONFIG = NeedleConfig(lengths=(500, 700), depths=(0, 30, 60, 100))


def byte_task(**changes) -> tuple[NeedleTask, np.ndarray]:
    task = NeedleTask(dataclasses.replace(CONFIG, **changes), ByteTokenizer(), bos_id=256)
    text = np.array(ByteTokenizer().encode(TEXT * 30), np.int32)
    return task, np.resize(text, (task.config.samples, 2000))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [TEXT], tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet)
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(path))
    return load_tokenizer(str(path))


def test_a_prompt_is_bos_text_needle_text_question_of_the_given_length():
    task, text = byte_task()
    prompts = task.prompts(text, 700)
    fact = f"{CONFIG.cue} {CONFIG.answer}."
    end = f"\n\n{CONFIG.instruction}\n{CONFIG.question} {CONFIG.cue}"
    answer = ByteTokenizer().decode(task.answer)
    assert answer == f" {CONFIG.answer}" and task.new_tokens == 2 * len(answer)
    assert [p.mode for p in prompts] == ["", *["easy"] * 4, *["standard"] * 4]
    for prompt in prompts:
        assert prompt.tokens.size + task.answer_room == 700
        assert prompt.tokens[0] == 256 and not (prompt.tokens[1:] == 256).any()
        said = ByteTokenizer().decode(prompt.tokens)
        assert said.endswith(end)
        if not prompt.mode:
            assert said == (TEXT * 30)[: len(said) - len(end)] + end and fact not in said
            continue
        needle = f"\n{CONFIG.question} {fact}\n" if prompt.mode == "easy" else f"\n{fact}\n"
        before, after = said.split(needle)
        assert before + after == (TEXT * 30)[: len(before + after) - len(end)] + end
        assert len(before) == prompt.place
        rest = len(before + after) - len(end)
        if prompt.depth == 100:
            assert prompt.place == rest
        else:
            wanted = int(rest * prompt.depth / 100)
            assert prompt.place == (TEXT * 30).rfind(".", 0, wanted) + 1
    published = NeedleTask(dataclasses.replace(CONFIG, buffer=400), ByteTokenizer(), bos_id=256)
    assert published.text_length(1000) == 600


@pytest.mark.parametrize(("reach", "found"), [(1 << 20, 1.0), (20, 0.0)])
def test_an_oracle_that_copies_finds_all_and_a_blind_one_none(reach, found):
    task, text = byte_task(samples=2)
    text[1] = np.roll(text[1], 700)
    scores = find_needles(
        CopyOracle(reach=reach),
        task,
        text,
        [500, 700],
        batch_size=3,
        piece_length=64,
        progress=False,
    )
    for mode in ("easy", "standard"):
        np.testing.assert_array_equal(scores.found[mode], np.full((2, 4), found))
        expected = np.log1p(256 * np.exp(-8.0)) if found else np.log(257)
        np.testing.assert_allclose(scores.nll[mode], expected, rtol=1e-5)
        np.testing.assert_array_equal(scores.below_one[mode], np.full((2, 4), found))
        answer = scores.continuations[mode][1][2]
        assert answer.startswith(f" {CONFIG.answer}") if found else answer == "\0" * task.new_tokens
    np.testing.assert_array_equal(scores.found_without, [0, 0])
    np.testing.assert_allclose(scores.nll_without, np.log(257), rtol=1e-5)


def test_needles_beyond_an_oracles_range_are_not_found():
    task, text = byte_task(depths=(0, 25, 50, 75, 100))
    length, reach = 700, 330
    scores = find_needles(CopyOracle(reach=reach), task, text, [length], progress=False)
    prompts = [p for p in task.prompts(text, length) if p.mode == "standard"]
    # From the prompt's last token back to the end of the cue in the needle.
    back = [p.tokens.size - 1 - (1 + p.place + len(f"\n{CONFIG.cue}") - 1) for p in prompts]
    expected = [float(b <= reach) for b in back]
    assert 0 < sum(expected) < 5
    np.testing.assert_array_equal(scores.found["standard"][0], expected)


@pytest.mark.slow
def test_answers_equal_one_forward_pass_and_sampling():
    model = tiny_model()
    text = np.random.default_rng(0).integers(0, VOCAB, (3, 44)).astype(np.int32)
    expected = logits_nll(model, {"tokens": text[:, :-1], "labels": text[:, 1:]})
    answerer = Answerer(model, max_length=40, num_tokens=5, piece_length=16)
    for length in (9, 40):
        prompts, answers = text[:, :length], text[:, length : length + 4]
        nll, drawn = answerer(prompts, answers)
        np.testing.assert_allclose(nll, expected[:, length - 1 : length + 3], rtol=2e-5)
    sampled = models.sample(
        model, jnp.asarray(prompts), num_tokens=5, key=jax.random.key(0), temperature=0
    )
    np.testing.assert_array_equal(drawn, sampled)
    assert answerer.answer._cache_size() == 1  # one program for prompts of all lengths


@pytest.mark.slow
@pytest.mark.parametrize("method", ("softmax", "fox", "gla", "gated_deltanet", "mamba2", "rwkv7"))
def test_prompts_of_several_lengths_in_one_batch_are_answered_as_alone(method):
    config = models.lm(method, "tiny", vocab_size=VOCAB)
    config.num_layers, config.dtype, config.remat = 2, "float32", "none"
    answerer = Answerer(
        models.Decoder(config, rngs=nnx.Rngs(0)), max_length=40, num_tokens=3, piece_length=16
    )
    tokens = np.random.default_rng(1).integers(0, VOCAB, (3, 42)).astype(np.int32)
    lengths, answers = np.array([40, 11, 1]), tokens[:, 40:]
    nll, drawn = answerer(tokens[:, :40], answers, lengths)
    for row, length in enumerate(lengths):
        alone = answerer(tokens[row : row + 1, 40 - length : 40], answers[row : row + 1])
        np.testing.assert_allclose(nll[row], alone[0][0], rtol=2e-5)
        np.testing.assert_array_equal(drawn[row], alone[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(mixers.METHODS))
def test_answers_of_every_method(method):
    config = models.lm(method, "tiny", vocab_size=VOCAB)
    config.num_layers, config.dtype, config.remat = 2, "float32", "none"
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, (2, 44)).astype(np.int32)
    nll, _ = Answerer(model, max_length=40, num_tokens=2, piece_length=16)(
        tokens[:, :40], tokens[:, 40:]
    )
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    np.testing.assert_allclose(nll, logits_nll(model, batch)[:, -4:], rtol=1e-3, atol=1e-3)


def test_haystacks_of_stores_text_and_another_tokenizer(tmp_path, tokenizer):
    rows = np.array([[5, 6, 256, 7], [8, 256, 9, 10]])
    store = write_array(tmp_path / "heldout.zarr", rows, vocab_size=257, encoder="bytes")
    data = DataConfig(heldout_path=str(store), sequence_length=4)
    for number in (3, 5, 99):
        tokens = haystack_tokens(data, ByteTokenizer(), number, vocab_size=257)
        np.testing.assert_array_equal(tokens, [5, 6, 7, 8, 9, 10][:number])
    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "text" / name).write_text(TEXT)
    data = DataConfig(heldout_path=str(tmp_path / "text"), sequence_length=4)
    for encoder in (ByteTokenizer(), tokenizer):
        tokens = haystack_tokens(data, encoder, 10**6, vocab_size=10**6)
        assert encoder.decode(tokens) == f"{TEXT}\n\n{TEXT}\n\n"
    task = NeedleTask(CONFIG, tokenizer, bos_id=None)
    prompt = task.prompts(np.resize(tokens, (1, 5000)), 500)[3]
    said = tokenizer.decode(np.concatenate([prompt.tokens, task.answer]))
    assert said.count(f"{CONFIG.question} {CONFIG.cue} {CONFIG.answer}") == 2
    assert prompt.tokens.size + task.answer_room == 500


@pytest.mark.slow
def test_needle_task_writes_scores_and_a_picture(run, tmp_path):
    config = dataclasses.replace(CONFIG, lengths=(460, 500), depths=(0, 100))
    request = Request(needle=config, batch_size=5, piece_length=100)
    results = TASKS["needle"](run, request, tmp_path)
    assert results == json.loads((tmp_path / "needle.json").read_text())
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert np.shape(results["easy"]["found"]) == np.shape(results["standard"]["nll"]) == (2, 2)
    assert np.all(np.array(results["easy"]["nll"]) > 1)  # three steps of training
    assert any("over the training length 32" in note for note in results["notes"])
    assert needle_table(results)
    copied = TASKS["needle"](dataclasses.replace(run, model=CopyOracle()), request, tmp_path)
    assert copied["easy"]["found_mean"] == copied["standard"]["found_mean"] == 1
    assert copied["without_needle"]["found"] == [0, 0]


def test_lengths_beyond_the_windows_have_a_note():
    config = models.lm("softmax", "tiny", vocab_size=VOCAB)
    config.num_layers = 2
    assert length_notes(config, [100], 100) == []
    config.layers["L"].mixer.window = 10
    (note,) = length_notes(config, [19, 20, 30], 100)
    assert note.startswith("lengths 20, 30 are over the 19 tokens that the layers' windows can see")


def test_containment_ignores_case_and_space():
    assert contains("it is  UNDER the\nblue pot.", "under the blue pot")
    assert not contains("under the pot", "under the blue pot")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lengths=(0,)), "needle.lengths=.*integers from 1"),
        (dict(lengths=("a",)), "needle.lengths=.*integers from 1"),
        (dict(depths=(101,)), "needle.depths=.*percentages from 0 to 100"),
        (dict(depths=()), "needle.depths=.*at least one"),
        (dict(modes=("hard",)), "accepted: easy, standard"),
        (dict(modes=("easy", "easy")), "different values"),
        (dict(samples=0), "needle.samples=0"),
        (dict(answer=" "), "needle.answer=' '"),
    ],
)
def test_invalid_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Request(needle=dataclasses.replace(CONFIG, **changes)).validate()


def test_invalid_lengths_and_prompts_are_refused():
    with pytest.raises(ValueError, match=r"needle.lengths=100; .* require at least \d{3} tokens"):
        byte_task(lengths=(100,))[0].lengths(4096)
    with pytest.raises(ValueError, match="needle.lengths=4,8,16,32; "):
        byte_task(lengths=())[0].lengths(16)
    assert byte_task(lengths=())[0].lengths(1024) == [512, 1024, 2048]
    with pytest.raises(ValueError, match="needle.buffer=20; .* require at least"):
        byte_task(buffer=20)
    task, text = byte_task()
    with pytest.raises(ValueError, match="text has shape"):
        find_needles(CopyOracle(), task, text[:, :100], [500], progress=False)
    answerer = Answerer(CopyOracle(), max_length=8, num_tokens=1)
    with pytest.raises(ValueError, match="over max_length=8"):
        answerer(np.zeros((1, 9), np.int32), np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match="ids from 0 to 257; .* vocabulary has 257"):
        answerer(np.zeros((1, 3), np.int32), np.full((1, 2), [0, 257], np.int32))
    with pytest.raises(ValueError, match="answers has shape"):
        answerer(np.zeros((2, 3), np.int32), np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match=r"lengths=\[4\]: accepted are 1 numbers of 1 to 3"):
        answerer(np.zeros((1, 3), np.int32), np.zeros((1, 1), np.int32), np.array([4]))


TEXTS = {
    "question": "Which colour has the harbour's bell? Answer:",
    "cue": "The harbour's bell is",
    "answer": "painted green",
    "instruction": "A line above is about a bell.",
    "judge": {"model": "judge-1", "system": "Rate.", "user": "{reference}|{input}|{prediction}"},
}


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(TEXTS))
    return str(path)


def test_a_prompts_file_has_its_texts_and_the_published_numbers(texts):
    config = NeedleConfig(prompt=texts, buffer=400)
    task = NeedleTask(config, ByteTokenizer(), bos_id=256)
    assert task.new_tokens == 1024 and task.text_length(1000) == 600
    assert task.lengths(64) == [1000 + 3100 * i for i in range(11)]
    assert NeedleConfig(prompt=texts).with_texts().buffer == 200
    prompts = task.prompts(np.resize(np.array(ByteTokenizer().encode(TEXT)), (1, 600)), 1000)
    easy, standard = (next(p for p in prompts if p.mode == mode) for mode in ("easy", "standard"))
    question, fact = TEXTS["question"], "The harbour's bell is painted green."
    for prompt, needle in ((easy, f"\n{question} {fact}\n"), (standard, f"\n{fact}\n")):
        text = ByteTokenizer().decode(prompt.tokens)
        assert needle in text
        assert text.endswith(f"\n\nA line above is about a bell. {question} The harbour's bell is")


def test_invalid_prompts_and_judges_are_refused(texts, tmp_path):
    with pytest.raises(ValueError, match="needle.answer='x' and needle.prompt=.*texts.json"):
        NeedleConfig(prompt=texts, answer="x").validate()
    with pytest.raises(ValueError, match="needle.prompt='foo' cannot be read"):
        NeedleConfig(prompt="foo").validate()
    with pytest.raises(ValueError, match="needle.samples=2; with needle.judge=requests"):
        NeedleConfig(prompt=texts, judge="requests", samples=2).validate()
    with pytest.raises(
        ValueError, match="judge=requests and needle.prompt=own; accepted is a file"
    ):
        NeedleConfig(judge="requests").validate()
    path = tmp_path / "wrong.json"
    for wrong, words in (
        (dict(TEXTS, cue=3), "has no text under cue"),
        (dict(TEXTS, judge={"model": "m", "system": "s"}), "has no text under judge.user"),
        (dict(TEXTS, judge={"model": "m", "system": "s", "user": "u"}), "judge.user has no {reference}"),
        ([1], "has no text under question, cue, answer, instruction"),
    ):  # fmt: skip
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=words):
            NeedleConfig(prompt=str(path)).validate()


@pytest.mark.slow
def test_the_judges_requests_and_ratings(run, texts, tmp_path, capsys):
    config = NeedleConfig(
        prompt=texts, lengths=(460,), depths=(0, 100), judge="requests", buffer=200, new_tokens=40
    )
    TASKS["needle"](run, Request(needle=config, batch_size=5, piece_length=100), tmp_path)
    rows = [json.loads(r) for r in (tmp_path / "needle_judge.jsonl").read_text().splitlines()]
    names = [row["custom_id"] for row in rows]
    assert names == ["easy-460-0", "easy-460-100", "standard-460-0", "standard-460-100"]
    body = rows[0]["body"]
    assert body["model"] == "judge-1" and body["temperature"] == 0
    message = body["messages"][1]["content"]
    assert message.startswith(
        "\nThe harbour's bell is painted green.\n|Which colour has the harbour's bell?|"
    )
    ratings = dict(zip(names, (10, 4, 1, 1), strict=True))
    answers = [{"custom_id": k, "content": f"Short. Rating: [[{v}]]"} for k, v in ratings.items()]
    message = {"choices": [{"message": {"content": answers[0].pop("content")}}]}
    answers[0]["response"] = {"body": message}
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in answers))
    judge.main([f"--folder={tmp_path}", f"--answers={path}"])
    judged = json.loads((tmp_path / "needle_judged.json").read_text())
    assert judged["ratings"] == {"easy": [[10, 4]], "standard": [[1, 1]]}
    assert judged["means"] == {"easy": 7, "standard": 1} and "7.00" in capsys.readouterr().out
    path.write_text(json.dumps(answers[1]) + "\n")
    with pytest.raises(ValueError, match="request 'easy-460-0' has no answer with"):
        judge.main([f"--folder={tmp_path}", f"--answers={path}"])
    for row, message in (
        ({"content": "[[5]]"}, "answer 1 has custom_id=None; accepted"),
        ({"custom_id": names[0], "content": 5}, "answer 'easy-460-0' has the content 5; accepted"),
    ):
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=message):
            judge.main([f"--folder={tmp_path}", f"--answers={path}"])
    path.write_text("".join(json.dumps(answers[1] | dict(content=c)) + "\n" for c in "ab"))
    with pytest.raises(ValueError, match="two unequal answers to 'easy-460-100'"):
        judge.main([f"--folder={tmp_path}", f"--answers={path}"])
    (tmp_path / "needle.json").write_text('{"lengths": 5}')
    with pytest.raises(ValueError, match=r"needle\.json: lengths=5; accepted is a list"):
        judge.main([f"--folder={tmp_path}", f"--answers={path}"])
