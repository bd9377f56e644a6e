"""What the documents say is so: files, keys, groups, options, numbers, output of commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from describe_commands import PAGE, page
from hydra.errors import HydraException

import hetexp
from hetexp.app import compose_config, conf_dir, register_resolvers
from hetexp.app import main as train_main
from hetexp.cli import main
from hetexp.core.compose.conf_folders import name_own_conf_dir
from hetexp.core.compose.overrides import compose_typed
from hetexp.core.compose.words import written_out
from hetexp.core.sweep.grid import compose_jobs
from hetexp.hardware.catalogue import shipped

ROOT = conf_dir().parent
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^(?:\.venv/bin/)?python train\.py +(.*?)(?: {2,}.*| #.*)?$", re.MULTILINE)
LAUNCH = re.compile(r"^ *hetexp launch +([\w/]+\.py .*?)(?: {2,}.*| #.*)?$", re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / target).exists(), target


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_anchors_are_headings(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", path.read_text(encoding="utf-8")):
        assert anchor in _anchors(path.parent / target if target else path), f"{target}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_files_and_keys_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:hetexp|tests|scripts|benchmarks|conf|docs)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)  # what a command prints may name wrong keys
    text = re.sub(r"<!-- keys .*?<!-- /keys -->", "", text, flags=re.DOTALL)  # written from the schema
    plain = compose_config([])
    for key in re.findall(r"`((?:trainer|launch|comm|debug|hardware|logger)\.[a-z_.]+)`?", text):
        if key not in ("hardware.cards", "hardware.catalogue"):
            node = plain
            for part in key.split("."):
                assert part in node, key
                node = node[part]


def test_the_site_has_every_page_once() -> None:
    """`make docs` builds it; here without its packages."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r"[\w/.-]+\.md\b", navigation)
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_pages_link_only_to_pages_and_images() -> None:
    """Links to other files would work on GitHub and not in the site."""
    for path in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
            assert DOCS in (path.parent / target).resolve().parents, f"{path}: {target}"


def test_the_home_page_leads_to_every_guide() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)}
    assert {f"how-to/{path.name}" for path in (DOCS / "how-to").glob("*.md")} <= linked


def test_the_page_of_commands_is_what_the_parsers_say() -> None:
    pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")
    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/describe_commands.py"


def test_the_page_of_the_api_has_every_public_name() -> None:
    text = (DOCS / "reference/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(?:::: hetexp\.|      heading: )(\w+)$", text, re.MULTILINE)
    stub = (ROOT / "hetexp/__init__.pyi").read_text(encoding="utf-8")
    typed = re.findall(r"(?<= as )\w+$|^\w+(?= = )", stub, re.MULTILINE)
    assert sorted(listed) == sorted(typed) == sorted(set(vars(hetexp)["__all__"]) - {"__version__"})


def test_experiments_have_as_many_runs_as_their_table_says() -> None:
    text = (DOCS / "how-to/compare.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:\[)?`(\w+)`.*?\| *(\d+) \| .*min \|$", text, re.MULTILINE)
    assert len(rows) == 5
    register_resolvers()
    name_own_conf_dir(None)
    for name, runs in rows:
        if name == "weights_search":
            trials = (conf_dir() / "experiment/weights_search.yaml").read_text(encoding="utf-8")
            assert f"n_trials: {runs}\n" in trials
        else:
            jobs, problems = compose_jobs([f"experiment={name}"])
            assert not problems
            assert len(jobs) == int(runs), name


def test_the_readme_counts_the_cards() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (number,) = re.findall(r"(\d+) cards can be \[emulated\]", text)
    assert len(shipped().cards) == int(number)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def commands() -> list[str]:
    found = []
    for path in DOCUMENTS:
        text = re.sub(r" \\\n +", " ", path.read_text(encoding="utf-8"))
        found += [line for line in COMMAND.findall(text) if line]
    return sorted(set(found))


def _one_of(word: str) -> str:
    """Return a sweep's word with its first choice only."""
    word = re.sub(r"=choice\((.*)\)$", r"=\1", word)
    word = re.sub(r"=.*interval\(([^,]+),.*", r"=\1", word)
    return word if "=[" in word else re.sub(r"=([\w.:]+),.*", r"=\1", word)


@pytest.mark.parametrize("typed", commands())
def test_commands_compose(typed: str) -> None:
    """Commands that the documents show as wrong are those that they show refused."""
    words = [word for word in written_out(shlex.split(typed)) if not word.startswith("-")]
    if "dpp" in typed:
        with pytest.raises(HydraException):
            compose_config(words)
        return
    if "--" in typed:
        return
    sweep = "-m" in typed.split()
    compose_typed(words, sweep)  # which gives arguments of a class the sign of a new key
    compose_config([_one_of(word) if sweep else word for word in words])


def launches() -> list[str]:
    found = []
    for path in [*DOCUMENTS, *(ROOT / "examples").glob("*.py")]:
        found += LAUNCH.findall(path.read_text(encoding="utf-8"))
    return sorted(set(found))


@pytest.mark.parametrize("line", launches())
def test_launches_can_be_composed(line: str) -> None:
    script, *words = line.partition(" -- ")[0].split()
    assert script == "script.py" or (ROOT / script).exists()
    compose_config([word for word in words if not word.startswith("resume=")])


def test_the_line_of_layers_is_that_of_the_contract() -> None:
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'"([^"]+)"', contract.partition("layers = [")[2].partition("]")[0])
    text = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    shown = [part for part in text.split("\n\n") if part.startswith("`cli`")]
    assert shown, "the line of layers begins with `cli`"
    drawn = " → ".join(f"`{layer.replace('hetexp.', '')}`" for layer in layers)
    assert [" ".join(part.split()) for part in shown] == [drawn]


def shown_by(page: str, command: str) -> tuple[list[str], list[str]]:
    """Return the words of a command that a page shows, and the lines of output below it."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```\n\$ {command} (.+?)^```", text, re.MULTILINE | re.DOTALL)
    words, *lines = block.splitlines()
    return shlex.split(words), [line.rstrip() for line in lines]


def test_the_mistakes_of_the_first_page_are_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, lines = shown_by("tutorial.md", r"python train\.py")
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    with pytest.raises(SystemExit) as ended:
        train_main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == lines


def test_the_plan_of_the_guide_is_what_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run of lines between two `…` is printed in this form, one run after the other."""
    words, lines = shown_by("how-to/planning.md", "hetexp plan")
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["plan", *words]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    for run in filter(None, "\n".join(lines).split("\n…")):
        _, found, printed = printed.partition(run)
        assert found, run
