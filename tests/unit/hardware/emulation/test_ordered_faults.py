"""Sudden faults of a device's process: how it ends, or what it raises."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from hetexp.core.fault import Due
from hetexp.hardware.emulation.ordered_faults import suffer


def test_an_error_of_the_device_is_torchs_own_and_names_it() -> None:
    with pytest.raises(torch.AcceleratorError, match=r"on cuda:0 \(A\), as `fault.events` orders") as caught:
        suffer(Due("device_error", 5.0), "cuda:0 (A)")
    assert isinstance(caught.value, RuntimeError)


def child(kind: str) -> subprocess.Popen[str]:
    program = f"""
        import threading
        from hetexp.core.fault import Due
        from hetexp.hardware.emulation.ordered_faults import suffer

        def live():
            input()
            print("lives", flush=True)

        threading.Thread(target=live, daemon=True).start()
        print("begins", flush=True)
        suffer(Due({kind!r}, 5.0), "cpu:0")
        print("goes on", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    return process


def test_a_wrong_address_ends_the_process() -> None:
    with child("segfault") as process:
        assert process.wait(60) == -signal.SIGSEGV
        assert process.communicate()[0] == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_frozen_process_runs_no_thread() -> None:
    with child("freeze") as process:
        stat = Path(f"/proc/{process.pid}/stat")
        while (
            stat.read_text().rpartition(")")[2].split()[0] != "T"
        ):  # the test's own limit ends a wait for good
            assert process.poll() is None
        process.kill()


def test_the_threads_of_a_hanging_process_live() -> None:
    with child("hang") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "lives\n"
        assert process.poll() is None
        process.kill()
        assert process.stdout.read() == ""


def test_broken_connections_end_for_the_other_side_and_one_is_spared() -> None:
    with ExitStack() as stack:
        ends = []
        for _ in range(2):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            ends.append((client, stack.enter_context(listener.accept()[0])))
        (lost, lost_peer), (kept, kept_peer) = ends
        spared = kept.getpeername()[1]
        # Both ends are of this process: the peer's end, too, has another port than the spared one.
        program = (
            "import socket, sys; from hetexp.hardware.emulation.ordered_faults import break_connections; "
            "print(break_connections(int(sys.argv[1])))"
        )
        numbers = (lost.fileno(), kept.fileno())
        told = subprocess.run(
            [sys.executable, "-c", program, str(spared)],
            pass_fds=numbers,
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout == "1\n"
        lost_peer.settimeout(60.0)
        assert lost_peer.recv(1) == b""
        kept.sendall(b"x")
        assert kept_peer.recv(1) == b"x"
