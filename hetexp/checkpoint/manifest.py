"""Writes checkpoint folders whole, and finds and verifies them.

`<run>/checkpoints/step_00000100/` holds data files and `manifest.json`, which names each with its size and
SHA-256. A save writes into a hidden folder, the manifest last, and then renames the folder. Whenever a save
is killed, the older checkpoint or the new one is found whole.

A save holds a lock on its hidden folder: a hidden folder without a lock is left over from a killed save.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hetexp.checkpoint.stage_parts import lacking, note_path
from hetexp.checkpoint.tensor_file import Written
from hetexp.core.errors import CheckpointError, ConfigError, must_be
from hetexp.core.files import fsync_dir, lock_folder, read_json, write_json

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the layout; a reader refuses a newer one."""

ACCEPTED = "a checkpoint folder (…/checkpoints/step_00000100) or a run folder with checkpoints"

_STEP_FOLDER = re.compile(r"step_(\d+)")
_RANK_FOLDER = re.compile(r"rank_(\d+)")
_HIDDEN_FOLDER = re.compile(r"\.(step_\d+)\.\d+\.(new|old)")
_DELETED_FOLDER = re.compile(r"\.step_\d+\.\d+\.gone")


def folder_name(step: int) -> str:
    """Return the name of a step's folder; names sort as their steps do."""
    return f"step_{step:08d}"


@contextmanager
def write_folder(
    parent: Path,
    step: int,
    written: Mapping[str, Written] | None = None,
    evaluation: Mapping[str, float] | None = None,
    stages: Mapping[str, Any] | None = None,
    timed: bool = False,
) -> Iterator[Path]:
    """Yield a hidden folder to write files into; it gets its manifest and its name when the block ends.

    An older checkpoint of the same step is replaced, and stays in place if anything fails. The folders of
    killed saves are completed or removed.

    Args:
        written: size and checksum of files, by name, when the block ends; other files are read again.
        evaluation: metrics of the weights that are saved, if they were evaluated.
        stages: record of the parts of a model in stages (`hetexp.checkpoint.stage_parts`).
        timed: whether it is saved only because the last checkpoint is old, so that newer ones take its place.

    Raises:
        CheckpointError: the folder cannot be written (no space, no permission).
    """
    about = {"evaluation": dict(evaluation or {}), "stages": dict(stages or {}), "timed": timed}
    final = parent / folder_name(step)
    temporary = parent / f".{final.name}.{os.getpid()}.new"
    with ExitStack() as held:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _tidy(parent)
            temporary.mkdir()
            held.enter_context(lock_folder(temporary))
            yield temporary
            _seal(temporary, step, written or {}, {key: value for key, value in about.items() if value})
            _replace(temporary, final)
            note_path(parent, step).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint '{final}' could not be written: {error}. The earlier checkpoints are "
                "unchanged."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # renamed away unless something failed


def delete_folder(folder: Path) -> bool:
    """Delete a checkpoint, which is gone or whole at any moment; return `False` if a reader holds it.

    Raises:
        OSError: the folder could not be renamed.
    """
    with lock_folder(folder, wait=False) as locked:
        if not locked:
            return False
        gone = folder.with_name(f".{folder.name}.{os.getpid()}.gone")
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
    return True


def complete_checkpoints(parent: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, by step; judged by names and sizes."""
    return [folder for folder in reversed(newest_first(parent)) if incompleteness(folder) is None]


def evaluation_of(folder: Path) -> dict[str, float]:
    """Return the metrics of a complete checkpoint's evaluation; empty if its step was not evaluated."""
    return dict(_read_manifest(folder).get("evaluation") or {})


def is_timed(folder: Path) -> bool:
    """Return whether a complete checkpoint was saved only because the last checkpoint was old."""
    return bool(_read_manifest(folder).get("timed"))


def add_evaluation(folder: Path, evaluation: Mapping[str, float]) -> None:
    """Add the metrics of a later evaluation to a complete checkpoint's manifest.

    Raises:
        OSError: the manifest could not be written, and is unchanged.
    """
    manifest = _read_manifest(folder)
    files = manifest.pop("files")
    write_json(folder / MANIFEST, manifest | {"evaluation": dict(evaluation), "files": files})


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(folder.name.lstrip(".").split(".")[0][5:])


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint folder that `path` means: itself, or the newest complete one of a run folder.

    Raises:
        ConfigError: `path` is neither.
        CheckpointError: `path` holds no complete checkpoint.
    """
    return search_checkpoint(path)[0]


def search_checkpoint(path: Path, contents: bool = False) -> tuple[Path, tuple[str, ...]]:
    """Return the folder as `find_checkpoint` does, with a sentence for each newer folder that was skipped.

    Args:
        contents: whether to compare checksums of the files, too, and not names and sizes only.
    """
    accepted_path(path)
    if is_checkpoint_folder(path):
        verify(path, contents)
        return path, ()
    folder, skipped = first_whole(newest_first(checkpoints_of(path)), contents)
    if folder is not None:
        return folder, skipped
    if rank_folders(path):
        skipped = (*skipped, "Its devices trained apart: hetexp merge makes one model of theirs.")
    raise CheckpointError(
        " ".join([must_be("resume", "a folder with a complete checkpoint", str(path)), *skipped])
    )


def first_whole(folders: Iterable[Path], contents: bool) -> tuple[Path | None, tuple[str, ...]]:
    """Return the first complete checkpoint, and a sentence for each folder before it.

    Args:
        contents: as of `search_checkpoint`.
    """
    skipped: list[str] = []
    for folder in folders:
        problem = incompleteness(folder)
        if problem is None and contents and (damaged := damage(folder)):
            problem = f"is damaged, {damaged}"
        if problem is None:
            return folder, tuple(skipped)
        skipped.append(f"'{folder}' was skipped: it {problem}.")
    return None, tuple(skipped)


def checkpoints_of(path: Path) -> Path:
    """Return the folder of a run's checkpoints; `path` may be that folder itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def rank_folders(path: Path) -> list[Path]:
    """Return the folders `rank_<rank>`, in rank order, of a run whose ranks save models of their own."""
    parent = checkpoints_of(path)
    folders = [folder for folder in parent.iterdir() if folder.is_dir()] if parent.is_dir() else []
    by_rank = {int(match[1]): f for f in folders if (match := _RANK_FOLDER.fullmatch(f.name)) is not None}
    return [by_rank[rank] for rank in sorted(by_rank)]


def search_rank_checkpoints(path: Path) -> list[Path]:
    """Return each rank's checkpoint of the newest step that all ranks have a complete one of.

    Args:
        path: a run's folder with `rank_folders`.

    Raises:
        CheckpointError: there is no such step.
    """
    folders = rank_folders(path)
    complete = [{checkpoint.name for checkpoint in complete_checkpoints(folder)} for folder in folders]
    common = set.intersection(*complete) if complete else set()
    names = sorted(name for name in common if not name.startswith("."))
    if not names:
        accepted = "a run folder with a step of which every device has a complete checkpoint"
        raise CheckpointError(must_be("resume", accepted, str(path)))
    return [folder / names[-1] for folder in folders]


def verify(folder: Path, contents: bool = True) -> None:
    """Check that every file of a checkpoint exists and has the size and SHA-256 of the manifest.

    Args:
        contents: whether to compare the SHA-256, which reads the files.

    Raises:
        CheckpointError: it is no folder or incomplete, or a file differs; the message names the file.
    """
    if not folder.is_dir():
        raise CheckpointError(must_be("resume", "a checkpoint folder", str(folder)))
    if problem := incompleteness(folder):
        raise CheckpointError(must_be("resume", "a complete checkpoint", str(folder), f"It {problem}."))
    if contents and (damaged := damage(folder)):
        raise CheckpointError(
            f"`resume` must name an undamaged checkpoint, but {damaged}. Resume from another checkpoint."
        )


def damage(folder: Path) -> str | None:
    """Return which file of a complete checkpoint has a wrong checksum, `None` if none; reads all files."""
    for name, entry in _read_manifest(folder)["files"].items():
        if _sha256(folder / name) != entry["sha256"]:
            return (
                f"the checksum of '{folder / name}' differs from its manifest: the file was changed after it "
                "was saved"
            )
    return None


def _seal(folder: Path, step: int, written: Mapping[str, Written], about: Mapping[str, Any]) -> None:
    """Write the manifest, with the facts `about` the checkpoint."""
    files = {}
    for path in sorted(folder.iterdir()):
        facts = written.get(path.name)
        if facts is None:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            facts = Written(path.stat().st_size, _sha256(path))
        files[path.name] = {"bytes": facts.num_bytes, "sha256": facts.sha256}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, **about, "files": files})


def _replace(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final`; an older folder is moved away first, as no rename replaces a folder."""
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    replaces = final.exists()
    if replaces:
        os.replace(final, old)
    try:
        os.replace(temporary, final)
    except OSError:
        if replaces:
            os.replace(old, final)
        raise
    fsync_dir(final.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def _tidy(parent: Path) -> None:
    """Complete or remove the hidden folders of killed saves; those of a live process stay."""
    for hidden in _hidden(parent):
        final = parent / hidden.name.split(".")[1]
        with lock_folder(hidden, wait=False) as locked:
            if not locked:
                continue
            if incompleteness(hidden) is None and not final.exists():
                os.replace(hidden, final)
            else:
                shutil.rmtree(hidden, ignore_errors=True)
    for deleted in parent.iterdir():
        if _DELETED_FOLDER.fullmatch(deleted.name):
            shutil.rmtree(deleted, ignore_errors=True)


def _hidden(parent: Path) -> list[Path]:
    """Return the hidden folders, the new before the old one of a step."""
    return sorted(path for path in parent.iterdir() if _HIDDEN_FOLDER.fullmatch(path.name) and path.is_dir())


def newest_first(parent: Path) -> list[Path]:
    """Return the folders by falling step; after a kill between two renames, a step has only a hidden one."""
    folders = [path for path in parent.iterdir() if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    names = {path.name for path in folders}
    for hidden in _hidden(parent):
        if hidden.name.split(".")[1] not in names and incompleteness(hidden) is None:
            folders.append(hidden)
            names.add(hidden.name.split(".")[1])
    return sorted(folders, key=step_of, reverse=True)


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a path means one checkpoint, not a run's folder."""
    return (path / MANIFEST).is_file() or _STEP_FOLDER.fullmatch(path.name) is not None


def accepted_path(path: Path) -> None:
    """Check that a path is that of a checkpoint or of a folder of checkpoints.

    Raises:
        ConfigError: the path is neither.
    """
    if path.is_dir():
        if is_checkpoint_folder(path) or (path / "checkpoints").is_dir() or newest_first(path):
            return
        raise ConfigError(must_be("resume", ACCEPTED, str(path), "This folder holds no checkpoints."))
    if not path.exists():
        raise ConfigError(must_be("resume", ACCEPTED, str(path), "There is nothing at this path."))
    fix = "hetexp reads no pickles and no single files: export the weights to safetensors first."
    raise ConfigError(must_be("resume", ACCEPTED, str(path), fix))


def incompleteness(folder: Path) -> str | None:
    """Return why a folder is no complete checkpoint, by names and sizes only; `None` if it is complete."""
    if not (folder / MANIFEST).is_file():
        return f"has no {MANIFEST}: its save did not end"
    try:
        manifest = _read_manifest(folder)
        stages = manifest.get("stages")
        lacks = lacking(stages, manifest["step"]) if stages is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"has a {MANIFEST} that cannot be read ({error!r})"
    if lacks is not None:
        return lacks
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != entry["bytes"]:
            return f"has {path.stat().st_size} bytes of {name} instead of {entry['bytes']}"
    return None


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest after checking its form."""
    manifest = read_json(folder / MANIFEST)
    if int(manifest["format"]) > FORMAT:
        raise ValueError(f"format {manifest['format']} is newer than this hetexp reads")
    for name, entry in manifest["files"].items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no plain file name")
        if not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
            raise ValueError(f"the entry of {name!r} is no size and checksum")
    return dict(manifest)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()  # in blocks, since hashlib.file_digest came with Python 3.11
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
