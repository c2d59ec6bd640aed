"""Write docs/results/evidence.md from the rows of docs/evidence.jsonl: `python -m scripts.evidence_page`.

The page begins with two sentences that the rows decide: which statements of the papers hold, and which do not. It has a section for
each table that has a row. The command also draws the plots, and adds the page to docs/index.md and docs/results/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import report
from benchmarks.tables import TABLES
from benchmarks.tables.evidence import FILE
from scripts import draw_results

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "results" / "evidence.md"
SECTIONS = (
    ("evidence_claims", "What the papers say, and more comparisons", "A statement is a paper's if the paper compares these methods by such a measure: held-out loss stands for its perplexities and tasks of language, fields of records for FDA and SWDE. The papers' models are larger and were trained on more tokens. "
     "FoX's paper compares DeltaNet, not Gated DeltaNet, and the cloze of names and the multi-key needles are tasks of this project: those are comparisons of this project. Needles are near perfect in FoX's paper for models of 760M parameters trained on 48 B tokens; that a share of at least 0.9 is near perfect is how this page reads it, and the statement is decided by each of two scores.\n\n"
     "Values are means over the seeds. A difference that is not larger than the noise decides nothing, and the cell says what the noise is of. It is the largest difference between seeds of one model: of the two models that are compared if both have two seeds, "
     "otherwise of any model of any table; for a statement on one model that has two seeds, it is their distance from the mean. Perplexities are compared by their ratio. For shares of questions it is at least two standard errors of the difference, of which each share of n questions has at least 3 / n where two models are compared; "
     "all seeds answer the same questions, which count once. Most models have one seed, so that the noise may be larger than it is here."),
    ("evidence_fox", "The Forgetting Transformer's models", ""),
    ("evidence_mom", "Mixture-of-Memories", "`baseline=inner` is the inner mixer alone, `baseline=expanded` with a memory three times as large, `expanded=5` with one as large as all memories together, and `hidden_ratio` one with as many parameters; `row_conv=4` has a convolution of four tokens along the row in front of the memories.\n\n"
     "Around Gated DeltaNet, with two seeds each, MoM has no lower held-out loss than its inner mixer (2.399 and 2.457 beside 2.399 and 2.436), with five times the memory, but recalls more names, a task of this project (the cloze of names that a document repeats): 0.132 and 0.107 of 280 questions beside 0.039 and 0.032. The task was added to the paper's statements after the first seed's rows were known; the second seeds confirm it. "
     "A single memory three times as large (28.6 MB a sequence and 184 million parameters; all of MoM's memories 48.0 MB) has 2.295 and 2.320, 0.120 below MoM, which is twice the noise, and recalls 0.032 and 0.039 of the names. So the model with the larger memory, which also has 43 million parameters more than the inner mixer, has a lower loss and recalls no more names; MoM's loss differs from the inner mixer's by less than the noise, and it recalls more names. A single memory in a model of as many parameters (198 million, by a wider feedforward, `hidden_ratio=8`; a token of MoM uses 170) has 2.388 and 2.380 and recalls 0.032 and 0.046 of the names, so that the parameters alone do not explain it. "
     "That only several memories can recall these names is not shown: RWKV6, with one memory of 2.4 MB, recalls 0.086 of them and Mamba2, with 19.1 MB, 0.118, in models that tie embedding and head, and Mamba2 by FoX's config, which does not tie them, 0.075 (one seed each). A single memory as large as all of MoM's has no row yet.\n\n"
     "Around GLA nothing is known about MoM and its inner mixer at this size: MoM has 2.985, and two seeds of the inner mixer have 2.911 and 3.043. A memory three times as large has 2.834, ahead of all three, but by less than the noise of seeds from the nearest. It was supposed here that MoM lacks the token before, which is in another memory in one of two cases, "
     "but for the shared memory, since GLA has no short convolution. The rows do not show it: with a convolution along the row MoM comes to 2.849, and a single memory with the same convolution (`row_conv=4,memories=1,top_k=1,shared=0`) to 2.801, within the noise of seeds, and recalls no more. "
     "Nor has the router collapsed (below). What remains to be tried is a lower learning rate, with which a short run ended lower (5.710 at 0.0005 on the corpus; 5.766 at 0.001, the lowest of the first three, on another beginning of it), "
     "a larger weight of the balance loss, and longer training: a memory of MoM is updated by half of the tokens."),
    ("evidence_routing", "Routing of the memories", "At the end of training, over layers and memories: a memory's load is its share of the choices, one over the number of memories if they are even. Of several seeds each has its value."),
    ("evidence_moe", "Linear-MoE", "`pattern=N` is softmax attention in every layer, `LLLN` in every fourth."),
    ("evidence_methods", "All methods with a kernel", "Linear attention has neither decay nor convolution, and learns the slowest of the methods at 10M, too. Held-out loss with the memory of a sequence and the parameters: Gated DeltaNet 2.217 (12.7 MB, 119 M), Mamba2 2.337 (19.1 MB, 115 M), RWKV6 2.403 (2.4 MB, 121 M), KDA 2.478 (4.9 MB, 114 M), DeltaNet 2.563 (4.9 MB, 110 M), RetNet 2.671 (18.9 MB, 138 M), gated retention 2.789 (9.4 MB, 117 M), GLA 2.846 (4.7 MB, 110 M), lightning attention 3.215 (4.7 MB, 117 M). The first five mix a token with those before it, by short convolutions, or token shifts in RWKV6, and the last four do not: all of the first five are below all of the last four, which also differ in rules, decays and sizes; a convolution alone takes GLA's memory by MoM's config from 2.911 and 3.043 to 2.801, within the noise of seeds. What convolutions, rules and sizes contribute is not separated here. DeltaNet was trained twice with one seed, and had 2.556 before.\n\n"
     "These models tie embedding and head; those of FoX's and MoM's configs do not. Mamba2 by FoX's config, with the same layers and the same learning rate, has 2.624 where it has 2.337 here: besides the head, the rate ends at 0 instead of a tenth of its peak, and warms up from zero (one seed each). So a model of this table beside one of the others compares more than methods, as the statement on FoX (Pro) and Gated DeltaNet does; by Mamba2's rows that is to FoX's disadvantage."),
    ("evidence_methods_xla", "Methods without a kernel", ""),
    ("evidence_rates", "Learning rates", "The best of the rates that were tried in short runs with seed 0 was used; where it is the lowest or the highest of them, a better one may lie beyond. A model without short runs was given one rate. Of the short runs that the call of the long run made, the row does not say the tokens if the cell is empty; the other ones are made by the commands below."),
)  # fmt: skip
ALT = {
    "loss": "Loss by position and perplexity of beginnings of long documents, with the training length marked",
    "recall": "Recall of real text against the size of the decode state",
    "routing": "Smallest and largest load of a memory in each layer over training, of each Mixture-of-Memories",
}
NOTES = """One row is one model. A state is that of one sequence after a row of training. P(l) is the perplexity of the first l tokens of held-out
documents of 65,536 tokens. Needles: the share recalled, over depths, in one text cut to 1,024, 2,048 and 4,096 tokens, the training length T, and to 8,192 and 16,384 beyond it, by two definitions: found, the
model's continuation contains the answer; below 1 nat, the answer itself has a loss below 1 nat a token after the prompt. The first is nearer to the paper, where another model judges continuations. Places are
after full stops: at 4,096 tokens depths of 50 and 75 % are one place of this text, which counts once, so that 14 prompts of each mode are within T. Card hours are
of all that a model took: short runs, training and evaluations, with compiling unless another model trained on the card meanwhile. The corpus is [docs/corpus.md](../corpus.md)'s. Steps have 16 rows of 4,096 tokens, fewer than published, since the runs are shorter:
model, weight decay and the schedule's shape are the published ones."""


def page() -> str:
    """Return the page's markdown, with the marks of its tables and without their contents.

    Raises:
        ValueError: there is no row of a model.
    """
    if "evidence_found" not in TABLES:
        raise ValueError(f"docs/{FILE} has no row of a model; add those of python -m benchmarks evidence")  # fmt: skip
    parts = ["# Evidence at size", _mark("evidence_found"), NOTES]
    for table, title, text in SECTIONS:
        if table in TABLES:
            parts += [f"## {title}", *([text] if text else []), _mark(table), *_plots(table)]
    return "\n\n".join(parts) + "\n"


def _mark(table: str) -> str:
    return f"<!-- table: {table} -->\n{report.END}"


def _plots(table: str) -> list[str]:
    """Return the images of the plots of a table's rows."""
    return [
        "\n".join(f"![{ALT[name.rpartition('_')[2]]}](plots/{name}-{mode}.svg){{.only-{mode}}}" for mode in ("light", "dark"))
        for name, (shown, _) in draw_results.PLOTS.items()
        if shown == table
    ]  # fmt: skip


def add_to_contents(docs: Path) -> None:
    """Add the page to the site's contents and to the list of results pages, before the training steps, unless it is there.

    Raises:
        ValueError: a page has no line of the training steps.
    """
    for name, place, line in (
        ("index.md", "results/training_steps\n", "results/evidence\n"),
        ("results/README.md", "| [training_steps.md]", "| [evidence.md](evidence.md) | models of 125M on real text: what holds of the papers' statements |\n"),
    ):  # fmt: skip
        text = (docs / name).read_text()
        if line not in text and place not in text:
            raise ValueError(
                f"{docs / name} has no line {place.strip()!r}, before which the page is listed"
            )
        if line not in text:
            (docs / name).write_text(text.replace(place, line + place, 1))


def main() -> int:
    """Write the page, its plots and its line in the contents; return the exit status."""
    try:
        text = page()
    except ValueError as error:
        print(f"evidence_page: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(report.fill(text, PAGE, DOCS.parent))
    draw_results.write(draw_results.FOLDER)
    try:
        add_to_contents(DOCS)
    except ValueError as error:
        print(f"evidence_page: {error}", file=sys.stderr)
        return 1
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
