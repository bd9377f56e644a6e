"""Fine-tuning files: which tokens count, how samples are padded, what is told of lines that are lacking."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from language_model import write_lines

from hetexp.core.errors import ConfigError
from hetexp.data.base import build_data, same_shape
from hetexp.data.padded import IGNORED, PaddedRows
from hetexp.data.sft_jsonl import SftJsonl
from hetexp.data.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer(None)
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Yö."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "No."},
    ]
}
PAIR = {"prompt": "2 + 2 = ", "completion": "4"}


def source(tmp_path: Path, lines: list[Any], **options: Any) -> SftJsonl:
    file = write_lines(tmp_path / "lines.jsonl", lines)
    return SftJsonl(file=str(file), **({"test_fraction": 0.0} | options))


def rows(dataset: Any) -> PaddedRows:
    assert isinstance(dataset, PaddedRows)
    return dataset


def counted(sample: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return the text of the targets that count."""
    return str(TOKENIZER.decode(sample[1][sample[1] != IGNORED]))


def text(sample: tuple[torch.Tensor, torch.Tensor]) -> str:
    return str(TOKENIZER.decode(sample[0]))


def test_only_the_assistants_words_and_their_ends_count(tmp_path: Path) -> None:
    sample = source(tmp_path, [CHAT]).train[0]
    written = "<s>system: Be brief.\nuser: Hi?\nassistant: Yö.</s>user: And?\nassistant: No."
    assert text(sample) == written  # the last end is a target only
    assert counted(sample) == "Yö.</s>No.</s>"


def test_only_the_completion_and_its_end_count(tmp_path: Path) -> None:
    sample = source(tmp_path, [PAIR]).train[0]
    assert (text(sample), counted(sample)) == ("2 + 2 = 4", "4</s>")
    tokens, targets = sample
    assert tokens[1:][targets[:-1] != IGNORED].tolist() == targets[:-1][targets[:-1] != IGNORED].tolist()


def test_a_tokenizer_from_a_folder_with_a_template_of_its_own(tmp_path: Path) -> None:
    own = load_tokenizer(None)
    own.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    own.save_pretrained(tmp_path / "tokenizer")
    sample = source(tmp_path, [CHAT], tokenizer=str(tmp_path / "tokenizer")).train[0]
    assert counted(sample) == "Yö.[end]No.[end]"


def test_samples_are_as_long_as_the_longest_of_their_batch(tmp_path: Path) -> None:
    lines = [{"prompt": "a" * size, "completion": "b"} for size in (3, 9, 5)]
    data = source(tmp_path, lines)
    few = rows(data.train).__getitems__([0, 2])
    assert [len(tokens) for tokens, _ in few] == [6, 6]
    assert few[0][0].tolist()[-2:] == [0, 0] and few[0][1].tolist()[-2:] == [IGNORED] * 2
    whole = same_shape(data.train)
    assert data.facts["sequence_length"] == 10
    for index in range(3):
        assert [len(part) for part in whole[index]] == [10, 10]
        assert all(
            torch.equal(one, other) for one, other in zip(whole[index], data.train[index], strict=True)
        )


def test_what_is_cut_and_what_has_no_answer_left_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [
        {"prompt": "a" * 4, "completion": "b" * 10},  # cut, some answer left
        {"prompt": "a" * 30, "completion": "b"},  # cut, none left
        {"messages": [{"role": "user", "content": "x"}]},  # never had one
        PAIR,
    ]
    with caplog.at_level(logging.WARNING):
        data = source(tmp_path, lines, max_length=12)
    assert data.report["train"] | {"tokens": 0} == {
        "lines": 4, "truncated": 2, "unanswered": 2, "tokens": 0, "counted": 9 + 2
    }  # fmt: skip
    assert len(rows(data.train)) == 2
    assert "2 of 4 lines of the training data have more than 12 tokens" in caplog.text
    assert "2 of 4 lines of the training data have no token of an answer and are left out" in caplog.text
    kept = source(tmp_path, lines, max_length=12, unanswered="keep")
    assert len(rows(kept.train)) == 4 and int((kept.train[1][1] != IGNORED).sum()) == 0
    with pytest.raises(ConfigError, match=r"line 2 has no token of an answer; line 3 has no"):
        source(tmp_path, lines, max_length=12, unanswered="refuse")


def test_evaluation_is_the_end_of_the_file_or_another_one(tmp_path: Path) -> None:
    lines = [{"prompt": f"{number} ", "completion": "x"} for number in range(10)]
    data = source(tmp_path, lines, test_fraction=0.2)
    assert data.evaluation is not None
    assert [text(data.evaluation[i]) for i in range(2)] == ["8 x", "9 x"]
    other = write_lines(tmp_path / "other.jsonl", [{"prompt": "longer than any ", "completion": "y"}])
    data = source(tmp_path, lines, evaluation_file=str(other))
    assert (len(rows(data.train)), len(rows(data.evaluation))) == (10, 1)
    assert data.evaluation is not None
    assert len(data.train[0][0]) == len(data.evaluation[0][0])


def test_the_shipped_questions(caplog: pytest.LogCaptureFixture) -> None:
    data = build_data({"_target_": "hetexp.data.sft_jsonl.SftJsonl"})
    assert len(rows(data.train)) == 58
    assert not caplog.records
    assert data.facts["vocab_size"] == 259


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["{"], "line 1 is no JSON"),
        (['{"prompt": "x"}'], "line 1 has neither a list `messages` nor texts `prompt` and `completion`"),
        (['{"messages": [{"role": "user"}]}'], "line 1 has a message without `role` and `content`"),
        (["[]", "3", "{}", "null"], "; and 1 more"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: list[str], told: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        SftJsonl(file=str(file))
    assert told in str(caught.value)


def test_a_template_that_writes_an_answer_in_another_way_later(tmp_path: Path) -> None:
    own = load_tokenizer(None)
    written = "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}|"
    own.chat_template = "{% for m in messages %}" + written + "{% endfor %}"
    own.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(
        ConfigError, match="line 1 has an answer that the chat template writes in another way"
    ):
        source(tmp_path, [CHAT], tokenizer=str(tmp_path / "tokenizer"))


def test_wrong_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        SftJsonl(file="/no/file", evaluation_file="/no/other")
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match=r"`data\.tokenizer` must be a folder with a tokenizer"):
        SftJsonl(tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match="at least one answer to learn from"):
        source(tmp_path, [{"prompt": "a" * 20, "completion": "b"}], max_length=4)
