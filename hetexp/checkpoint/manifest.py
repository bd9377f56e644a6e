"""How a checkpoint folder appears whole, and how it is found and verified.

`<run>/checkpoints/step_00000100/` holds data files and `manifest.json`, which names each with its size and
SHA-256. A folder counts once its manifest is there: it is written last, into a hidden folder beside, which
is then renamed. Wherever a save is killed, the older checkpoint or the new one is found whole.

A save holds a lock on its hidden folder while it lives: what has none was left by one that was killed.
"""

from __future__ import annotations

import hashlib
import json
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
from hetexp.core.files import fsync_dir, lock_folder, write_json

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
    """Give a hidden folder to write files into; it gets its manifest and its name when the block ends.

    An older checkpoint of the same step is replaced, and stays in place if anything fails. What an earlier
    save left when it was killed is completed or removed.

    Args:
        written: what is known of files when the block ends, by name; others are read again.
        evaluation: of the weights that are saved, where they were evaluated.
        stages: of a model in stages, whose parts it is of (`hetexp.checkpoint.stage_parts`).
        timed: whether it is saved only because the last checkpoint is old, so that newer ones take its place.

    Raises:
        CheckpointError: the folder cannot be written (no space, no permission).
    """
    final = parent / folder_name(step)
    temporary = parent / f".{final.name}.{os.getpid()}.new"
    with ExitStack() as held:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _tidy(parent)
            temporary.mkdir()
            held.enter_context(lock_folder(temporary))
            yield temporary
            _seal(temporary, step, written or {}, evaluation, stages, timed)
            _replace(temporary, final)
            note_path(parent, step).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint '{final}' could not be written: {error}. The ones before it are as they "
                "were."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # renamed away unless something failed


def delete_folder(folder: Path) -> bool:
    """Delete a checkpoint, which is gone or whole at any moment; return False if a reader holds it.

    Raises:
        OSError: it could not be renamed.
    """
    with lock_folder(folder, wait=False) as mine:
        if not mine:
            return False
        gone = folder.with_name(f".{folder.name}.{os.getpid()}.gone")
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
    return True


def complete_checkpoints(parent: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, by step; judged by names and sizes."""
    return [folder for folder in reversed(newest_first(parent)) if incompleteness(folder) is None]


def evaluation_of(folder: Path) -> dict[str, float]:
    """Return what a complete checkpoint's evaluation said; empty where there was none at its step."""
    return dict(_read_manifest(folder).get("evaluation") or {})


def is_timed(folder: Path) -> bool:
    """Return whether a complete checkpoint was saved only because the one before was old."""
    return bool(_read_manifest(folder).get("timed"))


def add_evaluation(folder: Path, evaluation: Mapping[str, float]) -> None:
    """Write into a complete checkpoint what an evaluation of its weights said afterwards.

    Raises:
        OSError: the manifest could not be written, and is as it was.
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
        CheckpointError: it is, but holds no complete checkpoint.
    """
    return search_checkpoint(path)[0]


def search_checkpoint(path: Path, contents: bool = False) -> tuple[Path, tuple[str, ...]]:
    """Like `find_checkpoint`, with a sentence for each newer folder that was passed over.

    Args:
        contents: whether files are read and their checksums compared, or names and sizes only.
    """
    accepted_path(path)
    if is_checkpoint_folder(path):
        if contents:
            verify(path)
        elif problem := incompleteness(path):
            raise CheckpointError(must_be("resume", "a complete checkpoint", str(path), f"It {problem}."))
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
    """Return the first complete checkpoint, and a sentence for each before it that is none.

    Args:
        contents: as for `search_checkpoint`.
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
    """Return the folder of a run's checkpoints, which may be given itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def rank_folders(path: Path) -> list[Path]:
    """Return the folders, in rank order, that the ranks of a run have each saved a model of its own into."""
    parent = checkpoints_of(path)
    found = [(_RANK_FOLDER.fullmatch(one.name), one) for one in parent.iterdir()] if parent.is_dir() else []
    return [one for _, one in sorted((int(m[1]), one) for m, one in found if m is not None and one.is_dir())]


def search_rank_checkpoints(path: Path) -> list[Path]:
    """Return each rank's checkpoint of the newest step that all of them have complete.

    Args:
        path: a run's folder with `rank_folders`.

    Raises:
        CheckpointError: there is no such step.
    """
    folders = rank_folders(path)
    complete = [{one.name for one in newest_first(f) if incompleteness(one) is None} for f in folders]
    common = sorted(set.intersection(*complete)) if complete else []
    common = [name for name in common if not name.startswith(".")]
    if not common:
        accepted = "a run folder with a step of which every device has a complete checkpoint"
        raise CheckpointError(must_be("resume", accepted, str(path)))
    return [folder / common[-1] for folder in folders]


def verify(folder: Path) -> None:
    """Check that every file of a checkpoint is there and has the size and SHA-256 of the manifest.

    Raises:
        CheckpointError: not a folder, incomplete, or a file differs; the message names the file.
    """
    if not folder.is_dir():
        raise CheckpointError(must_be("resume", "a checkpoint folder", str(folder)))
    if problem := incompleteness(folder):
        raise CheckpointError(must_be("resume", "a complete checkpoint", str(folder), f"It {problem}."))
    if damaged := damage(folder):
        raise CheckpointError(
            f"`resume` must name an undamaged checkpoint, but {damaged}. Resume from another checkpoint."
        )


def damage(folder: Path) -> str | None:
    """Return which file of a complete checkpoint has another checksum than its manifest; reads all files."""
    for name, entry in _read_manifest(folder)["files"].items():
        if _sha256(folder / name) != entry["sha256"]:
            return (
                f"the checksum of '{folder / name}' differs from its manifest: the file was changed after it "
                "was saved"
            )
    return None


def _seal(
    folder: Path,
    step: int,
    written: Mapping[str, Written],
    evaluation: Mapping[str, float] | None,
    stages: Mapping[str, Any] | None,
    timed: bool,
) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        known = written.get(path.name)
        if known is None:
            _fsync_file(path)
            known = Written(path.stat().st_size, _sha256(path))
        files[path.name] = {"bytes": known.num_bytes, "sha256": known.sha256}
    about: dict[str, Any] = {"evaluation": dict(evaluation)} if evaluation else {}
    about |= {"stages": dict(stages)} if stages else {}
    about |= {"timed": True} if timed else {}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, **about, "files": files})


def _replace(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final`, from where an older folder first steps aside: no rename replaces it."""
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
    """Complete or remove the hidden folders of saves that were killed; those of another process that lives
    stay as they are.
    """
    for hidden in _hidden(parent):
        final = parent / hidden.name.split(".")[1]
        with lock_folder(hidden, wait=False) as left:
            if not left:
                continue
            if incompleteness(hidden) is None and not final.exists():
                os.replace(hidden, final)
            else:
                shutil.rmtree(hidden, ignore_errors=True)
    for deleted in parent.iterdir():
        if _DELETED_FOLDER.fullmatch(deleted.name):
            shutil.rmtree(deleted, ignore_errors=True)


def _hidden(parent: Path) -> list[Path]:
    """Hidden folders, the new before the old of the same step."""
    return sorted(path for path in parent.iterdir() if _HIDDEN_FOLDER.fullmatch(path.name) and path.is_dir())


def newest_first(parent: Path) -> list[Path]:
    """Folders by falling step. A hidden one stands in where a kill came between the two renames of a save."""
    folders = [path for path in parent.iterdir() if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    names = {path.name for path in folders}
    for hidden in _hidden(parent):
        if hidden.name.split(".")[1] not in names and incompleteness(hidden) is None:
            folders.append(hidden)
            names.add(hidden.name.split(".")[1])
    return sorted(folders, key=step_of, reverse=True)


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a path is meant as one checkpoint, not as a run's folder."""
    return (path / MANIFEST).is_file() or _STEP_FOLDER.fullmatch(path.name) is not None


def accepted_path(path: Path) -> None:
    """Check that a path is of a checkpoint, or of a folder that has some.

    Raises:
        ConfigError: it is neither.
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
    """Return what makes a folder no complete checkpoint, by names and sizes only; None if it is one."""
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
    """Return the manifest after checking its form, so that what uses it may index it."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
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


def _fsync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
