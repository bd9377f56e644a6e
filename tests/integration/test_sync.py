"""`hetexp sync` with W&B's own command, against a server on this machine that takes what comes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from wandb_files import without_wandb_variables

MAKE_RUNS = """
import json, sys
from pathlib import Path
from hetexp.logger.base import RunInfo
from hetexp.logger.wandb import WandbLogger

for run_id, steps in json.loads(sys.argv[2]).items():
    run_dir = Path(sys.argv[1]) / run_id
    run_dir.mkdir(parents=True)
    (run_dir / "plan.json").write_text(json.dumps({"run_id": run_id}))
    logger = WandbLogger(project="proj", mode="offline")
    logger.start(RunInfo(run_id, run_dir, run_id, "my-sweep", "sweep", ("emulated",), {}))
    for step in steps:
        logger.log({"train/loss": 1 / step}, step)
    logger.finish({"status": "completed"}, 0)
    (run_dir / "summary.json").write_text("{}")
"""
STEPS = {"first": [1, 2, 3, 4], "refused": [1, 2], "resumed": [3, 4, 5, 6]}


class Server(ThreadingHTTPServer):
    """As much of W&B's server as `wandb sync` needs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: list[dict[str, Any]] = []
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.artifacts: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Return the data of a GraphQL request; None refuses it."""
        text, variables = asked["query"], asked.get("variables") or {}
        data: dict[str, Any] = {}
        if "serverInfo" in text:
            data["serverInfo"] = {"features": []}
        if "upsertBucket" in text:
            if variables["name"] == "refused":
                return None
            self.runs.append(variables)
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": variables["name"], "config": "{}", "historyLineCount": 0}
            data["upsertBucket"] = {"bucket": bucket | {"project": project}, "inserted": True}
        if "createRunFiles" in text:
            urls = [{"name": name, "uploadUrl": f"{self.address}/{name}"} for name in variables["files"]]
            data["createRunFiles"] = {"runID": "b", "uploadHeaders": [], "files": urls}
        if "createArtifact(" in text:
            self.artifacts.append(variables["input"]["artifactCollectionName"])
            artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "a"}}}
            data["createArtifact"] = {"artifact": artifact}
        return data


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def do_POST(self) -> None:
        told = json.loads(self._body())
        if self.path.startswith("/graphql"):
            data = self.server.answer(told)
            self._reply({"data": data} if data is not None else {"errors": [{"message": "no"}]}, data is None)
            return
        run_id = self.path.split("/")[-2]
        lines = told.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        self.server.history.setdefault(run_id, []).extend(map(json.loads, lines))
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, value: dict[str, Any], refused: bool = False) -> None:
        body = json.dumps(value).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def test_each_point_of_each_run_is_sent_once(server: Server, tmp_path: Path) -> None:
    """One run is refused, the others are sent; asked again, only that one is tried."""
    environment = without_wandb_variables() | {
        "HOME": str(tmp_path),
        "WANDB_BASE_URL": server.address,
        "WANDB_API_KEY": "0" * 40,
    }
    environment.setdefault("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )

    made = call("-c", MAKE_RUNS, str(tmp_path / "runs"), json.dumps(STEPS))
    assert made.returncode == 0, made.stderr
    done = call("-m", "hetexp.cli", "sync", "runs", "--timeout", "60")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"  {tmp_path / 'runs' / 'refused'}", done.stderr
    assert done.stdout.count("synced  ") == 2
    sent = {
        run_id: [(line["trainer/step"], line["train/loss"]) for line in lines]
        for run_id, lines in server.history.items()
    }
    # Steps 3 and 4 are of two runs, and both have them.
    assert sent == {name: [(s, 1 / s) for s in STEPS[name]] for name in ("first", "resumed")}
    first = next(run for run in server.runs if run["name"] == "first")
    assert (first["project"], first["groupName"], first["jobType"]) == ("proj", "my-sweep", "sweep")
    assert first["tags"] == ["emulated"]
    assert sorted(server.artifacts) == ["first-run", "resumed-run"]

    again = call("-m", "hetexp.cli", "sync", "runs", "--timeout", "60")
    assert again.returncode == 1 and "synced  " not in again.stdout
    assert {run_id: len(lines) for run_id, lines in server.history.items()} == {"first": 4, "resumed": 4}
