"""Random requests to a real server: whatever is asked, it answers as its description says, and never fails.

`benchmarks/fuzz_dashboard.py` asks thousands.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed (it needs Python 3.11)")

from fuzz_dashboard import fuzz, laboratory

OPERATIONS = 14


def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    with laboratory(tmp_path) as address:
        found = fuzz(address, examples=4, plans=False)
    assert found.failures == []
    assert found.cases > 4 * OPERATIONS
    assert found.statuses.keys() > {"200", "404", "409", "422"}
    assert not list(tmp_path.rglob("plan.json")), "a training was started"
