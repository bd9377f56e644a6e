"""Instructions and chats from a JSON-lines file, to fine-tune a language model on the answers only."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from hetexp.core.errors import ConfigError, must_be
from hetexp.data.base import DataSource

if TYPE_CHECKING:
    from hetexp.data.padded import Row

SHIPPED = Path(__file__).parent / "corpus" / "questions.jsonl"
FEW = 3
"""Number of lines that a message names."""

log = logging.getLogger(__name__)


class SftJsonl(DataSource):
    """A line is `{"messages": [{"role": …, "content": …}, …]}` or `{"prompt": …, "completion": …}`.

    A sample is (tokens, for each the token to predict): int64 [seq] twice. What is not part of an answer has
    the target -100 and counts nowhere; the loss is a mean over the answers' tokens of the whole batch.
    Samples are padded at their end, as far as the longest of their microbatch; in a pipeline, and on emulated
    devices, as far as the longest of all. How many lines were cut, and left out, is logged and in `report`.

    Args:
        file: JSON lines with `messages`, or `prompt` and `completion`; `None`: 64 short questions that ship
            with hetexp.
        evaluation_file: evaluation data in the same form; `None`: the last lines of `file`.
        test_fraction: part of the lines kept for evaluation if `evaluation_file` is `None`; 0: no evaluation.
        tokenizer: folder of the tokenizer, as `save_pretrained` writes it; `None`: a small one, a token for
            each byte.
        max_length: most tokens of a sample; the rest is cut off.
        unanswered: reaction to a line that keeps no token of an answer: `drop` or `keep` the line, or
            `refuse` the file.

    Raises:
        ConfigError: a file or tokenizer cannot be read, a line is no sample, or none is left.
    """

    report: dict[str, dict[str, int]]
    """Counts of `train` and `evaluation`: `lines`, `truncated`, `unanswered`, `tokens`, `counted` tokens."""

    def __init__(
        self,
        file: str | None = None,
        evaluation_file: str | None = None,
        test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1,
        tokenizer: str | None = None,
        max_length: PositiveInt = 512,
        unanswered: Literal["drop", "keep", "refuse"] = "drop",
    ) -> None:
        if problems := self.check(file, evaluation_file):
            raise ConfigError(problems)
        from hetexp.data.padded import PaddedRows
        from hetexp.data.tokenizers import load_tokenizer

        reader = _Reader(load_tokenizer(tokenizer), max_length, unanswered)
        lines = _lines("file", file)
        held = round(len(lines) * test_fraction) if evaluation_file is None else 0
        cut = len(lines) - held
        kept = lines[cut:] if evaluation_file is None else _lines("evaluation_file", evaluation_file)
        parts = {"train": reader.read("file", file, lines[:cut])}
        source = ("file", file) if evaluation_file is None else ("evaluation_file", evaluation_file)
        parts["evaluation"] = reader.read(*source, kept)
        if not parts["train"].rows:
            shown = "the shipped questions" if file is None else file
            raise ConfigError(must_be("data.file", "a file with at least one answer to learn from", shown))
        self.report = {name: part.report() for name, part in parts.items()}
        for name, part in parts.items():
            part.warn(name, max_length)
        longest = max(len(tokens) for part in parts.values() for tokens, _ in part.rows)
        made = {name: PaddedRows(part.rows, longest, reader.padding) for name, part in parts.items()}
        self.train, self.evaluation = made["train"], made["evaluation"] if len(made["evaluation"]) else None
        self.facts = {"vocab_size": len(reader.tokenizer), "sequence_length": longest}

    @staticmethod
    def check(file: str | None = None, evaluation_file: str | None = None, **_: Any) -> list[str]:
        """Return which files are missing, one sentence a problem."""
        return [
            must_be(f"data.{key}", "an existing file of JSON lines", given)
            for key, given in (("file", file), ("evaluation_file", evaluation_file))
            if given is not None and not Path(given).expanduser().is_file()
        ]


def _lines(key: str, file: str | None) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    path = SHIPPED if file is None else Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(must_be(f"data.{key}", "a readable UTF-8 file", file, str(error))) from error
    # Not splitlines: a text may hold other separators, which JSON leaves as they are.
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


@dataclass
class _Part:
    """The rows of some lines, with what is reported of them."""

    rows: list[Row] = field(default_factory=list)
    lines: int = 0
    truncated: int = 0
    unanswered: list[int] = field(default_factory=list)
    """Numbers of the lines without an answer."""
    kept: bool = False
    """Whether these lines are among the rows."""

    def report(self) -> dict[str, int]:
        from hetexp.data.padded import IGNORED

        counts = {"lines": self.lines, "truncated": self.truncated, "unanswered": len(self.unanswered)}
        tokens = sum(len(tokens) for tokens, _ in self.rows)
        return counts | {"tokens": tokens, "counted": sum(int((t != IGNORED).sum()) for _, t in self.rows)}

    def warn(self, name: str, max_length: int) -> None:
        """Log how many lines were cut off, and how many have no answer."""
        which = "training" if name == "train" else name
        if self.truncated:
            log.warning(
                "data: %d of %d lines of the %s data have more than %d tokens and are cut off there "
                "(data.max_length)",
                self.truncated,
                self.lines,
                which,
                max_length,
            )
        if self.unanswered:
            log.warning(
                "data: %d of %d lines of the %s data have no token of an answer and %s (data.unanswered), "
                "the first at line %d",
                len(self.unanswered),
                self.lines,
                which,
                "are kept, but teach nothing" if self.kept else "are left out",
                self.unanswered[0],
            )


class _Reader:
    """Makes rows of lines.

    Args:
        tokenizer: tokenizer of transformers.
    """

    def __init__(
        self, tokenizer: Any, max_length: int, unanswered: Literal["drop", "keep", "refuse"]
    ) -> None:
        self.tokenizer, self._max_length, self._unanswered = tokenizer, max_length, unanswered
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.padding: int = next(number for number in ids if number is not None)

    def read(self, key: str, file: str | None, lines: list[tuple[int, str]]) -> _Part:
        """Return the rows of these lines.

        Raises:
            ConfigError: some lines are no samples; the message names the first few.
        """
        from hetexp.data.padded import IGNORED
        from hetexp.data.sft_rows import RowError, encode

        part, problems = _Part(lines=len(lines), kept=self._unanswered == "keep"), []
        for number, line in lines:
            try:
                tokens = encode(json.loads(line), self.tokenizer)
            except (RowError, ValueError) as error:
                why = str(error) if isinstance(error, RowError) else f"is no JSON: {error}"
                problems.append(f"line {number} {why}")
                continue
            row = tokens.row(self._max_length)
            part.truncated += len(tokens.numbers) > self._max_length + 1
            if not (row[1] != IGNORED).any():
                part.unanswered.append(number)
                if self._unanswered == "refuse":
                    problems.append(f"line {number} has no token of an answer")
                if self._unanswered != "keep" or not len(row[0]):
                    continue
            part.rows.append(row)
        if problems:
            more = f"; and {len(problems) - FEW} more" if len(problems) > FEW else ""
            listed = "; ".join(problems[:FEW]) + more
            raise ConfigError(must_be(f"data.{key}", "a file of samples", file, f"There, {listed}."))
        return part
