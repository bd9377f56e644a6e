"""Epochs and requests are known as soon as the launcher has said them."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from fake_store import SECRET
from launched import wait_for

from hetexp.core.epoch import LATEST, LATEST_REQUEST, Epoch, Request, SignedStore
from hetexp.training.recovery.watch import LauncherNews


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def publish(store: dist.Store, epoch: Epoch) -> None:
    launcher = SignedStore(store, SECRET)
    launcher.write(Epoch.key(epoch.number), epoch.to_json())
    launcher.write(LATEST, str(epoch.number))


def test_the_newest_epoch_is_known(store: dist.Store) -> None:
    broken: list[int] = []
    watch: LauncherNews
    watch = LauncherNews(store, SECRET, lambda epoch: broken.append(watch.epoch))
    watch.start()
    assert watch.newest_after(0, 0.01) is None
    publish(store, Epoch(1, (0, 2), "/plan"))
    found = watch.newest_after(0, 20.0)
    assert found is not None
    assert found.members == (0, 2)
    assert watch.broken_since(0)
    assert not watch.broken_since(1)
    assert broken == [0]  # before anybody here could learn of it
    publish(store, Epoch(2, (0, 2, 3), "/plan", joined=(3,), urgent=False))
    later = watch.newest_after(1, 20.0)
    assert later is not None
    assert later.joined == (3,)
    assert not watch.broken_since(1)
    assert len(broken) == 1


def test_a_newcomer_begins_with_the_present_epoch(store: dist.Store) -> None:
    publish(store, Epoch(7, (0, 2), "/plan"))
    watch = LauncherNews(store, SECRET)
    assert watch.epoch == 7
    watch.start()
    publish(store, Epoch(8, (0, 2, 9), "/plan", urgent=False))
    found = watch.newest_after(7, 20.0)
    assert found is not None
    assert found.number == 8


def test_requests_are_counted(store: dist.Store) -> None:
    watch = LauncherNews(store, SECRET)
    watch.start()
    assert watch.request == 0
    for number in (1, 2):
        SignedStore(store, SECRET).write(Request.key(number), Request(number, "checkpoint").to_json())
    wait_for(lambda: watch.request == 2, "the second request")


def test_epochs_and_requests_of_others_do_not_count(store: dist.Store) -> None:
    broken: list[Epoch] = []
    for number in (1, 2):
        store.set(Request.key(number), Request(number, "stop").to_json())
        store.set(Epoch.key(number), Epoch(number, (1,), "/plan").to_json())
    store.set(LATEST, "2")
    store.set(LATEST_REQUEST, "2")
    watch = LauncherNews(store, SECRET, broken.append)
    watch.start()
    assert watch.newest_after(0, 0.3) is None  # looks many times
    SignedStore(store, SECRET).write(Request.key(1), Request(1, "checkpoint").to_json())
    wait_for(lambda: watch.request == 1, "the launcher's own request")
    publish(store, Epoch(1, (0, 1), "/plan"))
    found = watch.newest_after(0, 20.0)
    assert found is not None
    assert (found.number, found.members) == (1, (0, 1))
    assert [epoch.members for epoch in broken] == [(0, 1)]
    watch.stop()
    assert watch.request == 1
