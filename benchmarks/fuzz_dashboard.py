"""Ask a real server of the dashboard thousands of random things, over HTTP, and check every answer.

    python benchmarks/fuzz_dashboard.py [--examples 100] [--seed 1]

`hetexp dashboard` is started on a free port of 127.0.0.1 in a folder of its own. schemathesis reads its
OpenAPI and makes requests of it, right ones and wrong ones; some are given devices and trainings that
exist, so that they get further. No answer may be a failure of the server, nor one of a status, type or
shape that the description does not have. All trainings wait behind one that never ends: none is started.
Prints the figures as JSON; returns 1 where a check failed.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_dashboard import samples, served

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
BLOCKER, ENDED = "holds-the-processor", "has-ended"
DEVICES = (["emulated:rtx_3090", "emulated:arc_a770"], ["cpu"], ["emulated:t4", "cpu"])
OVERRIDES: tuple[dict[str, Any], ...] = (
    {},
    {"trainer.global_batch_size": 96, "optimizer.lr": 0.01},
    {"model": "mlp", "data": "synthetic", "strategy": "auto"},
    {"model": "gpt", "data": "digits"},
    {"trainer.global_batch_size": 1, "trainer.accumulate": 4},
)
"""Of requests that get further: some of them are refused by the planner."""
FURTHER = 4
"""One request of so many gets devices or a training that exist."""
PROBLEMS_SHOWN = 20


@dataclass
class Asked:
    """What was asked, and what was wrong with the answers."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return sum(self.statuses.values())

    def figures(self) -> dict[str, Any]:
        shown = {"cases": self.cases, "failures": len(self.failures), "seconds": round(self.seconds, 1)}
        return {**shown, "statuses": dict(sorted(self.statuses.items())), "checks": list(CHECKS)}


@contextmanager
def laboratory(folder: Path) -> Iterator[str]:
    """Give the address of a server with a device, a training that has ended and one that never does."""
    from hetexp.monitor.sample import host_name
    from hetexp.monitor.store import Store
    from hetexp.web.job import LOCK, Job

    url = f"sqlite:///{folder / 'fuzz.sqlite'}"
    store, now = Store(url), time.time()
    for second in range(60):
        store.write(samples(2), now - second)
    common = {"distributed": False, "emulated": True, "strategy": "single", "host": host_name()}
    for name, state in ((BLOCKER, "running"), (ENDED, "failed")):
        job = Job(name, str(folder), f"outputs/{name}", (), name, url, ("cpu",), ())
        job.write()
        row = {"id": name, "name": name, "state": state, "gpu_ids": ["cpu"], "run_dir": str(job.run_dir)}
        end = {"error": "its launcher was killed", "ended": now} if state == "failed" else {}
        store.begin({**common, **row, **end, "created": now})
    metrics = [json.dumps({"step": step, "train/loss": 1 / step}) for step in range(1, 50)]
    (folder / "outputs" / ENDED / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    store.close()
    with (folder / "outputs" / BLOCKER / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a launcher that lives holds it
        with served(folder, url) as address:
            yield address


def fuzz(address: str, examples: int, seed: int | None = None, plans: bool = True) -> Asked:
    """Ask each address `examples` right and as many wrong requests.

    Args:
        plans: whether some requests name devices that exist; the server starts a process with torch for it.
    """
    import requests
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.errors import Unsatisfiable
    from schemathesis.checks import CHECKS as ALL
    from schemathesis.core.failures import Failure, FailureGroup
    from schemathesis.core.result import Ok

    found, begun = Asked(), time.monotonic()
    schema = schemathesis.openapi.from_url(f"{address}/api/v1/openapi.json")
    checks = [ALL.get_one(name) for name in CHECKS]
    wrong = ALL.get_one("negative_data_rejection")
    known, count = [ENDED, BLOCKER], itertools.count()
    with requests.Session() as session:

        def ask(case: Any) -> None:
            altered = next(count) % FURTHER == 0
            if altered:
                _further(case, known, found.cases // FURTHER, plans)
            answer = case.call(session=session, timeout=120)
            found.statuses[f"{answer.status_code}"] += 1
            if case.operation.path.endswith("/trainings") and answer.status_code == 201:
                known.append(answer.json()["id"])
            try:
                # What was wrong in an altered one may be right now.
                case.validate_response(answer, checks=checks, excluded_checks=[wrong] if altered else [])
            except (Failure, FailureGroup) as error:
                found.failures.append(f"{case.method} {case.operation.path}: {error}")

        for operation, mode in itertools.product(
            [one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)],
            (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE),
        ):
            bounded = settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=seed is None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            strategy = operation.as_strategy(generation_mode=mode)
            test = bounded(given(case=strategy)(ask))
            with suppress(Unsatisfiable):  # what takes nothing can be asked nothing wrong
                (test if seed is None else seeded(seed)(test))()
    found.seconds = time.monotonic() - begun
    return found


def _further(case: Any, known: list[str], number: int, plans: bool) -> None:
    """Give a request a training, or devices and settings, that exist."""
    if "training_id" in (case.path_parameters or {}):
        case.path_parameters["training_id"] = known[number % len(known)]
    if plans and isinstance(case.body, dict) and "gpu_ids" in case.body:
        case.body = {
            "gpu_ids": DEVICES[number % len(DEVICES)],
            "overrides": OVERRIDES[number % len(OVERRIDES)],
        }


def main() -> int:
    """Print the figures; return 1 where a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=100, help="of each address, right and wrong ones")
    parser.add_argument("--seed", type=int, help="for other requests than the last time's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["HETEXP_HOME"] = str(Path(name) / "home")
        with laboratory(Path(name)) as address:
            found = fuzz(address, options.examples, options.seed)
    print(json.dumps(found.figures(), indent=2))
    for failure in found.failures[:PROBLEMS_SHOWN]:
        print(failure, file=sys.stderr)
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
