"""Membership as the store holds it."""

from __future__ import annotations

import pytest
from fake_store import SECRET, Store

from hetexp.core.epoch import Departure, Epoch, Request, SignedStore


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


@pytest.mark.parametrize("text", ["", '{"name": "stop"}', "ä\0\n"])
def test_a_signed_value_reads_back(text: str) -> None:
    store = Store()
    SignedStore(store, SECRET).write("request/1", text)
    assert SignedStore(store, SECRET).read("request/1") == text
    assert SignedStore(store, SECRET).read("request/2") is None


def test_what_others_write_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    ours = SignedStore(store, SECRET)
    ours.write("request/1", "stop")
    signed = store["request/1"]
    SignedStore(store, "5b" * 32).write("request/2", "stop")
    forged = {
        "request/3": b"stop",
        "request/4": signed,  # another number's
        "request/5": b"0" * 64 + b"stop",
        "request/6": b"",
        "request/7": b"\xff" * 80,
        "request/1": signed + b" ",
    }
    store |= forged
    for key in (*forged, "request/2"):
        assert ours.read(key) is None, key
        assert ours.read(key) is None, key
        assert caplog.text.count(f"`{key}`") == 1
    store["request/1"] = signed
    assert ours.read("request/1") == "stop"


def test_without_a_secret_nothing_counts() -> None:
    store = Store()
    SignedStore(store, "").write("epoch/1", "{}")
    assert SignedStore(store, "").read("epoch/1") is None
