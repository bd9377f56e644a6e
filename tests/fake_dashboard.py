"""A server that speaks the dashboard's API with made-up values, for states that a machine seldom shows.

`python tests/fake_dashboard.py 8899` serves it until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import mimetypes
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hetexp.core.device import GIB

STATIC = Path(__file__).parents[1] / "hetexp" / "web" / "static"
POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
STEPS = 40
EVERY_SECONDS = 0.25
"""Between samples, and between steps of a training."""
Row = dict[str, Any]
CARDS = [
    {"id": "emulated:rtx_3090", "name": "RTX 3090", "vendor": "nvidia", "memory_total_bytes": 24 * GIB},
    {"id": "emulated:arc_a770", "name": "Arc A770", "vendor": "intel", "memory_total_bytes": 16 * GIB},
]
OPTIONS: Row = {
    "experiments": ["gpt_text"],
    "models": ["convnet", "gpt", "mlp"],
    "data": ["digits", "synthetic", "text"],
    "strategies": ["auto", "ddp", "single"],
    "policies": ["auto", "equal", "profiled"],
    "emulated_cards": CARDS,
    "allowed_overrides": [
        {
            "key": "model",
            "kind": "choice",
            "choices": ["convnet", "gpt", "mlp"],
            "description": "option of model",
        },
        {"key": "trainer.global_batch_size", "kind": "int", "description": "samples of one optimizer step"},
        {"key": "trainer.max_steps", "kind": "int", "description": "optimizer steps", "nullable": True},
        {"key": "optimizer.lr", "kind": "float", "description": "learning rate"},
        {"key": "trainer.drop_last", "kind": "bool", "description": "leave out the last, smaller batch"},
        {"key": "model.widths", "kind": "ints", "description": "channels of each stage"},
    ],
    "defaults": {
        "model": "convnet",
        "data": "digits",
        "trainer.global_batch_size": 64,
        "trainer.max_steps": None,
    },
}


def _device(number: int, name: str, total: int, **more: Any) -> Row:
    return {
        "key": f"host/{number}", "id": f"cuda:{number}", "name": name, "vendor": "nvidia", "backend": "cuda",
        "host": "host", "here": True, "stale": False, "age_seconds": 0.4,
        "index": number, "environment": "nvidia", "emulated": False, "integrated": False, "lost": False,
        "state": "ok", "reason": None, "selectable": True, "run": None, "memory_total_bytes": total,
        "power_limit_w": 350.0, "throttle": [], "fan": 0.4, "busy": False, "busy_by": None, **more,
    }  # fmt: skip


DEVICES = [
    _device(0, "RTX 3090", 24 * GIB, busy=True, busy_by={"run": "run-1", "rank": 0}),
    _device(1, "RTX 4090", 24 * GIB, throttle=["thermal"]),
    _device(0, "Arc A770", 16 * GIB, id="xpu:0", key="host/xpu", vendor="intel", backend="xpu",
            environment="intel", fan=None, power_limit_w=None),
    _device(2, "RTX 2080 Ti", 11 * GIB, lost=True, state="lost", selectable=False,
            reason="It fell off the bus."),
]  # fmt: skip


class FakeDashboard:
    """The server, in a thread of its own. `trainings`, `busy` and `token` may be changed while it runs."""

    def __init__(self, port: int = 0, token: str | None = None) -> None:
        self.port, self.token = port, token
        self.requests: list[str] = []
        self.trainings: dict[str, Row] = {}
        self.rows: dict[str, list[Row]] = {}
        self.sockets: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None
        self._add("run-1", "running", ["cuda:0", "xpu:0"], step=60, steps=600)
        self._add("run-0", "failed", ["cuda:1"], step=7, error=(
            "RuntimeError: CUDA error: an illegal memory access was encountered\n"
            "rank 0 on cuda:1 (RTX 4090) ended at step 7."))  # fmt: skip
        self._add(
            "run-done",
            "completed",
            ["cuda:0", "cuda:1"],
            step=STEPS,
            report_url="/api/v1/trainings/run-done/report",
        )

    def __enter__(self) -> FakeDashboard:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def _add(
        self, name: str, state: str, ids: list[str], step: int = 0, steps: int = STEPS, **more: Any
    ) -> Row:
        now = time.time()
        self.rows[name] = [_row(i, ids) for i in range(1, step + 1)]
        over = state in ("failed", "completed", "stopped")
        self.trainings[name] = {
            "id": name, "name": f"convnet {name}", "state": state, "gpu_ids": ids,
            "distributed": len(ids) > 1,
            "strategy": "ddp", "balancing": "profiled",
            "emulated": any(one.startswith("emulated") for one in ids),
            "progress": step / steps, "step": step, "steps": steps, "loss": None, "samples_per_second": None,
            "efficiency": 0.873 if state == "completed" else None, "split": _split(ids), "error": None,
            "run_dir": f"outputs/{name}", "report_url": None, "created": now - 90 + len(self.trainings),
            "started": None if state == "pending" else now - 80, "ended": now - 20 if over else None,
            "waits_for": ["cuda:0"] if state == "pending" else [], "log_tail": [], **more,
        }  # fmt: skip
        self._told(self.trainings[name])
        return self.trainings[name]

    def _told(self, training: Row) -> None:
        rows = self.rows[training["id"]]
        training["log_tail"] = [f"step {row['step']}  loss {row['loss']:.4f}" for row in rows][-30:]
        if rows:
            training["loss"], training["samples_per_second"] = (
                rows[-1]["loss"],
                rows[-1]["samples_per_second"],
            )

    # The loop: samples and steps

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        beating = asyncio.ensure_future(self._beat())
        await self._end.wait()
        beating.cancel()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _beat(self) -> None:
        while True:
            self._push({"kind": "sample", "time": time.time(), "devices": devices()})
            for training in self.trainings.values():
                if training["state"] in ("pending", "running"):
                    self._step(training)
                    self._push({"kind": "training", "training": _brief(training)})
            await asyncio.sleep(EVERY_SECONDS)

    def _step(self, training: Row) -> None:
        if training["state"] == "pending":
            training.update(state="running", started=time.time(), waits_for=[])
            return
        step = training["step"] + 1
        self.rows[training["id"]].append(_row(step, training["gpu_ids"]))
        training.update(step=step, progress=step / training["steps"])
        self._told(training)
        if step >= training["steps"]:
            training.update(state="completed", ended=time.time(), efficiency=0.861)

    def _push(self, message: Row) -> None:
        for writer in list(self.sockets):
            with contextlib.suppress(ConnectionError):
                writer.write(_frame(json.dumps(message).encode()))

    # Connections

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ")
            headers = {
                k.lower(): v.strip() for k, v in (line.split(":", 1) for line in head[1:] if ":" in line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append(f"{method} {target}")
            if headers.get("upgrade") == "websocket":
                await self._websocket(headers, reader, writer)
                return
            status, kind, answer = self._answer(method, target, headers, body)
            writer.write(
                f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(answer)}\r\n"
                f"content-security-policy: {POLICY}\r\ncache-control: no-store\r\n"
                "connection: close\r\n\r\n".encode()
                + answer
            )
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.sockets.discard(writer)
            writer.close()

    async def _websocket(
        self, headers: Row, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        magic = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        key = base64.b64encode(hashlib.sha1(magic.encode()).digest()).decode()
        writer.write(
            "HTTP/1.1 101 x\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            f"sec-websocket-accept: {key}\r\n\r\n".encode()
        )
        if self.token is not None:
            first, second = await reader.readexactly(2)
            mask, data = await reader.readexactly(4), await reader.readexactly(second & 127)
            said = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
            if first & 15 != 1 or json.loads(said).get("token") != self.token:
                writer.write(b"\x88\x02" + (4401).to_bytes(2, "big"))
                return
        self.sockets.add(writer)
        while await reader.read(4096):
            pass

    def _answer(self, method: str, target: str, headers: Row, body: bytes) -> tuple[int, str, bytes]:
        parts = urlsplit(target)
        path, query = unquote(parts.path), {k: v[0] for k, v in parse_qs(parts.query).items()}
        if not path.startswith("/api/v1/"):
            return _file(path)
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            return _json(401, {"detail": [{"key": "Authorization", "message": "A token is needed."}]})
        if method == "POST" and headers.get("content-type") != "application/json":
            return _json(415, {"detail": [{"key": "Content-Type", "message": "JSON only."}]})
        sent = json.loads(body) if body else {}
        words = path.removeprefix("/api/v1/").split("/")
        if words == ["system", "gpus"]:
            return _json(200, {"devices": devices()})
        if words == ["system", "metrics"]:
            return _json(200, history(query["view"], float(query["since"]), int(query["points"])))
        if words == ["options"]:
            return _json(200, OPTIONS)
        if words == ["session"]:
            return _json(200, {"token_required": self.token is not None})
        if words == ["estimate"] and "experiment" in sent["overrides"]:
            return _json(422, {"detail": [{"key": "experiment", "message": "`experiment` is not a key."}]})
        if words == ["estimate"]:
            return _json(200, estimate(sent))
        if words[0] == "trainings":
            return self._trainings(method, words[1:], query, sent)
        return _json(404, {"detail": [{"key": None, "message": "There is no such thing."}]})

    def _trainings(self, method: str, words: list[str], query: Row, sent: Row) -> tuple[int, str, bytes]:
        if not words and method == "POST":
            steps = sent["overrides"].get("trainer.max_steps", 8)
            if not isinstance(steps, int) or steps < 1:
                message = f"`trainer.max_steps` must be a whole number from 1, but is {steps} instead."
                return _json(422, {"detail": [{"key": "trainer.max_steps", "message": message}]})
            name = f"run-new-{len(self.trainings)}"
            return _json(201, self._add(name, "pending", sent["gpu_ids"], steps=steps))
        if not words:
            found = [one for one in self.trainings.values() if query.get("state") in (None, one["state"])]
            found.sort(key=lambda one: -one["created"])
            return _json(200, {"trainings": [_brief(one) for one in found][: int(query.get("limit", 50))]})
        training = self.trainings.get(words[0])
        if training is None:
            return _json(404, {"detail": [{"key": "id", "message": "There is no such training."}]})
        if words[1:] == ["metrics"]:
            since = int(query.get("since_step", -1))
            return _json(200, {"rows": [row for row in self.rows[words[0]] if row["step"] > since]})
        if words[1:] == ["stop"]:
            training.update(state="stopped", ended=time.time())
            self._push({"kind": "training", "training": _brief(training)})
        if words[1:] == ["report"]:
            return 200, "text/html", b"<!doctype html><title>report</title>report"
        if method == "DELETE":
            del self.trainings[words[0]]
            self._push({"kind": "deleted", "id": words[0]})
            return 204, "application/json", b""
        return _json(200, training)


def _json(status: int, answer: object) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(answer).encode()


def _file(path: str) -> tuple[int, str, bytes]:
    file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
    if STATIC not in file.resolve().parents or not file.is_file():
        return 404, "text/plain", b""
    kind = "text/javascript" if file.suffix == ".js" else mimetypes.guess_type(file.name)[0] or "text/plain"
    return 200, kind, file.read_bytes()


def _frame(data: bytes) -> bytes:
    size = len(data)
    if size < 126:
        return bytes([0x81, size]) + data
    return bytes([0x81, 126]) + size.to_bytes(2, "big") + data


def _brief(training: Row) -> Row:
    return {key: value for key, value in training.items() if key != "log_tail"}


def _split(ids: list[str]) -> list[Row]:
    weights = [2.0**-i for i in range(len(ids))]
    return [{"id": name, "share": weight / sum(weights)} for name, weight in zip(ids, weights, strict=True)]


def _row(step: int, ids: list[str]) -> Row:
    loss = 2.3 * math.exp(-step / 12) + 0.06 + 0.05 * math.sin(step * 1.7)
    row = {"step": step, "loss": loss, "samples_per_second": 640 + 25 * math.sin(step / 3)}
    if step % 10 == 0:
        row["eval/loss"] = loss + 0.05
    return row | {f"device/{one['id']}/share": one["share"] for one in _split(ids)}


def _wave(place: int, at: float) -> float:
    return 0.5 + 0.42 * math.sin(at / (23 + 9 * place) + place) * math.cos(at / 71)


def _state(place: int, device: Row, at: float) -> Row:
    """Return the values of a device; the third tells little, the fourth nothing."""
    lost, little = device["lost"], place == 2
    used = (0.93 if place == 1 else 0.2 + 0.4 * _wave(place, at / 4)) * device["memory_total_bytes"]
    return {
        "utilisation": None if lost else _wave(place, at),
        "memory_used_bytes": None if lost else int(used),
        "memory_free_bytes": None if lost else int(device["memory_total_bytes"] - used),
        "temperature_c": None if lost or little else 48 + 30 * _wave(place, at / 3),
        "power_w": None if lost or little else 90 + 240 * _wave(place, at),
        "clock_mhz": None if lost or little else 1695,
    }


def devices() -> list[Row]:
    now = time.time()
    return [{**one, **_state(place, one, now), "time": now} for place, one in enumerate(DEVICES)]


def history(view: str, seconds: float, points: int) -> Row:
    now = time.time()
    times = [now - seconds * (1 - i / (points - 1)) for i in range(points)]
    keys = ("utilisation", "memory_used_bytes", "temperature_c", "power_w")
    series: list[Row] = []
    for place, device in enumerate(DEVICES):
        states = [_state(place, device, at) for at in times]
        about = {
            "device": device["id"],
            "host": device["host"],
            "key": device["key"],
            "name": device["name"],
            "run": None,
            "time": times,
        }
        series.append(about | {key: [one[key] for one in states] for key in keys})
    if view == "aggregated":
        whole: Row = {"device": None, "host": None, "key": None, "name": None, "run": None, "time": times}
        whole |= {
            key: [_mean(values) for values in zip(*(one[key] for one in series), strict=True)] for key in keys
        }
        series = [whole]
    return {"view": view, "since": times[0], "series": series}


def _mean(values: tuple[float | None, ...]) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) / len(told) if told else None


def estimate(wish: Row) -> Row:
    batch = wish["overrides"].get("trainer.global_batch_size", 64)
    ids = wish["gpu_ids"]
    per_device = []
    for one in _split(ids):
        local = round(batch * one["share"])
        need = int(local / 64 * 3.1 * GIB)
        per_device.append({"id": one["id"], "local_batch_size": local, "micro_batch_size": min(local, 64),
                           "memory_bytes": need, "fits": need < 20 * GIB})  # fmt: skip
    return {"effective_batch_size": batch, "per_device": per_device, "recommended": ["cuda:1", "xpu:0"],
            "predicted_step_seconds": 0.0123 / len(ids)}  # fmt: skip


@contextlib.contextmanager
def fake_dashboard(port: int = 0, token: str | None = None) -> Iterator[FakeDashboard]:
    """Serve made-up values on a port of this machine as long as the block runs."""
    with FakeDashboard(port, token) as server:
        yield server


if __name__ == "__main__":
    with fake_dashboard(int(sys.argv[1]), *sys.argv[2:]) as shown:
        print(shown.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
