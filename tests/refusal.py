"""What a person sees whose command is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetexp.app import main


class Refusals:
    """Types commands that must be refused before any process starts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run_dir: Path
    ) -> None:
        self.monkeypatch, self.capfd, self.run_dir = monkeypatch, capfd, run_dir

    def __call__(self, words: list[str]) -> str:
        """Return what the screen shows: no traceback, and an exit code that is not 0."""

        def never(*_: object) -> None:
            raise AssertionError("a process was started")

        self.monkeypatch.setattr("hetexp.launch.processes.members.start_rank", never)
        flags = [word for word in words if word.startswith("-")]
        folder = f"hydra.{'sweep' if flags else 'run'}.dir={self.run_dir}"
        rest = [word for word in words if word not in flags]
        own = [folder] if not any(word.startswith(folder.partition("=")[0]) for word in rest) else []
        self.monkeypatch.setattr(sys, "argv", ["train.py", *flags, *own, *rest])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code not in (0, None)
        out, err = self.capfd.readouterr()
        assert "Traceback" not in out + err
        assert not list(self.run_dir.rglob("rank_*.log"))
        return err
