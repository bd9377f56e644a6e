"""The addresses of the API. `docs/how-to/dashboard.md` shows them with examples."""

from __future__ import annotations

import time
from asyncio import to_thread
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response, WebSocket
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.requests import HTTPConnection

from hetexp.core.errors import must_be
from hetexp.core.sweep.folder import new_name
from hetexp.monitor.history import MOST_POINTS
from hetexp.plan.planner import run_id
from hetexp.web import allowed, schemas, views
from hetexp.web.access import COOKIE, REPORT_POLICY
from hetexp.web.devices import emulated_cards
from hetexp.web.job import RUNS, Job
from hetexp.web.jobs import report_of
from hetexp.web.refused import RefusedError

_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Problems}
    for status in (400, 401, 403, 404, 405, 409, 413, 415, 421, 422, 429, 503)
}
_JSON: dict[str, Any] = {"requestBody": {"content": {"application/json": {"schema": {}}}}}
"""OpenAPI's entry for requests without a body, which need the content type of JSON (`hetexp.web.access`)."""
router = APIRouter(prefix="/api/v1", responses=_REFUSALS)
TrainingId = Annotated[str, Path(max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
LONGEST_HISTORY = 31 * 86400.0
"""Oldest samples that the database keeps, in seconds ago."""


def _dashboard(connection: HTTPConnection) -> Any:
    return connection.app.state.dashboard


Served = Annotated[Any, Depends(_dashboard)]
"""`hetexp.web.server.Dashboard`, which this module cannot import."""


@router.get("/session")
def session(dashboard: Served) -> schemas.Session:
    """Show whether the server needs a token; this request alone needs none."""
    return schemas.Session(token_required=dashboard.access.token is not None)


@router.post("/session", openapi_extra=_JSON)
def open_reports(dashboard: Served, request: Request, response: Response) -> schemas.Session:
    """Set a cookie for reports, which are links and carry no header; other requests ignore it."""
    response.set_cookie(
        COOKIE,
        dashboard.access.cookie,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/api/v1/trainings",
    )
    return schemas.Session(token_required=dashboard.access.token is not None)


@router.get("/system/gpus", response_model=schemas.Devices)
def gpus(dashboard: Served) -> Any:
    """List all devices with their newest samples, those of this machine first."""
    return JSONResponse({"devices": dashboard.devices()})


@router.get("/system/gpus/{device_id:path}")
def gpu(dashboard: Served, device_id: Annotated[str, Path(max_length=200)]) -> schemas.Device:
    """Show one device of this machine by its id, or any by its key."""
    for device in dashboard.devices():
        if device_id == device["key"] or (device_id == device["id"] and device["here"]):
            return schemas.Device.model_validate(device)
    raise RefusedError(404, [("device_id", must_be("device_id", "a device of this machine", device_id))])


@router.get("/system/metrics", response_model=schemas.History)
def metrics(
    dashboard: Served,
    view: Literal["aggregated", "per_gpu"] = "aggregated",
    since: Annotated[str, Query(max_length=40, description="seconds ago, or ISO 8601")] = "600",
    points: Annotated[int, Query(ge=1, le=MOST_POINTS)] = 300,
) -> Any:
    """Show samples over time: means of all devices together, or of each device."""
    now = time.time()
    begin = _moment(since, now)
    facts = {row["key"]: row for row in dashboard.store.latest()}
    series = [views.series(samples, facts) for samples in dashboard.store.history(begin, now, view, points)]
    # A model of the answer would check 100,000 numbers, which takes longer than their query.
    return JSONResponse({"view": view, "since": begin, "series": series})


@router.get("/options")
async def options(dashboard: Served) -> schemas.Options:
    """List the choices of a request: options, cards to emulate, and keys to set."""
    dashboard.checker.warm()  # the next request is usually an estimate
    return await to_thread(_options, dashboard)


@router.post("/estimate")
async def estimate(dashboard: Served, request: schemas.Question) -> schemas.Estimate:
    """Predict a step on some devices: batch, memory, time, and the best of these devices."""
    groups = {"model": request.model, "data": request.data}
    overrides = {name: value for name, value in groups.items() if value is not None} | request.overrides
    words = await to_thread(_words, dashboard, overrides, request.experiment, request.gpu_ids)
    answer = await dashboard.checker.ask("estimate", words, request.gpu_ids)
    return schemas.Estimate.model_validate(answer)


@router.post("/trainings", status_code=201)
async def start(dashboard: Served, request: schemas.NewTraining) -> schemas.Training:
    """Start a training, or let it wait for its devices."""
    words = await to_thread(_words, dashboard, request.overrides, request.experiment, request.gpu_ids)
    facts = await dashboard.checker.ask("check", words, request.gpu_ids)
    folder = f"{RUNS}/{datetime.now():%Y-%m-%d}/{new_name()}"
    job = Job(
        id=run_id(dashboard.root / folder),
        root=str(dashboard.root),
        folder=folder,
        words=tuple(words),
        name=facts["name"] or allowed.named(request.overrides, request.experiment),
        monitor_url=dashboard.config.url,
        gpu_ids=tuple(request.gpu_ids),
        cards=dashboard.machine.real(request.gpu_ids),
        overrides=dict(request.overrides),
        experiment=request.experiment,
        balancing=facts["balancing"],
    )
    row = await to_thread(dashboard.jobs.add, job, facts["strategy"], facts["emulated"])
    return schemas.Training.model_validate(dashboard.training(row))


@router.get("/trainings")
def trainings(
    dashboard: Served,
    state: Annotated[list[schemas.State] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
) -> schemas.Trainings:
    """List trainings, the newest first, with those of the command line."""
    rows = dashboard.store.trainings(state, limit=limit, offset=offset)
    return schemas.Trainings.model_validate({"trainings": [dashboard.training(row) for row in rows]})


@router.get("/trainings/{training_id}")
def training(dashboard: Served, training_id: TrainingId) -> schemas.TrainingWithLog:
    """Show one training, with the end of its log."""
    return schemas.TrainingWithLog.model_validate(
        dashboard.training(_row(dashboard, training_id), with_log=True)
    )


@router.get("/trainings/{training_id}/metrics")
def training_metrics(
    dashboard: Served,
    training_id: TrainingId,
    since_step: Annotated[int, Query(ge=-1, le=2**31)] = -1,
    limit: Annotated[int, Query(ge=1, le=5000)] = 2000,
) -> schemas.Rows:
    """Show the lines of a training's log after a step."""
    return schemas.Rows(rows=views.metrics(_row(dashboard, training_id), since_step, limit))


@router.get(
    "/trainings/{training_id}/report",
    response_class=Response,  # HTMLResponse would describe refusals, which are JSON, as HTML
    responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}},
)
def report(dashboard: Served, training_id: TrainingId) -> HTMLResponse:
    """Show the report of an ended training as a page."""
    text = report_of(_row(dashboard, training_id))
    return HTMLResponse(text, headers={"content-security-policy": REPORT_POLICY})


@router.post("/trainings/{training_id}/stop", openapi_extra=_JSON)
def stop(dashboard: Served, training_id: TrainingId) -> schemas.Training:
    """Ask a training to end, as Ctrl-C does; a waiting training never starts."""
    dashboard.jobs.stop(_row(dashboard, training_id))
    return schemas.Training.model_validate(dashboard.training(_row(dashboard, training_id)))


@router.delete("/trainings/{training_id}", status_code=204)
def delete(dashboard: Served, training_id: TrainingId) -> None:
    """Forget a training that has ended; its folder stays."""
    dashboard.jobs.delete(_row(dashboard, training_id))
    dashboard.hub.broadcast({"kind": "deleted", "id": training_id})


@router.websocket("/live")
async def live(socket: WebSocket, dashboard: Served) -> None:
    """Send every sample, and every change of a training."""
    await dashboard.hub.serve(socket, dashboard.access, dashboard.first)


def _options(dashboard: Any) -> schemas.Options:
    chosen = allowed.options()
    return schemas.Options.model_validate(
        {
            "experiments": list(chosen["experiment"]),
            "models": list(chosen["model"]),
            "strategies": list(chosen["strategy"]),
            "policies": list(chosen["balancing"]),
            "data": list(chosen["data"]),
            "emulated_cards": emulated_cards(),
            "allowed_overrides": list(allowed.allowed().values()),
            "defaults": allowed.defaults(),
            "token_required": dashboard.access.token is not None,
        }
    )


def _row(dashboard: Any, training_id: str) -> dict[str, Any]:
    row: dict[str, Any] | None = dashboard.store.training(training_id)
    if row is None:
        message = must_be("training_id", "one that GET /api/v1/trainings lists", training_id)
        raise RefusedError(404, [("training_id", message)])
    return row


def _words(
    dashboard: Any, overrides: dict[str, Any], experiment: str | None, gpu_ids: list[str]
) -> list[str]:
    problems = allowed.problems_of(overrides, experiment) + dashboard.machine.problems(gpu_ids)
    if problems:
        raise RefusedError(422, problems)
    return allowed.words(overrides, experiment, gpu_ids)


def _moment(since: str, now: float) -> float:
    """Return the moment of `since`, which is a number of seconds ago or an ISO 8601 time."""
    try:
        ago = float(since)
    except ValueError:
        try:
            moment = datetime.fromisoformat(since.replace("Z", "+00:00"))
            ago = now - (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
        except (ValueError, OverflowError):
            ago = -1.0
    if not 0 < ago <= LONGEST_HISTORY:
        accepted = f"seconds ago from 0 to {LONGEST_HISTORY:g}, or a moment as 2026-01-31T12:00:00Z"
        raise RefusedError(422, [("since", must_be("since", accepted, since))])
    return now - ago
