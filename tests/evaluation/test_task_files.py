"""Task files of lm-evaluation-harness: code needs permission, and errors name the file and the line."""

from __future__ import annotations

import time

import pytest

from lsm_jax.evaluation import HarnessConfig, check_harness
from lsm_jax.evaluation.suites import FOLDER
from lsm_jax.evaluation.task_files import check_task_files

HARMLESS = """task: mine
dataset_path: json
output_type: multiple_choice
doc_to_text: text
doc_to_choice: [a, b]
doc_to_target: label
metric_list: [{metric: acc}, {metric: exact_match}]
"""


def folder_with(tmp_path, text, name="a.yaml"):
    folder = tmp_path / "tasks"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_harmless_task_files_need_no_trust(tmp_path):
    folder = folder_with(tmp_path, HARMLESS)
    folder_with(tmp_path, "include: _common\ntask: other\n", "b.yaml")
    folder_with(tmp_path, "doc_to_text: text\n", "_common")
    check_harness(HarnessConfig(tasks="mine", include_path=str(folder)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "process_docs: !function utils.f",
            r"a\.yaml, line 8: `!function utils\.f` runs Python code",
        ),
        ("x: [1, {y: !function 'os.system'}]", "`!function os.system` runs Python code"),
        ('doc_to_text: "Q: {{text}}"', "line 8: doc_to_text: it has a Jinja template"),
        ('doc_to_text: "\\x7b\\x7btext}}"', "doc_to_text: it has a Jinja template"),
        ('description: "{% if 1 %}"', "description: it has a Jinja template"),
        ('fewshot_config: {doc_to_text: ["{# x #}"]}', "doc_to_text: it has a Jinja template"),
        ('"{{x}}": 1', "it has a Jinja template"),
        ("class: mine.Task", "class: it names a Python class"),
        ("use_prompt: qa-basic:q-newline-a", "use_prompt: it names a prompt"),
        ("metric_list: [{metric: someone/metric}]", "the harness has no metric 'someone/metric'"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]", "hf_evaluate: it lets a metric"),
        ("dataset_kwargs: {trust_remote_code: True}", "trust_remote_code: it lets"),
        ("dataset_path: pandas", "dataset_path: it loads pickles"),
    ],
)
def test_code_in_task_files_needs_trust(tmp_path, line, message):
    # The line takes the place of the one with the same key, and is always number 8.
    others = [x for x in HARMLESS.splitlines() if not x.startswith(line.partition(":")[0] + ":")]
    others += [""] * (len(HARMLESS.splitlines()) - len(others))
    folder = folder_with(tmp_path, "\n".join([*others, line, ""]))
    config = HarnessConfig(tasks="mine", include_path=str(folder))
    with pytest.raises(ValueError, match=message + r".*pass --lm_eval\.trust"):
        check_harness(config)
    config.trust = True
    check_harness(config)


@pytest.mark.parametrize(
    ("line", "given"), [("dataset_path: 5", "5"), ("test_split: [a]", "a seq"), ("output_type: {a: 1}", "a map")]
)  # fmt: skip
def test_fields_of_texts_have_texts(tmp_path, line, given):
    rest = "".join(x for x in HARMLESS.splitlines(True) if not x.startswith(line.split(":")[0]))
    folder = folder_with(tmp_path, rest + line + "\n")
    name = line.partition(":")[0]
    with pytest.raises(ValueError, match=rf"a\.yaml, line \d+: {name}={given}; accepted is a text"):
        check_task_files(folder, trust=True)


def test_a_key_that_occurs_twice_is_named(tmp_path):
    folder = folder_with(tmp_path, HARMLESS + "metadata: {version: 1, other: 2, version: 2}\n")
    with pytest.raises(ValueError, match=r"a\.yaml, line 8: the key 'version' occurs twice in one"):
        check_task_files(folder, trust=True)
    folder_with(tmp_path, HARMLESS + "task: other\n")
    with pytest.raises(ValueError, match=r"a\.yaml, line 8: the key 'task' occurs twice"):
        check_task_files(folder, trust=True)


def test_code_in_included_files_needs_trust(tmp_path):
    folder = folder_with(tmp_path, HARMLESS + "include: [_b]\n")
    folder_with(tmp_path, "include: _c\n", "_b")
    folder_with(tmp_path, "x: !function y.z\n", "_c")
    with pytest.raises(ValueError, match=r"_c, line 1: `!function y\.z`"):
        check_task_files(folder, trust=False)
    check_task_files(folder, trust=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: a\ndoc_to_text: [1, 2\nx: 1\n", r"a\.yaml, line 3: not YAML"),
        ("task: a\n\tb: 1\n", r"a\.yaml, line 2: not YAML: found "),
        (b"task: \xff\n", r"a\.yaml: not YAML"),
        ("- task: a\n", r"a\.yaml: accepted is a YAML mapping"),
        ("", r"a\.yaml: accepted is a YAML mapping"),
        ("a: " + "[" * 100_000, r"a\.yaml, line 1: nested more than 64 deep"),
        ("a: " + "{a: " * 100_000, r"a\.yaml, line 1: nested more than 64 deep"),
        ("x: &x [*x]\n", r"a\.yaml, line 1: an alias contains itself"),
        (
            "a0: &a0 [1, 2]\n"
            + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
            "its aliases stand for more than",
        ),
        ("x: !!python/object/apply:os.system [ls]\n", "line 1: the tag .* is not known"),
        ("x: !thing 1\n", "line 1: the tag '!thing' is not known"),
        ("x: !!function a.b\n", "line 1: the tag 'tag:yaml.org,2002:function' is not known"),
        ("include: nowhere\n", r"a\.yaml, line 1: include: 'nowhere' does not exist"),
        ("x: " + "a" * (5 << 20), r"a\.yaml has .* bytes; accepted are at most"),
    ],
)
def test_damaged_task_files_are_named_with_their_line_at_once(tmp_path, text, message):
    folder = folder_with(tmp_path, text)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message) as error:
        check_harness(HarnessConfig(tasks="mine", include_path=str(folder)))
    assert time.perf_counter() - start < 1 and "\n" not in str(error.value)


def test_task_files_stay_in_their_folder_without_trust(tmp_path):
    (tmp_path / "outside").write_text("doc_to_text: text\n")
    for include in ("../outside", str(tmp_path / "outside")):
        folder = folder_with(tmp_path, f"task: a\ninclude: {include}\n")
        with pytest.raises(ValueError, match=r"line 2: include: .*outside', which leads to"):
            check_task_files(folder, trust=False)
        check_task_files(folder, trust=True)
    (folder / "a.yaml").unlink()
    (folder / "a.yaml").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"a\.yaml is a link, which leads to"):
        check_task_files(folder, trust=False)


def test_our_suites_are_yaml():
    check_task_files(FOLDER, trust=True)
