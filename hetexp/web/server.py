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
from hetexp.monitor.store import ACTIVE, Store
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
RECENT_SECONDS = 15.0
"""Devices without a sample for this long are not shown."""
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
        self.jobs = Jobs(self.store, self._changed)
        self._ending = threading.Event()
        self._shown_until = 0.0
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
        """Return all devices with their newest samples."""
        rows = self.store.latest(time.time() - RECENT_SECONDS)
        return [self.machine.shown(views.device(row)) for row in rows]

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
        self._show(moment, [{**as_dict(sample), "time": moment} for sample in samples])

    def _poll(self) -> None:
        """Show the samples that another process took."""
        while not self._ending.wait(POLL_SECONDS):
            try:
                rows = self.store.latest(max(self._shown_until, time.time() - RECENT_SECONDS))
            except SQLAlchemyError as error:
                _LOG.warning("%s", error)
                continue
            newest = max((row["time"] for row in rows), default=0.0)
            if newest > self._shown_until:
                self._show(newest, [row for row in rows if row["time"] == newest])

    def _show(self, moment: float, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            if moment <= self._shown_until:
                return
            self._shown_until = moment
        devices = [self.machine.shown(views.device(row)) for row in rows]
        self.hub.broadcast({"kind": "sample", "time": moment, "devices": devices})

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
