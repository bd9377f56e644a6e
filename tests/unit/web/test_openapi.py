"""Random requests against the description: whatever is asked, the server answers as it says, and never fails.

HETEXP_SCHEMATHESIS_CASES=200 (examples of each address; 15 by default) makes some thousand cases of it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed (it needs Python 3.11)")

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

CASES = int(os.environ.get("HETEXP_SCHEMATHESIS_CASES", "15"))
LOCAL = {"host": "127.0.0.1"}


@pytest.fixture
def described(dashboard: Any) -> Any:
    from hetexp.web.server import make_app

    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", make_app(dashboard), headers=LOCAL)


@pytest.mark.timeout(1800)
def test_no_request_makes_the_server_fail(dashboard: Any, described: Any) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    checks = (not_a_server_error, response_schema_conformance, status_code_conformance)
    operations = [one.ok() for one in described.get_all_operations()]
    assert len(operations) == 14
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    asked = 0
    for operation in operations:
        for mode in modes:
            cases = operation.as_strategy(generation_mode=mode)

            @settings(
                max_examples=CASES,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=cases)
            def ask(case: Any) -> None:
                nonlocal asked
                asked += 1
                case.call_and_validate(checks=checks, headers=LOCAL, timeout=60)

            with suppress(Unsatisfiable):  # what takes nothing can be asked nothing wrong
                ask()
    print(f"{asked} requests")
    assert asked > 5 * len(operations)
