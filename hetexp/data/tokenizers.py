"""Loads a tokenizer from the user's folder, or makes a small one without files: a token for each byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetexp.core.errors import ConfigError, must_be

SPECIAL = ("<pad>", "<s>", "</s>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Chat template of the small tokenizer."""


def load_tokenizer(folder: str | None) -> Any:
    """Return a tokenizer of transformers; nothing is downloaded.

    Args:
        folder: folder, as `save_pretrained` writes it; `None`: the small tokenizer.

    Raises:
        ConfigError: transformers is missing, the folder holds no tokenizer, or the tokenizer does not report
            the part of a text that each token stands for.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "`data` sft_jsonl needs transformers, not installed here: pip install 'hetexp[lora]'."
        ) from error
    if folder is None:
        return _bytes()
    accepted = "a folder with a tokenizer that transformers reads"
    try:
        path = str(Path(folder).expanduser())
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many classes
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(must_be("data.tokenizer", accepted, folder, reason)) from error
    if not tokenizer.is_fast:
        fix = f"{type(tokenizer).__name__} does not report which part of the text a token is."
        raise ConfigError(must_be("data.tokenizer", accepted, folder, fix))
    return tokenizer


def _bytes() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    padding, begin, end = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=padding, bos_token=begin, eos_token=end
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
