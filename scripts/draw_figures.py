"""Draw the figures of docs/framework.md, each for a light and a dark page: `python -m scripts.draw_figures`.

Every number in them is computed by this file from the definitions, with numpy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"


class Mode(NamedTuple):
    """The colours of one mode of the site.

    Attributes:
        name: "light" or "dark".
        page: the background of the page.
        ink: text and lines.
        faint: lines that matter less.
        accent, second: the two colours of what is drawn.
    """

    name: str
    page: str
    ink: str
    faint: str
    accent: str
    second: str

    @property
    def numbers(self) -> LinearSegmentedColormap:
        """The colours of numbers from negative (second) over 0 (the page) to positive (accent)."""
        return LinearSegmentedColormap.from_list("numbers", [self.second, self.page, self.accent])


LIGHT = Mode("light", "#ffffff", "#222832", "#b4bcc8", "#1f5a96", "#c8553d")
DARK = Mode("dark", "#121212", "#ced6dd", "#5a6472", "#6cb0f2", "#f08a6e")


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of the given size in inches with a transparent background."""
    figure = Figure(figsize=(width, height))
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    return figure


def save(figure: Figure, path: Path, *, tight: bool = False) -> Path:
    """Write a figure as an SVG file that is the same whenever it is drawn, and return the file's path.

    Args:
        figure: the figure.
        path: the file to write.
        tight: whether the picture is cut to what is drawn, labels included.
    """
    box = dict(bbox_inches="tight", pad_inches=0.05) if tight else {}
    with rc_context({"svg.hashsalt": "lsm_jax", "mathtext.fontset": "cm"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None}, **box)
    # Lines that end in a space are an error of `git diff --check`.
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")
    return path


def show(axes: Axes, matrix: np.ndarray, mode: Mode, *, most: float | None = None) -> None:
    """Draw a matrix as coloured cells, without ticks; `most` is the number with the strongest colour."""
    most = float(np.abs(matrix).max()) if most is None else most
    axes.imshow(matrix, cmap=mode.numbers, vmin=-most, vmax=most, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color(mode.faint)


def arrow(axes: Axes, start: tuple, end: tuple, colour: str, *, bend: float = 0.0) -> None:
    """Draw an arrow between two points of the axes' data."""
    style = dict(arrowstyle="-|>", mutation_scale=11, linewidth=1.2, shrinkA=0, shrinkB=0)
    axes.add_patch(FancyArrowPatch(start, end, color=colour, connectionstyle=f"arc3,rad={bend}", **style))  # fmt: skip


def canvas(figure: Figure, width: float, height: float) -> Axes:
    """Return axes that cover the figure, without a frame, with the given data limits."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def tokens(number: int, channels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return smooth unit keys, values and decays of some tokens, [number, channels] each."""
    random = np.random.default_rng(3)
    k = random.normal(size=(number, channels))
    v = random.normal(size=(number, channels))
    decay = 1 / (1 + np.exp(-random.normal(1.5, 1.0, size=(number, channels))))
    return k / np.linalg.norm(k, axis=1, keepdims=True), v, decay


def draw_recurrence(mode: Mode) -> Figure:
    """Draw the memory of gated linear attention after each of four tokens: the update, and the read."""
    figure = new_figure(8.0, 2.9)
    axes = canvas(figure, 8.0, 2.9)
    k, v, decay = tokens(4, 8)
    memory = np.zeros((8, 8))
    side, gap = 0.98, 0.66
    for t in range(5):
        left = 0.35 + t * (side + gap)
        cells = figure.add_axes((left / 8.0, 1.0 / 2.9, side / 8.0, side / 2.9))
        show(cells, memory, mode, most=1.2)
        axes.text(left + side / 2, 2.08, f"$M_{t}$", ha="center", color=mode.ink, fontsize=12)
        if t:
            arrow(axes, (left + side / 2, 0.96), (left + side / 2, 0.52), mode.accent)
            axes.text(left + side / 2, 0.3, f"$o_{t} = q_{t} M_{t}$", ha="center", va="center", color=mode.ink, fontsize=11)  # fmt: skip
        if t < 4:
            arrow(axes, (left + side + 0.06, 1.49), (left + side + gap - 0.06, 1.49), mode.ink)
            arrow(axes, (left + side + gap / 2, 2.3), (left + side + gap / 2, 1.56), mode.second)
            axes.text(left + side + gap / 2, 2.48, f"$k_{t + 1}, v_{t + 1}$", ha="center", va="center", color=mode.ink, fontsize=11)  # fmt: skip
            memory = decay[t][:, None] * memory + np.outer(k[t], v[t])
    return figure


def draw_transitions(mode: Mode) -> Figure:
    """Draw Θ of six families of methods as matrices over the key channels."""
    figure = new_figure(8.0, 2.15)
    k, _, decay = tokens(6, 8)
    key, alpha, beta = k[5], decay[1], 0.9
    eye = np.eye(8)
    removal = np.outer(key, key)
    families = (
        (r"$1$", "linear attention", eye),
        (r"$\gamma$", "RetNet, Mamba2", 0.6 * eye),
        (r"$\mathrm{diag}(\alpha)$", "GLA, HGRN2, RWKV6", np.diag(alpha)),
        (r"$I - \beta\, k^\top k$", "DeltaNet", eye - beta * removal),
        (r"$(I - \beta\, k^\top k)\,\mathrm{diag}(\alpha)$", "Gated DeltaNet, KDA", (eye - beta * removal) * alpha),
        (r"$\mathrm{diag}(w) + b^\top a$", "RWKV7", np.diag(alpha) - beta * np.outer(key, k[2])),
    )  # fmt: skip
    for i, (formula, names, matrix) in enumerate(families):
        axes = figure.add_axes(((0.12 + i * 1.3) / 8.0, 0.21, 1.1 / 8.0, 1.1 / 2.15))
        show(axes, matrix, mode, most=1.0)
        axes.set_title(formula, color=mode.ink, fontsize=9)
        axes.set_xlabel(names, color=mode.ink, fontsize=8)
    return figure


def draw_forms(mode: Mode) -> Figure:
    """Draw how eight tokens become a memory in the three forms."""
    figure = new_figure(8.0, 2.6)
    axes = canvas(figure, 8.0, 2.6)
    titles = ("recurrent: one by one", "chunk: products, then a scan", "associative: a tree")
    for part, title in enumerate(titles):
        left = 0.2 + part * 2.65
        x = left + 0.12 + 0.29 * np.arange(8)
        axes.text(left + 1.13, 2.4, title, ha="center", color=mode.ink, fontsize=10)
        for one in x:
            axes.add_patch(Rectangle((one - 0.09, 0.2), 0.18, 0.18, facecolor=mode.accent, edgecolor="none"))  # fmt: skip
        if part == 0:
            for i, one in enumerate(x):
                axes.plot(one, 1.2, "o", color=mode.second, ms=6)
                arrow(axes, (one, 0.42), (one, 1.08), mode.faint)
                if i:
                    arrow(axes, (x[i - 1] + 0.07, 1.2), (one - 0.07, 1.2), mode.ink)
        elif part == 1:
            for i in range(2):
                inside = x[4 * i : 4 * i + 4]
                axes.add_patch(Rectangle((inside[0] - 0.14, 0.12), inside[-1] - inside[0] + 0.28, 0.36, fill=False, edgecolor=mode.ink))  # fmt: skip
                middle = inside.mean()
                axes.add_patch(Rectangle((middle - 0.2, 0.85), 0.4, 0.4, facecolor=mode.accent, alpha=0.45))  # fmt: skip
                arrow(axes, (middle, 0.5), (middle, 0.83), mode.faint)
                axes.plot(middle, 1.75, "o", color=mode.second, ms=6)
                arrow(axes, (middle, 1.27), (middle, 1.64), mode.faint)
            arrow(axes, (x[:4].mean() + 0.08, 1.75), (x[4:].mean() - 0.08, 1.75), mode.ink)
        else:
            level, height = list(x), 0.38
            while len(level) > 1:
                above = [(a + b) / 2 for a, b in zip(level[::2], level[1::2], strict=True)]
                for i, one in enumerate(above):
                    for below in level[2 * i : 2 * i + 2]:
                        axes.plot([below, one], [height + 0.04, height + 0.5], color=mode.ink, linewidth=1.1)  # fmt: skip
                    axes.plot(one, height + 0.55, "o", color=mode.second, ms=6)
                level, height = above, height + 0.55
    return figure


def draw_documents(mode: Mode) -> Figure:
    """Draw how much each token's output depends on each earlier token: without decay, with decay, and with documents."""
    figure = new_figure(8.0, 2.75)
    number = 48
    t = np.arange(number)
    causal = t[:, None] >= t
    random = np.random.default_rng(0)
    log_decay = -random.uniform(0.01, 0.18, number)
    total = np.cumsum(log_decay)
    decayed = np.exp(np.where(causal, total[:, None] - total, -np.inf))
    document = np.digitize(t, (14, 33))
    same = document[:, None] == document
    panels = (
        (causal * 0.85, "Θ = 1"),
        (decayed, "Θ is a decay"),
        (decayed * same, "three documents: Θ = 0 at their starts"),
    )
    for i, (matrix, title) in enumerate(panels):
        axes = figure.add_axes(((0.5 + i * 2.55) / 8.0, 0.13, 2.05 / 8.0, 2.05 / 2.75))
        show(axes, matrix, mode, most=1.0)
        axes.set_title(title, color=mode.ink, fontsize=10)
        axes.set_xlabel("written by token", color=mode.ink, fontsize=9)
        if not i:
            axes.set_ylabel("read by token", color=mode.ink, fontsize=9)
    return figure


FIGURES: dict[str, Callable[[Mode], Figure]] = {
    "recurrence": draw_recurrence,
    "transitions": draw_transitions,
    "forms": draw_forms,
    "documents": draw_documents,
}


def write(folder: Path) -> list[Path]:
    """Draw every figure in both modes; return the paths of the SVG files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in FIGURES.items():
        for mode in (LIGHT, DARK):
            with rc_context({"mathtext.fontset": "cm"}):
                paths.append(save(draw(mode), folder / f"{name}-{mode.name}.svg"))
    return paths


def main() -> None:
    """Write the figures into docs/figures, or into the folder --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder to write")
    print(*write(parser.parse_args().output), sep="\n")


if __name__ == "__main__":
    main()
