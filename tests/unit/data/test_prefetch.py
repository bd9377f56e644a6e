"""A thread takes an iterator's items ahead: the same items, no further than it may, and it ends with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hetexp.data.in_memory import InMemory
from hetexp.data.prefetch import is_prefetchable, prefetched


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hetexp-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


class Counted:
    """Counts what was taken of it, and says when."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.taken: list[int] = []
        self.takers: dict[int, str] = {}
        self.second = threading.Event()
        self._count, self._fails_at = count, fails_at

    def __iter__(self) -> Iterator[int]:
        for number in range(self._count):
            self.taken.append(number)
            self.takers[number] = threading.current_thread().name
            if number == 1:
                self.second.set()
            if number == self._fails_at:
                raise KeyError(f"item {number} is broken")
            yield number


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_items_in_their_order(count: int, depth: int) -> None:
    items = Counted(count)
    assert list(prefetched(iter(items), depth)) == list(range(count))
    assert items.taken == list(range(count))


def test_the_next_item_is_taken_while_one_is_in_use() -> None:
    items = Counted(9)
    found = prefetched(iter(items), 1)
    assert threads() == []  # nothing was asked for yet
    assert next(found) == 0
    assert items.second.wait(30)
    assert items.takers[1] == "hetexp-prefetch"
    found.close()


def test_a_thread_that_does_not_come_to_it_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all cores are busy with other processes."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout: None)
    items = Counted(5, fails_at=4)
    found = prefetched(iter(items), 1)
    assert [next(found) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="item 4 is broken"):
        next(found)
    assert set(items.takers.values()) == {threading.current_thread().name}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("used", [1, 4])
def test_nothing_further_ahead_is_taken(depth: int, used: int) -> None:
    items = Counted(99)
    found = prefetched(iter(items), depth)
    for number in range(used):
        assert next(found) == number
        assert len(items.taken) <= number + 1 + depth
    found.close()  # joins the thread, so that nothing follows
    assert used <= len(items.taken) <= used + depth


def test_what_it_raises_is_raised_in_its_place() -> None:
    found = prefetched(iter(Counted(9, fails_at=3)), 2)
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="item 3 is broken") as caught:
        next(found)
    assert any(entry.name == "__iter__" for entry in caught.traceback)  # where it happened
    assert threads() == []


def test_the_thread_ends_with_the_loop() -> None:
    def leave_early(by: type[BaseException] | None) -> None:
        for number in prefetched(iter(Counted(99)), 1):
            if number == 2:
                if by is None:
                    break
                raise by

    leave_early(None)
    assert threads() == []
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            leave_early(error)
        assert threads() == []


class Asked(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Says(Asked):
    prefetchable = True


class PassesOn(Asked):
    """Wraps a data set; it has the attributes of that one, and noise of its own."""

    def __init__(self, within: Dataset[Any]) -> None:
        self._within = within

    def __getattr__(self, name: str) -> Any:
        return getattr(self._within, name)


def test_a_data_set_has_to_say_that_it_draws_no_numbers() -> None:
    rows = InMemory(torch.ones(3, 2))
    for known in (Says(), Subset(Says(), [2, 0]), rows, TensorDataset(torch.ones(3)), Subset(rows, [1])):
        assert is_prefetchable(known)
    for unknown in (Asked(), Subset(Asked(), [2, 0]), PassesOn(Says()), PassesOn(rows)):
        assert not is_prefetchable(unknown)


def test_a_class_derived_from_rows_may_give_other_samples() -> None:
    class Noisy(InMemory):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return tuple(tensor[index] + torch.rand(()) for tensor in self.tensors)

    assert not is_prefetchable(Noisy(torch.ones(3)))
