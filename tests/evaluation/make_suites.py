"""Make a few rows of each suite's data, in the layouts that the suites read: no network is needed.

    python -m tests.evaluation.make_suites --out=suites
    python eval.py --workdir=runs/x --tasks=lm_eval --lm_eval.tasks=recall --lm_eval.data=suites

The texts are made up. Their only purpose is that each suite runs.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from lsm_jax.evaluation import recall_data

WORDS = "amber birch cedar delta ember fjord grove heron inlet jetty kiosk lotus maple north ocean".split()
LONGBENCH = {
    "narrativeqa": "en",
    "qasper": "en",
    "multifieldqa_en": "en",
    "hotpotqa": "en",
    "2wikimqa": "en",
    "musique": "en",
    "gov_report": "en",
    "qmsum": "en",
    "multi_news": "en",
    "trec": "en",
    "triviaqa": "en",
    "samsum": "en",
    "lcc": "python",
    "repobench-p": "python",
}
SUBJECTS = Path(__file__).with_name("mmlu_subjects.txt").read_text().split()


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=8)).capitalize() + "."


def filler(rng: random.Random, count: int) -> str:
    return " ".join(sentence(rng) for _ in range(count))


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def public_recall_rows(task: str) -> list[dict]:
    """Return three rows for the recall task `task`, as its public data set has them; the answer is in front,
    in the middle and at the end of the context.
    """
    rng, rows = random.Random(task), []
    for number, before in enumerate((0, 40, 80)):
        value = f"{rng.choice(WORDS)} {rng.randint(1000, 9999)}"
        if task in ("fda", "swde"):
            fact, asked = (
                f"Registry number of product {number}: {value}.",
                f"Registry number of product {number}",
            )
        else:
            asked = f"The registry number of product {number} is"
            fact = f"{asked} {value}."
        # Another sentence follows the fact, since a context loses the full stop that ends it.
        context = f"{filler(rng, before)} {fact} {filler(rng, 80 - before)} {sentence(rng)}".strip()
        row = {"doc_id": f"{task}-{number}"}
        if task == "fda":
            row |= {"key": asked, "value": value, "text": f"{context}\n{asked}:"}
        elif task == "swde":
            row |= {
                "key": asked,
                "value": value,
                "text": f"{context}\nSummary of information above...\n{asked}:",
            }
        elif task == "squad":
            row |= {"value": value, "text": f"{context} {asked}"}
        else:
            row |= {"question": asked, "answers": [value, "none of these"], "context": context}
        rows.append(row)
    return rows


def make_recall(folder: Path) -> None:
    for task in recall_data.TASKS:
        source = folder / "public" / f"{task}.jsonl"
        write_rows(source, public_recall_rows(task))
        recall_data.main([f"--task={task}", f"--source={source}", f"--out={folder}"])


def make_commonsense(folder: Path) -> None:
    rng = random.Random(0)
    piqa = [{"goal": "open a jar", "sol1": "turn the lid", "sol2": "eat the lid", "label": 0}]
    write_rows(folder / "baber/piqa/validation.jsonl", piqa * 2)
    hellaswag = {
        "activity_label": "Cooking",
        "ctx_a": "A man stirs a pot.",
        "ctx_b": "he",
        "ctx": "A man stirs a pot. He",
        "endings": [sentence(rng) for _ in range(4)],
        "label": "2",
    }
    write_rows(folder / "Rowan/hellaswag/data/validation-00000-of-00001.jsonl", [hellaswag] * 2)
    winogrande = {
        "sentence": "The cup is not in the box because the _ is too large.",
        "option1": "cup",
        "option2": "box",
        "answer": "1",
    }
    write_rows(folder / "allenai/winogrande/winogrande_xl/validation.jsonl", [winogrande] * 2)
    arc = {
        "question": "Which is a metal?",
        "choices": {"text": ["iron", "wood", "glass", "wool"], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
    }
    for config in ("ARC-Easy", "ARC-Challenge"):
        write_rows(folder / f"allenai/ai2_arc/{config}/test.jsonl", [arc] * 2)


def make_commonsense_of_mom_and_fox(folder: Path) -> None:
    """Write small data sets into `folder`, for the tasks that the suites commonsense_mom and commonsense_fox
    have besides those of the suite commonsense.
    """
    rng = random.Random(4)
    write_rows(
        folder / "EleutherAI/wikitext_document_level/wikitext-2-raw-v1/test.jsonl",
        [{"page": filler(rng, 8)}],
    )
    texts = [{"text": filler(rng, 3).removesuffix(".")} for _ in range(2)]
    for split in ("validation", "test"):
        write_rows(folder / f"cimec/lambada/{split}.jsonl", texts)
    write_rows(folder / "EleutherAI/lambada_openai/default/test.jsonl", texts)
    copa = {
        "premise": "The lamp went out.",
        "choice1": "Its oil was used up.",
        "choice2": "It was morning.",
        "question": "cause",
        "label": 0,
    }
    write_rows(folder / "aps/super_glue/copa/validation.jsonl", [copa] * 2)
    boolq = {"passage": "Iron is a metal.", "question": "is iron a metal", "label": 1}
    write_rows(folder / "aps/super_glue/boolq/validation.jsonl", [boolq] * 2)
    openbookqa = {
        "question_stem": "A metal is",
        "choices": {"text": ["iron", "wood", "glass", "wool"], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
    }
    write_rows(folder / "allenai/openbookqa/main/test.jsonl", [openbookqa] * 2)
    sciq = {
        "support": "Iron is a metal.",
        "question": "What is iron?",
        "distractor1": "wood",
        "distractor2": "glass",
        "distractor3": "wool",
        "correct_answer": "a metal",
    }
    write_rows(folder / "allenai/sciq/test.jsonl", [sciq] * 2)


def make_mmlu(folder: Path) -> None:
    for subject in SUBJECTS:
        rows = [
            {
                "question": f"What is {i} + 1?",
                "choices": [str(i + j) for j in range(4)],
                "answer": 1,
            }
            for i in range(6)
        ]
        write_rows(folder / f"cais/mmlu/{subject}/dev.jsonl", rows[:5])
        write_rows(folder / f"cais/mmlu/{subject}/test.jsonl", rows[5:])


def make_longbench(folder: Path) -> None:
    """Write a small data set for each task of LongBench into `folder`, in the layout of the repository
    LongBench, whose rows have the question under the name "input".
    """
    rng = random.Random(1)
    for name, language in LONGBENCH.items():
        row = {
            "input": "What colour is the door?",
            "context": filler(rng, 60),
            "answers": ["amber birch"],
            "length": 480,
            "dataset": name,
            "language": language,
            "all_classes": ["amber birch", "cedar"] if name == "trec" else None,
            "_id": f"{name}-0",
        }
        write_rows(folder / f"LongBench/data/{name}.jsonl", [row])


def make_essays(folder: Path) -> None:
    rng = random.Random(2)
    (folder / "essays").mkdir(parents=True, exist_ok=True)
    for number in range(2):
        (folder / "essays" / f"{number}.txt").write_text(filler(rng, 30))


def make_needle_prompt(folder: Path) -> None:
    """Write a made-up prompt for the needle test, with a judge, in the format that `--needle.prompt` reads."""
    texts = {
        "question": "Where is the lamp?",
        "cue": "The lamp is",
        "answer": "in the north grove beside the jetty",
        "instruction": "Answer the question by one sentence of the text.",
        "judge": {
            "model": "made-up-judge",
            "system": "You rate answers.",
            "user": "Question: {input} Correct: {reference} Given: {prediction} Rate it from [[1]] to [[10]].",
        },
    }
    (folder / "needle_prompt.json").write_text(json.dumps(texts, indent=2) + "\n")


def make_questions(folder: Path) -> None:
    """Write small files in the formats of SQuAD 2.0 and HotpotQA into `folder`: the files from which RULER's
    question tasks are made.
    """
    rng = random.Random(3)
    articles, hotpot = [], []
    for number in range(4):
        paragraphs = []
        for part in range(3):
            question = f"Who keeps lamp {number}-{part}?"
            answers = [
                {"text": f"keeper {number}{part}", "answer_start": 0},
                {"text": "the keeper"},
            ]
            paragraphs.append(
                {
                    "context": f"keeper {number}{part} keeps lamp {number}-{part}. {filler(rng, 2)}",
                    "qas": [
                        {"question": question, "answers": answers, "is_impossible": False},
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            )
        articles.append({"title": f"{number}", "paragraphs": paragraphs})
        context = [
            [f"Title {number}-{part}", [f"Keeper {number}. ", sentence(rng)]] for part in range(2)
        ]
        row = {
            "question": f"Who is keeper {number}?",
            "answer": f"Keeper {number}",
            "context": context,
        }
        hotpot.append(row)
    (folder / "ruler").mkdir(parents=True, exist_ok=True)
    (folder / "ruler/dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    (folder / "ruler/hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpot))


def make_suites(folder: Path) -> Path:
    makers = (
        make_recall,
        make_commonsense,
        make_commonsense_of_mom_and_fox,
        make_mmlu,
        make_longbench,
        make_essays,
        make_needle_prompt,
        make_questions,
    )
    for make in makers:
        make(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    make_suites(parser.parse_args().out)
