"""Sizes and tolerances of products of a few tokens, and of many by tiles, for their tests.

- `INTERPRETED`: small cases for the interpreter, on a CPU.
- `TILES_INTERPRETED` and `TILES_COMPILED`: the same of `tile_product`.
- `COMPILED`: cases that are compiled for the card, and that run on it: the products of models of 340M and 1.3B parameters.
"""

from __future__ import annotations

from typing import NamedTuple

TOLERANCE = 8e-3
"""Largest difference of a result in bfloat16 from the plain form's, relative to the largest result: a unit of its last place, since sums of
another order may be rounded to the other side."""


class Case(NamedTuple):
    """The sizes of one call of `row_product`.

    Attributes:
        batch: B, the number of rows.
        channels: I.
        widths: of the parts; their sum is F.
        first: what stands in front: "norm", "gated norm" (of heads of 256 channels) or "".
        behind: what stands behind: "added", "swiglu" or "".
        dtype: of the results.
    """

    batch: int
    channels: int
    widths: tuple[int, ...]
    first: str = ""
    behind: str = ""
    dtype: str = "bfloat16"

    @property
    def id(self) -> str:
        """The name of this case in the tests' output: its sizes and what stands around the product."""
        words = [
            f"{self.batch}x{self.channels}x{'+'.join(map(str, self.widths))}",
            self.first,
            self.behind,
        ]
        return "-".join(word.replace(" ", "_") for word in [*words, self.dtype] if word)


INTERPRETED = (
    Case(1, 512, (16, 24, 8), "norm"),
    Case(1, 512, (12,), "gated norm", "added"),
    Case(1, 256, (16,), "norm", "swiglu"),
    Case(2, 768, (12,), "", "added"),
    Case(2, 512, (2112,), "norm", dtype="float32"),
)
"""Cases for the interpreter; the first three are of the fast tests."""
COMPILED = (
    Case(1, 1024, (512, 512, 1024, 1024, 16), "norm"),
    Case(1, 1024, (1024,), "gated norm", "added"),
    Case(1, 1024, (5632,), "norm", "swiglu"),
    Case(1, 2816, (1024,), "", "added"),
    Case(1, 1024, (32000,), "norm", dtype="float32"),
    Case(4, 1024, (512, 512, 1024, 1024, 16), "norm"),
    Case(4, 1024, (1024,), "gated norm", "added"),
    Case(4, 1024, (5632,), "norm", "swiglu"),
    Case(4, 2816, (1024,), "", "added"),
    Case(4, 1024, (32000,), "norm", dtype="float32"),
    Case(1, 2048, (1024, 1024, 2048, 2048, 16), "norm"),
    Case(1, 2048, (2048,), "gated norm", "added"),
    Case(1, 2048, (11264,), "norm", "swiglu"),
    Case(1, 5632, (2048,), "", "added"),
)
"""Cases that are compiled for, and run on, an NVIDIA Hopper GPU."""


class TileCase(NamedTuple):
    """The sizes of one call of `tile_product`.

    Attributes:
        batch: B, the number of rows.
        channels: I.
        size: F.
        normed: whether a norm stands in front.
        behind: what stands behind: "added", "swiglu" or "".
        squares: whether the squares of the tokens are given, behind a norm, or else those of the result returned.
        tiling: of the work, or () for the kernel's own.
        heads: the number of heads, each with a norm of its own, or 0; squares are then given and returned.
    """

    batch: int
    channels: int
    size: int
    normed: bool = False
    behind: str = ""
    squares: bool = False
    tiling: tuple[int, ...] = ()
    heads: int = 0

    @property
    def returns_squares(self) -> bool:
        """Whether the squares of the result are returned."""
        return self.squares and (self.heads > 0 or not self.normed)

    @property
    def id(self) -> str:
        """The name of this case in the tests' output: its sizes and what stands around the product."""
        words = [f"{self.batch}x{self.channels}x{self.size}", "norm" * self.normed, self.behind]
        words += ["squares" * self.squares, ":".join(map(str, self.tiling))]
        words += [f"{self.heads} heads"] if self.heads else []
        return "-".join(word.replace(" ", "_") for word in words if word)


TILES_INTERPRETED = (
    TileCase(128, 448, 128, True, "swiglu"),
    TileCase(64, 384, 32, True),
    TileCase(128, 128, 64, False, "added"),
    TileCase(256, 64, 192),
    TileCase(128, 384, 128, True, "swiglu", squares=True),
    TileCase(128, 128, 288, False, "added", squares=True),
    TileCase(256, 256, 128, False, "added", squares=True, tiling=(32, 128, 2, 2, 4)),
    TileCase(128, 384, 64, True, "added", squares=True, tiling=(32, 64, 5), heads=3),
    TileCase(64, 256, 64, True, "added", squares=True, tiling=(64, 128, 3), heads=1),
    TileCase(128, 256, 64, True, "swiglu", squares=True, tiling=(32, 64, 2), heads=2),
)
"""Cases of `tile_product` for the interpreter; the first one has more steps than stages."""
TILES_COMPILED = tuple(
    TileCase(batch, channels, size, behind != "added", behind)
    for batch in (64, 128, 256)
    for channels, size, behind in (
        (1024, 3136, ""),
        (1024, 1024, "added"),
        (1024, 5632, "swiglu"),
        (2816, 1024, "added"),
    )
) + (
    TileCase(192, 1024, 5632, True, "swiglu", True),
    TileCase(128, 2560, 640, False, "added", True),
    TileCase(256, 1024, 3136, True, "", True, (64, 64, 7, 1, 1)),
    TileCase(256, 1024, 5632, True, "swiglu", True, (64, 64, 6, 2, 2)),
    TileCase(256, 1024, 1024, True, "added", True, (32, 64, 7, 1, 1), heads=4),
    TileCase(256, 1024, 1024, True, "added", True, (32, 128, 5, 1, 2), heads=4),
    TileCase(256, 2816, 1024, False, "added", True, (32, 128, 5, 1, 4)),
    TileCase(256, 2816, 1024, False, "added", True, (32, 128, 5, 2, 4)),
)
"""Cases of `tile_product` that are compiled for, and run on, an NVIDIA Hopper GPU: the products of a model of 340M parameters, also by the tilings
of `lsm_jax.models.token_tiles`, and one whose sums of squares are padded."""
