"""How the tests themselves are handed out to xdist's workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from xdist.remote import Producer

FILES = (
    "tests/gpu/test_cuda.py",
    "tests/unit/test_cli.py",
    "tests/gpu/test_energy.py",
    "tests/unit/test_docs.py",
)
TESTS = [f"{file}::test_{number}" for file in FILES for number in range(3)]


class Worker:
    """One of xdist's workers, which only remembers what it is given."""

    shutting_down = False

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def test_one_worker_gets_all_tests_that_need_a_card(pytestconfig: pytest.Config) -> None:
    """The command of the README: files side by side would find their card busy."""
    option = SimpleNamespace(dist="loadfile", loadscopereorder=False, tx=["popen"] * 4, numprocesses=4)
    config = SimpleNamespace(
        option=option,
        getoption=lambda name: getattr(option, name),
        getvalue=lambda name: getattr(option, name),
    )
    log = Producer("test", enabled=False)
    scheduler = pytestconfig.hook.pytest_xdist_make_scheduler(config=config, log=log)
    workers = [Worker(number) for number in range(4)]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, TESTS)
    scheduler.schedule()
    by_worker = [{test.partition("::")[0] for test in worker.given} for worker in workers]
    on_cards = [files for files in by_worker if any("/gpu/" in file for file in files)]
    assert on_cards == [{FILES[0], FILES[2]}]
    assert sorted(test for worker in workers for test in worker.given) == sorted(TESTS)
