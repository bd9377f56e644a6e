"""The figures of the package's shape, of a tiny package that has one of each."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import shape

MODULES = {
    "__init__": "",
    # A circle at import, through a relative import of a package's own name.
    "pair/__init__": "from .left import go\n",
    "pair/left": "from tiny import pair\n",
    # One that a function closes, and one that type checkers close.
    "upper": "import tiny.lower\n",
    "lower": "def go():\n    from tiny.upper import x\n\n    class Inner:\n        import os\n",
    "types_a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tiny.types_b import B\n",
    "types_b": "try:\n    from tiny import types_a\nexcept ImportError:\n    pass\n",
    # Down only, and other packages.
    "leaf": "import json\nimport tinyother\n",
    "user": "from tiny.leaf import x\nfrom tiny import leaf, upper\n",
    "many/a": "",
    "many/b": "@wraps\ndef f():\n    return 1\n\n\nclass C:\n    async def g(self):\n        x = 1\n\n"
    "        return x\n",
    "many/c": "",
}
STEP = {"stack": ["worker.py", "loop.py"], "entered": ["loop.py", "step.py", "worker.py"]}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        path = tmp_path / "tiny" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tiny"


def test_circles_by_where_the_imports_are(package: Path) -> None:
    _, lists = shape.measure(package, STEP)
    pair, lazy, types = "tiny.pair ↔ tiny.pair.left", "tiny.lower ↔ tiny.upper", "tiny.types_a ↔ tiny.types_b"
    assert lists["circles at import"] == [pair]
    assert lists["circles with imports in functions"] == [lazy, pair]
    assert lists["circles with imports for type checkers"] == [lazy, pair, types]


def test_a_long_circle_is_one_group_and_a_chain_is_none() -> None:
    names = [f"m{number:04}" for number in range(3000)]
    ring = dict(zip(names, [{name} for name in [*names[1:], names[0]]], strict=True))
    assert shape.circles(ring) == [names]
    assert shape.circles(ring | {names[-1]: set()}) == []
    assert shape.circles({"a": {"a", "b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_folders_files_and_functions(package: Path) -> None:
    assert shape.flat_files(package) == {"tiny": 7, "tiny/many": 3, "tiny/pair": 2}
    assert list(shape.file_lines(package).items())[0] == ("tiny/many/b.py", 10)
    assert shape.function_lines(package) == {
        "tiny/lower.py:1 go": 5,
        "tiny/many/b.py:7 g": 4,
        "tiny/many/b.py:2 f": 2,
    }
    (package / "many/b.py").write_text("def f():\n" + "    x = 1\n" * shape.FILE_LINES)
    for number in range(shape.FLAT_FILES):
        (package / f"many/more_{number}.py").write_text("")
    figures, lists = shape.measure(package, STEP)
    assert lists["folders with more than 20 flat files"] == ["tiny/many: 23"]
    assert lists["functions over 60 lines"] == ["tiny/many/b.py:1 f: 401"]
    assert lists["files over 400 lines"] == ["tiny/many/b.py: 401"]
    assert figures["most flat files in a folder"] == 23
    assert figures["lines of the longest file"] == figures["lines of the longest function"] == 401
    assert figures["files of the reading path"] == 2
    assert figures["files entered in a step"] == 3


def test_a_figure_above_its_limit_is_named(package: Path) -> None:
    figures, _ = shape.measure(package, STEP)
    limits = {"circles at import": (1, 0), "lines in all": (figures["lines in all"] - 1, None)}
    assert shape.above(figures, limits) == ["lines in all"]
    assert set(shape.LIMITS) <= set(figures)


def test_the_stack_of_a_call_and_nothing_of_other_packages(package: Path) -> None:
    seen: list[str] = []

    def look(frame: FrameType) -> None:
        seen.extend(shape.stack_files(frame, package))

    def run(name: str, text: str, **names: object) -> dict[str, object]:
        scope = dict(names)
        exec(compile(text, str(package / name), "exec"), scope)
        return scope

    inner = run("leaf.py", "import sys\ndef f(): look(sys._getframe())", look=look)["f"]
    outer = run("many/a.py", "def g(n): inner() if n == 0 else g(n - 1)", inner=inner)["g"]
    assert callable(outer)
    outer(3)
    assert seen == ["many/a.py", "leaf.py"]
    assert shape.package_files([f"{package}_other/x.py", sys.executable], package) == []
