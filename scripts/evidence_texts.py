"""Sections and texts of docs/results/evidence.md, with places for numbers of the rows, which `filled` writes.

A place is {FIELD|MODEL}: the value of a model of 100 M tokens, of several seeds all values. Fields are loss, names (recall of the cloze of names),
mb (state), active and all (10⁶ parameters), rate (learning rate), speed (10³ tokens/s). {short|MODEL|RATE} is the loss of a short run at a learning
rate, {methods} the list of methods with their losses, {missing|TABLE} the models of a table without a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.tables import evidence
from benchmarks.tables.table import Row

Text = tuple[str, str, str]
SECTIONS: tuple[Text, ...] = (
    ("evidence_claims", "What the papers say, and more comparisons", """
A statement is a paper's if the paper compares these methods by such a measure: held-out loss stands for its perplexities and tasks of language,
fields of records for FDA and SWDE. The papers' models are larger or were trained on more tokens. FoX's paper compares DeltaNet, not Gated DeltaNet, and
the cloze of names and the multi-key needles are tasks of this project: those are comparisons of this project. Needles are near perfect in FoX's
paper for models of 760M parameters trained on 48 B tokens; that a share of at least 0.9 is near perfect is how this page reads it, and the
statement is decided by each of two scores.

Values are means over the seeds. A difference that is not larger than the noise decides nothing, and the cell says what the noise is of. It is the
largest difference between seeds of one model: of the two models that are compared if both have two seeds, otherwise of any model of any table; for a
statement on one model that has two seeds, it is their distance from the mean. Perplexities are compared by their ratio. For shares of questions it is
at least two standard errors of the difference, of which each share of n questions has at least 3 / n where two models are compared; all seeds answer
the same questions, which count once. Most models have one seed, so that the noise may be larger than it is here."""),
    ("evidence_fox", "The Forgetting Transformer's models", """
Width, depth, weight decay and the schedule (from 0 over a tenth of the tokens, then a cosine to 0) of the `fox:` models are those of the authors' recipe at 125M; Gated DeltaNet is the
registry's, whose rate ends at a tenth of its peak and whose embedding is its head. The paper has one learning rate, 2e-3, for FoX and transformers at this size. Here each model has the best of 1e-3, 2e-3 and 4e-3
in a run of 10 M tokens, in which transformers have learned little: {rate|fox:pro-125m} for FoX (Pro) and {rate|fox:transformer-pro-125m} for Transformer (Pro), the two ends of what was tried. So better rates may
lie beyond for both, and what part of their difference the rates make is not known."""),
    ("evidence_mom", "Mixture-of-Memories", """
MoM's paper has models of 340M and 1.3B at a rate of 3e-4 with a weight decay of 0.01. These have the width, depth, rate (2e-3, times what short runs chose) and weight decay (0.1) of FoX's 125M; the rate ends at a tenth of its peak, as in MoM's paper.
`baseline=inner` is the inner mixer alone, `baseline=expanded` with a memory three times as large, `expanded=5` with one as large as all memories together, and `hidden_ratio` one with as many parameters; `row_conv=4` has a convolution of four tokens along the row in front of the memories.

Around Gated DeltaNet, with two seeds each, MoM has no lower held-out loss than its inner mixer ({loss|mom:125m} beside {loss|mom:125m,baseline=inner}), with five times the memory, but recalls more names, a task of this project (the cloze of names that a document repeats): {names|mom:125m} of 280 questions beside {names|mom:125m,baseline=inner}. The task was added after the first seed's rows were known; the second seeds confirm it.
A single memory three times as large ({mb|mom:125m,baseline=expanded} MB a sequence and {all|mom:125m,baseline=expanded} million parameters; all of MoM's memories {mb|mom:125m} MB) has {loss|mom:125m,baseline=expanded}, below MoM by more than the noise, and recalls {names|mom:125m,baseline=expanded} of the names. So the model with the larger memory, which also has more parameters than the inner mixer ({all|mom:125m,baseline=inner} million), has a lower loss and recalls no more names; MoM's loss differs from the inner mixer's by less than the noise, and it recalls more names. A single memory in a model of as many parameters ({all|mom:125m,baseline=inner,hidden_ratio=8} million, by a wider feedforward, `hidden_ratio=8`; a token of MoM uses {active|mom:125m}) has {loss|mom:125m,baseline=inner,hidden_ratio=8} and recalls {names|mom:125m,baseline=inner,hidden_ratio=8} of the names, so that the parameters alone do not explain it.
That only several memories can recall these names is not shown: RWKV6, with one memory of {mb|lm:rwkv6-125m} MB, recalls {names|lm:rwkv6-125m} of them and Mamba2, with {mb|lm:mamba2-125m} MB, {names|lm:mamba2-125m}, in models that tie embedding and head, and Mamba2 by FoX's config, which does not tie them, {names|fox:mamba2-125m} (one seed each). A single memory as large as all of MoM's has no row yet.

Around GLA nothing is known about MoM and its inner mixer at this size: MoM has {loss|mom:125m,inner=gla}, and seeds of the inner mixer have {loss|mom:125m,inner=gla,baseline=inner}. A memory three times as large has {loss|mom:125m,inner=gla,baseline=expanded}, ahead of all three, but by less than the noise of seeds from the nearest. It was supposed here that MoM lacks the token before, which is in another memory in one of two cases,
but for the shared memory, since GLA has no short convolution. The rows do not show it: with a convolution along the row MoM comes to {loss|mom:125m,inner=gla,row_conv=4}, and a single memory with the same convolution (`row_conv=4,memories=1,top_k=1,shared=0`) to {loss|mom:125m,inner=gla,row_conv=4,memories=1,top_k=1,shared=0}, within the noise of seeds, and recalls no more.
The row of MoM around GLA has no routing, so that a collapse of its router is not excluded; of the models below, which have routing, one is around GLA, with the convolution. What remains to be tried is a lower learning rate, with which a short run ended lower ({short|mom:125m,inner=gla|0.0005} at 0.0005 on the corpus; {short|mom:125m,inner=gla|0.001} at 0.001, the lowest of the first three, on another beginning of it),
a larger weight of the balance loss, and longer training: a memory of MoM is updated by half of the tokens."""),
    ("evidence_routing", "Routing of the memories", """
At the end of training, over layers and memories: a memory's load is its share of the choices, one over the number of memories if they are even. Of several seeds each has its value. Rows from before routing was stored, such as that of MoM around GLA, are not here."""),
    ("evidence_moe", "Linear-MoE", """
`pattern=N` is softmax attention in every layer, `LLLN` in every fourth. `a-small` is no published size: it has width, depth, rate and weight decay of FoX's 125M, and 8 of 64 experts. In equal time the hybrid would have few more tokens: the long runs have {speed|linear_moe:a-small,mixer=gla,pattern=LLLN} thousand tokens/s beside {speed|linear_moe:a-small,pattern=N} of softmax attention, so that no row of equal time was made. One seed each."""),
    ("evidence_methods", "Methods with a kernel", """
The rows are a part of the registry. Methods with a kernel that have no row: {missing|methods}. Of those without a kernel, which would be trained on 30 M tokens: {missing|methods_xla}.

Rate (2e-3, times what short runs chose) and weight decay are those of FoX's 125M, and the rate ends at a tenth of its peak. Held-out loss with the memory of a sequence and the parameters: {methods}. Gated DeltaNet, Mamba2, RWKV6, KDA and DeltaNet mix a token with those before it, by short convolutions, or token shifts in RWKV6, and RetNet, gated retention, GLA, lightning and linear attention do not: each of the former is below all of the latter, which also differ in rules, decays and sizes; a convolution alone takes GLA's memory by MoM's config from {loss|mom:125m,inner=gla,baseline=inner} to {loss|mom:125m,inner=gla,row_conv=4,memories=1,top_k=1,shared=0}, within the noise of seeds. What convolutions, rules and sizes contribute is not separated here. Linear attention has neither decay nor convolution, and learns the slowest of the methods at 10M, too. DeltaNet was trained twice with one seed, and had 2.556 before.

These models tie embedding and head; those of FoX's and MoM's configs do not. Mamba2 by FoX's config, with the same layers and the same learning rate, has {loss|fox:mamba2-125m} where it has {loss|lm:mamba2-125m} here: besides the head, the rate ends at 0 instead of a tenth of its peak, and warms up from zero (one seed each). So a model of this table beside one of the others compares more than methods, as the comparison of FoX (Pro) and Gated DeltaNet does; by Mamba2's rows that is to FoX's disadvantage."""),
    ("evidence_methods_xla", "Methods without a kernel", ""),
    ("evidence_rates", "Learning rates", """
The best of the rates that were tried in short runs with seed 0 was used; where it is the lowest or the highest of them, a better one may lie beyond. A model without short runs was given one rate. Of the short runs that the call of the long run made, the row does not say the tokens if the cell is empty; the other ones are made by the commands below."""),
)  # fmt: skip
NOTES = """One row is one model; vocabulary, tokens, rows in a step (16 of 4,096 tokens, fewer than published, since the runs are shorter) and a warm-up over a tenth of the tokens are this
benchmark's, and each section says what of its models' recipe is published. A state is that of one sequence after a row of training. Card hours are of all that a model took:
short runs, training and evaluations, with compiling unless another model trained on the card meanwhile.

The corpus is made of 82 of the 97 packages in [docs/corpus.md](../corpus.md): 117.3 M training tokens, of which the models saw 100 M. P(l) is the perplexity of the first l tokens of held-out
documents of 65,536 tokens, and L(i) the loss at position i. Both are means over 29 documents, those of the 32 that were packed that are long enough. Nine are pieces of one
dictionary (WordNet), four files of Emacs, three modules of Ansible, two pieces of FOLDOC, two files each of Singular and Vim, and seven of other packages. So
these curves are of these texts: nine of 29 parts of each mean are one dictionary. In the plots a line is a seed, and a point of L(i) the mean of
512 positions, the blocks that rows store; FoX's paper averages 101.

Needles: the share recalled, over depths, in one text, a file of Emacs Lisp, cut to 1,024, 2,048 and 4,096 tokens, the training length T, and to 8,192 and 16,384 beyond it, by two definitions: found, the
model's continuation contains the answer; below 1 nat, the answer itself has a loss below 1 nat a token after the prompt. The first is nearer to the paper, where another model judges continuations. Places are
after full stops: at 4,096 tokens depths of 50 and 75 % are one place of this text, which counts once, so that 14 prompts of each mode are within T."""
TOKENS = 100_000_000
_FIELDS: dict[str, tuple[Callable[[Row], float | None], str]] = {
    "loss": (evidence.heldout_loss, "{:.3f}"),
    "names": (evidence.recall("names"), "{:.3f}"),
    "mb": (lambda row: row["state_bytes"] / 1e6, "{:.1f}"),
    "active": (lambda row: row["parameters"]["active"] / 1e6, "{:.0f}"),
    "all": (lambda row: row["parameters"]["total"] / 1e6, "{:.0f}"),
    "rate": (lambda row: row["peak_lr"], "{:.0e}"),
    "speed": (lambda row: row["tokens_per_second"] / 1e3, "{:.0f}"),
}


def filled(text: str, rows: list[Row]) -> str:
    """Return a text with the values of the rows in its places.

    Raises:
        LookupError: a model, or a short run at a rate, has no row.
    """
    newest = list(
        {evidence.identity(row): row for row in rows if row.get("kind") != "rates"}.values()
    )
    trained = [row for row in newest if row["tokens"] == TOKENS and not row.get("time_of")]

    def value(place: re.Match[str]) -> str:
        field, _, model = place.group(1).partition("|")
        if field == "methods":
            return methods(trained)
        if field == "missing":
            return missing(model, newest)
        if field == "short":
            return short(rows, *model.split("|"))
        read, form = _FIELDS[field]
        return " and ".join(dict.fromkeys(form.format(read(row)) for row in _runs(trained, model)))

    return re.sub(r"\{([^{}]+)\}", value, text)


def _runs(rows: list[Row], model: str) -> evidence.Runs:
    """Return the rows of a model, of several learning rates those with the lowest loss, in the order of their seeds."""
    runs = evidence.by_model([row for row in rows if row["model"] == model])
    if not runs:
        raise LookupError(f"no row of {model} with {TOKENS} tokens")
    return sorted(runs[0], key=lambda row: row["seed"])


def short(rows: list[Row], model: str, rate: str) -> str:
    """Return the loss of a model's short run at a learning rate.

    Raises:
        LookupError: there is none.
    """
    for row in rows:
        if row["model"] == model and row.get("kind") == "rates" and rate in row["rates"]:
            return f"{row['rates'][rate]:.3f}"
    raise LookupError(f"no short run of {model} at {rate}")


def methods(rows: list[Row]) -> str:
    """Return the methods of the registry with their losses, memories and parameters, the lowest loss first."""
    runs = evidence.by_model([row for row in rows if evidence.belongs(row, "methods")])
    return ", ".join(
        f"`{own[0]['model'][3:].removesuffix('-125m')}` {evidence.mean(own, evidence.heldout_loss):.3f} "
        f"({own[0]['state_bytes'] / 1e6:.1f} MB, {own[0]['parameters']['active'] / 1e6:.0f} M)"
        for own in runs
    )


def missing(table: str, rows: list[Row]) -> str:
    """Return the methods of a table of `python -m benchmarks evidence` that have no row, and how many of how many these are."""
    from benchmarks.cases.evidence import TABLES  # imports JAX

    done = {row["model"] for row in rows}
    left = [name[3:].removesuffix("-125m") for name in TABLES[table] if name not in done]
    names = ", ".join(f"`{name}`" for name in left)
    return f"{len(left)} of {len(TABLES[table])} ({names})" if left else "none"
