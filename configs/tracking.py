"""State tracking of every method: `--config=configs/tracking.py:<method>[,task=parity][,size=small][,negative=1][,steps=2]`.

Reproduces: words of permutation groups and parity (arXiv 2411.12537 on negative eigenvalues, arXiv 2502.10297 on DeltaProduct),
on which a transition that reflects, or n reflections a token, can store what gates in (0, 1) cannot. The model reads moves and says
after each what has become of the things; it is tested on more moves than it was trained on.
Command: python train.py --config=configs/tracking.py:gated_deltaproduct,task=S3,steps=2,size=published --workdir=runs/s3
Hardware: one GPU for minutes, with `size=medium` for one or two; `small` is for a CPU, one to three minutes. `python -m benchmarks tracking` trains the table.
Expected: docs/tracking.jsonl has the first rows: DeltaNet learns parity with negative eigenvalues (words of 41 to 256 moves: 1.000,
1.000 and 0.773 for three seeds, when the first stops the training) and not with positive ones (0.501). benchmarks/pending.jobs has the jobs of the medium size.

Tasks: `parity` (permutations of two things), `S3`, `S5-swaps` (moves that exchange two of five things, or none), `S5` (all 120
moves), `S5-mixed` (S5, tested as S5 is, and trained besides on short words, half of them of swaps). A product of n
reflections exchanges n + 1 things at most, so one layer requires n = 1 for parity and swaps, 2 for S3, 4 for S5.

Settings as published (github.com/automl/DeltaProduct, state_tracking): one layer of the method and a feedforward, width 128, eight
heads of 32 channels, no convolution, no output gate, no decay in DeltaProduct, AdamW at 1e-3 with a cosine, 100,000 words of 128
moves, tests of 512 moves, three seeds, a token that marks the start. `negative=1` is β in (0, 2), with which transitions have
eigenvalues down to -1. Methods other than the delta rules are our presets at this width, with their convolutions.

Different from the published settings: batches of 512 in 20 epochs, which are as many steps as 2,048 in 80 (theirs: 100 at
most); tied embeddings, with different ids for moves and states; float32; gradients are scaled down to a norm of 1. Parity is asked
after every move, not only after the last, and is trained on 40 moves, which contain all shorter words. `size=medium` is the same in
3,840 steps of 128 words, with two learning rates and two seeds. `size=small` has width 32, two
heads of 16, shorter words, 768 steps of 32 words and a rate of 5e-3; the ops run token by token, which compiles faster.

Not published: the training words of `S5-mixed`. One batch in three is of S5's words, one is of 7 moves of all 120, one of 7
swaps, and there are as many steps of each as another task has in all; `size=small` is too short for it. From S5's words alone,
with 14,400 pairs of moves, four steps a token learned no more than the first move in 3,840 steps. Swaps are learned first, in
some hundred steps; the memory can then permute, and each other move is learned from words that contain it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from configs.variants import Option, parse_variant
from lsm_jax import mixers
from lsm_jax.data import TrackingTask, tracking_vocabulary
from lsm_jax.models import RecallModelConfig
from lsm_jax.training import TrackingConfig

# Things that are permuted, the moves, and the lengths of words in training and in the longest test, by size; and the moves and
# lengths of further words of the training, as many as those of the first kind.
TASKS: dict[str, dict[str, Any]] = {
    "parity": dict(things=2, moves="all", small=(40, 256), medium=(40, 256), published=(40, 256)),
    "S3": dict(things=3, moves="all", small=(24, 96), medium=(128, 512), published=(128, 512)),
    "S5-swaps": dict(
        things=5, moves="swaps", small=(24, 96), medium=(128, 512), published=(128, 512)
    ),
    "S5": dict(things=5, moves="all", small=(24, 96), medium=(128, 512), published=(128, 512)),
    "S5-mixed": dict(
        things=5, moves="all", beside=(("all", 7), ("swaps", 7)), small=(24, 96), medium=(128, 512), published=(128, 512)
    ),
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "small": dict(
        width=32, heads=2, head_dim=16, examples=8192, tests=128, batch_size=32, epochs=3, rates=(5e-3,), seeds=(0, 1, 2),
        form="recurrent", chunk_size=None,
    ),
    "medium": dict(
        width=128, heads=8, head_dim=32, examples=98_304, tests=512, batch_size=128, epochs=5, rates=(1e-3, 3e-3),
        seeds=(0, 1), form="chunk", chunk_size=32,
    ),
    "published": dict(
        width=128, heads=8, head_dim=32, examples=100_000, tests=1024, batch_size=512, epochs=20, rates=(1e-3,),
        seeds=(0, 1, 2), form="chunk", chunk_size=None,
    ),
}  # fmt: skip


def mixer_config(method: str, sizes: dict[str, Any], variant: str, **fields: Any) -> Any:
    """Return the config of the mixer `method` for state tracking: our preset with the heads of `sizes`, without convolution
    and output gate, and with the given fields.

    Raises:
        ValueError: the method has none of the given fields.
    """
    width, heads, dim = sizes["width"], sizes["heads"], sizes["head_dim"]
    config = mixers.get_method(method).config.for_width(width)
    known = {field.name for field in dataclasses.fields(config)}
    if missing := sorted(set(fields) - known):
        raise ValueError(f"variant {variant!r}: {method} has no field {', '.join(missing)}")
    wanted: dict[str, Any] = {}
    if "allow_negative_eigenvalues" in known:  # the delta rules
        ratio = heads * dim / width
        wanted = dict(num_heads=heads, head_dim=dim, conv_size=1, output_gate=False, decay=False)
        wanted |= dict(expand_k=ratio, expand_v=ratio if "expand_k" in known else 1.0)
    elif "num_heads" in known:
        wanted = dict(num_heads=heads)
    if "op" in known:
        options = {name: sizes[name] for name in ("form", "chunk_size")}
        wanted["op"] = dataclasses.replace(config.op, **options)
    return dataclasses.replace(config, **{n: v for n, v in wanted.items() if n in known} | fields)


OPTIONS = dict(
    task=Option(choices=TASKS),
    size=Option(choices=SIZES),
    negative=Option(kind=bool),
    steps=Option(kind=int, least=1),
    pattern=Option(),
)


def get_config(variant: str = "gated_deltaproduct") -> TrackingConfig:
    """Return the config of the state-tracking sweep `<method>[,task=parity][,size=small][,negative=][,steps=][,pattern=LF]`.

    Raises:
        ValueError: the method, task or option does not exist, or the method does not have the option; the message lists those
            that are accepted.
    """
    method, given = parse_variant(variant, OPTIONS)
    task, size = TASKS[given.get("task", "parity")], given.get("size", "small")
    sizes = SIZES[size]
    fields = dict(negative="allow_negative_eigenvalues", steps="num_steps")
    chosen = {field: given[option] for option, field in fields.items() if option in given}
    model = RecallModelConfig(
        mixer=mixer_config(method, sizes, variant, **chosen),
        hidden_size=sizes["width"],
        vocab_size=tracking_vocabulary(task["things"]),
        pattern=given.get("pattern", "LF"),
    )
    group = dict(things=task["things"], moves=task["moves"])
    length, longest = task[size]
    kinds = ((task["moves"], length), *task.get("beside", ()))
    config = TrackingConfig(
        name=variant,
        model=model,
        train=tuple(
            TrackingTask(
                things=task["things"], moves=moves, length=most, num_examples=sizes["examples"]
            )
            for moves, most in kinds
        ),
        test=tuple(
            TrackingTask(**group, first=first, length=last, num_examples=sizes["tests"])
            for first, last in ((1, length), (length + 1, longest))
        ),
        learning_rates=sizes["rates"],
        seeds=sizes["seeds"],
        batch_size=sizes["batch_size"],
        epochs=sizes["epochs"],
        weight_decay=1e-6,
        clip_norm=1.0,
        stop_above=0.999,
        steps_per_call=64 if len(kinds) == 1 else 16,  # so that kinds of words alternate often
    )
    config.validate()
    return config
