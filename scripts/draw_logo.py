"""Draw the logo and the banner for light and dark pages: `python -m scripts.draw_logo`.

The picture is the library's equation: a memory after some tokens, its cells coloured by the numbers that a decayed sum of
outer products has there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import to_hex
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from scripts.draw_figures import DARK, LIGHT, Mode, tokens

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "static"
CELLS = 6
NAME = "lsm_jax"
LINE = "linear sequence models in JAX"


def memory() -> np.ndarray:
    """Return the memory [CELLS, CELLS] after five tokens, scaled to numbers between -1 and 1."""
    k, v, decay = tokens(5, CELLS)
    value = np.zeros((CELLS, CELLS))
    for t in range(len(k)):
        value = decay[t][:, None] * value + np.outer(k[t], v[t])
    return np.clip(1.3 * value / np.abs(value).max(), -1, 1)


def mark(mode: Mode, left: float, top: float, side: float) -> list[str]:
    """Return the elements of the picture, a square of rounded cells, with its corner at (left, top)."""
    step = side / CELLS
    size = 0.84 * step
    shapes = []
    for (row, column), number in np.ndenumerate(memory()):
        colour = to_hex(mode.numbers((number + 1) / 2))
        x, y = left + column * step + 0.08 * step, top + row * step + 0.08 * step
        shapes.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{size:.2f}" height="{size:.2f}" rx="{size / 5:.2f}" fill="{colour}" stroke="{mode.faint}" stroke-width="0.6"/>')  # fmt: skip
    return shapes


def text(words: str, colour: str, left: float, baseline: float, size: float, *, bold: bool) -> str:
    """Return words as one path, which looks the same in every browser."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    path = TextPath((0, 0), words, size=size, prop=font)
    letters = {path.MOVETO: "M", path.LINETO: "L", path.CURVE3: "Q", path.CURVE4: "C"}
    parts = []
    for points, code in path.iter_segments():
        if code == path.CLOSEPOLY:
            parts.append("Z")
            continue
        pairs = zip(left + points[::2], baseline - points[1::2], strict=True)
        parts.append(letters[code] + " ".join(f"{x:.1f} {y:.1f}" for x, y in pairs))
    return f'<path d="{"".join(parts)}" fill="{colour}"/>'


def svg(width: int, height: int, label: str, shapes: list[str]) -> str:
    """Return an SVG file with the given elements and a label for readers that do not show pictures."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{label}">'
    return "\n".join([head, *shapes, "</svg>", ""])


def logo(mode: Mode) -> str:
    """Return the logo: the picture and the name."""
    shapes = [*mark(mode, 4, 4, 56), text(NAME, mode.ink, 74, 43, 32, bold=True)]
    return svg(212, 64, NAME, shapes)


def banner(mode: Mode) -> str:
    """Return the banner: the picture, the name and what the library is."""
    words = [
        text(NAME, mode.ink, 190, 76, 54, bold=True),
        text(LINE, mode.ink, 192, 108, 20, bold=False),
        text("M ← Θ ◇ M + f(k, v)     o = q M", mode.accent, 192, 140, 18, bold=False),
    ]
    return svg(560, 172, f"{NAME}: {LINE}", [*mark(mode, 16, 16, 140), *words])


def write(folder: Path) -> list[Path]:
    """Draw both in both modes; return the paths of the SVG files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with rc_context({"path.simplify": False}):
        for name, draw in (("logo", logo), ("banner", banner)):
            for mode in (LIGHT, DARK):
                path = folder / f"{name}-{mode.name}.svg"
                path.write_text(draw(mode))
                paths.append(path)
    return paths


def main() -> None:
    """Write the pictures into docs/static, or into the folder --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder to write")
    print(*write(parser.parse_args().output), sep="\n")


if __name__ == "__main__":
    main()
