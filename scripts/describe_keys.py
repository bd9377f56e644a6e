"""Write the texts that describe configuration keys, from the one place that describes each key.

python scripts/describe_keys.py

The docstring below a field describes the key of a typed section (`hetexp/core/config`), and the `Args:` of a
`_target_` class describe its arguments. From these come:

- the comment behind each key in `conf/*.yaml`: the first sentence;
- the tables between `<!-- keys … -->` and `<!-- /keys -->` in `docs`: all sentences;
- `hetexp/web/allowed.json`, the settings of the dashboard's form: first sentence, type, limits and choices.

A class of another package (`torch.optim`) has no such text; its YAML comments are written by hand.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter

from hetexp.core.config import COMPONENTS, Config, OptimizerKeys, SampleKeys
from hetexp.core.instantiate import locate
from hetexp.core.sweep.search import SearchConfig

ROOT = Path(__file__).parents[1]
CONF, DOCS, ALLOWED = ROOT / "conf", ROOT / "docs", ROOT / "hetexp/web/allowed.json"
SECTION_FILES = (
    "data/custom",
    "trainer/default",
    "comm/auto",
    "debug/none",
    "monitor/default",
    "fault/none",
    "cluster/lab",
)
"""Files of typed sections that give keys, besides `config.yaml`."""
WIDTH = 120
FORM = [
    *("trainer.global_batch_size", "trainer.max_steps", "trainer.max_epochs", "trainer.accumulate"),
    *("trainer.microbatch_size", "trainer.clip_norm", "trainer.activation_checkpointing"),
    *("trainer.precision", "trainer.non_finite", "trainer.schedule", "trainer.warmup_steps"),
    *("trainer.eval_every", "trainer.checkpoint_every", "trainer.checkpoint_minutes"),
    *("trainer.log_every", "trainer.drop_last", "trainer.fast_dev_run", "trainer.seed", "optimizer.lr"),
    *("optimizer.weight_decay", "balancing.weights", "strategy.sync_every", "model.hidden_sizes"),
    *("model.widths", "model.num_layers", "model.num_heads", "model.embedding_size", "model.dropout"),
    *("data.num_samples", "data.num_test_samples", "data.sequence_length", "comm.wire"),
    *("comm.boundary_wire", "hardware.time_scale", "hardware.efficiency", "hardware.overhead_seconds"),
    *("hardware.threads_per_rank", "name"),
]
"""Keys that a request to the dashboard may set. None of them names code, a file or an address."""
REQUIRED = inspect.Parameter.empty
"""In place of a default."""
LEAST, GREATEST = 1e-9, 10_000_000
"""Smallest positive number and largest number of a request, if the schema has no limit."""
_MARKED = re.compile(r"(<!-- keys (?P<names>[^>]+) -->\n).*?(<!-- /keys -->)", re.DOTALL)


@dataclass(frozen=True)
class Key:
    """One key, as the schema or a class describes it."""

    text: str
    annotation: Any = Any
    default: Any = REQUIRED

    @property
    def sentences(self) -> list[str]:
        text = self.text.replace("`None`", "`null`")
        first, *rest = re.split(r"(?<=\.) +(?=[A-Z`0-9])", text)
        missing = [name for name in choices(self.annotation) if f"`{name}`" not in first]
        if missing:
            names = ", ".join(f"`{name}`" for name in choices(self.annotation))
            what, semicolon, rest_of_it = first.removesuffix(".").partition("; ")
            first = f"{what}: {names}{semicolon}{rest_of_it}."
        return [first[0].upper() + first[1:], *rest]

    @property
    def comment(self) -> str:
        """The first sentence, without signs of Markdown."""
        return self.sentences[0].removesuffix(".").replace("`", "")


def choices(annotation: Any) -> list[str]:
    """Return all strings that an annotation names by `Literal`."""
    if typing.get_origin(annotation) is typing.Literal:
        return [value for value in typing.get_args(annotation) if isinstance(value, str)]
    return [name for part in typing.get_args(annotation) for name in choices(part)]


# ---------------------------------------------------------------- where keys are described


def section_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield every key of a section, those of inner sections and list entries (`hosts[].name`) included."""
    hints = typing.get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = field.annotation
        entries = [part for part in typing.get_args(inner) if inspect.isclass(part)]
        section = inner if inspect.isclass(inner) and issubclass(inner, BaseModel) else None
        text = field.description or (inspect.getdoc(section) or "").split("\n\n")[0] * bool(section)
        default = REQUIRED if field.is_required() else field.get_default()
        yield path, Key(" ".join(text.split()), hints[name], default)
        if section is not None:
            yield from section_keys(section, f"{path}.")
        elif typing.get_origin(inner) is list and issubclass(entries[0], BaseModel):
            yield from section_keys(entries[0], f"{path}[].")


def class_keys(target: str) -> dict[str, Key]:
    """Return the arguments of a class of hetexp, with the texts of its docstring's `Args:`."""
    found = locate(target)
    hints = typing.get_type_hints(found.__init__, include_extras=True)
    _, _, args = (inspect.getdoc(found) or "").partition("Args:\n")
    args = re.split(r"\n\n?(?=\S)", args)[0]
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", args):
        names, _, text = entry.partition(":")
        texts |= dict.fromkeys(names.strip().split(", "), " ".join(text.split()))
    parameters = inspect.signature(found).parameters
    return {name: Key(texts[name], hints.get(name, Any), one.default) for name, one in parameters.items()}


def search_keys() -> dict[str, Key]:
    """Return the settings of a search (`hydra.sweeper`), with the docstrings below its fields."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(SearchConfig))).body
    assert isinstance(body, ast.ClassDef)
    texts = {
        one.target.id: " ".join(str(after.value.value).split())
        for one, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    return {
        one.name: Key(texts[one.name], Any, one.default)
        for one in fields(SearchConfig)
        if one.name != "_target_"
    }


@cache
def schema() -> dict[str, Key]:
    """Return every key of the typed sections; `fallback` is written as `strategy.fallback`."""
    found = dict(section_keys(Config)) | dict(section_keys(SampleKeys, "data."))
    own = dict(section_keys(OptimizerKeys, "optimizer."))
    return found | {"strategy.fallback": found.pop("fallback")} | own


def target_of(group: str, option: str) -> str:
    """Return the class of an option, that of its defaults if it names none; empty for a form to fill in."""
    raw = yaml.safe_load((CONF / group / f"{option}.yaml").read_text(encoding="utf-8"))
    target = raw.get("_target_") or target_of(group, raw["defaults"][0])
    return "" if target == "???" else str(target)


@cache
def option_keys(group: str, option: str) -> dict[str, Key]:
    """Return the arguments of an option's class; of a class of another package as its file describes them."""
    target = target_of(group, option)
    if target.startswith("hetexp."):
        return class_keys(target)
    text = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8")
    values = {name: value for name, value in yaml.safe_load(text).items() if not name.startswith("_")}
    comments = dict(re.findall(r"^(\w+):.*?# (.*)$", text, re.MULTILINE))
    return {name: Key(comments[name], type(value), value) for name, value in values.items() if target}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


# ---------------------------------------------------------------- conf


@dataclass
class Line:
    """A line of YAML."""

    text: str
    path: str = ""
    """Of its key: `trainer.early_stopping.patience`; empty without a key."""
    comment: str = ""


def read_lines(text: str, prefix: str) -> Iterator[Line]:
    """Yield the lines of a file with the keys that they give, without comments behind and below keys."""
    parents: list[tuple[int, str]] = []
    for raw in text.splitlines():
        match = re.fullmatch(r"( *)(- )?([A-Za-z]\w*):(.*)", raw)
        if match is None:
            if not re.match(r"\s+#", raw):
                yield Line(raw)
            continue
        indent, dash, name, _ = match.groups()
        depth = len(indent) + len(dash or "")
        while parents and parents[-1][0] >= (len(indent) + 1 if dash else depth):
            parents.pop()
        if dash:
            parents.append((len(indent) + 1, "[]"))
        parents.append((depth, name))
        path = ".".join([*filter(None, [prefix]), *(part for _, part in parents)]).replace(".[]", "[]")
        yield Line(re.sub(r"\s+#.*", "", raw), path)


def described(text: str, prefix: str, keys: Mapping[str, Key]) -> tuple[str, set[str]]:
    """Return a file with the comment of each known key behind it, and the keys that it describes.

    Hydra's own part and `_target_` lines stay as they are.
    """
    lines = list(read_lines(text, prefix))
    seen: set[str] = set()
    for line in lines:
        if line.path in keys and line.path not in seen:
            seen.add(line.path)
            line.comment = keys[line.path].comment
    written: list[str] = []
    block: list[Line] = []
    for line in [*lines, Line("")]:
        if line.path and line.path.partition(".")[0] != "hydra":
            block.append(line)
            continue
        column = max((len(one.text) for one in block if one.comment and len(one.text) <= 36), default=0) + 2
        for one in block:
            written += _commented(one, max(column, len(one.text) + 2))
        block = []
        written.append(line.text)
    return "\n".join(written[:-1]) + "\n", seen


def _commented(line: Line, column: int) -> list[str]:
    if not line.comment:
        return [line.text]
    first, *rest = textwrap.wrap(line.comment, WIDTH - column - 2, break_on_hyphens=False)
    return [f"{line.text:<{column}}# {first}", *(f"{'':<{column}}# {more}" for more in rest)]


def conf_files() -> tuple[dict[Path, str], set[str]]:
    """Return the YAML files that describe keys, and all keys of the typed sections that they describe."""
    found: dict[Path, str] = {}
    seen: set[str] = set()
    for name in ("config", *SECTION_FILES):
        path = CONF / f"{name}.yaml"
        prefix = name.partition("/")[0] if "/" in name else ""
        found[path], described_here = described(path.read_text(encoding="utf-8"), prefix, schema())
        seen |= described_here
    for group in COMPONENTS:
        for option in options(group):
            if target_of(group, option).startswith("hetexp."):
                path = CONF / group / f"{option}.yaml"
                keys = {f"{group}.{name}": key for name, key in option_keys(group, option).items()}
                found[path], _ = described(path.read_text(encoding="utf-8"), group, keys)
    return found, seen


# ---------------------------------------------------------------- docs


def tables(text: str, values: Mapping[str, str]) -> str:
    """Return a page with its marked tables written from the schema.

    Args:
        values: what conf gives each key, as it is written there.
    """

    def table(match: re.Match[str]) -> str:
        rows = [row for word in match["names"].split() for row in _rows(word, values)]
        has_defaults = any(default for _, default, _ in rows)
        head = ["key", "default", "meaning"] if has_defaults else ["key", "meaning"]
        cells = [
            [f"`{name}`", *([default and f"`{default}`"] * has_defaults), text]
            for name, default, text in rows
        ]
        lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *cells]]
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return _MARKED.sub(table, text)


def _rows(word: str, values: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, default and text of what a word of a marker names.

    `trainer.seed` is one key, `trainer.*` are all of a section, `strategy=ddp` those of an option's class.
    """
    group, equals, option = word.partition("=")
    if equals:
        keys, prefix = {f"{group}.{name}": key for name, key in option_keys(group, option).items()}, ""
    elif word == "hydra.sweeper.*":
        keys, prefix = {f"hydra.sweeper.{name}": key for name, key in search_keys().items()}, ""
    else:
        keys = {name: key for name, key in schema().items() if fits(name, word)}
        prefix = word.removesuffix("*") if "[]" in word else ""
    if not keys:
        raise ValueError(f"a marker names `{word}`, which is no key")
    for name, key in keys.items():
        is_default = key.default is not REQUIRED and not isinstance(key.default, BaseModel)
        default = values.get(f"{word}.{name}" if equals else name)
        if default is None:
            default = json.dumps(key.default).strip('"') if is_default and not prefix else ""
        yield name.removeprefix(prefix), default, " ".join(key.sentences).replace("|", r"\|")


def fits(name: str, word: str) -> bool:
    """Tell whether a word of a marker names a key; `*` names neither sections nor lists' entries."""
    if not word.endswith("*"):
        return name == word
    start = word.removesuffix("*")
    is_section = any(other.startswith(f"{name}.") for other in schema())
    rest = name.removeprefix(start)
    at_top = start or "." not in name
    return (
        name.startswith(start)
        and "[]" not in rest
        and not is_section
        and bool(at_top)
        and name not in COMPONENTS
    )


# ---------------------------------------------------------------- the dashboard's form


def allowed() -> list[dict[str, Any]]:
    """Return the keys that a request may set, as `GET /api/v1/options` lists them."""
    return [_setting(name) for name in FORM]


def _setting(name: str) -> dict[str, Any]:
    plain = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    group, _, argument = name.partition(".")
    if name in schema():
        key, only = schema()[name], ""
    else:
        having = [option for option in options(group) if argument in option_keys(group, option)]
        having.sort(key=lambda option: {group: option} not in plain["defaults"])
        key = option_keys(group, having[0])[argument]
        others = {option for option in options(group) if target_of(group, option)} - set(having)
        only = f" ({group}={', '.join(sorted(having))})" if others else ""
    shape = TypeAdapter(key.annotation).json_schema()
    shapes = [one for one in shape.get("anyOf", [shape]) if one["type"] != "object"]  # a form has no mapping
    (own,) = [one for one in shapes if one["type"] != "null"]
    numbers = own.get("items", own)
    kind = {"integer": "int", "number": "float", "boolean": "bool", "string": "text"}[numbers["type"]]
    row: dict[str, Any] = {
        "key": name,
        "kind": "choice" if "enum" in own else kind + "s" * (numbers is not own),
    }
    row["description"] = key.comment + only
    least = LEAST if kind == "float" else 1
    if kind in ("int", "float"):
        over, under = numbers.get("exclusiveMinimum"), numbers.get("exclusiveMaximum")
        row["minimum"] = numbers.get("minimum", 0 if over is None else over + least)
        row["maximum"] = numbers.get("maximum", GREATEST if under is None else under - least)
    if "enum" in own:
        row["choices"] = own["enum"]
    if len(shapes) > 1:
        row["nullable"] = True
    return row


# ---------------------------------------------------------------- all of it


def written_values(files: Mapping[Path, str]) -> dict[str, str]:
    """Return the value of each key as conf writes it; a key of an option follows `strategy=ddp.`."""
    found: dict[str, str] = {}
    for path, text in files.items():
        group = path.parent.name if path.parent != CONF else ""
        start = f"{group}={path.stem}." if group in COMPONENTS else ""
        for line in read_lines(text, group):
            value = line.text.partition(":")[2].strip()
            if line.path and value and "[]" not in line.path:
                found.setdefault(start + line.path, value)
    return found


def outputs() -> dict[Path, str]:
    """Return the text of every file that this script writes."""
    found, _ = conf_files()
    values = written_values(found)
    for page in sorted(DOCS.rglob("*.md")):
        found[page] = tables(page.read_text(encoding="utf-8"), values)
    rows = ",\n".join(json.dumps(row) for row in allowed())
    return found | {ALLOWED: f"[\n{rows}\n]\n"}


if __name__ == "__main__":
    for file, content in outputs().items():
        file.write_text(content, encoding="utf-8")
