"""The dashboard as a person has it: a server, trainings that it starts, what becomes of them without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetexp.core.compose.conf_folders import conf_dir
from hetexp.monitor.processes import lives

httpx = pytest.importorskip("httpx", reason="the extra `dashboard` is not installed")
store = pytest.importorskip("hetexp.monitor.store", reason="the extra `monitor` is not installed")
pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")
exceptions = pytest.importorskip("websockets.exceptions", reason="the extra `dashboard` is not installed")
client = pytest.importorskip("websockets.sync.client", reason="the extra `dashboard` is not installed")

pytestmark = pytest.mark.timeout(400)
SMALL = {
    "model": "mlp",
    "data": "synthetic",
    "balancing": "equal",
    "logger": "none",
    "trainer.max_epochs": None,
    "trainer.global_batch_size": 8,
    "trainer.log_every": 2,
    "data.num_samples": 32,
    "data.num_test_samples": 8,
    "hardware.threads_per_rank": 1,
    "hardware.efficiency": 1e-6,
}
TWO = ["emulated:rtx_3090", "emulated:arc_a770"]


@dataclass
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    api: Any
    seen: list[dict[str, Any]] = field(default_factory=list)
    """What the WebSocket told."""

    def start(self, name: str, gpu_ids: list[str] = TWO, **overrides: Any) -> dict[str, Any]:
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        asked = {"overrides": {**SMALL, "name": name, **keys}, "gpu_ids": gpu_ids}
        answer = self.api.post("/trainings", json=asked)
        assert answer.status_code == 201, answer.text
        started: dict[str, Any] = answer.json()
        return started

    def training(self, training_id: str) -> dict[str, Any]:
        answer = self.api.get(f"/trainings/{training_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait(self, training_id: str, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline:
            found = self.training(training_id)
            if until(found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"it did not come so far: {found}")


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hetexp.cli",
            "dashboard",
            "--port=0",
            f"monitor.url=sqlite:///{folder / 'lab.sqlite'}",
            "monitor.interval_seconds=0.5",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(conf_dir().parent), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=(folder / "server.log").open("a"),
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, (folder / "server.log").read_text()
        with httpx.Client(base_url=f"{url}/api/v1", timeout=120) as api:
            server = Server(process, url, api)
            listener = threading.Thread(target=_listen, args=(server,))
            listener.start()
            try:
                yield server
            finally:
                process.terminate()
                process.wait(20)
                listener.join(20)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _listen(server: Server) -> None:
    address = f"{server.url.replace('http', 'ws')}/api/v1/live"
    with client.connect(address) as socket, suppress(exceptions.ConnectionClosed):
        for text in socket:
            server.seen.append(json.loads(text))


def told(server: Server) -> set[tuple[str, str | None]]:
    """Return what kinds of messages, and of trainings in what state, the WebSocket told."""
    return {(one["kind"], one.get("training", {}).get("state")) for one in list(server.seen)}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for server and trainings, which end with the test whatever comes of it."""
    yield tmp_path
    for row in _rows(tmp_path):
        if row["pid"] is not None and lives(row["pid"], row["process_mark"]):
            os.killpg(row["pid"], signal.SIGKILL)


def test_trainings_live_without_the_server(folder: Path) -> None:
    with served(folder) as server:
        first = server.start("first", trainer__max_steps=400, hardware__time_scale=5.0)
        second = server.start("second", trainer__max_steps=100_000)
        third = server.start("third", trainer__max_steps=5)
        assert first["gpu_ids"] == TWO and first["distributed"] and first["emulated"]
        # The processor computes for all emulated devices: one training at a time.
        assert server.training(second["id"])["waits_for"] == ["this machine's processor, which first uses"]
        stopped = server.api.post(f"/trainings/{third['id']}/stop", json={})
        assert stopped.json()["state"] == "stopped"
        assert server.api.post(f"/trainings/{third['id']}/stop", json={}).status_code == 409
        assert server.api.delete(f"/trainings/{first['id']}").status_code == 409

        running = server.wait(first["id"], lambda one: bool(one["progress"]))
        assert running["state"] == "running" and running["steps"] == 400
        assert [one["share"] for one in running["split"]] == [0.5, 0.5]
        gpus = server.api.get("/system/gpus").json()["devices"]
        used = {one["id"]: one["busy_by"] for one in gpus if one["run"] == first["id"]}
        assert used == {f"emulated:{rank}": {"run": first["id"], "rank": rank} for rank in (0, 1)}
        server.wait(first["id"], lambda _: ("training", "running") in told(server))
        assert told(server) > {("sample", None), ("training", "pending"), ("training", "stopped")}
        server.process.kill()
        server.process.wait()

    with served(folder) as server:
        again = server.training(first["id"])
        assert again["state"] in ("running", "completed")
        ended = server.wait(first["id"], lambda one: one["state"] != "running")
        assert (ended["state"], ended["progress"], ended["step"]) == ("completed", 1.0, 400), ended
        rows = server.api.get(f"/trainings/{first['id']}/metrics?since_step=390").json()["rows"]
        assert [row["step"] for row in rows if row["loss"] is not None] == [392, 394, 396, 398, 400]
        report = server.api.get(ended["report_url"].removeprefix("/api/v1"))
        assert report.status_code == 200 and "sandbox" in report.headers["content-security-policy"]

        server.wait(second["id"], lambda one: not one["waits_for"])
        failing = server.start("failing", [TWO[0]], optimizer__lr=1e6, optimizer="sgd", trainer__max_steps=50)
        stopping = server.api.post(f"/trainings/{second['id']}/stop", json={}).json()
        assert stopping["stopping"]
        ended = server.wait(second["id"], lambda one: one["ended"] is not None)
        assert ended["state"] == "stopped"
        failed = server.wait(failing["id"], lambda one: one["state"] in ("completed", "failed"))
        assert failed["state"] == "failed" and "not finite" in failed["error"]
        assert any("failed" in line for line in failed["log_tail"])
        assert server.api.delete(f"/trainings/{failing['id']}").status_code == 204
        assert server.api.get(f"/trainings/{failing['id']}").status_code == 404
        assert Path(failed["run_dir"]).is_dir()
        states = {one["name"]: one["state"] for one in server.api.get("/trainings").json()["trainings"]}
        assert states == {"first": "completed", "second": "stopped", "third": "stopped"}
    assert server.process.returncode in (0, -signal.SIGTERM)


def _rows(folder: Path) -> list[dict[str, Any]]:
    database = store.Store(f"sqlite:///{folder / 'lab.sqlite'}")
    try:
        found: list[dict[str, Any]] = database.trainings()
        return found
    finally:
        database.close()
