"""Format the results of evaluations as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from lsm_jax.data.needle import MODES

_PREFIX = "val/perplexity_len_"


def perplexity_table(results: Mapping[str, Any]) -> RenderableType:
    """Return a table of the perplexity P(l) of the first l positions by length l, and below it the mean
    loss over all tokens; from the content of results.json."""
    table = Table("length l", "mean loss L(i < l), nats", "perplexity P(l)", title="Held-out text")
    for column in table.columns:
        column.justify = "right"
    lengths = sorted(
        int(name.removeprefix(_PREFIX)) for name in results if name.startswith(_PREFIX)
    )
    for length in lengths:
        average = results[f"val/loss_avg_len_{length}"]
        table.add_row(f"{length:,}", f"{average:.4f}", f"{results[f'{_PREFIX}{length}']:.3f}")
    unit = "byte" if "val/bits_per_byte" in results else "token"
    mean = f"{results['val/tokens']:,} {unit}s: loss {results['val/loss']:.4f} nats per {unit}"
    if unit == "byte":
        mean += f", {results['val/bits_per_byte']:.4f} bits per byte"
    if "val/row_perplexity" in results:
        mean += f"; mean of the rows' perplexities {results['val/row_perplexity']:.3f}"
    if "val/teacher_loss" in results:
        mean += (
            f"; this is the student, and the teacher's loss is {results['val/teacher_loss']:.4f}"
        )
    return Group(table, mean + f"; {results['tokens_per_second']:,.0f} {unit}s/s")


def needle_table(results: Mapping[str, Any]) -> RenderableType:
    """Return a table of the share of needles found and of the answer's loss by length, means over depths;
    from the content of needle.json."""
    modes = [mode for mode in MODES if mode in results]
    heads = [f"{mode}: {what}" for mode in modes for what in ("found", "loss")]
    table = Table("length", *heads, "no needle: found", "loss", title="Needle in a haystack")
    for column in table.columns:
        column.justify = "right"
    without = results["without_needle"]
    for i, length in enumerate(results["lengths"]):
        row = []
        for cells in (*(results[mode] for mode in modes), without):
            row += [f"{np.mean(cells['found'][i]):.0%}", f"{np.mean(cells['nll'][i]):.3f}"]
        table.add_row(f"{length:,}", *row)
    notes = "".join(f"\nNote: {note}." for note in results["notes"])
    return Group(table, f"loss in nats per token of the answer {results['answer']!r}{notes}")


def bits_table(bits: Mapping[str, float], *, model: str, title: str) -> RenderableType:
    """Return a table of bits per byte by name of model or compressor, best first; the row of `model` is
    bold."""
    table = Table("coded by", "bits per byte", title=title)
    table.columns[1].justify = "right"
    for name, value in sorted(bits.items(), key=lambda item: item[1]):
        table.add_row(name, f"{value:.4f}", style="bold" if name == model else None)
    return table
