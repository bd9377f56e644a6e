"""Membership: what the store and the plans say after each change, and whose trouble a failure is."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_store import signed
from support import plan_on, unbuilt_config

from hetexp.core.device import DeviceSpec
from hetexp.core.epoch import LATEST, Departure, Epoch, SignedStore, reformed_key
from hetexp.core.plan import Plan
from hetexp.hardware.catalogue import card
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.launch.elastic.membership import Membership, device_trouble
from hetexp.launch.processes.failure import RankFailure

CARDS = [EmulatedBackend.describe_card(i, card("rtx_3090")) for i in range(3)]


@pytest.fixture
def store() -> SignedStore:
    return signed()


@pytest.fixture
def membership(tmp_path: Path, store: SignedStore) -> Membership:
    plan = plan_on(CARDS, unbuilt_config(trainer={"global_batch_size": 12}), run_dir=str(tmp_path))
    return Membership(replace(plan, store_port=1234), store)


def gone(device: DeviceSpec, member: int, kind: str = "SIGKILL") -> Departure:
    return Departure(member, device.id, kind, time.time())


def newest(store: SignedStore) -> tuple[Epoch, Plan]:
    epoch = Epoch.from_json(store.read(Epoch.key(int(store.read(LATEST) or 0))) or "")
    return epoch, Plan.read(Path(epoch.plan))


def test_a_member_goes_and_its_device_comes_back(membership: Membership, store: SignedStore) -> None:
    membership.leave({0: gone(CARDS[0], 0)}, {0: 17})
    epoch, plan = newest(store)
    assert (epoch.number, epoch.members, epoch.joined, epoch.urgent) == (1, (1, 2), (), True)
    assert epoch.left[0].device == "emulated:0"
    assert [device.id for device in plan.devices] == ["emulated:1", "emulated:2"]
    assert plan.local_batch_sizes == (6, 6)
    assert plan.store_port == 1234
    assert membership.take_report() is None
    facts = {"step": 17, "donor": 1, "seconds": 0.1, "steps_lost": 0, "way": "in process"}
    store.write(reformed_key(1), json.dumps(facts))
    assert (membership.take_report() or {})["step"] == 17
    assert membership.take_report() is None  # once
    (loss,) = membership.unreported()
    assert loss.to_dict() | {"recovered_s": None} == {
        "step": 17,
        "device": "emulated:0",
        "kind": "SIGKILL",
        "recovered_s": None,
        "steps_lost": 0,
    }
    assert loss.recovered_seconds is not None
    assert 0 <= loss.recovered_seconds < 5
    plan, rank = membership.plan_with(0)
    assert (rank, plan.local_batch_sizes) == (0, (4, 4, 4))
    membership.join({3: 0})
    epoch, plan = newest(store)
    assert (epoch.members, epoch.joined, epoch.left, epoch.urgent) == ((3, 1, 2), (3,), (), False)
    assert plan.devices == tuple(CARDS)


def test_losses_of_two_epochs_end_with_the_group_that_forms(
    membership: Membership, store: SignedStore
) -> None:
    membership.leave({1: gone(CARDS[1], 1)})
    membership.leave({2: gone(CARDS[2], 2, "Frozen")})
    store.write(reformed_key(1), json.dumps({"step": 3, "steps_lost": 0}))  # too late to count
    assert membership.take_report() is None
    store.write(reformed_key(2), json.dumps({"step": 4, "steps_lost": 0}))
    assert membership.take_report() is not None
    assert [(loss.device, loss.kind, loss.step) for loss in membership.unreported()] == [
        ("emulated:1", "SIGKILL", 4),
        ("emulated:2", "Frozen", 4),
    ]
    assert newest(store)[1].local_batch_sizes == (12,)


def test_one_more_device(membership: Membership, store: SignedStore) -> None:
    more = EmulatedBackend.describe_card(3, card("rtx_3090"))
    place = membership.extend(more, 0.25, "float32", 1)
    assert membership.member_at(place) is None
    assert membership.plan_with(place)[0].local_batch_sizes == (3, 3, 3, 3)
    membership.join({7: place})
    assert newest(store)[0].members == (0, 1, 2, 7)
    assert membership.place_of("emulated:3") == 3
    assert membership.place_of("cuda:0") is None
    membership.drop(0, gone(CARDS[0], 0, "dropped"))
    epoch, plan = newest(store)
    assert (epoch.members, epoch.urgent, plan.world_size) == ((1, 2, 7), False, 3)
    assert membership.losses == []


@pytest.mark.parametrize(
    ("kind", "message", "code", "peer_lost", "trouble"),
    [
        ("SIGSEGV", "killed by SIGSEGV", -signal.SIGSEGV, False, "SIGSEGV"),
        ("exit code 143", "", 143, False, "SIGTERM"),
        ("AcceleratorError", "CUDA error: an illegal memory access", 1, False, "AcceleratorError"),
        ("DeviceMemoryError", "Rank 1 ran out of memory", 1, False, "DeviceMemoryError"),
        ("RuntimeError", "Traceback …\nRuntimeError: HIP error: unspecified", 1, False, "DeviceError"),
        (
            "RuntimeError",
            "…\nRuntimeError: Native API failed: UR_RESULT_ERROR_DEVICE_LOST",
            1,
            False,
            "DeviceError",
        ),
        ("PeerLostError", "another rank is gone", 1, True, "PeerLostError"),
        ("RuntimeError", "…\nRuntimeError: this sample is broken", 1, False, None),
        ("ConfigError", "`model` must be …", 1, False, None),
        ("ValueError", "…\nValueError: CUDA error is a word of mine", 1, False, None),
        ("exit code 3", "ended with exit code 3", 3, False, None),
    ],
)
def test_whose_trouble_it_is(
    kind: str, message: str, code: int, peer_lost: bool, trouble: str | None
) -> None:
    assert device_trouble(RankFailure(1, kind, message, peer_lost=peer_lost), code) == trouble


def test_who_came_too_late_is_left_out_without_a_word(membership: Membership, store: SignedStore) -> None:
    """The others have done the last step, and have ended or are about to."""
    membership.leave({0: gone(CARDS[0], 0)})
    store.write(reformed_key(1), json.dumps({"step": 17}))
    membership.take_report()
    membership.withdraw()
    assert list(membership.members) == [1, 2]
    membership.join({3: 0})
    assert [*membership.members, membership.forming] == [3, 1, 2, True]
    membership.withdraw()
    assert [*membership.members, membership.forming] == [1, 2, False]
    assert store.read(LATEST) == "2"


def test_a_restart_from_a_later_step_than_the_last_heartbeat_lost_none(membership: Membership) -> None:
    failures = [
        (1, CARDS[1].id, RankFailure(1, "SIGKILL", "killed")),
        (2, CARDS[2].id, RankFailure(2, "X", "x")),
    ]
    membership.ended(failures[:1], 7, 4)
    assert [loss.steps_lost for loss in membership.losses] == [3]
    membership.recovered()
    membership.ended(failures[1:], 3, 4)  # heartbeats are older than checkpoints
    assert [loss.steps_lost for loss in membership.losses] == [3, 0]
