"""The application of the dashboard: its threads, processes and routes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

import hetexp
from hetexp.core.config import MonitorConfig
from hetexp.core.errors import HetexpError
from hetexp.monitor.sample import Sample, as_dict
from hetexp.monitor.service import Service
from hetexp.monitor.store import ACTIVE, KEPT_SECONDS, Store, with_ages
from hetexp.monitor.tables import UNREACHABLE
from hetexp.web import allowed, views
from hetexp.web.access import Access, Guard
from hetexp.web.checker import Checker
from hetexp.web.devices import Machine
from hetexp.web.job import environment
from hetexp.web.jobs import Jobs
from hetexp.web.live import Hub
from hetexp.web.refused import RefusedError, detail
from hetexp.web.routes import router

STATIC = Path(__file__).parent / "static"
FRESH_SECONDS = 15.0
"""A device without a sample for this long is stale."""
POLL_SECONDS = 0.25
_LOG = logging.getLogger(__name__)


class Dashboard:
    """The state of the server: database, trainings, devices and clients.

    Args:
        config: configuration of the monitor, with its database.
        access: the checks of requests.
        root: working folder of trainings.
    """

    def __init__(self, config: MonitorConfig, access: Access, root: Path) -> None:
        self.config, self.access, self.root = config, access, root
        self.store = Store(config.url)
        self.hub, self.machine = Hub(), Machine()
        self.checker = Checker(root, environment())
        self.jobs = Jobs(self.store, self._changed, root)
        self._ending = threading.Event()
        self._newest: dict[str, dict[str, Any]] = {}
        """Key of a device → its newest sample that clients have got."""
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._sample, name="sampler", daemon=True),
            threading.Thread(target=self._poll, name="samples", daemon=True),
            threading.Thread(target=allowed.defaults, name="options", daemon=True),  # takes seconds once
        ]

    async def start(self) -> None:
        """Start to follow trainings and devices."""
        self.hub.bind()
        await asyncio.to_thread(self.jobs.start)
        for thread in self._threads:
            thread.start()

    async def close(self) -> None:
        """End threads and processes of the server; trainings go on."""
        self.hub.close()
        self._ending.set()
        await self.checker.close()
        await asyncio.to_thread(self._join)

    def devices(self) -> list[dict[str, Any]]:
        """Return the devices of all machines with their newest samples, those of this machine first."""
        now = time.time()
        rows = {row["key"]: row for row in self.store.latest(now - KEPT_SECONDS)}
        with self._lock:
            rows |= {key: row for key, row in self._newest.items() if self._is_news(row, rows.get(key))}
        shown = [views.device(row) for row in with_ages([*rows.values()], now, self._fresh)]
        return [self.machine.shown(device) for device in sorted(shown, key=lambda one: not one["here"])]

    def training(self, row: dict[str, Any], with_log: bool = False) -> dict[str, Any]:
        """Return a training as the API shows it."""
        return views.training(row, self.jobs.waits_for(row["id"]), with_log)

    def first(self) -> list[dict[str, Any]]:
        """Return the first messages of a new WebSocket."""
        now: list[dict[str, Any]] = [{"kind": "sample", "time": time.time(), "devices": self.devices()}]
        active = self.store.trainings(ACTIVE)
        return now + [{"kind": "training", "training": self.training(row)} for row in reversed(active)]

    def _changed(self, row: dict[str, Any]) -> None:
        self.hub.broadcast({"kind": "training", "training": self.training(row)})

    def _sample(self) -> None:
        """Sample all devices, unless another process of this machine samples them."""
        Service(self.config, seen=self._seen).run(self._ending)

    def _seen(self, moment: float, samples: Sequence[Sample]) -> None:
        self._show([{**as_dict(sample), "time": moment} for sample in samples])

    def _poll(self) -> None:
        """Show the samples that other processes took, of this machine and of others."""
        while not self._ending.wait(POLL_SECONDS):
            try:
                self._show(self.store.latest(time.time() - self._fresh))
            except SQLAlchemyError as error:
                _LOG.warning("%s", error)

    def _show(self, rows: list[dict[str, Any]]) -> None:
        """Send all devices to the clients if any of these samples is newer than what they have got."""
        with self._lock:
            news = [row for row in rows if self._is_news(row, self._newest.get(row["key"]))]
            self._newest |= {row["key"]: row for row in news}
        if news:
            moment = max(row["time"] for row in news)
            self.hub.broadcast({"kind": "sample", "time": moment, "devices": self.devices()})

    @staticmethod
    def _is_news(row: dict[str, Any], known: dict[str, Any] | None) -> bool:
        return known is None or row["time"] > known["time"]

    @property
    def _fresh(self) -> float:
        return max(FRESH_SECONDS, 3 * self.config.interval_seconds)

    def _join(self) -> None:
        self.jobs.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10.0)
        self.store.close()


def make_app(dashboard: Dashboard) -> Any:
    """Return the ASGI application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await dashboard.start()
        try:
            yield
        finally:
            await dashboard.close()

    app = FastAPI(
        title="hetexp",
        version=hetexp.__version__,
        description="Devices and trainings of this machine. Times are seconds since the epoch; unknown "
        "values are null.",
        docs_url=None,  # these pages would load their scripts from other servers
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
        lifespan=lifespan,
    )
    app.state.dashboard = dashboard
    app.include_router(router)
    _add_errors(app)
    if (STATIC / "index.html").is_file():

        @app.get("/", include_in_schema=False)
        def page() -> FileResponse:
            return FileResponse(STATIC / "index.html")

        app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return Guard(app, dashboard.access)


def _add_errors(app: FastAPI) -> None:
    """Give every refusal the same form."""

    @app.exception_handler(RefusedError)
    async def _refused(_: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse(detail(error.problems), error.status)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(detail(_sentence(problem) for problem in error.errors()), 422)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}."
        return JSONResponse(detail([(None, message)]), error.status_code, headers=error.headers)

    @app.exception_handler(SQLAlchemyError)
    async def _database(_: Request, error: SQLAlchemyError) -> JSONResponse:
        _LOG.warning("%s", error)
        return JSONResponse(detail([(None, f"{UNREACHABLE} now.")]), 503)

    @app.exception_handler(HetexpError)
    async def _hetexp(_: Request, error: HetexpError) -> JSONResponse:
        return JSONResponse(detail([(None, str(error))]), 409)


def _sentence(error: dict[str, Any]) -> tuple[str | None, str]:
    """Return key and message of pydantic's error of a request."""
    place = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    key = ".".join(place) or "body"
    if error["type"] == "missing":
        return key, f"`{key}` must be given, but is missing."
    if error["type"] == "extra_forbidden":
        return key, f"`{key}` is not a key of this request."
    if error["type"] == "json_invalid":
        return "body", "`body` must be JSON, but cannot be read as it."
    said = str(error["msg"]).replace("Input should be", "must be").replace("should", "must")
    return key, f"`{key}` {said if said.startswith('must') else f'is wrong: {said}'}."
