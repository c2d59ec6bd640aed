"""Damage files: bytes of any file, fields of JSON, headers of safetensors and GGUF files, lines of JSONL, links.

A mutation is a function of (random generator, file, folder outside) that changes the file in place, and returns
what it did and the names of which an error message must contain one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Damage = tuple[str, set[str]]
Mutation = Callable[[Random, Path, Path], Damage]

_NESTED = "[" * 100_000
_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 5, 10**9, 2**40, 2**63, -(2**31), 1.5, 1e308, 10**30),
    *("", "x", "blosc", "../outside/file", "\u0000", "🙂", "<i4", "no" * 5000),
    *([], {}, [None], [1, 2, 3], [2**40, 2**40], {"a": 1}, [[[[[]]]]], {"": {"": {"": 0}}}),
)


def truncate(rng: Random, file: Path, outside: Path) -> Damage:
    """Cut the file at a random byte."""
    size = rng.randrange(max(1, file.stat().st_size))
    os.truncate(file, size)
    return f"cut to {size} bytes", set()


def empty(rng: Random, file: Path, outside: Path) -> Damage:
    """Make the file empty."""
    os.truncate(file, 0)
    return "empty", set()


def flip(rng: Random, file: Path, outside: Path) -> Damage:
    """Flip one bit."""
    content = bytearray(file.read_bytes() or b"\0")
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} flipped", set()


def append(rng: Random, file: Path, outside: Path) -> Damage:
    """Append random bytes."""
    count = rng.choice((1, 16, 5000))
    with file.open("ab") as out:
        out.write(rng.randbytes(count))
    return f"{count} bytes appended", set()


def erase(rng: Random, file: Path, outside: Path) -> Damage:
    """Write zeros over a block of the file, as after a crash of the machine."""
    content = bytearray(file.read_bytes())
    at = rng.randrange(max(1, len(content)))
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    file.write_bytes(content)
    return f"zeros from byte {at}", set()


def delete(rng: Random, file: Path, outside: Path) -> Damage:
    """Remove the file."""
    file.unlink()
    return "removed", {file.parent.name}


def folder(rng: Random, file: Path, outside: Path) -> Damage:
    """Put a folder in the place of the file."""
    file.unlink()
    file.mkdir()
    return "a folder", {file.parent.name}


def link_outside(rng: Random, file: Path, outside: Path) -> Damage:
    """Put a link to an equal file outside of the folder in the place of the file."""
    target = outside / f"linked-{file.name}"
    shutil.move(file, target)
    file.symlink_to(target)
    return "a link to an equal file outside", {target.name, file.parent.name}


def link_loop(rng: Random, file: Path, outside: Path) -> Damage:
    """Put a link to itself in the place of the file."""
    file.unlink()
    file.symlink_to(file.name)
    return "a link to itself", {file.parent.name}


def link_to_nothing(rng: Random, file: Path, outside: Path) -> Damage:
    """Put a link to a file outside that does not exist in the place of the file."""
    file.unlink()
    file.symlink_to(outside / "new-file")
    return "a link to a missing file outside", {"new-file", file.parent.name}


BYTES: tuple[Mutation, ...] = (truncate, empty, flip, append, erase)
PLACES: tuple[Mutation, ...] = (delete, folder, link_outside, link_loop, link_to_nothing)


def set_field(rng: Random, file: Path, outside: Path) -> Damage:
    """Replace a random value inside a JSON file by another value."""
    value = json.loads(file.read_text())
    places = list(_places(value))
    holder, key, names = rng.choice(places)
    new = rng.choice([x for x in _VALUES if x != holder[key] or type(x) is not type(holder[key])])
    if isinstance(new, str) and new.startswith("../outside"):
        new = rng.choice((new, f"../outside/{file.name}", str(outside / "file"), "../../.."))
    holder[key] = new
    file.write_text(json.dumps(value))
    accepted = {str(n) for n in names[-2:]} | ({new} if isinstance(new, str) else set())
    accepted |= {str(n).replace("_", " ") for n in names[-1:]}
    return f"{'.'.join(map(str, names))} = {json.dumps(new)[:60]}", accepted


def remove_field(rng: Random, file: Path, outside: Path) -> Damage:
    """Remove a random value inside a JSON file."""
    value = json.loads(file.read_text())
    holder, key, names = rng.choice(list(_places(value)))
    del holder[key]
    file.write_text(json.dumps(value))
    return f"{'.'.join(map(str, names))} removed", {str(n) for n in names[-2:]}


def _places(value: Any, names: tuple[Any, ...] = ()) -> Any:
    """Yield (object or list, key, path) of each value in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key, (*names, key)
        if isinstance(item, dict | list):
            yield from _places(item, (*names, key))


def nest(rng: Random, file: Path, outside: Path) -> Damage:
    """Nest the JSON value, or a value in it, 100,000 deep."""
    text = file.read_text()
    if rng.random() < 0.5 and '": ' in text:
        start, _, rest = text.partition('": ')
        file.write_text(f'{start}": {_NESTED}{"]" * len(_NESTED)}, "rest": {rest}')
    else:
        file.write_text(_NESTED + rng.choice(("", "]" * len(_NESTED))))
    return "nested 100,000 deep", set()


def other_json(rng: Random, file: Path, outside: Path) -> Damage:
    """Replace the whole JSON value by one of another type, or by text that is not JSON."""
    text = rng.choice(("[]", "5", "null", '"text"', "true", "[1, 2]", "NaN", "9" * 10_000, "{,}"))
    file.write_text(text)
    return f"contains {text[:20]}", set()


def bad_utf8(rng: Random, file: Path, outside: Path) -> Damage:
    """Insert bytes that are not UTF-8."""
    content = file.read_bytes()
    at = rng.randrange(len(content) + 1)
    file.write_bytes(content[:at] + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80")) + content[at:])
    return f"not UTF-8 at byte {at}", set()


def repeat_field(rng: Random, file: Path, outside: Path) -> Damage:
    """Put a key of a JSON file, with another value, in front of the same key."""
    content = file.read_bytes()
    places = [(m.start(), m[1]) for m in re.finditer(rb'"([^"\\]*)"\s*:', content)]
    if not places:
        return empty(rng, file, outside)
    at, key = rng.choice(places)
    file.write_bytes(content[:at] + b'"%s": 5, ' % key + content[at:])
    return f"the key {key.decode()!r} occurs twice", {key.decode(), file.name}


JSON: tuple[Mutation, ...] = (set_field, set_field, set_field, remove_field, repeat_field, nest, other_json, bad_utf8)  # fmt: skip


def header_length(rng: Random, file: Path, outside: Path) -> Damage:
    """Change the length of a safetensors file's header."""
    number = rng.choice((0, 1, 2**20, 2**31, 2**40, 2**63 - 1, 2**64 - 1))
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", number) + content[8:])
    return f"header of {number} bytes", set()


def header_field(rng: Random, file: Path, outside: Path) -> Damage:
    """Replace a field in a safetensors file's header by another value."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = rng.choice([n for n in header if n != "__metadata__"])
    kind = rng.choice(("dtype", "shape", "data_offsets", "all", "nested"))
    if kind == "all":
        header[name] = rng.choice(_VALUES)
    elif kind == "nested":
        header[name] = "NESTED"
    elif kind == "dtype":
        header[name][kind] = rng.choice(("F99", "I32", "BOOL", "", None, 5))
    else:
        header[name][kind] = rng.choice(
            ([2**40, 2**40], [-1, 4], [], [0, 2**62], None, 5, [0, 0], [4, 2], ["a"], [1] * 1000)
        )
    text = json.dumps(header).replace('"NESTED"', _NESTED).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return f"{kind} of {name} in the header", {name, kind}


SAFETENSORS: tuple[Mutation, ...] = (header_length, header_field, header_field)


def number_in_header(rng: Random, file: Path, outside: Path) -> Damage:
    """Write a large number over eight bytes in the first part of a GGUF file."""
    content = bytearray(file.read_bytes())
    number = rng.choice((0, 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**64 - 1))
    at = rng.choice((8, 16, rng.randrange(4, 700)))
    content[at : at + 8] = struct.pack("<Q", number)
    file.write_bytes(content)
    return f"{number} at byte {at}", set()


def number_of_key(rng: Random, file: Path, outside: Path) -> Damage:
    """Replace the value of one of a GGUF file's keys with a number."""
    content = bytearray(file.read_bytes())
    keys = [b".block_count", b".embedding_length", b".attention.head_count", b".vocab_size"]
    keys += [b".feed_forward_length", b".attention.head_count_kv", b"ggml.bos_token_id"]
    key = rng.choice([k for k in keys if k in content])
    at = content.index(key) + len(key) + 4  # after the type
    number = rng.choice((0, 1, 3, 10**9, 2**31, 2**32 - 1))
    content[at : at + 4] = struct.pack("<I", number)
    file.write_bytes(content)
    return f"{key.decode()} = {number}", {key.decode().lstrip(".")}


def flip_in_header(rng: Random, file: Path, outside: Path) -> Damage:
    """Flip a bit in the first 2,000 bytes of a file."""
    content = bytearray(file.read_bytes())
    at, bit = rng.randrange(min(len(content), 2000)), rng.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} flipped", set()


def huge_array(rng: Random, file: Path, outside: Path) -> Damage:
    """Replace a GGUF file by one of 113 bytes whose only field is an array of 2^40 numbers."""
    key = b"general.x"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    field = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, rng.choice((0, 4)), 2**40)
    file.write_bytes((head + field).ljust(113, b"\0"))
    return "an array of 2^40 numbers in 113 bytes", {"general.x"}


GGUF: tuple[Mutation, ...] = (number_in_header, number_in_header, number_of_key, flip_in_header, flip_in_header, huge_array)  # fmt: skip


def line(rng: Random, file: Path, outside: Path) -> Damage:
    """Damage one line of a JSONL file."""
    lines = file.read_bytes().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    old = lines[at]
    choices = (
        old[: rng.randrange(len(old))] + b"\n",
        old.rstrip(b"\n"),
        b"[1, 2]\n",
        b"null\n",
        b"5\n",
        b'"text"\n',
        b"\n",
        b"\xff\xfe" + old,
        b"\xef\xbb\xbf" + old,
        old.replace(b"{", b'{"step": 1, "text": "a", "step": 1, ', 1),
        old.replace(b'"step": ', b'"step": "x'),
        old.replace(b'"step": ', b'"step": -'),
        old.replace(b'"step": ', b'"step": 1e400, "s": '),
        old.replace(b'"step"', b'"text"').replace(b'"text": "', b'"text": 5, "x": "'),
        _NESTED.encode() + b"\n",
        old + old,
        b"\0" * 4096 + b"\n",
        b"",
        b"9" * 10_000 + b"\n",
        b'{"step": ' + b"9" * 10_000 + b"}\n",
    )
    number = rng.randrange(len(choices))
    lines[at] = choices[number]
    file.write_bytes(b"".join(lines))
    return f"line {at + 1} of {len(lines)}: {choices[number][:30]!r}", {f"line {at + 1}"}


LINES: tuple[Mutation, ...] = (line, line, line, bad_utf8)

_YAML = (
    "a: [1, 2",
    "a: b: c",
    "\tx: 1",
    "- 1\n- 2",
    "5",
    "",
    "&a [*a]",
    "task: !function outside.touch",
    "task: !unknown x",
    "a: *missing",
    "{" * 20_000,
    "include: ../outside/other.yaml",
    "include: missing.yaml",
    "include: {name}",
    "doc_to_text: '{{{{ 1/0 }}}}'\ntask: {stem}",
    "doc_to_text: '{{{{ x.__class__.__mro__ }}}}'\ntask: {stem}",
    "task: [{stem}]",
    "task: {stem}\ngroup: 5",
    "task: {stem}\ndataset_path: 5",
    "task: {stem}\noutput_type: nothing",
    "task: {stem}\nmetric_list: 5",
)


def yaml(rng: Random, file: Path, outside: Path) -> Damage:
    """Replace a task file by another text, or a part of it."""
    if rng.random() < 0.4:
        lines = file.read_text().splitlines(keepends=True)
        at = rng.randrange(len(lines))
        name, colon, _ = lines[at].partition(":")
        bad = rng.choice(("5", "[1", "null", "'{{ x", "!function outside.touch", "{}", "../x"))
        lines[at] = f"{name}{colon} {bad}\n"
        file.write_text("".join(lines))
        return f"{name.strip()}: {bad}", {name.strip()}
    text = rng.choice(_YAML).format(stem=file.stem, name=file.name) if rng.random() < 0.9 else "\x00"  # fmt: skip
    file.write_text(text)
    return f"contains {text[:40]!r}", set()


TEMPLATES = (
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ messages[99].content.x.y }}",
    "{% for m in messages %}",
    "{% for a in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(messages) }}{{ messages }}",
    "{% include '/etc/passwd' %}",
    "{{ undefined_name.field }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ [1] | join(5) }}{{ 'a' + 1 }}",
)


def template(rng: Random, file: Path, outside: Path) -> Damage:
    """Set the chat template of a tokenizer_config.json to one that fails, or that asks for too much."""
    value, text = json.loads(file.read_text()), rng.choice(TEMPLATES)
    value["chat_template"] = text
    file.write_text(json.dumps(value))
    return f"chat template {text}", {"chat template", "chat_template"}


def for_file(file: Path) -> tuple[Mutation, ...]:
    """Return the mutations of a file, by its name."""
    name, common = file.name, (*BYTES, *PLACES)
    if name == "tokenizer_config.json":
        return (*common, *JSON, *[template] * 8)
    if name.endswith(".json") or name in (".zarray", ".zattrs"):
        return (*common, *JSON, *JSON)
    if name.endswith(".safetensors"):
        return (*common, *SAFETENSORS, *SAFETENSORS)
    if name.endswith(".gguf"):
        return (*BYTES, *GGUF, *GGUF)
    if name.endswith(".jsonl"):
        return (*common, *LINES, *LINES)
    if name.endswith(".yaml"):
        return (*common, *[yaml] * 12, bad_utf8)
    return common
