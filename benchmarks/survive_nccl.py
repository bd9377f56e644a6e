"""Kills ranks of two cards that NCCL joins, and compares what is left with an undisturbed run.

    python benchmarks/survive_nccl.py [--kills 10] [--limit 165] [--devices cuda:0,cuda:1] [--out FOLDER]

A run of float32 and one of float64 with BatchNorm share the devices, and their ranks are killed (SIGKILL of a
random rank at a random moment; the next one once the device is back). Then both are trained undisturbed. For
each kill it prints the longest time without a step, the seconds until the device trained again and the steps
lost; for each run the largest relative difference of a loss. What hangs for 20 s is shown with the stacks of
all ranks, and ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

REPOSITORY = Path(__file__).resolve().parent.parent
HANGS_SECONDS = 20.0
LOOK_SECONDS = 0.005
BACK = re.compile(r"takes part from step")
PACE_CYCLES = 40_000_000
"""Of `torch.cuda._sleep`: some 20 ms."""


class Net(nn.Module):
    """Wide layers, whose gradients travel for a while.

    Args:
        paced_until: file that ends the pause in each pass in training.
    """

    def __init__(self, width: int, norm: bool, paced_until: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, width, bias=not norm),
            *([nn.BatchNorm1d(width)] if norm else []),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 10),
        )
        self.paced_until, self.paced = Path(paced_until), True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and self.paced and torch.is_grad_enabled():
            self.paced = not self.paced_until.exists()
            if self.paced and inputs.is_cuda:
                torch.cuda._sleep(PACE_CYCLES)
            elif self.paced:
                time.sleep(0.02)
        output: torch.Tensor = self.layers(inputs)
        return output


@dataclass
class Kill:
    """One kill, by the monotonic clock."""

    at: float
    member: int
    back: float | None = None


@dataclass
class Case:
    """A run under way."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    paced_until: Path | None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When each line of `metrics.jsonl` came, and its step."""
    kills: list[Kill] = field(default_factory=list)
    hung: bool = False

    @property
    def screen(self) -> str:
        path = self.folder / "screen.txt"
        return path.read_text(errors="replace") if path.exists() else ""


def start(name: str, options: list[str], folder: Path, paced: bool, devices: str) -> Case:
    folder.mkdir(parents=True)
    release = folder / "released"
    if not paced:
        release.touch()
    paths = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'benchmarks'}"
    environment = os.environ | {"PYTHONPATH": paths, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    environment.setdefault("NCCL_DEBUG", "WARN")
    command = [
        sys.executable,
        str(REPOSITORY / "train.py"),
        "model=custom",
        "model._target_=survive_nccl.Net",
        f"+model.paced_until={release}",
        "data=synthetic",
        "data.num_samples=4096",
        "data.num_test_samples=256",
        "data.input_shape=[256]",
        "data.num_classes=10",
        "optimizer=adamw",
        "optimizer.lr=1e-5",
        "logger=none",
        "diagram=false",
        "monitor=none",
        f"hardware.devices=[{devices}]",
        "hardware.share_devices=true",
        "strategy=ddp",
        "balancing=equal",
        "trainer.max_epochs=null",
        "trainer.global_batch_size=256",
        "fault.respawn=100",
        f"hydra.run.dir={folder / 'run'}",
        *options,
    ]
    with (folder / "screen.txt").open("wb") as screen:
        process = subprocess.Popen(
            command, cwd=folder, stdout=screen, stderr=subprocess.STDOUT, env=environment
        )
    case = Case(name, folder, process, release if paced else None)
    threading.Thread(target=follow, args=(case,), daemon=True).start()
    return case


def follow(case: Case) -> None:
    """Note when each line of the metrics file comes."""
    path, place = case.folder / "run" / "metrics.jsonl", 0
    while case.process.poll() is None:
        if path.exists():
            with path.open("rb") as file:
                file.seek(place)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            place += len(whole)
            now = time.monotonic()
            for line in whole.splitlines():
                row = json.loads(line)
                if "train/loss" in row:
                    case.arrivals.append((now, row["step"]))
        time.sleep(LOOK_SECONDS)


def ranks_of(case: Case) -> dict[int, int]:
    """Return the processes of the ranks by member: children of the launcher that write a rank's log."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            log = str((entry / "fd" / "1").readlink())
        except (OSError, ValueError, IndexError):
            continue
        match = re.search(r"/logs/rank_(\d+)\.log$", log)
        if match and parent == case.process.pid:
            found[int(match[1])] = int(entry.name)
    return found


def show_hang(case: Case) -> None:
    """Print the stacks of all ranks and the ends of their logs, and end the run."""
    case.hung = True
    print(f"\n=== {case.name} hangs: no step for {HANGS_SECONDS:g} s", flush=True)
    for member, process in ranks_of(case).items():
        os.kill(process, signal.SIGUSR1)
        time.sleep(0.5)
        names = [p.read_text().strip() for p in Path(f"/proc/{process}/task").glob("*/comm")]
        print(f"--- member {member}, process {process}, threads: {' '.join(sorted(names))}")
        for path in (
            case.folder / f"run/logs/rank_{member}.stack",
            case.folder / f"run/logs/rank_{member}.log",
        ):
            if path.exists():
                print(f"--- {path.name}\n{path.read_text(errors='replace')[-5000:]}")
    show_files(case)
    case.process.kill()


def show_files(case: Case) -> None:
    """Print the ends of the screen and of all logs."""
    print(f"--- screen of {case.name}\n{case.screen[-4000:]}")
    for path in sorted((case.folder / "run" / "logs").glob("*")):
        print(f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}")


def torment(case: Case, kills: int, deadline: float, seed: int) -> None:
    """Kill ranks of a run until there have been enough, then let it go at full speed."""
    dice = random.Random(seed)
    while len(case.arrivals) < 20 and case.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(dice.uniform(8.0, 9.0))
    while len(case.kills) < kills and time.monotonic() < deadline and case.process.poll() is None:
        ranks = ranks_of(case)
        if len(ranks) != 2:
            time.sleep(0.05)
            continue
        member = dice.choice(sorted(ranks))
        kill = Kill(time.monotonic(), member)
        os.kill(ranks[member], signal.SIGKILL)
        case.kills.append(kill)
        while kill.back is None and case.process.poll() is None and time.monotonic() < deadline:
            if len(BACK.findall(" ".join(case.screen.split()))) >= len(case.kills):
                kill.back = time.monotonic()
            if time.monotonic() - max(case.arrivals[-1][0], kill.at) > HANGS_SECONDS:
                show_hang(case)
                return
            time.sleep(LOOK_SECONDS)
        time.sleep(dice.uniform(3.0, 5.0))
    assert case.paced_until is not None
    case.paced_until.touch()


def report(case: Case, reference: Case) -> None:
    """Print what became of a tormented run."""
    lines = [row for row in _rows(case) if "train/loss" in row]
    steps = [row["step"] for row in lines]
    print(
        f"\n=== {case.name}: exit code {case.process.poll()}, {len(steps)} log lines, last step {steps[-1:]}"
    )
    twice = len(steps) - len(set(steps))
    print(f"in order: {steps == sorted(steps)}, lines twice: {twice}")
    summary = _summary(case)
    failures = summary.get("failures", [])
    for number, kill in enumerate(case.kills):
        end = (kill.back or kill.at + 30.0) + 1.0
        times = [at for at, _ in case.arrivals if kill.at - 1.0 <= at <= end]
        gaps = [(b - a, a) for a, b in zip(times, times[1:], strict=False)]
        pause = max((gap for gap, a in gaps if a <= kill.at + 1.5), default=float("nan"))
        joins = max((gap for gap, a in gaps if a > kill.at + 1.5), default=float("nan"))
        failure = failures[number] if number < len(failures) else {}
        back = f"{kill.back - kill.at:.2f}" if kill.back else "not"
        print(
            f"kill {number:2d} member {kill.member:3d}: lost {failure.get('steps_lost')} steps, "
            f"pause {pause:.2f} s (by the launcher {failure.get('recovered_s') or float('nan'):.2f} s), "
            f"back after {back} s, pause when it joined {joins:.2f} s"
        )
    expected = {row["step"]: row["train/loss"] for row in _rows(reference) if "train/loss" in row}
    differences = {
        row["step"]: abs(row["train/loss"] / expected[row["step"]] - 1.0)
        for row in lines
        if row["step"] in expected
    }
    # A line is a mean over steps. What a killed rank had summed up of them is lost, and the line lacks it.
    broken = {next((step for at, step in case.arrivals if at > kill.at), 0) for kill in case.kills}
    rest = {step: difference for step, difference in differences.items() if step not in broken}
    worst = max(rest.items(), key=lambda item: item[1], default=(0, 0.0))
    within = max((differences.get(step, 0.0) for step in broken), default=0.0)
    missing = sorted(set(expected) - set(steps))
    print(
        f"largest relative difference of {len(rest)} losses: {worst[1]:.2e} at step {worst[0]}, of the lines "
        f"within which a rank was killed: {within:.2e}; missing {missing[:5]}"
    )
    print(f"backend {summary.get('comm')}, status {summary.get('status')}, error {summary.get('error')}")
    for kind in (
        "have ended after",
        "is built:",
        "takes part",
        "was lost at",
        "did not form",
        "did not come",
    ):
        print("\n".join(_matching(case, kind)))
    if case.process.poll() != 0 or missing:
        show_files(case)


def _matching(case: Case, kind: str) -> list[str]:
    texts = [
        path.read_text(errors="replace") for path in sorted((case.folder / "run/logs").glob("rank_*.log"))
    ]
    return [line[:220] for text in (*texts, case.screen) for line in text.splitlines() if kind in line][:24]


def _rows(case: Case) -> list[dict[str, Any]]:
    path = case.folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _summary(case: Case) -> dict[str, Any]:
    path = case.folder / "run" / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return summary


def check_flag() -> None:
    """Print whether a small copy from page-locked memory reads it when the device comes to the copy."""
    if not torch.cuda.is_available():
        return
    from hetexp.comm.connections.revocation import Revocation

    for when in ("before", "after"):
        revocation = Revocation()
        revocation.native = True
        torch.cuda._sleep(1_000_000)
        revocation.snapshot(torch.device("cuda"))
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        if when == "before":
            seen = revocation.snapshot(torch.device("cuda"))
            revocation.revoke()  # the copy is queued, and the device has not come to it
        else:
            revocation.revoke()
            seen = revocation.snapshot(torch.device("cuda"))
        assert seen is not None
        torch.cuda.synchronize()
        print(f"flag set {when} the device comes to its copy: seen {bool(seen)} (must be True)", flush=True)


def wait_for(cases: list[Case], deadline: float) -> None:
    """Wait for the ends of runs; one that has not ended by the deadline is shown and killed."""
    for case in cases:
        try:
            case.process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{case.name} has not ended: step {case.arrivals[-1:]}")
            show_hang(case)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--limit", type=float, default=165.0)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    began = time.monotonic()
    folder = (options.out or Path(tempfile.mkdtemp(prefix="survive-"))).absolute()
    print(f"torch {torch.__version__}, folder {folder}", flush=True)
    check_flag()
    width = f"+model.width={options.width}"
    kinds = {
        "float32": ["trainer.precision=float32", "trainer.log_every=1", "+model.norm=false"],
        "float64": ["trainer.precision=float64", "trainer.log_every=4", "+model.norm=true"],
    }
    words = {
        name: [*extra, width, f"trainer.max_steps={options.steps}", *options.more]
        for name, extra in kinds.items()
    }
    killed = [
        start(f"{name}-killed", given, folder / name / "killed", True, options.devices)
        for name, given in words.items()
    ]
    threads = [
        threading.Thread(
            target=torment, args=(case, options.kills, began + options.limit - 55.0, options.seed + number)
        )
        for number, case in enumerate(killed)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"killing ended after {time.monotonic() - began:.0f} s", flush=True)
    wait_for(killed, began + options.limit - 25.0)
    undisturbed = [
        start(f"{name}-undisturbed", given, folder / name / "undisturbed", False, options.devices)
        for name, given in words.items()
    ]
    wait_for(undisturbed, began + options.limit)
    for case, reference in zip(killed, undisturbed, strict=True):
        code, count = reference.process.poll(), len(_rows(reference))
        print(f"\n{reference.name}: exit code {code}, {count} lines")
        if code != 0:
            show_files(reference)
        report(case, reference)
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
