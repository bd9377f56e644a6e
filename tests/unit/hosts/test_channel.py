"""Case 52: both sides prove that they know the token before anything else is read. Nothing else enters."""

from __future__ import annotations

import json
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetexp.hosts.channel import (
    FRAME_BYTES,
    GREETING_BYTES,
    Channel,
    RefusedError,
    WireError,
    handshake_as_leader,
    handshake_as_member,
    receive_frame,
    send_frame,
)

TOKEN = b"a" * 64


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def answered(end: socket.socket, token: bytes = TOKEN, seconds: float = 5.0) -> Callable[[], Any]:
    """Let a thread be the leader; return what waits for its outcome: what it returned, or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(handshake_as_leader(end, token, seconds))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(10)
        assert not thread.is_alive()
        return outcome[0]

    return wait


def joined(pair: tuple[socket.socket, socket.socket]) -> tuple[Channel, Channel]:
    wait = answered(pair[0])
    member = handshake_as_member(pair[1], TOKEN, "member", "b", 5.0)
    purpose, name, leader = wait()
    assert (purpose, name) == ("member", "b")
    return leader, member


def test_both_sides_prove_themselves_and_talk(pair: tuple[socket.socket, socket.socket]) -> None:
    leader, member = joined(pair)
    leader.send({"op": "welcome"})
    assert member.receive() == {"op": "welcome"}
    member.send({"text": "ä" * 1_000})
    assert leader.receive() == {"text": "ä" * 1_000}


def test_a_secret_cannot_be_read_on_the_way(pair: tuple[socket.socket, socket.socket]) -> None:
    wait, secret = answered(pair[0]), "5a" * 32
    member = handshake_as_member(pair[1], TOKEN, "member", "b", 5.0)
    leader: Channel = wait()[2]
    sent = [leader.hidden(secret, nonce) for nonce in ("one", "two")]
    assert len({secret, *sent}) == 3
    assert [member.hidden(text, nonce) for text, nonce in zip(sent, ("one", "two"), strict=True)] == [
        secret
    ] * 2
    assert member.hidden(sent[0], "two") != secret


def test_a_wrong_token_is_refused_on_both_sides(pair: tuple[socket.socket, socket.socket]) -> None:
    wait = answered(pair[0])
    with pytest.raises(RefusedError, match="its token is not this cluster's"):
        handshake_as_member(pair[1], b"b" * 64, "member", "b", 5.0)
    assert isinstance(wait(), RefusedError)


def test_a_leader_without_the_token_is_not_believed(pair: tuple[socket.socket, socket.socket]) -> None:
    def impostor() -> None:
        send_frame(pair[0], {"hetexp": 1, "nonce": "0" * 64})
        said = receive_frame(pair[0], GREETING_BYTES, time.monotonic() + 5)
        send_frame(pair[0], {"proof": said["proof"]})  # all that it has is what it was told

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(RefusedError, match="it does not know this cluster's token"):
        handshake_as_member(pair[1], TOKEN, "member", "b", 5.0)
    thread.join()


def test_a_recorded_proof_is_of_no_use_later(pair: tuple[socket.socket, socket.socket]) -> None:
    recorded: list[dict[str, Any]] = []
    wait = answered(pair[0])
    greeting = receive_frame(pair[1], GREETING_BYTES, time.monotonic() + 5)
    relay = socket.socketpair()

    def record() -> None:
        send_frame(relay[0], greeting)
        recorded.append(receive_frame(relay[0], GREETING_BYTES, time.monotonic() + 5))
        send_frame(pair[1], recorded[0])
        send_frame(relay[0], receive_frame(pair[1], GREETING_BYTES, time.monotonic() + 5))

    thread = threading.Thread(target=record)
    thread.start()
    handshake_as_member(relay[1], TOKEN, "member", "b", 5.0)
    thread.join()
    assert wait()[0] == "member"
    again = socket.socketpair()
    wait = answered(again[0])
    receive_frame(again[1], GREETING_BYTES, time.monotonic() + 5)
    send_frame(again[1], recorded[0])
    assert "refused" in receive_frame(again[1], GREETING_BYTES, time.monotonic() + 5)
    assert isinstance(wait(), RefusedError)
    for end in (*relay, *again):
        end.close()


@pytest.mark.parametrize(("key", "value"), [("purpose", "store"), ("name", "c"), ("nonce", "1" * 64)])
def test_a_proof_is_for_one_purpose_name_and_number(
    pair: tuple[socket.socket, socket.socket], key: str, value: str
) -> None:
    """Who relays the handshake of a `probe` can change nothing of it, such as what the connection is for."""
    wait, relay, errors = answered(pair[0]), socket.socketpair(), []

    def probe() -> None:
        try:
            handshake_as_member(relay[1], TOKEN, "probe", "b", 5.0)
        except RefusedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=probe)
    thread.start()
    send_frame(relay[0], receive_frame(pair[1], GREETING_BYTES, time.monotonic() + 5))
    greeting = receive_frame(relay[0], GREETING_BYTES, time.monotonic() + 5)
    assert greeting[key] != value
    send_frame(pair[1], greeting | {key: value})
    send_frame(relay[0], receive_frame(pair[1], GREETING_BYTES, time.monotonic() + 5))
    thread.join()
    assert isinstance(wait(), RefusedError)
    assert errors == ["its token is not this cluster's"]
    for end in relay:
        end.close()


def test_another_version_of_the_protocol_is_reported(pair: tuple[socket.socket, socket.socket]) -> None:
    send_frame(pair[0], {"hetexp": 99, "nonce": "0" * 64})
    with pytest.raises(RefusedError, match="it speaks version 99 of the protocol, this machine 1"):
        handshake_as_member(pair[1], TOKEN, "member", "b", 5.0)


@pytest.mark.parametrize("what", ["changed", "repeated", "left out", "reflected"])
def test_no_message_is_taken_but_the_next_one(pair: tuple[socket.socket, socket.socket], what: str) -> None:
    leader, member = joined(pair)
    frames = []
    for number in range(2):
        member.send({"number": number})
        header = pair[0].recv(4, socket.MSG_WAITALL)
        frames.append(header + pair[0].recv(struct.unpack(">I", header)[0], socket.MSG_WAITALL))
    sent = {
        "changed": [frames[0][:-2] + b"7}"],
        "repeated": [frames[0], frames[0]],
        "left out": [frames[1]],
        "reflected": [frames[0]],
    }[what]
    reader = member if what == "reflected" else leader
    (pair[0] if what == "reflected" else pair[1]).sendall(b"".join(sent))
    for _ in sent[1:]:
        reader.receive(time.monotonic() + 5)
    with pytest.raises(WireError, match="a message that the other side has not sent"):
        reader.receive(time.monotonic() + 5)


@pytest.mark.parametrize("length", [GREETING_BYTES + 1, FRAME_BYTES, 2**32 - 1])
def test_a_stranger_cannot_announce_a_long_message(
    pair: tuple[socket.socket, socket.socket], length: int
) -> None:
    wait = answered(pair[0])
    pair[1].sendall(struct.pack(">I", length) + b"x" * 10)
    error = wait()
    assert type(error) is WireError
    assert str(error) == f"a message of {length} bytes, where {GREETING_BYTES} are the most"


def test_who_says_nothing_has_no_more_than_its_time(pair: tuple[socket.socket, socket.socket]) -> None:
    started = time.monotonic()
    assert isinstance(answered(pair[0], seconds=0.3)(), TimeoutError)
    assert time.monotonic() - started < 5


def test_who_says_a_byte_at_a_time_has_no_more_than_its_time(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    wait, over = answered(pair[0], seconds=0.5), threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            try:
                pair[1].sendall(b"\0")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    assert isinstance(wait(), (TimeoutError, WireError))
    over.set()
    thread.join()


class _Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('unpickled')",))


def _garbage(random_: random.Random) -> bytes:
    """Return something that no machine of hetexp sends first."""
    kind = random_.randrange(7)
    if kind == 0:
        return random_.randbytes(random_.randrange(1, 200))
    if kind == 1:
        body = random_.randbytes(random_.randrange(0, 200))
    elif kind == 2:
        body = pickle.dumps(_Bomb())
    elif kind == 3:
        body = b"[" * random_.randrange(1, GREETING_BYTES)
    elif kind == 4:
        body = json.dumps(random_.choice([None, 1, "x", [1], {}, {"nonce": 1}, {"proof": None}])).encode()
    elif kind == 5:
        keys = ["hetexp", "nonce", "purpose", "name", "proof"]
        values = [1, 1.5, "0" * 64, "member", None, [], {}, "ä", "\0", True, -1, 10**30]
        body = json.dumps({key: random_.choice(values) for key in keys}).encode()
    else:
        known = {"hetexp": 1, "nonce": "0" * 64, "purpose": "member", "name": "b", "proof": "0" * 64}
        changed = bytearray(json.dumps(known).encode())
        changed[random_.randrange(len(changed))] = random_.randrange(256)
        body = bytes(changed)
    length = len(body) if random_.random() < 0.8 else random_.randrange(2**32)
    return struct.pack(">I", length) + body


def test_a_thousand_malformed_greetings_are_all_refused() -> None:
    random_ = random.Random(0)
    for _ in range(1000):
        ends = socket.socketpair()
        ends[1].sendall(_garbage(random_))
        ends[1].shutdown(socket.SHUT_WR)
        with pytest.raises((WireError, OSError)):
            handshake_as_leader(ends[0], TOKEN, 5.0)
        for end in ends:
            end.close()


def test_a_thousand_malformed_messages_of_a_member_are_all_refused() -> None:
    random_ = random.Random(1)
    for _ in range(1000):
        ends = socket.socketpair()
        channel = Channel(ends[0], b"key", leads=True)
        ends[1].sendall(_garbage(random_))
        ends[1].shutdown(socket.SHUT_WR)
        with pytest.raises((WireError, OSError)):
            channel.receive(time.monotonic() + 5)
        for end in ends:
            end.close()
