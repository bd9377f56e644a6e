"""What the user typed, before Hydra reads it: short forms, and words that the shell or a web page changed."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

_CARDS = re.compile(r"(?:hardware\.)?(?P<key>gpu_ids|cuda_ids)=(?P<value>.*)", re.DOTALL)
_MODE = re.compile(r"(?P<key>strategy(?:\.mode)?)=(?P<value>[\w,]*)")
_MODES = {"none": "single", "dataparallel": "dp", "distributed": "ddp", "hybrid": "hybrid", "auto": "auto"}
"""Modes of older configurations, and our strategies."""
_ADDED = re.compile(r"\+{1,2}(?P<rest>experiment=.*)", re.DOTALL)
_OWN_KEYS = ("model.weights=", "model.weights_strict=")
"""Keys that hetexp reads in a group beside the arguments of its class."""
_TYPOGRAPHIC = "“”„‘’‚«»"
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?")
_VALUE = re.compile(r"[\w.+/:-]+|\[[^=]*\]")
_KEY = re.compile(r"[\w@$-]+(?:[./][\w@$-]+)*")
_SWEEPING = ("choice(", "range(", "interval(", "glob(", "shuffle(", "sort(")
_OTHER_WORDS = {
    "trainer.global_batch_size": "batch batch_size bs train_batch_size total_batch_size",
    "trainer.batch_size_per_device": "per_device_batch_size per_device_train_batch_size batch_size_per_gpu",
    "trainer.microbatch_size": "micro_batch_size train_micro_batch_size_per_gpu",
    "trainer.accumulate": "accumulate_grad_batches gradient_accumulation_steps grad_accum accumulation_steps",
    "trainer.max_epochs": "max_epochs epoch epochs num_epochs n_epochs num_train_epochs",
    "trainer.max_steps": "max_steps steps num_steps train_steps max_iters iterations num_iterations",
    "trainer.clip_norm": "clip_norm gradient_clip_val grad_clip max_grad_norm clip_grad_norm",
    "trainer.precision": "precision amp fp16 bf16 mixed_precision dtype torch_dtype",
    "trainer.seed": "seed random_seed manual_seed seed_everything",
    "trainer.num_workers": "num_workers workers dataloader_num_workers",
    "trainer.eval_every": "eval_every eval_steps val_check_interval check_val_every_n_epoch",
    "trainer.checkpoint_every": "checkpoint_every save_steps save_every every_n_train_steps",
    "trainer.log_every": "log_every logging_steps log_every_n_steps log_interval",
    "trainer.schedule": "schedule scheduler lr_scheduler lr_scheduler_type",
    "trainer.warmup_steps": "warmup warmup_steps num_warmup_steps",
    "optimizer.lr": "lr learning_rate base_lr max_lr",
    "optimizer.weight_decay": "wd weight_decay",
    "hardware.gpu_ids": "gpu gpus gpu_id num_gpus cuda_visible_devices",
    "hardware.devices": "device devices accelerator accelerators nproc_per_node world_size",
    "cluster.hosts": "nodes num_nodes nnodes hosts",
    "hydra.run.dir": "output_dir out_dir save_dir log_dir default_root_dir run_dir",
    "resume": "checkpoint ckpt ckpt_path resume_from_checkpoint load_from",
    "name": "run_name experiment_name exp_name",
}
"""Our keys, and the words for them in other trainers."""
KEY_OF = {word: key for key, words in _OTHER_WORDS.items() for word in words.split()}
"""A word of another trainer → our key."""


def written_out(words: Sequence[str]) -> list[str]:
    """Return the words with `gpu_ids=0,1` as `hardware.gpu_ids=[0,1]`, and older modes as our strategies.

    `strategy=distributed` and `strategy.mode=distributed` are `strategy=ddp`. `+experiment=mine`, as other
    projects write it, is `experiment=mine`, since the group is among the defaults. `model.weights=…` gets
    the sign of a new key.

    With `-m` a comma sweeps, as for every key: `gpu_ids=0,1` is two jobs of one card each, and
    `'gpu_ids=choice([0,1],[2])'` two jobs of a list each.
    """
    sweep = any(word in ("-m", "--multirun") for word in words)
    return [_written_out(word, sweep) for word in words]


def _written_out(word: str, sweep: bool) -> str:
    mode = _MODE.fullmatch(word)
    if mode is not None:
        names = mode["value"].split(",")
        if mode["key"] == "strategy" or all(name in _MODES for name in names):
            return f"strategy={','.join(_MODES.get(name, name) for name in names)}"
    if word.startswith(_OWN_KEYS):  # no option of the group has it, and Hydra would ask for a sign
        return f"++{word}"
    added = _ADDED.fullmatch(word)
    if added is not None:
        return added["rest"]
    match = _CARDS.fullmatch(word)
    if match is None:
        return word
    value = match["value"]
    bare = "," in value and not value.startswith(("[", "'", '"', *_SWEEPING))
    return f"hardware.{match['key']}=" + (f"[{value}]" if bare and not sweep else value)


def without_hyphens(words: Sequence[str], flags: Iterable[str]) -> list[str]:
    """Return the words with `--key=value` and `--key value` as `key=value`.

    The agent of a W&B sweep writes the first form, and users of other trainers write both.

    Args:
        flags: those of the command, which stay, shortened as well (`--multi`).
    """
    flags = list(flags)
    left, found = list(words), []
    while left:
        key = _hyphenated(left[0], flags)
        if key is None:
            found.append(left.pop(0))
            continue
        word = left.pop(0)
        if "=" in word:
            found.append(f"{key}={word.partition('=')[2]}")
        elif left and "=" not in left[0] and not left[0].startswith("-"):
            found.append(f"{key}={left.pop(0)}")
        else:  # a key without a value is refused, which says more than "unrecognized argument"
            found.append(key if "." in key or key in KEY_OF else word)
    return found


def _hyphenated(word: str, flags: Sequence[str]) -> str | None:
    """Return the key of `--key` or `--key=value`, `None` if the word is something else or a flag."""
    flag = word.partition("=")[0]
    if not flag.startswith("--") or any(known.startswith(flag) for known in flags):
        return None
    key = flag[2:]
    other = KEY_OF.get(key.replace("-", "_"))
    if other is not None and "-" in key:
        return key.replace("-", "_")
    return key if _KEY.fullmatch(key) is not None and "-" not in key else None


def asks_for_help(arguments: argparse.Namespace) -> bool:
    """Return whether the command only shows help or a configuration."""
    asks = (arguments.help, arguments.hydra_help, arguments.info, arguments.cfg, arguments.shell_completion)
    return any(asks)


def where_to_look(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the folders and the name of the configuration that a command line names, for `compose_typed`."""
    names = ("config_dir", "config_path", "config_name")
    return {name: value for name in names if (value := getattr(arguments, name))}


def end_of_word(words: Sequence[str]) -> int:
    """Return how many of the words belong together: open brackets, spaces around `=`, or no `=` at all."""
    if len(words) > 2 and words[1] == "=":
        return 3
    if len(words) > 1 and (
        (words[0].endswith("=") and "=" not in words[1]) or (words[1].startswith("=") and "=" not in words[0])
    ):
        return 2
    numbers = list(itertools.takewhile(_NUMBER.fullmatch, words))
    if len(numbers) > 1:
        return len(numbers)
    if len(words) > 1 and _KEY.fullmatch(words[0]) and not numbers and _VALUE.fullmatch(words[1]):
        return 2
    if len(words) > 1 and words[0].endswith(",") and "=" not in words[1]:
        return 1 + end_of_word(words[1:])
    depth = 0
    for count, word in enumerate(words, start=1):
        depth += sum(word.count(bracket) for bracket in "[{") - sum(word.count(bracket) for bracket in "]}")
        if depth == 0:
            return count
    return 1


def why_apart(whole: str) -> str:
    """Say why words that belong together were read as several, and what to type instead."""
    first = whole.partition(" ")[0]
    if _NUMBER.fullmatch(first):
        return why_unreadable(first)
    right = f"type '{_without_spaces(whole)}'."
    if "=" not in whole:
        return f"A key and its value are joined by `=`: {right}"
    return f"The shell cuts words at spaces: {right}"


def _without_spaces(whole: str) -> str:
    key, equals, value = whole.partition("=")
    if not equals:
        key, _, value = whole.partition(" ")
    key, value = key.strip(), value.strip()
    value = value if "{" in value else re.sub(r" *, *", ",", value)
    return f'"{key}={value}"' if " " in value else f"{key}={value}"


def why_unreadable(text: str) -> str:
    """Say what keeps Hydra from reading a word, and how it is written."""
    key, equals, value = text.partition("=")
    if _NUMBER.fullmatch(text):
        return "It is a value without a key. A flag before it takes one value only: run the command for each."
    if any(sign in text for sign in _TYPOGRAPHIC):
        return "“ and ” are typographic quotes, as web pages have them: type ' or \"."
    if not equals:
        return "It has no `=`; a value with spaces needs quotes around the whole word."
    if not key:
        return "There is no key before `=`."
    if not _KEY.fullmatch(key.lstrip("+~")):
        return "The parts of a key are joined by one dot each, as in `trainer.max_steps`."
    if any(text.count(one) != text.count(other) for one, other in ("[]", "{}")):
        return "Its brackets do not match."
    if "=" in value:
        return f"A value with `=` in it needs quotes that reach Hydra: '{key}=\"{value}\"'."
    return (
        f"A list is written [a,b]; a text with such signs needs quotes that reach Hydra: '{key}=\"{value}\"'."
    )
