"""Turns a line of a fine-tuning file into tokens, of which only the answers count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetexp.data.padded import IGNORED, Row


class RowError(Exception):
    """A line is no sample; the message does not name its place."""


@dataclass(frozen=True)
class Tokens:
    """A line as tokens."""

    numbers: list[int]
    answers: list[bool]
    """Whether each token is part of an answer."""

    def row(self, max_length: int) -> Row:
        """Return tokens and, for each, the next token if that is part of an answer, else `IGNORED`.

        Args:
            max_length: most tokens of the row; later tokens are cut off.
        """
        numbers = np.asarray(self.numbers[: max_length + 1], dtype=np.int64)
        answers = np.asarray(self.answers[: max_length + 1], dtype=bool)
        return numbers[:-1], np.where(answers[1:], numbers[1:], IGNORED)


def encode(line: Any, tokenizer: Any) -> Tokens:
    """Return the tokens of a line: `messages`, or `prompt` and `completion`.

    Raises:
        RowError: the line has neither, or the tokenizer's chat template refuses it.
    """
    if isinstance(line, Mapping):
        if isinstance(line.get("messages"), list):
            return _chat(line["messages"], tokenizer)
        if isinstance(line.get("prompt"), str) and isinstance(line.get("completion"), str):
            return _instruction(line["prompt"], line["completion"], tokenizer)
    raise RowError("has neither a list `messages` nor texts `prompt` and `completion`")


def _instruction(prompt: str, completion: str, tokenizer: Any) -> Tokens:
    """Return the tokens of both as one text, with the tokenizer's special tokens and an end."""
    tokens = _split(prompt + completion, [(len(prompt), len(prompt + completion))], tokenizer, True)
    end = tokenizer.eos_token_id
    if end is not None and tokens.numbers[-1:] != [end]:
        return Tokens([*tokens.numbers, end], [*tokens.answers, True])
    return tokens


def _chat(messages: Sequence[Any], tokenizer: Any) -> Tokens:
    """Return the tokens of a chat; the template's text of each of the assistant's messages is an answer."""
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RowError("has a message without `role` and `content`")
    if tokenizer.chat_template is None:
        raise RowError("has messages, but the tokenizer has no chat template")

    def templated(count: int, asks: bool) -> str:
        try:
            text: str = tokenizer.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # the template's own complaint
            raise RowError(f"is refused by the chat template: {str(error).partition(chr(10))[0]}") from error
        return text

    whole, spans = templated(len(messages), False), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, through = templated(index, True), templated(index + 1, False)
            if not whole.startswith(through) or not through.startswith(before):
                raise RowError(
                    "has an answer that the chat template writes in another way once more follows; make "
                    "each answer the last message of a line of its own"
                )
            spans.append((len(before), len(through)))
    return _split(whole, spans, tokenizer, False)


def _split(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any, around: bool) -> Tokens:
    """Return a text's tokens; tokens that begin within one of the spans are part of an answer."""
    encoded = tokenizer(text, add_special_tokens=around, return_offsets_mapping=True)
    places = encoded["offset_mapping"]
    answers = [end > start and any(a <= start < b for a, b in spans) for start, end in places]
    return Tokens(list(encoded["input_ids"]), answers)
