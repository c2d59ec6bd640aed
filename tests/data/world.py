"""A small vocabulary in the format of RWKV's World tokenizer, for tests."""

from __future__ import annotations

from pathlib import Path

from lsm_jax.data.world_tokenizer import VOCABULARY

LONGER = (b"th", b"the", b" the", b"the thing", b"\n\n", "é".encode(), "日".encode(), b"\xe6\x97")
"""The tokens of more than one byte."""


def tokens() -> list[bytes]:
    """Return the tokens in the order of their ids, from 1: all bytes, then longer ones."""
    return [bytes([byte]) for byte in range(256)] + list(LONGER)


def write_vocabulary(folder: Path, name: str = VOCABULARY) -> Path:
    """Write the vocabulary into a folder, and return the file's path."""

    def literal(token: bytes) -> str:
        try:
            return repr(token.decode())
        except UnicodeDecodeError:
            return repr(token)

    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{i} {literal(token)} {len(token)}\n" for i, token in enumerate(tokens(), 1)]
    (folder / name).write_bytes("".join(lines).encode())
    return folder / name
