"""Find the tokenizer of a pretrained model that is used where it is, without an import."""

from __future__ import annotations

import os
from pathlib import Path

from lsm_jax.convert.tokenizer import tokenizer_files, tokenizer_of
from lsm_jax.data.world_tokenizer import VOCABULARY

FILE = "tokenizer.json"


def tokenizer_path(
    source: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None
) -> Path:
    """Return the path of the tokenizer with which a pretrained model is used where it is, without an import. That of a GGUF file
    is written into a folder beside the file.

    Args:
        source: a Hugging Face folder, a GGUF file or a .pth file of RWKV's authors.
        tokenizer: the path of another tokenizer, as of `tokenizer_files`; None is the source's.

    Raises:
        ValueError: as `tokenizer_files`; or the folder beside a GGUF file has the tokenizer of another file.
    """
    path = Path(source).expanduser()
    if tokenizer is not None:
        given = Path(tokenizer).expanduser().absolute()
        tokenizer_files(path, given)
        return given
    if path.suffix == ".pth":
        tokenizer_files(path.parent)
        return tokenizer_path(path.parent)
    if path.is_dir():
        names = [name for name in (FILE, VOCABULARY) if (path / name).is_file()]
        return path / (names[0] if names else FILE)
    written = path.with_name(path.name + ".tokenizer") / FILE
    if not written.is_file():
        return tokenizer_of(path, written.parent)
    tokenizer_files(path, written)  # raises if the .gguf file was replaced by another
    return written
