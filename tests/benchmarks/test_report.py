"""Test that the results tables in the documentation agree with the stored rows from which they are generated."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks import report
from benchmarks.cases import liger, model_step
from benchmarks.tables import TABLES, training_steps
from benchmarks.tables.table import significant, time_text


@pytest.fixture
def checkout(tmp_path):
    """Fixture: a folder with a copy of the documentation's pages and of the stored rows."""
    shutil.copy(report.ROOT / "README.md", tmp_path)
    for pattern in ("docs/*.jsonl", "docs/results/*.jsonl", "docs/results/*.md"):
        for source in report.ROOT.glob(pattern):
            target = tmp_path / source.relative_to(report.ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return tmp_path


def test_the_pages_agree_with_the_rows(capsys):
    assert report.main(["--check"]) == 0, (
        capsys.readouterr().out + "run python -m benchmarks report --write"
    )


def test_every_rows_file_exists_and_every_table_is_used_once():
    for table in TABLES.values():
        assert all((report.ROOT / "docs" / name).is_file() for name in table.files), table.name
    used = [name for page in report.pages(report.ROOT) for name in report.names(page.read_text())]
    assert sorted(used) == sorted(TABLES)


def test_every_other_file_of_rows_is_used_and_names_its_source_or_commit():
    used = {name for table in TABLES.values() for name in table.files}
    for path in (report.ROOT / "docs" / "results").glob("*.jsonl"):
        assert f"results/{path.name}" in used
        rows = map(json.loads, path.read_text().splitlines())
        assert all(row.get("source") or row["commit"] for row in rows), path.name


def test_the_links_of_the_pages_exist():
    for page in report.pages(report.ROOT)[1:]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_papers_pages_quote_the_results_that_they_link_to():
    """Every number with decimals in a cell of docs/papers that links to a results page is in that page, or is one of its numbers
    rounded.
    """
    number, quoted = re.compile(r"(?<![\w.])\d[\d,]*\.\d+"), 0
    for page in (report.ROOT / "docs" / "papers").glob("*.md"):
        for cell in re.split(r"[|\n]", page.read_text()):
            links = set(re.findall(r"\((\.\./results/\w+\.md)[)#]", cell))
            texts = [(page.parent / link).read_text() for link in links]
            measured = [text.replace(",", "") for text in number.findall(" ".join(texts))]
            for text in number.findall(cell) if links else ():
                digits = len(text.partition(".")[2])
                rounded = {
                    f"{float(x):.{digits}f}" for x in measured if len(x.partition(".")[2]) >= digits
                }
                assert text.replace(",", "") in rounded, f"{page.name}: {text} is not in {links}"
                quoted += 1
    assert quoted > 50


def test_the_page_of_liger_names_the_rows_of_its_tables():
    """The numbers after `--rows` in docs/papers/liger.md are those of the table's own models."""
    gates = [f"gate={name}" for name in ("gla", "hgrn2", "gsa", "mamba2", "mlstm", "rwkv6")]
    kinds = ("random_gate", "feature_map", "no_lora", "no_window")
    tables = {
        "Table 1, Table 5": gates,
        "Tables 6 and 10": ["gate=gla", *(f"ablation={kind}" for kind in kinds)],
        "Table 9": gates[:3],
    }
    page = (report.ROOT / "docs" / "papers" / "liger.md").read_text()
    found = dict(
        re.findall(r"^\| (Tables? [^:|]+):.*liger \.\.\. --rows ([\d,]+)`", page, re.MULTILINE)
    )
    named = {t: [liger.ROWS[int(n)][1] for n in rows.split(",")] for t, rows in found.items()}
    assert named == tables


def test_a_changed_row_changes_its_pages_until_they_are_rewritten(checkout, capsys):
    rows = checkout / "docs" / "kernels.jsonl"
    kda = [json.loads(line) for line in rows.read_text().splitlines()]
    newest = [
        row
        for row in kda
        if row["op"] == "kda" and row["shape"] == "8x4096x16x128" and "fla" in row
    ][-1]
    with rows.open("a") as file:
        file.write(json.dumps(newest | {"kernel": [0.987, 3.21], "commit": "1234567"}) + "\n")
    assert report.main(["--root", str(checkout)]) == 0
    assert report.main(["--root", str(checkout), "--check"]) == 1
    printed = capsys.readouterr().out
    assert "README.md: differs" in printed and "docs/results/kernels.md: differs" in printed
    assert report.main(["--root", str(checkout), "--write"]) == 0
    assert report.main(["--root", str(checkout), "--check"]) == 0
    assert "0.987 / 3.210" in (checkout / "docs/results/kernels.md").read_text()
    assert "1234567" in (checkout / "docs/results/kernels.md").read_text()
    assert "0.987 / 3.21 ms" in (checkout / "README.md").read_text()


def test_an_older_row_changes_nothing(checkout):
    rows = checkout / "docs" / "mom.jsonl"
    oldest = next(row for row in map(json.loads, rows.read_text().splitlines()) if "fla" in row)
    rows.write_text(
        rows.read_text() + json.dumps(oldest | {"fla": [1, 2], "date": "2020-01-01"}) + "\n"
    )
    assert not report.stale(checkout)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "<!-- table: kernel -->\n<!-- end of table -->",
            "no table 'kernel'; the nearest name is 'kernels'",
        ),
        ("<!-- table: mom -->\n", "1 results tables begin and 0 end"),
        ("<!-- table: mom -->\n<!-- table: mqar -->\n<!-- end of table -->", "table 'mom' has no"),
    ],
)
def test_wrong_marks_are_errors(text, message):
    page = report.ROOT / "docs" / "results" / "page.md"
    with pytest.raises(ValueError, match=message):
        report.fill(text, page, report.ROOT)


def test_a_step_without_a_kernel_replaces_no_other_step(tmp_path):
    row = dict(
        table="layouts", variant="a0.3b-2b,mixer=gla", mesh={}, rows=32, length=2048, tokens_per_second=1000, step_ms=1.0, gib=1.0,
        date="2026-01-01", commit="a",
    )  # fmt: skip
    changed = dict(step_ms=2.0, without="grouped_swiglu"), dict(step_ms=3.0, remat="dots")
    rows = [
        row,
        *(row | fields for fields in changed),
        *(row | dict(table="axes") | f for f in ({}, *changed)),
    ]
    (tmp_path / "linear_moe.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [r["step_ms"] for r in TABLES["large_steps"].rows(tmp_path)] == [1.0, 2.0, 3.0]
    assert [r["step_ms"] for r in TABLES["axes"].rows(tmp_path)] == [1.0]


def test_a_shape_with_few_rows_of_triton_has_blank_cells(tmp_path):
    def row(shape, capability, **more):
        named = dict(op="kda", shape=shape, capability=capability, date="2026-01-01", commit="a")
        return named | dict(device="NVIDIA H200") | more

    rows = [
        row("1x64x2x64", "fla 8.0", fla=[4.0, 9.0]),
        row("2x64x2x64", "fla 8.0", fla=[4.0, 9.0], triton=[2.0, 3.0], xla=[10.0, 30.0]),
        row("2x64x2x64", "any", xla=[20.0, 60.0], automatic=[1.0, 2.0]),
        row("3x64x2x64", "9.0", triton=[1.5, 2.5]),
        row("4x64x2x64", "fla 8.0", fla_error="it ended"),
        row("5x64x2x64", "8.0", error="ValueError: no"),
    ]
    (tmp_path / "triton_kernels.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = TABLES["triton_times"].markdown(tmp_path, tmp_path / "page.md")
    lines = [[cell.strip() for cell in x.split("|")[2:-1]] for x in text.splitlines() if "| kda" in x]  # fmt: skip
    assert lines == [
        ["1 x 64 x 2 x 64", "", "", "", "", "4.000 / 9.000", "", "", "", ""],
        ["2 x 64 x 2 x 64", "2.000 / 3.000", "", "1.000 / 2.000", "20.00 / 60.00", "4.000 / 9.000", "", "5.0 / 10.0", "2.00 / 3.00", ""],
        ["3 x 64 x 2 x 64", "", "1.500 / 2.500", "", "", "", "", "", "", ""],
    ]  # fmt: skip


def test_a_table_without_rows_is_an_error(checkout):
    (checkout / "docs" / "mom.jsonl").write_text("")
    with pytest.raises(ValueError, match="table mom: no row of mom.jsonl belongs to it"):
        report.stale(checkout)


def test_the_report_does_not_import_jax():
    code = "import sys, benchmarks.report; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=report.ROOT)


@pytest.mark.parametrize(
    "value, text", [(0.16854, "0.169"), (13.1562, "13.16"), (117.96, "118.0"), (1234.5, "1234")]
)
def test_times_have_four_digits_at_most_three_of_them_decimals(value, text):
    assert time_text(value) == text


@pytest.mark.parametrize(
    "value, text", [(0.6064, "0.606"), (13.156, "13.2"), (30623, "30,600"), (0.32, "0.320")]
)
def test_significant_digits(value, text):
    assert significant(value) == text


def test_a_row_of_a_step_in_another_form_is_in_no_table_of_steps_by_default():
    rows = [
        json.loads(line)
        for line in (report.ROOT / "docs/model_step.jsonl").read_text().splitlines()
    ]
    plain = next(row for row in rows if training_steps.is_step(row))
    others = set(model_step.BENCHMARK.optional_key) - {
        "remat",
        "vocab_size",
        "peer",
        "implementation",
        "batch_steps",
    }
    assert "delta_chunks" in others
    for name in others:
        assert not training_steps.is_step(plain | {name: "another"})
