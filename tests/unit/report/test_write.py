"""The files of a report: what a person and another program read in them."""

from __future__ import annotations

import csv
import io
import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_folders import BATCH, FAST, SLOW, STEPS, write_run

from hetexp.cli import main
from hetexp.report.comparison import compare
from hetexp.report.markdown import render
from hetexp.report.runs import read_runs
from hetexp.report.tables import curves_csv, runs_csv, variants_csv
from hetexp.report.words import number, seconds
from hetexp.report.write import write_report

FILES = {"report.html", "report.svg", "report.md", "runs.csv", "variants.csv", "curves.csv"}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two variants of two seeds, one device alone, one run that diverged and one that failed."""
    folder = tmp_path / "sweep"
    for seed in (0, 1):
        write_run(folder / f"0{seed}", balancing="auto", seed=seed, speed=100 + seed, solo=[80.0, 40.0])
        write_run(folder / f"1{seed}", balancing="equal", seed=seed, speed=50 + seed)
    write_run(folder / "20", strategy="single", names=[FAST], balancing="auto", speed=80)
    write_run(folder / "30", strategy="local_sgd", balancing="auto", loss=math.nan, speed=10, exact=False)
    error = "RuntimeError: boom\n" + "x" * 1000
    failed = write_run(folder / "40", strategy="pipeline", balancing="a|b", status="failed", error=error)
    (failed / "error.txt").write_text(error)
    return folder


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_text_answers_first_and_marks_what_must_be_marked(sweep: Path) -> None:
    text = render(compare(read_runs([sweep]), "Title"))
    title, answer, *_ = text.split("\n\n")
    assert title == "# Title (emulated)"
    assert answer.startswith("`ddp, auto` trains 1.25× as fast as the RTX 3090 alone [1 seed]")
    lines = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert "100.5 [94.15–106.9]" in lines["| **ddp, auto** ← best"]
    assert f"{FAST} 0.500 + {SLOW} 0.500" in lines["| **ddp, auto** ← best"]
    assert lines["| local_sgd, auto"].endswith(
        "| diverged | 2.000 | 1 | emulated, 1 of 1 diverged, not one device's steps |"
    )
    assert "- `pipeline, a|b`, seed 0: **failed** in `40`. RuntimeError: boom xxx" in text
    assert "x" * 400 not in text
    assert f"Traceback: `{sweep / '40' / 'error.txt'}`." in text
    assert "J/sample" not in text  # nobody has anything for it
    told = text.partition("## Where the rest went")[2]
    assert "| ddp, auto | 0.838 | 0.0 % | 16.2 % |" in told
    assert "](" not in text  # no links: it is read anywhere


def test_the_image_has_each_variant_and_needs_no_other_file(sweep: Path, tmp_path: Path) -> None:
    write_report([sweep], tmp_path, "Title")
    text = (tmp_path / "report.svg").read_text()
    words = [element.text for element in ElementTree.fromstring(text).iter() if element.text]
    assert {"ddp, auto", "ddp, equal", "single, auto"} <= set(words)
    assert "Samples a second of each variant, emulated" in words
    assert any(word.startswith("Emulated devices: no measurement of hardware.") for word in words)
    assert any(word.startswith("100.5 ") for word in words)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_without_a_completed_run_there_is_no_image(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "0", status="failed", error="RuntimeError: boom")
    write_report([run], tmp_path / "report", "Title")
    assert {path.name for path in (tmp_path / "report").iterdir()} == FILES - {"report.svg"}


def test_tables_have_every_run_and_units(sweep: Path) -> None:
    found = compare(read_runs([sweep]), "Title")
    runs = rows(runs_csv(found))
    assert [row["status"] for row in runs].count("completed") == 6
    (failed,) = [row for row in runs if row["status"] == "failed"]
    assert failed["error"].endswith("x")
    assert failed["samples_per_second"] == ""
    first = next(row for row in runs if row["folder"].endswith("/00"))
    assert float(first["samples_per_second"]) == pytest.approx(100)
    assert float(first["step_seconds"]) == pytest.approx(BATCH / 100)
    assert float(first["solo_samples_per_second[emulated:0]"]) == pytest.approx(80)
    assert float(first["wall_clock_seconds"]) == pytest.approx(2 * STEPS * BATCH * 10 / 100)
    variants = rows(variants_csv(found))
    assert [row["variant"] for row in variants][:2] == ["ddp, auto", "single, auto"]
    assert variants[0]["best"] == "True"
    assert variants[0]["seeds"] == "0 1"
    curve = [row for row in rows(curves_csv(found)) if row["variant"] == "ddp, auto" and row["seed"] == "1"]
    assert [row["step"] for row in curve] == ["2", "4", "4"]
    assert [row["eval_loss"] for row in curve] == ["", "", "2.0"]
    assert float(curve[1]["seconds"]) == pytest.approx(4 * BATCH / 101)


def test_files_are_written_and_written_again(sweep: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "report"
    page = write_report([sweep], folder, "Title")
    assert page == folder / "report.html"
    assert {path.name for path in folder.iterdir()} == FILES
    before = {path.name: path.read_text() for path in folder.iterdir()}
    write_report([sweep], folder, "Title")
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_the_command_writes_beside_the_runs_and_answers(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["report", str(sweep)]) == 0
    screen = capsys.readouterr().out
    assert screen.startswith("`ddp, auto` trains 1.25×")
    assert f"Report: {sweep / 'report.html'}" in screen
    assert set(FILES) <= {path.name for path in sweep.iterdir()}
    assert (sweep / "report.md").read_text().startswith("# sweep")
    # Several folders have no place of their own, and a report in the folder is no run.
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(sweep / "00"), str(sweep / "10"), "--title", "Both"]) == 0
    assert (tmp_path / "report" / "report.md").read_text().startswith("# Both")
    assert main(["report", str(sweep), "--output", "again"]) == 0
    assert (tmp_path / "again" / "runs.csv").read_text() == (sweep / "runs.csv").read_text()


def test_the_command_refuses_in_a_sentence(
    sweep: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for words, told in (
        ([str(tmp_path / "nowhere")], "`FOLDER` must be a run folder or one above it, but is"),
        ([str(sweep), "--output", str(tmp_path / "file")], "`--output` must be a folder that can be written"),
    ):
        assert main(["report", *words]) == 2
        screen = capsys.readouterr()
        assert told in screen.err
        assert screen.out == ""


def test_a_report_needs_no_torch(sweep: Path) -> None:
    import subprocess

    code = (
        "import sys; from hetexp.cli import main; main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'hetexp.strategy.ddp')))"
    )
    subprocess.run([sys.executable, "-c", code, "report", str(sweep)], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1234567.0, "1,235,000"),
        (12.345678, "12.35"),
        (0.00012345, "0.0001234"),
        (9.9999, "10.00"),
        (-1.5, "-1.500"),
        (1e-9, "1.000e-09"),
        (math.nan, "not finite"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value, 4) == text


def test_durations() -> None:
    assert [seconds(value, 4) for value in (2.5, 0.0125, 3e-6, None)] == [
        "2.500 s",
        "12.50 ms",
        "3.000 µs",
        "–",
    ]
