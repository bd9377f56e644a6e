"""What `tests/conftest.py` does with the machine's cards: who gets them, and who sees none."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from xdist.remote import Producer

from hetexp.hardware.detection.builds import own_build
from hetexp.hardware.detection.inventory import detect

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


@pytest.fixture(scope="module")
def cards_of_a_shared_fixture() -> list[str]:
    """The cards that a fixture of many tests could use; it is made before any fixture of a single test."""
    return [card.spec.name for card in detect(builds=[own_build()]).cards if card.state == "available"]


def test_a_test_elsewhere_sees_no_card(cards_of_a_shared_fixture: list[str]) -> None:
    assert cards_of_a_shared_fixture == []
    assert not torch.cuda.is_available()
    sees = "import torch; print(torch.cuda.is_available())"
    answer = subprocess.run([sys.executable, "-c", sees], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
