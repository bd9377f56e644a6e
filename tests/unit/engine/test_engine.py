from __future__ import annotations

import importlib
import sys

import pytest

import hetexp.engine


def test_the_earlier_path_of_the_worker_function_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hetexp.engine.main", raising=False)
    with pytest.warns(FutureWarning, match="is now `hetexp.engine.train_function`"):
        earlier = importlib.import_module("hetexp.engine.main")
    assert earlier.train_function is hetexp.engine.train_function
