"""Weights & Biases, offline by default, and never able to stop or delay the training.

All calls into wandb run on one background thread, and each wait for it has a limit. The first error ends the
tracking of this run with one warning; `metrics.jsonl` still has the metrics. `finish` leaves no process
behind: `wandb.teardown()` ends wandb's service, which is killed if that hangs.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat

from hetexp.core.files import temporary_folder, write_json
from hetexp.logger.background import BackgroundCalls
from hetexp.logger.base import Logger, RunInfo, plain_value, run_files

if TYPE_CHECKING:
    from wandb import Run

STEP_METRIC = "trainer/step"
"""Name of W&B's horizontal axis: the optimizer step."""

ARTIFACT_TYPE = "run-files"

_LOG = logging.getLogger(__name__)

_MOST_WAITING = 1_000
"""Most log calls that may wait for the service; a faster training is slowed to its pace."""

_STALL_SECONDS = 5.0
"""Longest time for so many waiting calls, after which W&B is given up."""

_LONGEST_FOLDER = 60
"""Longest path of a folder, in bytes, to which the names of the service's sockets can be added."""

_LEFTOVERS = (
    "WANDB_RUN_ID",
    "WANDB_RUN_STORAGE_ID",
    "WANDB_RESUME",
    "WANDB_RESUME_FROM",
    "WANDB_FORK_FROM",
    "WANDB_SWEEP_ID",
    "WANDB_SWEEP_PARAM_PATH",
    "WANDB_LAUNCH",
    "WANDB_LAUNCH_CONFIG_PATH",
    "WANDB_SERVICE",
)
"""Variables that would give this run another identity, or attach it to another process's service."""

_AGENT = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
"""Variables of the agent of a W&B sweep: the run, the sweep, and a file with the run's parameters."""

_own_services: set[str] = set()
"""Every `WANDB_SERVICE` of a service of this process; such a value is never restored."""


class WandbLogger(Logger):
    """Logs a run to Weights & Biases; its files are in `<run_dir>/wandb`.

    The run's id is `RunInfo.run_id`, whatever the environment says. Only if the agent of a W&B sweep
    has started the command, the sweep gets the run, by the agent's id. Metrics keep their own axis
    (`trainer/step`), so a resumed run needs no increasing W&B step. At the end the small files of the run
    folder become the artifact `<run id>-run`, and a run whose timings must not be used is tagged `invalid`.

    Args:
        project: W&B project.
        entity: team or user; `None`: W&B's default.
        mode: mode of W&B: `offline` (files only), `online` or `disabled`; `None`: `WANDB_MODE`, else
            `offline`, and `online` under the agent of a W&B sweep.
        init_timeout_seconds: longest wait for the run to open; then it trains without W&B.
        finish_timeout_seconds: longest wait at the end for remaining data to be written or sent.
    """

    def __init__(
        self,
        project: str = "hetexp",
        entity: str | None = None,
        mode: Literal["offline", "online", "disabled"] | None = None,
        init_timeout_seconds: PositiveFloat = 30.0,
        finish_timeout_seconds: PositiveFloat = 30.0,
    ) -> None:
        self.project = project
        self.entity = entity
        self.mode = mode
        self.init_timeout_seconds = init_timeout_seconds
        self.finish_timeout_seconds = finish_timeout_seconds
        self._calls: BackgroundCalls | None = None
        self._latest = threading.Event()
        self._run: Run | None = None
        self._agent_run: str | None = None
        self._run_dir = Path()
        self._temporary: Path | None = None
        self._service: subprocess.Popen[bytes] | None = None
        self._owns_service = True
        self._inherited_service: str | None = None
        self._given_up = False
        self._lock = threading.Lock()

    def start(self, run: RunInfo) -> None:
        """Open the run; waits at most `init_timeout_seconds`."""
        self._agent_run = _agent_run(run)
        usual = "offline" if self._agent_run is None else "online"
        mode = self.mode or os.environ.get("WANDB_MODE") or usual
        if mode == "disabled":
            return
        self._run_dir = run.run_dir
        self._calls = BackgroundCalls("hetexp-wandb", self._on_error)
        opened = self._calls.submit(lambda: self._open(run, mode))
        if not opened.wait(self.init_timeout_seconds):
            self._give_up(f"it did not start within {self.init_timeout_seconds:g} s")

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Pass the metrics to the background thread, without `None` values.

        Returns at once, unless too many calls wait already.
        """
        if self._calls is None or self._given_up:
            return
        if self._calls.num_waiting >= _MOST_WAITING and not self._latest.wait(_STALL_SECONDS):
            self._give_up(f"its service has left {_MOST_WAITING} log calls waiting")
            return
        values = {name: plain_value(value) for name, value in metrics.items() if value is not None}
        values[STEP_METRIC] = step
        self._latest = self._calls.submit(lambda: self._send(values))

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Log the lines that the server lacks of a run that other processes have begun; offline, all lines.

        W&B writes its file in blocks, so that the last lines of a killed process are missing. Replaced files
        move to `<run_dir>/wandb/replaced`. Files of other run ids in the same folder stay.
        """
        if self._calls is None or self._given_up:
            return
        rows = list(lines)
        self._latest = self._calls.submit(lambda: self._send_again(rows))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the run and end wandb's processes, within little more than `finish_timeout_seconds`."""
        if self._calls is None:
            return
        calls, self._calls = self._calls, None
        # After a failure there is nothing to send, and one wait for a call that hangs is enough.
        patience = min(5.0, self.finish_timeout_seconds) if self._given_up else self.finish_timeout_seconds
        closed = calls.submit(lambda: self._close(summary, exit_code))
        if not closed.wait(patience):
            self._give_up(f"it did not finish within {self.finish_timeout_seconds:g} s")
        self._end_service()
        calls.close(timeout_seconds=1.0)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _open(self, run: RunInfo, mode: str) -> None:
        wandb = sys.modules.get("wandb")
        # A run that other code of this process has opened shares its service, which must not be ended here.
        self._owns_service = getattr(wandb, "run", None) is None
        self._temporary = temporary_folder() if self._owns_service else None
        # The path of a socket in this folder must not exceed the kernel's limit.
        if self._temporary is not None and len(str(self._temporary).encode()) <= _LONGEST_FOLDER:
            folder, usual = str(self._temporary), tempfile.gettempdir()
            with changed_environment({"TMPDIR": folder}):
                tempfile.tempdir = folder
                try:
                    self._open_run(run, mode)
                finally:
                    tempfile.tempdir = usual
        else:
            self._open_run(run, mode)

    def _open_run(self, run: RunInfo, mode: str) -> None:
        import wandb

        self._inherited_service = os.environ.get("WANDB_SERVICE")
        with changed_environment(self._variables(), kept="WANDB_SERVICE"):  # wandb's children need that one
            opened = wandb.init(
                project=self.project,
                entity=self.entity,
                id=self._agent_run or run.run_id,
                name=_short(run.name),
                group=run.group,
                job_type=run.job_type,
                tags=[tag[:64] for tag in run.tags if tag],  # W&B refuses the run for one longer tag
                dir=str(run.run_dir),
                config=_plain(run.config),
                mode=mode,  # type: ignore[arg-type]  # WANDB_MODE may hold anything; wandb checks it
                resume="allow",
                reinit="create_new",
                save_code=False,
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, init_timeout=self.init_timeout_seconds
                ),
            )
            self._service = _service_process()
            if self._owns_service:
                _own_services.add(os.environ.get("WANDB_SERVICE", ""))
        self._run = opened
        opened.define_metric(STEP_METRIC)
        opened.define_metric("*", step_metric=STEP_METRIC)

    def _variables(self) -> dict[str, str | None]:
        """Return variables that keep wandb from other runs, from questions and from sending error reports."""
        hidden = dict.fromkeys(_LEFTOVERS if self._owns_service else ())
        if self._agent_run is not None:
            hidden = {name: value for name, value in hidden.items() if name not in _AGENT}
        reports = os.environ.get("WANDB_ERROR_REPORTING", "false")  # the user's own choice stays
        return {**hidden, "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": reports}

    def _send(self, values: dict[str, Any]) -> None:
        if self._run is not None and not self._given_up:
            self._run.log(values)

    def _send_again(self, lines: list[Mapping[str, Any]]) -> None:
        run = self._run
        if run is None or self._given_up:
            return
        current = Path(run.dir).parent
        before = [path for path in current.parent.glob(f"*run-*-{run.id}") if path != current]
        if run.settings.mode == "offline":
            for path in before:
                path.parent.joinpath("replaced").mkdir(exist_ok=True)
                path.rename(path.parent / "replaced" / path.name)
            last_step = -1
        else:
            last_step = run.summary.get(STEP_METRIC, -1)  # type: ignore[no-untyped-call]
        for line in lines:
            if line["step"] > last_step:
                values = {name: plain_value(value) for name, value in line.items() if value is not None}
                self._send({STEP_METRIC: values.pop("step"), **values})

    def _close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        import wandb

        try:
            if self._run is not None:
                self._run.summary.update(_plain(summary))
                if summary.get("valid") is False:
                    self._run.tags = (*(self._run.tags or ()), "invalid")
                if not self._given_up:
                    self._log_files(self._run, summary)
                self._run.finish(exit_code=exit_code)
        finally:
            if self._owns_service:
                self._service = self._service or _service_process()
                wandb.teardown(exit_code=exit_code)

    def _log_files(self, run: Run, summary: Mapping[str, Any]) -> None:
        """Log the small files of the run folder as one artifact; they must stay in place until it is sent."""
        import wandb

        try:
            artifact = wandb.Artifact(f"{run.id}-run", type=ARTIFACT_TYPE)
            for path in run_files(self._run_dir):
                artifact.add_file(str(path), policy="immutable")
            if summary:  # it comes into the run folder only after all trackers are closed
                path = Path(run.dir).with_name("summary.json")
                write_json(path, summary)
                artifact.add_file(str(path), policy="immutable")
            run.log_artifact(artifact)
        except Exception as error:  # the metrics matter more than the files
            _LOG.warning("Weights & Biases did not take the files of %s: %s", self._run_dir, error)

    def _end_service(self) -> None:
        """Kill a service that `wandb.teardown` has not ended, and reset wandb for a next run."""
        if not self._owns_service:
            return
        service = self._service or _service_process()
        if service is not None and service.returncode is None:
            _kill(service)
            # teardown may already run, and may wait for a lock that a hanging call holds.
            late = BackgroundCalls("hetexp-wandb-teardown", lambda error: None)
            late.submit(teardown)
            late.close(timeout_seconds=2.0)
        inherited = self._inherited_service
        if inherited is not None and inherited not in _own_services:
            os.environ["WANDB_SERVICE"] = inherited

    def _on_error(self, error: BaseException) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name == "wandb":
            self._give_up("it is not installed (pip install wandb, or logger=none)")
            return
        text = next(iter(str(error).splitlines()), "")
        self._give_up(f"it raised {type(error).__name__}" + (f": {text}" if text else ""))

    def _give_up(self, reason: str) -> None:
        with self._lock:
            first, self._given_up = not self._given_up, True
        if first:
            _LOG.warning(
                "Weights & Biases is off for the rest of this run: %s. The training goes on, its metrics are "
                "in metrics.jsonl; what W&B had written is in %s.",
                reason,
                self._run_dir / "wandb",
            )


def _agent_run(run: RunInfo) -> str | None:
    """Return the run's id at the W&B sweep whose agent has started this command; `None`: no agent has.

    Variables that were left behind name no file of that run's parameters. Jobs of a Hydra sweep are several
    runs, and the agent's is one.
    """
    run_id, sweep, parameters = (os.environ.get(name, "") for name in _AGENT)
    names_run = run_id != "" and Path(parameters).name == f"config-{run_id}.yaml"
    is_agents = names_run and sweep != "" and run.job_type != "sweep" and Path(parameters).is_file()
    return run_id if is_agents else None


@contextlib.contextmanager
def changed_environment(changes: Mapping[str, str | None], kept: str | None = None) -> Iterator[None]:
    """Set variables of this process, and restore them afterwards; `None` removes a variable.

    Args:
        kept: a variable that is not restored.
    """
    before = {name: os.environ.get(name) for name in changes if name != kept}
    _set_variables(changes)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _short(name: str) -> str:
    """Return a name of at most 128 characters: W&B refuses longer names when they are sent."""
    return name if len(name) <= 128 else f"{name[:60]}…{name[-67:]}"


def _plain(value: Any) -> Any:
    """Return configuration values in a form that W&B stores: infinities, NaN and unknown objects as text.

    W&B writes NaN in a configuration as null, like a value that was not set.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    plain = plain_value(value)
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain


def _service_process() -> subprocess.Popen[bytes] | None:
    """Return the wandb-core process that this process has started, `None` if there is none."""
    try:
        from wandb.sdk import wandb_setup

        # wandb has no public handle; without this one only `wandb.teardown()` remains.
        process = wandb_setup._singleton._connection._proc._process  # type: ignore[union-attr]
    except (ImportError, AttributeError):
        return None
    return process if isinstance(process, subprocess.Popen) else None


def _kill(service: subprocess.Popen[bytes]) -> None:
    """End the service and its helpers: by SIGTERM, since it may still write, then by SIGKILL.

    wandb starts it in a new session. Its process group has only the service and its system-metrics helper,
    which would outlive a killed service for seconds.
    """
    if os.name != "posix":
        service.kill()
        service.wait(5.0)
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(service.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.wait(1.0)


def teardown() -> None:
    """End wandb's service."""
    import wandb

    wandb.teardown()
