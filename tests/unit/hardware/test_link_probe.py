from __future__ import annotations

import socket
import threading

import pytest

from hetexp.hardware.catalogue import Link
from hetexp.hardware.link_probe import answer, in_words, measured, slowest


def link(rate: float, latency: float) -> Link:
    return Link(gb_per_second=rate, efficiency=1.0, latency_seconds=latency, source="test")


def test_both_ends_agree_on_the_end() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
        listener.accept()[0] as far,
    ):
        thread = threading.Thread(target=answer, args=(far,))
        thread.start()
        found = measured(near)
        thread.join(10)
        assert not thread.is_alive()
    assert found.gb_per_second > 0.01
    assert 0 < found.latency_seconds < 1
    assert found.source.startswith("measured")


def test_an_end_that_goes_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        far.close()
        with near, pytest.raises(OSError, match="gone|reset|Broken pipe"):
            measured(near)


def test_the_slowest_rate_comes_with_the_longest_latency() -> None:
    assert slowest([]) is None
    found = slowest([link(1.0, 0.5), link(0.125, 0.01)])
    assert found is not None
    assert (found.gb_per_second, found.latency_seconds) == (0.125, 0.5)
    assert in_words(link(0.125, 0.0005)) == (
        "The network between the hosts has 1,000 Mbit/s after 0.5 ms, as measured."
    )
