"""Membership as the store holds it."""

from __future__ import annotations

from hetexp.core.epoch import Departure, Epoch, Request


def test_an_epoch_reads_back_as_it_was_written() -> None:
    gone = Departure(member=1, device="emulated:1", kind="SIGKILL", time=12.5)
    epoch = Epoch(3, (0, 2, 4), "/runs/a/plans/epoch_3.json", joined=(4,), left=(gone,), urgent=False)

    assert Epoch.from_json(epoch.to_json()) == epoch
    assert Epoch.from_json(epoch.to_json().encode()) == epoch
    assert Epoch.key(3) == "epoch/3"
    assert epoch.topic == "epoch/3/"


def test_a_request_reads_back_as_it_was_written() -> None:
    request = Request(7, "checkpoint", "before lunch")

    assert Request.from_json(request.to_json()) == request
    assert Request.key(7) == "request/7"
