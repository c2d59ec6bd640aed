"""Every block of code of README.md, CONTRIBUTING.md, SECURITY.md and docs/ is run or parsed, or says why it is not.

Blocks of Python are run, those of a page one after the other, in a folder with two small runs. Commands in indented blocks are
parsed by the parser of the program that they name; tests/test_doc_runs.py runs them at small sizes. JSON is read. What Sphinx
reads (`{toctree}`) is run by `make docs`. A block that is not run has a comment `<!-- not run: REASON -->`; its commands are
parsed. One that is not parsed either has a comment `<!-- not parsed: REASON -->`.
"""

from __future__ import annotations

import json
import shutil
import sys
import types

import pytest

from configs import lm
from lsm_jax import mixers
from lsm_jax.training import train
from scripts import doc_blocks
from scripts.doc_blocks import PAGES, ROOT, Block
from tests import doc_commands, doc_files

BLOCKS = {page: doc_blocks.blocks(page) for page in PAGES}
RUN = [page for page in PAGES if any(b.language == "python" and not b.reason for b in BLOCKS[page])]


def name(page) -> str:
    return page.relative_to(ROOT).as_posix()


CASES = [
    pytest.param(command.words, id=f"{page.name}:{' '.join(command.words)[:60]}")
    for page in PAGES
    for command in doc_blocks.commands_of(page)
]


def test_every_block_is_of_a_known_kind():
    unknown = [
        f"{name(block.page)}:{block.line}: {block.language}"
        for found in BLOCKS.values()
        for block in found
        if not block.reason
        and block.language not in ("python", "json", "indented")
        and not block.language.startswith("{")
    ]
    assert not unknown, "neither run nor marked `<!-- not run: REASON -->`"
    assert len(CASES) > 200 and len(RUN) >= 6


@pytest.mark.parametrize("words", CASES)
def test_a_command_is_accepted_by_its_parser(words, tmp_path, monkeypatch):
    if not any("leaky.py" in word for word in words):
        doc_commands.parse(words)
        return
    monkeypatch.setattr(mixers.method, "METHODS", methods := dict(mixers.METHODS))
    monkeypatch.setattr(mixers, "METHODS", methods)
    doc_files.write_leaky(tmp_path / "leaky.py")
    doc_commands.parse(words, tmp_path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with text and the runs that pages name, of one step of a small model each."""
    folder = tmp_path_factory.mktemp("pages")
    texts = folder / "my_texts"
    texts.mkdir()
    for i in range(20):
        (texts / f"{i}.txt").write_text(f"The number {i} is followed by {i + 1}. " * 200)
    config = lm.get_config("gla-nano")
    config.model.num_layers, config.model.hidden_size = 1, 32
    config.model.layers["L"].mixer.num_heads = 1
    config.batch_size, config.data.sequence_length, config.total_tokens = 2, 64, 128
    config.optimizer.warmup_tokens, config.data.path = 0, str(texts)
    train(config, folder / "runs" / "gla")
    shutil.copytree(folder / "runs" / "gla", folder / "runs" / "demo")
    return folder


@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_python_of_a_page_runs(page, runs, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(mixers.method, "METHODS", methods := dict(mixers.METHODS))
    monkeypatch.setattr(mixers, "METHODS", methods)
    code = [b for b in BLOCKS[page] if b.language == "python" and not b.reason]
    module = types.ModuleType("page")  # dataclasses look for the module of their class
    monkeypatch.setitem(sys.modules, "page", module)
    for block in code:
        # Empty lines in front, so that an error names the line of the page.
        exec(compile("\n" * block.line + block.text, str(page), "exec"), module.__dict__)


def test_json_is_read():
    found = [block for blocks in BLOCKS.values() for block in blocks if block.language == "json"]
    assert found
    for block in found:
        json.loads(block.text)


PAGE = """
<!-- not run:
     a reason -->

    ls

Text.

```bash
make demo
```

    A=--workdir=x
    python train.py $A \\
        --config=configs/lm.py:gla-nano

not code:
    indented without an empty line
"""


def test_blocks_and_reasons_are_found():
    found = doc_blocks.blocks(ROOT / "x.md", PAGE)
    assert [(b.language, b.reason) for b in found] == [("indented", "a reason"), ("bash", ""), ("indented", "")]  # fmt: skip
    (command,) = doc_blocks.commands(found[2], {}, {})
    assert command.words == ["python", "train.py", "--workdir=x", "--config=configs/lm.py:gla-nano"]
    with pytest.raises(ValueError, match="'ls': no command of"):
        list(doc_blocks.commands(found[0], {}, {}))


WRONG = (
    "python train.py --config=configs/lm.py:gla-tiny --workdir=x --config.model.layers.L.mixer.form=chunk",
    "python train.py --config=configs/lm.py:gla-tiny --workdir=x --config.batch_size=many",
    "python train.py --config=configs/lm.py:gla-tini --workdir=x",
    "python train.py --config=configs/lm.py:gla-tiny",
    "python train.py --folder=runs/x",
    "python eval.py --workdir=x --needle.length=1000",
    "python -m lsm_jax.data.tokenize --input x",
    "python -m benchmarks kernels --card 2",
    "lsm eval",
    "lsm methods gla retnet",
    "make everything",
    "pip install -e .[everything]",
    "python -m pytest tests/nothing",
)


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_noticed(command):
    (found,) = doc_blocks.commands(Block(ROOT, 1, "indented", command, ""), {}, {})
    with pytest.raises(AssertionError):
        doc_commands.parse(found.words)
