"""What the addresses answer; the process that checks configurations is another test's."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")

import hetexp.web.server
from hetexp.core.device import GIB, DeviceSpec
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.monitor.sample import Device, Sample, User, host_name
from hetexp.web.access import Access
from hetexp.web.devices import Machine
from hetexp.web.live import TOO_SLOW, WRONG_TOKEN, Hub

HERE = host_name()
SERVER = Path(hetexp.web.server.__file__)
EMULATED = Device(
    f"{HERE}/r/emulated:0", HERE, "emulated:0", None, "T4", "nvidia", "emulated", emulated=True, run_id="r"
)
CPU = Device(f"{HERE}/cpu", HERE, "cpu", None, "Xeon", "cpu", "cpu")


@pytest.fixture
def sampled(dashboard: Any) -> Any:
    busy = Sample(
        EMULATED, utilisation=0.5, memory_used_bytes=GIB, memory_total_bytes=16 * GIB, users=(User("r", 0),)
    )
    now = time.time()
    for second in range(5):
        dashboard.store.write([busy, Sample(CPU, utilisation=0.25)], now - second)
    return dashboard


def test_devices_have_what_is_known_and_null(sampled: Any, ask: Any) -> None:
    found = ask("GET", "/api/v1/system/gpus").json()["devices"]
    emulated, cpu = sorted(found, key=lambda one: one["backend"] == "cpu")
    assert emulated["memory_free_bytes"] == 15 * GIB and emulated["busy_by"] == {"run": "r", "rank": 0}
    assert emulated["busy"] and not emulated["selectable"] and emulated["temperature_c"] is None
    assert cpu["selectable"] and not cpu["busy"] and cpu["memory_free_bytes"] is None
    assert ask("GET", "/api/v1/system/gpus/cpu").json()["id"] == "cpu"
    assert ask("GET", f"/api/v1/system/gpus/{EMULATED.key}").json()["run"] == "r"
    missing = ask("GET", "/api/v1/system/gpus/cuda:9")
    assert missing.status_code == 404
    assert (
        "`device_id` must be a device of this machine, but is 'cuda:9'"
        in missing.json()["detail"][0]["message"]
    )


def card(host: str, number: int, name: str) -> Device:
    return Device(f"{host}/{number}", host, f"cuda:{number}", number, name, "nvidia", "cuda")


@pytest.fixture
def two_machines(dashboard: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This machine has one busy card, and "right" one of the same id, which is free, and one more."""
    spec = DeviceSpec("cuda:0", "cuda", 0, "H200", "nvidia")
    ours = DetectedCard(spec, python="/opt/nvidia/bin/python", busy="a training has it")
    monkeypatch.setattr(dashboard.machine, "cards", lambda: {"cuda:0": ours})
    now = time.time()
    dashboard.store.write([Sample(card(HERE, 0, "H200"), power_watts=400.0)], now)
    theirs = [Sample(card("right", number, "T4"), power_watts=70.0) for number in (0, 1)]
    dashboard.store.write(theirs, now - 1)
    return dashboard


def test_facts_of_this_machines_cards_are_for_no_other_machines(two_machines: Any, ask: Any) -> None:
    found = ask("GET", "/api/v1/system/gpus").json()["devices"]
    told = [(one["host"], one["id"], one["here"], one["selectable"], one["busy"]) for one in found]
    assert told == [
        (HERE, "cuda:0", True, True, True),
        ("right", "cuda:0", False, False, False),
        ("right", "cuda:1", False, False, False),
    ]
    assert [one["environment"] for one in found] == ["/opt/nvidia/bin/python", None, None]
    assert ask("GET", "/api/v1/system/gpus/cuda:0").json()["host"] == HERE
    assert ask("GET", "/api/v1/system/gpus/cuda:1").status_code == 404
    assert ask("GET", "/api/v1/system/gpus/right/1").json()["host"] == "right"
    series = ask("GET", "/api/v1/system/metrics?view=per_gpu").json()["series"]
    assert sorted((one["host"], one["device"]) for one in series) == sorted(
        [(HERE, "cuda:0"), ("right", "cuda:0"), ("right", "cuda:1")]
    )


def test_a_device_of_another_machine_cannot_be_asked_for(two_machines: Any, ask: Any) -> None:
    answer = ask("POST", "/api/v1/trainings", json={"gpu_ids": ["cuda:1"]})
    assert answer.status_code == 422
    assert "`gpu_ids[0]` must be a device of this machine" in answer.json()["detail"][0]["message"]


def test_each_live_message_has_all_machines(two_machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(two_machines.hub, "broadcast", sent.append)
    now = time.time()
    two_machines._seen(now + 1, [Sample(card(HERE, 0, "H200"), power_watts=401.0)])
    # The other machine samples at the same moments, and its rows come later.
    two_machines.store.write([Sample(card("right", 0, "T4"), power_watts=71.0)], now + 1)
    rows = two_machines.store.latest()
    two_machines._show(rows)
    two_machines._show(rows)
    watts = [{(one["host"], one["id"]): one["power_w"] for one in message["devices"]} for message in sent]
    assert watts[0] == {(HERE, "cuda:0"): 401.0, ("right", "cuda:0"): 70.0, ("right", "cuda:1"): 70.0}
    assert watts[-1] == {(HERE, "cuda:0"): 401.0, ("right", "cuda:0"): 71.0, ("right", "cuda:1"): 70.0}
    assert len(watts) == 2


def test_a_silent_machine_is_stale_before_it_vanishes(dashboard: Any, ask: Any) -> None:
    now = time.time()
    gone = replace(EMULATED, key=f"{HERE}/old/emulated:0")
    dashboard.store.write([Sample(card("right", 0, "T4"), power_watts=70.0), Sample(gone)], now - 120)
    dashboard.store.write([Sample(card("left", 0, "T4"))], now - 4000)
    dashboard.store.write([Sample(CPU)], now)
    found = ask("GET", "/api/v1/system/gpus").json()["devices"]
    assert [(one["host"], one["id"], one["stale"]) for one in found] == [
        (HERE, "cpu", False),
        ("right", "cuda:0", True),
    ]
    assert 119 < found[1]["age_seconds"] < 180


@pytest.mark.parametrize("since", ["60", "2020-01-01T00:00:00Z"])
def test_histories_have_both_views(sampled: Any, ask: Any, since: str) -> None:
    if since != "60":
        assert ask("GET", f"/api/v1/system/metrics?since={since}").status_code == 422
        return
    (both,) = ask("GET", f"/api/v1/system/metrics?since={since}&points=60").json()["series"]
    assert both["device"] is None and both["utilisation"] == [0.5] * len(both["time"])
    each = ask("GET", "/api/v1/system/metrics?view=per_gpu").json()["series"]
    assert {one["device"]: (one["run"], one["name"]) for one in each} == {
        "emulated:0": ("r", "T4"),
        "cpu": (None, "Xeon"),
    }


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("since=yesterday", "since"),
        ("since=-1", "since"),
        ("since=nan", "since"),
        ("view=all", "view"),
        ("points=0", "points"),
    ],
)
def test_wrong_questions_are_told(ask: Any, query: str, key: str) -> None:
    answer = ask("GET", f"/api/v1/system/metrics?{query}")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["key"] == key


def test_options_list_what_requests_may_set(ask: Any) -> None:
    found = ask("GET", "/api/v1/options").json()
    assert "custom" not in found["models"] and "gpt_text" in found["experiments"]
    assert found["defaults"]["trainer.global_batch_size"] == 64
    assert {one["id"] for one in found["emulated_cards"]} >= {"emulated:rtx_3090", "emulated:arc_a770"}


def test_trainings_are_queued_as_data(dashboard: Any, ask: Any, answers: Any, tmp_path: Path) -> None:
    asked = {
        "overrides": {"trainer.max_steps": 3, "name": "a (b)"},
        "gpu_ids": ["emulated:t4", "emulated:t4", "cpu"],
    }
    answers.answer["name"] = "a (b)"
    started = ask("POST", "/api/v1/trainings", json=asked)
    assert started.status_code == 201, started.text
    found = started.json()
    assert (found["state"], found["name"], found["balancing"]) == ("pending", "a (b)", "auto")
    kind, words = answers.asked[0]
    assert kind == "check"
    assert words == [
        "trainer.max_steps=3",
        "name='a (b)'",
        "hardware.devices=[emulated:t4,emulated:t4,cpu]",
        "hardware.cards=null",
    ]
    folder = Path(found["run_dir"])
    assert folder.is_relative_to(tmp_path / "outputs")
    assert json.loads((folder / "job.json").read_text())["overrides"] == asked["overrides"]
    assert [one["id"] for one in ask("GET", "/api/v1/trainings?state=pending").json()["trainings"]] == [
        found["id"]
    ]
    assert ask("GET", "/api/v1/trainings?offset=1").json() == {"trainings": []}
    shown = ask("GET", f"/api/v1/trainings/{found['id']}").json()
    assert shown["log_tail"] == [] and shown["overrides"] == asked["overrides"]
    assert ask("GET", f"/api/v1/trainings/{found['id']}/metrics").json() == {"rows": []}
    assert ask("GET", f"/api/v1/trainings/{found['id']}/report").status_code == 404
    assert ask("POST", f"/api/v1/trainings/{found['id']}/stop", json={}).json()["state"] == "stopped"
    assert ask("DELETE", f"/api/v1/trainings/{found['id']}").status_code == 204
    assert ask("GET", f"/api/v1/trainings/{found['id']}").status_code == 404


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"gpu_ids": []}, "gpu_ids"),
        ({}, "gpu_ids"),
        ({"gpu_ids": ["cpu"], "run_dir": "/etc"}, "run_dir"),
        ({"gpu_ids": ["cuda:77"]}, "gpu_ids[0]"),
        ({"gpu_ids": ["emulated:t4]"]}, "gpu_ids.0"),
        ({"gpu_ids": ["cpu"], "overrides": {"resume": "/etc/passwd"}}, "resume"),
        ({"gpu_ids": ["cpu"], "overrides": {"trainer.loss": "os.system"}}, "trainer.loss"),
        ({"gpu_ids": ["cpu"], "experiment": "../x"}, "experiment"),
        ({"gpu_ids": ["cpu"], "experiment": "scaling"}, "experiment"),
        ([], "body"),
    ],
)
def test_wrong_requests_start_nothing(dashboard: Any, ask: Any, answers: Any, body: Any, key: str) -> None:
    for path in ("trainings", "estimate"):
        answer = ask("POST", f"/api/v1/{path}", json=body)
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["key"] == key
    assert not answers.asked and not dashboard.store.trainings()


LONG = "1" + "0" * 400
ODD = [
    ('{"gpu_ids":["cpu"],"overrides":{"name":"\\ud800"}}', 422, "`name` must be at most 80 letters"),
    ('{"gpu_ids":["cpu"],"overrides":{"name":"a\\nb"}}', 422, "`name` must be at most 80 letters"),
    ('{"gpu_ids":["cpu"],"overrides":{"name":"${oc.env:HOME}"}}', 422, "`name` must be at most 80 letters"),
    ('{"gpu_ids":["cpu"],"overrides":{"name":"a\' resume=x"}}', 422, "`name` must be at most 80 letters"),
    ('{"gpu_ids":["cpu"],"overrides":{"\\ud800":1}}', 422, "must be a valid string"),
    (
        '{"gpu_ids":["cpu"],"overrides":{"model._target_":"os.system"}}',
        422,
        "not a key that a request may set",
    ),
    (
        f'{{"gpu_ids":["cpu"],"overrides":{{"trainer.max_steps":{LONG}}}}}',
        422,
        "must be a whole number from 1",
    ),
    (f'{{"gpu_ids":["cpu"],"overrides":{{"optimizer.lr":-{LONG}}}}}', 422, "must be a number from"),
    ('{"gpu_ids":["cpu"],"overrides":{"optimizer.lr":1e999}}', 422, "must be a finite number"),
    ('{"gpu_ids":["cpu"],"overrides":{"optimizer.lr":NaN}}', 422, "must be a finite number"),
    ('{"gpu_ids":["cpu"],"overrides":{"trainer.max_steps":' + "9" * 6000 + "}}", 400, "parsing the body"),
    ('{"gpu_ids":["\\ud800"]}', 422, "must be a valid string"),
    ('{"gpu_ids":["cpu\\u0000"]}', 422, "must match pattern"),
    ('{"gpu_ids":["cpu],resume=[x"]}', 422, "must match pattern"),
    ('{"gpu_ids":["cpu"],"experiment":"../../etc/passwd"}', 422, "must match pattern"),
    ('{"gpu_ids":["cpu"],"experiment":"gpt_text\\nresume=x"}', 422, "must match pattern"),
    (b'{"gpu_ids":["\xff"]}', 400, "parsing the body"),
    ("[" * 60_000, 400, "parsing the body"),
    ('{"gpu_ids":["cpu"],"overrides":{"x":' + "[" * 9000 + "]" * 9000 + "}}", 400, "parsing the body"),
]
"""Bodies, the status of their answers, and a part of the messages."""


@pytest.mark.parametrize(("body", "code", "message"), ODD)
def test_odd_bodies_are_refused(
    dashboard: Any, ask: Any, answers: Any, body: str | bytes, code: int, message: str
) -> None:
    headers = {"content-type": "application/json"}
    for path in ("trainings", "estimate"):
        answer = ask("POST", f"/api/v1/{path}", content=body, headers=headers)
        assert answer.status_code == code
        assert message in answer.json()["detail"][0]["message"]
    assert not answers.asked and not dashboard.store.trainings()


def test_what_is_not_json_is_told(ask: Any) -> None:
    answer = ask("POST", "/api/v1/trainings", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 422 and answer.json()["detail"][0]["key"] == "body"
    assert ask("GET", "/api/v1/nothing").json()["detail"][0]["message"] == "GET /api/v1/nothing: Not Found."
    assert ask("PUT", "/api/v1/trainings", json={}).status_code == 405


OUTSIDE = [
    *("..%2fserver.py", "%2e%2e/server.py", "%2e%2e%2fserver.py", "..%5cserver.py", "js/..%2f..%2fserver.py"),
    *("../server.py", "..%252fserver.py", str(SERVER), f"%2f{str(SERVER)[1:]}", "%00", "a" * 200, "%2e%2e"),
]
"""Ways to name a file outside the page's folder; most of them name one that exists."""


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_path_gets_through(ask: Any, name: str) -> None:
    assert ask("GET", f"/api/v1/trainings/{name}/report").status_code in (404, 422)
    answer = ask("GET", f"/static/{name}")
    assert answer.status_code in (404, 405)
    assert "class Dashboard" not in answer.text
    assert ask("GET", "/static/js/..%2fapp.js").status_code == 200  # a file of the page, by such a name


def test_a_card_twice_is_refused() -> None:
    machine = Machine()
    machine.cards = lambda: {"cuda:0": None}  # type: ignore
    assert machine.problems(["cuda:0", "cpu", "cpu"]) == []
    ((key, message),) = machine.problems(["cuda:0", "cuda:0"])
    assert key == "gpu_ids[1]" and "another card" in message


class Socket:
    """A WebSocket whose client takes what it is sent only when it is told to."""

    def __init__(self, says: str = "", takes: bool = True) -> None:
        self.got: list[Any] = []
        self.closed: int | None = None
        self._says, self._takes = says, takes

    async def accept(self) -> None: ...

    async def receive_text(self) -> str:
        if self._says:
            says, self._says = self._says, ""
            return says
        await asyncio.Event().wait()
        raise AssertionError

    async def send_text(self, text: str) -> None:
        if not self._takes:
            await asyncio.Event().wait()
        self.got.append(json.loads(text))

    async def close(self, code: int) -> None:
        self.closed = code


def test_a_slow_client_is_dropped_and_no_other_loses_a_sample() -> None:
    async def scene() -> tuple[Socket, Socket]:
        hub, quick, slow = Hub(), Socket(), Socket(takes=False)
        hub.bind()
        serving = [asyncio.create_task(hub.serve(one, Access(), list)) for one in (quick, slow)]  # type: ignore[arg-type]
        while len(hub._clients) < 2:
            await asyncio.sleep(0)
        for number in range(300):
            hub.broadcast({"number": number})
            while len(quick.got) <= number:
                await asyncio.sleep(0)
        await serving[1]
        hub.close()
        await serving[0]
        return quick, slow

    quick, slow = asyncio.run(asyncio.wait_for(scene(), 20))
    assert [one["number"] for one in quick.got] == list(range(300))
    assert slow.got == [] and slow.closed == TOO_SLOW


@pytest.mark.parametrize(
    "says",
    [
        *('{"token": "wrong"}', '{"token": "correct-horse-batterz"}', '{"token": ["correct-horse-battery"]}'),
        *("[]", "null", "{}", "x", '{"token": "\\ud800"}', '{"token": "\ud800"}', "[" * 60_000, "9" * 6000),
    ],
)
def test_a_wrong_first_message_ends_a_websocket(says: str, caplog: pytest.LogCaptureFixture) -> None:
    socket = Socket(says)
    access = Access(token="correct-horse-battery")
    asyncio.run(asyncio.wait_for(Hub().serve(socket, access, list), 20))  # type: ignore[arg-type]
    assert socket.closed == WRONG_TOKEN and socket.got == []
    assert len(caplog.messages) <= 1 and "Traceback" not in caplog.text


def test_a_websocket_without_a_token_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetexp.web.live.TOKEN_SECONDS", 0.05)
    socket, access = Socket(), Access(token="correct-horse-battery")
    asyncio.run(asyncio.wait_for(Hub().serve(socket, access, list), 20))  # type: ignore[arg-type]
    assert socket.closed == WRONG_TOKEN


def test_more_clients_than_the_limit_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetexp.web.live.MOST_CLIENTS", 2)

    async def scene() -> list[Socket]:
        hub, sockets = Hub(), [Socket() for _ in range(4)]
        hub.bind()
        serving = [asyncio.create_task(hub.serve(one, Access(), list)) for one in sockets]  # type: ignore[arg-type]
        await asyncio.gather(*serving[2:])
        hub.broadcast({"number": 1})
        while not all(one.got for one in sockets[:2]):
            await asyncio.sleep(0)
        hub.close()
        await asyncio.gather(*serving)
        return sockets

    first, second, *more = asyncio.run(asyncio.wait_for(scene(), 20))
    assert first.got == second.got == [{"number": 1}]
    assert [(one.closed, one.got) for one in more] == [(TOO_SLOW, [])] * 2
