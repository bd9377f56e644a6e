"""Text as a sequence of characters: of the user's own folder, or of the novel that ships with hetexp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from hetexp.core.errors import ConfigError, must_be
from hetexp.data.base import DataSource

SHIPPED = Path(__file__).parent / "corpus"


class Text(DataSource):
    """Every `*.txt` of a folder, in the order of their names, cut into windows that do not overlap.

    A sample is (characters, the characters that follow each): int64 [seq] twice.

    Args:
        folder: folder of `*.txt` files, UTF-8; `None`: the text that ships with hetexp.
        sequence_length: characters of a sample.
        test_fraction: part of the text, at its end, kept for evaluation.

    Raises:
        ConfigError: the folder is missing, holds no readable text, or too little of it.
    """

    characters: str
    """The vocabulary: token `i` is the character `characters[i]`."""

    def __init__(
        self,
        folder: str | None = None,
        sequence_length: PositiveInt = 128,
        test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    ) -> None:
        text, problems = _read(folder, sequence_length, test_fraction)
        if problems:
            raise ConfigError(problems)
        import numpy as np
        import torch

        from hetexp.data.in_memory import InMemory

        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        vocabulary, tokens = np.unique(codes, return_inverse=True)
        self.characters = "".join(map(chr, vocabulary.tolist()))

        def windows(part: torch.Tensor) -> InMemory:
            count = (len(part) - 1) // sequence_length
            inputs, targets = part[: count * sequence_length], part[1 : count * sequence_length + 1]
            return InMemory(inputs.view(count, sequence_length), targets.view(count, sequence_length))

        data = torch.from_numpy(tokens.astype(np.int64))
        cut = _train_length(len(text), test_fraction)
        self.train = windows(data[:cut])
        self.evaluation = windows(data[cut:])
        self.facts = {"vocab_size": len(vocabulary), "sequence_length": sequence_length}

    @staticmethod
    def check(
        folder: str | None = None, sequence_length: int = 128, test_fraction: float = 0.1, **_: Any
    ) -> list[str]:
        """Return what is wrong with the folder, one sentence a problem; reads it, but imports nothing."""
        return _read(folder, sequence_length, test_fraction)[1]


def _read(folder: str | None, sequence_length: int, test_fraction: float) -> tuple[str, list[str]]:
    """Return the whole text and what keeps it from being used."""
    path = SHIPPED if folder is None else Path(folder).expanduser()
    shown = "the shipped text" if folder is None else folder
    if not path.is_dir():
        return "", [must_be("data.folder", "an existing folder", shown)]
    files = sorted((file for file in path.glob("*.txt") if file.is_file()), key=lambda file: file.name)
    if not files:
        return "", [must_be("data.folder", "a folder with at least one .txt file", shown)]
    texts, problems = [], []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            fix = f"{file.name} cannot be read: {error}."
            problems.append(must_be("data.folder", "a folder of readable UTF-8 text", shown, fix))
    if problems:
        return "", problems
    text = "".join(texts)
    num_train = _train_length(len(text), test_fraction)
    num_test = len(text) - num_train
    if min(num_train, num_test) <= sequence_length:
        accepted = f"a folder whose text fills one window of {sequence_length} characters in both parts"
        fix = (
            f"Training has {num_train} characters and evaluation {num_test}, each needs "
            f"{sequence_length + 1}: add text, or lower `data.sequence_length`."
        )
        return "", [must_be("data.folder", accepted, shown, fix)]
    return text, []


def _train_length(length: int, test_fraction: float) -> int:
    return length - round(length * test_fraction)
