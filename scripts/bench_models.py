"""Models that nobody here wrote: hetexp beside plain torch and Accelerate, in turn, in one run.

    python scripts/bench_models.py --json models.json
    python scripts/bench_models.py --only resnet50,gpt2 --workers 0 --ways plain,launch --seconds 2
    python scripts/bench_models.py --cards 2 --only resnet50,resnet50_sync,vit --compile no
    python scripts/bench_models.py --device cpu --tiny
    python scripts/bench_models.py --show one.json,two.json

Ways: `plain` is a script for torch alone (DDP on several ranks), `accelerate` the same for Accelerate,
`launch` the same for `hetexp launch`, `train` the same model and data by configuration. All ranks are forked
from one process that has imported everything. With more ranks than cards, ranks share a card: then plain
torch exchanges by gloo, and Accelerate is left out. Speeds are medians of the log lines after the first
steps; memory is the peak of torch's allocator. The first run of `plain` decides how many steps `--seconds`
are. What a checkpoint costs: `benchmarks/bench_checkpoint.py --device cuda:0 --parameters 124`.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchlib.options import fill, names_of, numbers, parser_of
from benchlib.runs import SCRIPTS, free_port, keep, lines_of, start_in
from benchlib.tables import figure, median_of, ratio, table
from ddp_bench.task import QUIET
from models_bench.loops import LOOPS, Job, run_rank
from models_bench.tasks import TASKS
from rich.console import Console

from hetexp.commands.launch import make, parse
from hetexp.hardware.selection.devices import CARD_THREADS
from hetexp.launch.launcher import launch
from hetexp.launch.processes.process import PRELOADED

WAYS = (*LOOPS, "launch", "train")
IMPORTED = ("models_bench.loops", "timm", "transformers", "accelerate")
"""Not diffusers: it asks CUDA while it is imported, and then no forked process could use a card."""
OTHERS = tuple(name for name in TASKS if name not in ("gpt", "convnet"))
"""Models that are not hetexp's own."""
COMPILED = ("resnet50", "gpt2")
COMPILE = {"no": (False,), "yes": (True,), "both": (False, True)}
SHORTEST, LONGEST = 20, 100
"""Steps of a measurement."""
LIMIT_SECONDS = 240.0
GIB = 2**30
Row = dict[str, Any]


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    rows: list[Row] = []
    if arguments.show:
        rows = [row for path in arguments.show for row in json.loads(Path(path).read_text("utf-8"))]
        print(page(rows))
        return
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *IMPORTED])
    with tempfile.TemporaryDirectory(prefix="bench_models_") as temporary:
        os.environ["HETEXP_HOME"] = str(Path(temporary, "home"))  # a user's runs must not find these figures
        for number in range(arguments.rounds):
            for job in jobs_of(arguments):
                for way in ways_of(job, arguments.ways):
                    folder = Path(tempfile.mkdtemp(dir=temporary))
                    measure(way, replace(job, folder=str(folder)), rows, arguments, number)
                    keep(arguments.json, rows)
    print(page(rows))


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """Return what is measured, but for the steps and the folder."""
    on_card = arguments.device == "cuda"
    jobs = []
    for model in arguments.only:
        if TASKS[model].sync_batch_norm and arguments.cards == 1:
            continue  # nothing to synchronise
        for compiled in COMPILE[arguments.compile]:
            if compiled and model not in COMPILED:
                continue
            jobs += [
                Job(
                    model=model,
                    tiny=arguments.tiny,
                    on_card=on_card,
                    num_cards=torch.cuda.device_count() if on_card else 0,
                    world_size=arguments.cards,
                    local_batch=arguments.batch or (4 if arguments.tiny else TASKS[model].batch),
                    workers=workers,
                    compiled=compiled,
                    precision=arguments.precision,
                    steps=0,
                    log_every=arguments.log_every,
                    folder="",
                    first_card=arguments.first_card,
                )
                for workers in arguments.workers
            ]
    return jobs


def ways_of(job: Job, wanted: list[str]) -> list[str]:
    """Return the ways that can run a job: Accelerate gives each rank a card of its own."""
    shares = job.on_card and job.num_cards < job.world_size
    return [way for way in wanted if not (way == "accelerate" and shares)]


def measure(way: str, job: Job, rows: list[Row], arguments: argparse.Namespace, number: int) -> None:
    """Measure a job by one of the ways, and add what it gave, or why it failed, to the rows."""
    same = {key: getattr(job, key) for key in ("model", "world_size", "workers", "compiled")}
    known = [row for row in rows if row["way"] == "plain" and same.items() <= row.items()]
    step = median_of(known, "step_s")
    steps = SHORTEST if step is None else min(LONGEST, max(SHORTEST, round(arguments.seconds / step)))
    steps = arguments.steps or steps
    steps -= steps % job.log_every
    job = replace(job, steps=arguments.warm_steps + steps)
    began = time.perf_counter()
    row: Row = {**same, "way": way, "round": number, "batch": job.global_batch, "torch": torch.__version__}
    try:
        lines, peak = RUNS[way](job, way, arguments) if way in RUNS else in_ranks(job, way, arguments)
        seconds = [line["step_seconds"] for line in lines if line["step"] > arguments.warm_steps]
        row |= {"step_s": statistics.median(seconds), "steps": steps, "peak_bytes": peak}
        row["samples_per_s"] = job.global_batch / row["step_s"]
    except Exception as error:  # the other rows are worth having
        row["error"] = f"{type(error).__name__}: {error}"
    rows.append(row)
    result = row.get("error") or f"{row['samples_per_s']:,.1f} samples/s, {row['peak_bytes'] / GIB:.2f} GiB"
    print(
        f"round {number + 1}, {title(row)}, {way}: {result} ({time.perf_counter() - began:.1f} s)", flush=True
    )


def in_ranks(job: Job, way: str, arguments: argparse.Namespace) -> tuple[list[Row], int]:
    """Run one of `LOOPS` in forked ranks; return the lines of metrics and the peak of memory."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    words = (way, job.written())
    # A script on one card has all of torch's threads. torchrun gives each of several ranks a single one,
    # which an expert raises: to the number that hetexp gives the rank of a card.
    threads = arguments.threads or (0 if job.world_size == 1 else CARD_THREADS)
    ranks = [
        context.Process(target=run_rank, args=(*words, rank, threads, port)) for rank in range(job.world_size)
    ]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + LIMIT_SECONDS
    try:
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
    finally:
        for rank in ranks:
            if rank.is_alive() and rank.pid is not None:
                os.kill(rank.pid, signal.SIGKILL)
                rank.join()
    folder = Path(job.folder)
    for number, rank in enumerate(ranks):
        if rank.exitcode:
            written = (folder / f"rank_{number}.log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"rank {number} ended with {rank.exitcode}: {written[-1000:]}")
    peaks = [
        json.loads((folder / f"rank_{n}.json").read_text("utf-8"))["peak_memory_bytes"]
        for n in range(len(ranks))
    ]
    return lines_of(folder / "metrics.jsonl"), max(peaks)


def words_of(job: Job, threads: int) -> list[str]:
    """Return the overrides that both of hetexp's ways share."""
    numbers_ = range(job.world_size)
    names = [f"cuda:{job.card(number)}" if job.on_card else "cpu" for number in numbers_]
    several = job.world_size > 1
    sync = [f"strategy.sync_batch_norm={str(job.task.sync_batch_norm).lower()}"] if several else []
    return [
        f"hardware.devices=[{','.join(names)}]",
        f"hardware.share_devices={str(job.on_card and job.num_cards < job.world_size).lower()}",
        f"strategy={'ddp' if several else 'single'}",
        *sync,
        "balancing=equal",
        *([f"hardware.threads_per_rank={threads}"] if threads else []),
        f"trainer.precision={job.precision}",
        "launch.start_method=forkserver",
        "monitor=none",
        *QUIET,
    ]


def by_script(job: Job, way: str, arguments: argparse.Namespace) -> tuple[list[Row], int]:
    """Run the loop for `hetexp.setup` by `hetexp launch`."""
    folder = Path(job.folder, "run")
    script = str(SCRIPTS / "models_bench" / "loops.py")
    options, rest = parse(
        [script, *words_of(job, arguments.threads), f"hydra.run.dir={folder}", "--", "hetexp", job.written()]
    )
    summary = launch(*make(options, rest), Console(file=io.StringIO(), width=200))
    return lines_of(folder / "metrics.jsonl"), peak_of(summary)


def by_configuration(job: Job, way: str, arguments: argparse.Namespace) -> tuple[list[Row], int]:
    """Run the same training without a script."""
    tiny = str(job.tiny).lower()
    words = [
        "model=custom",
        "data=custom",
        "model._target_=models_bench.tasks.model_of",
        f"+model.name={job.model}",
        f"+model.tiny={tiny}",
        "data._target_=models_bench.tasks.data_of",
        f"+data.name={job.model}",
        f"+data.tiny={tiny}",
        f"+data.num_samples={job.num_samples}",
        *job.task.words,
        "optimizer=adamw",
        f"optimizer.lr={job.learning_rate}",
        "optimizer.fused=true",
        f"trainer.global_batch_size={job.global_batch}",
        f"trainer.num_workers={job.workers}",
        f"trainer.log_every={job.log_every}",
        f"trainer.compile={str(job.compiled).lower()}",
        f"trainer.fast_dev_run={job.steps}",
    ]
    run = start_in(Path(job.folder, "run"), [*words, *words_of(job, arguments.threads)])
    return run.rows, peak_of(run.summary)


RUNS = {"launch": by_script, "train": by_configuration}


def peak_of(summary: dict[str, Any]) -> int:
    """Return the peak memory of the device that held the most."""
    return max((device["peak_memory"] or 0 for device in summary["devices"]), default=0)


def title(row: Row) -> str:
    """Return a row's name."""
    compiled = ", compiled" if row["compiled"] else ""
    devices = f", {row['world_size']} ranks" if row["world_size"] > 1 else ""
    return f"{TASKS[row['model']].title}{compiled}{devices}, {row['workers']} workers"


def page(rows: list[Row]) -> str:
    """Return the table: a line for each job, hetexp's ways against the faster of the other two."""
    grouped: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        grouped.setdefault(title(row), {way: [] for way in WAYS})[row["way"]].append(row)
    cells = []
    for name, ways in grouped.items():
        right = {way: [row for row in runs if "error" not in row] for way, runs in ways.items()}
        speeds = {way: median_of(runs, "samples_per_s") for way, runs in right.items()}
        peaks = {way: median_of(runs, "peak_bytes") for way, runs in right.items()}
        best = max((speeds[way] or 0.0 for way in LOOPS), default=0.0)
        least = min((peaks[way] or float("inf") for way in LOOPS), default=0.0)
        failed = {way for way, runs in ways.items() if any("error" in row for row in runs)}
        cells.append(
            [
                name,
                *("fails" if way in failed else figure(speeds[way], ",.0f") for way in WAYS),
                *(figure(ratio(speeds[way], best), ".3f") for way in RUNS),
                *(figure(peaks[way], ".2f", 1 / GIB) for way in WAYS),
                *(figure(ratio(peaks[way], least), ".3f") for way in RUNS),
            ]
        )
    head = ["samples/s", *WAYS, *(f"{way} ÷ faster" for way in RUNS)]
    head += [*(f"{way}, GiB" for way in WAYS), *(f"{way} ÷ smaller" for way in RUNS)]
    return table(head, cells)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cards", "--ranks", dest="cards", type=int, default=1, help="ranks")
    parser.add_argument("--first-card", type=int, default=0, help="number of the first rank's card")
    parser.add_argument("--only", type=names_of(TASKS), default=list(OTHERS), help=", ".join(TASKS))
    parser.add_argument("--ways", type=names_of(WAYS), default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--workers", type=numbers, default=[0, 4], help="loader processes of a rank")
    parser.add_argument("--compile", choices=COMPILE, default="both", help=f"of {', '.join(COMPILED)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="that steps of a measurement may take")
    parser.add_argument("--steps", type=int, help="instead of --seconds")
    parser.add_argument("--warm-steps", type=int, help="before them; 10, tiny 2")
    parser.add_argument("--log-every", type=int, help="steps; 10, tiny 2")
    parser.add_argument("--batch", type=int, help="samples of a step on each device")
    parser.add_argument("--threads", type=int, default=0, help="of each rank; 0: what each way has by itself")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], help="bfloat16, on a CPU float32")
    parser.add_argument("--tiny", action="store_true", help="models of no use: whether it works, no figures")
    parser.add_argument("--json", type=Path, help="where results are kept as they come")
    parser.add_argument("--show", type=lambda text: text.split(","), help="print the table of such files")
    arguments = parser.parse_args(given)
    fill(arguments, {"warm_steps": (10, 2), "log_every": (10, 2)})
    if arguments.precision is None:  # not every processor computes in bfloat16
        arguments.precision = "float32" if arguments.device == "cpu" else "bfloat16"
    if arguments.warm_steps % arguments.log_every:
        parser.error("--warm-steps must be a multiple of --log-every")
    return arguments


if __name__ == "__main__":
    main()
