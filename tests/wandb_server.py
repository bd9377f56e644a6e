"""W&B's server, as far as W&B's own clients ask it."""

from __future__ import annotations

import gzip
import json
from collections import ChainMap
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """As much of W&B's server as `wandb sync` and a run online need."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: list[dict[str, Any]] = []
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.artifacts: list[str] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a client that was killed with its connection open."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Return the data of a GraphQL request; None refuses it."""
        text, variables = asked["query"], asked.get("variables") or {}
        data: dict[str, Any] = {}
        if "serverInfo" in text:
            data["serverInfo"] = {"features": []}
        if "RunResumeStatus" in text:
            data["model"] = self._known(variables["name"])
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

    def _known(self, run_id: str) -> dict[str, Any]:
        """Return what a process that opens a run again gets to know about it."""
        project = {"id": "p", "name": "proj", "entity": {"id": "e", "name": "me"}}
        lines = self.history.get(run_id)
        if not lines:
            return project | {"bucket": None}
        bucket: dict[str, Any] = {"id": "b", "name": run_id, "config": "{}", "wandbConfig": '{"t": 1}'}
        bucket |= {"tags": [], "historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
        bucket |= {"historyTail": json.dumps([json.dumps(lines[-1])]), "eventsTail": "[]"}
        bucket |= {"summaryMetrics": json.dumps(dict(ChainMap(*reversed(lines))))}
        return project | {"bucket": bucket}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def do_POST(self) -> None:
        given = json.loads(self._body())
        if self.path.startswith("/graphql"):
            data = self.server.answer(given)
            self._reply({"data": data} if data is not None else {"errors": [{"message": "no"}]}, data is None)
            return
        run_id = self.path.split("/")[-2]
        lines = given.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
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
