"""Survivors end their collectives only once all of them have given up the group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from fake_store import SECRET
from launched import wait_for

from hetexp.core.epoch import LATEST, Departure, Epoch, SignedStore, revoked_key
from hetexp.training.recovery.rank_recovery import RankRecovery


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def rank(store: dist.Store) -> Iterator[RankRecovery]:
    """Member 0 of three that a vendor's library joins; its training thread starts no collective."""
    recovery = RankRecovery(store, 0, SECRET)
    recovery.store.revocation.native = True
    recovery.start()
    yield recovery
    recovery.stop()


def publish(store: dist.Store, epoch: Epoch) -> None:
    launcher = SignedStore(store, SECRET)
    launcher.write(Epoch.key(epoch.number), epoch.to_json())
    launcher.write(LATEST, str(epoch.number))


def given_up(store: dist.Store, number: int) -> None:
    """Wait until the rank has given up its group for an epoch; the rank itself uses the same connection."""
    wait_for(lambda: store.check([revoked_key(number, 0)]), "the rank has given up its group")


def lost(number: int, *members: int) -> Epoch:
    return Epoch(number, members, "/plan", left=(Departure(9, "cuda:9", "SIGKILL", 0.0),))


def test_all_survivors_give_up_first(store: dist.Store, rank: RankRecovery) -> None:
    revocation = rank.store.revocation
    publish(store, lost(1, 0, 1))
    given_up(store, 1)
    assert revocation.revoked
    assert not revocation.wait_for_abort(0.1)  # member 1 may still take a wrong number for a right one
    store.set(revoked_key(1, 1), "")  # anybody's
    assert not revocation.wait_for_abort(0.1)
    SignedStore(store, SECRET).write(revoked_key(1, 1), "")
    assert revocation.wait_for_abort(20.0)


def test_a_survivor_that_dies_meanwhile_is_not_waited_for(store: dist.Store, rank: RankRecovery) -> None:
    publish(store, lost(1, 0, 1, 2))
    given_up(store, 1)
    SignedStore(store, SECRET).write(revoked_key(1, 2), "")
    publish(store, lost(2, 0, 2))
    assert rank.store.revocation.wait_for_abort(20.0)
    given_up(store, 2)


def test_a_change_without_a_loss_ends_nothing(store: dist.Store, rank: RankRecovery) -> None:
    publish(store, Epoch(1, (0, 1, 2, 3), "/plan", joined=(3,), urgent=False))
    publish(store, lost(2, 0, 1, 2, 3))
    given_up(store, 2)
    assert not store.check([revoked_key(1, 0)])
