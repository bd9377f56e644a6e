"""Case 99: a stream (`IterableDataset`) trains on unequal shares, each sample once, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import streaming_loop
import torch
from support import Run, Train, difference, start_run, start_script, worst

from hetexp.core.errors import ConfigError, RunFailedError

STEPS = 12
"""77 samples are two batches of 32 and a short one of 13, so that 12 steps are four epochs."""
COMMON = (
    "data=custom",
    "data._target_=streaming.Source",
    "model=mlp",
    "model.hidden_sizes=[16]",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
LIMIT = 1e-12


def split(*counts: int) -> tuple[str, ...]:
    devices = ",".join(["cpu"] * len(counts))
    weights = ",".join(map(str, counts))
    return f"hardware.devices=[{devices}]", "balancing=manual", f"balancing.weights=[{weights}]"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The reference: one device with the whole batch."""

    @cache
    def start(*overrides: str) -> Run:
        folder = tmp_path_factory.mktemp("single") / "run"
        return start_run(folder, ("hardware=cpu", "strategy=single", *COMMON, *overrides))

    return start


def assert_like(run: Run, reference: Run, steps: int = STEPS) -> None:
    loss, parameters = worst(run, reference, steps)
    assert loss <= LIMIT
    assert parameters <= LIMIT
    mine, its = (one.summary["final"]["eval"] for one in (run, reference))
    assert mine["accuracy"] == its["accuracy"]
    assert mine["samples"] == its["samples"] == 41
    assert mine["loss"] == pytest.approx(its["loss"], rel=LIMIT)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(split(3, 1), id="3:1"),
        pytest.param((*split(5, 2, 1), "trainer.num_workers=2"), id="5:2:1-workers"),
        pytest.param((*split(5, 2, 1), "trainer.accumulate=2"), id="5:2:1-accumulate"),
        pytest.param(
            (*split(31, 1), "trainer.num_workers=1", "trainer.prefetch_factor=4"), id="31:1-workers"
        ),
        pytest.param((*split(1, 1), "strategy=pipeline"), id="pipeline"),
        pytest.param((*split(5, 2, 1), "strategy=hybrid", "strategy.groups=[[0,1],[2]]"), id="hybrid"),
        pytest.param(
            (*split(5, 2, 1), "strategy=local_sgd", "strategy.sync_every=1", "optimizer=sgd"), id="local_sgd"
        ),
    ],
)
def test_steps_equal_one_device(train: Train, single: Callable[..., Run], options: tuple[str, ...]) -> None:
    sgd = ("optimizer=sgd",) if "optimizer=sgd" in options else ()
    assert_like(train(*COMMON, *options), single(*sgd))


def test_one_device_with_a_loader_process(train: Train, single: Callable[..., Run]) -> None:
    assert_like(train(*COMMON, "hardware=cpu", "strategy=single", "trainer.num_workers=2"), single())


@pytest.mark.parametrize("workers", [0, 2])
def test_other_devices_go_on_in_the_middle_of_an_epoch(
    train: Train, tmp_path: Path, single: Callable[..., Run], workers: int
) -> None:
    whole = single()
    first = train(*COMMON, *split(3, 1), "trainer.max_steps=5", folder=tmp_path / "first")
    rest = train(
        *COMMON,
        *split(5, 2, 1),
        f"trainer.num_workers={workers}",
        f"resume={first.folder}",
        folder=tmp_path / "rest",
    )
    assert rest.losses == pytest.approx(whole.losses[5:], rel=LIMIT)
    assert difference(rest.parameters(), whole.parameters()) <= LIMIT


@pytest.mark.parametrize("workers", [0, 1])
def test_a_lost_device_costs_no_sample(train: Train, single: Callable[..., Run], workers: int) -> None:
    """Rank 2 dies in the first pass of step 7, which the others then take again."""
    hurt = train(
        *COMMON,
        *split(5, 2, 1),
        f"trainer.num_workers={workers}",
        "strategy=ddp",
        "fault.survive=true",
        "fault.respawn=0",
        "fault.heartbeat_seconds=5",
        "+fault.events=[{kind: death, device: 'cpu:2', at_step: 6}]",
    )
    assert hurt.summary["failures"]
    assert_like(hurt, single())


def test_a_device_that_comes_walks_to_the_others(train: Train, single: Callable[..., Run]) -> None:
    hurt = train(
        *COMMON,
        *split(3, 1),
        "strategy=ddp",
        "fault.survive=true",
        "fault.respawn=1",
        "fault.respawn_seconds=0.1",
        "fault.heartbeat_seconds=5",
        "+fault.events=[{kind: death, device: 'cpu:0', at_step: 4}]",
    )
    assert hurt.summary["failures"]
    assert hurt.losses == pytest.approx(single().losses, rel=LIMIT)
    assert difference(hurt.parameters(), single().parameters()) <= LIMIT


STATE = ("data._target_=streaming.StatefulSource", "trainer.max_steps=8")
"""A stream with a state; a checkpoint of step 4 is one batch into its second epoch."""
READ = "samples are read and dropped"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("buffer", [0, 5])
def test_a_stream_with_a_state_goes_on_without_a_walk(
    train: Train, tmp_path: Path, single: Callable[..., Run], buffer: int, workers: int
) -> None:
    """Where the state says too little, as with a shuffle buffer, the walk follows."""
    options = (*STATE, f"+data.buffer={buffer}")
    whole = single(*options)
    loader = f"trainer.num_workers={workers}"
    first = train(*COMMON, *options, *split(3, 1), loader, "trainer.max_steps=4", folder=tmp_path / "first")
    made = tmp_path / "made.txt"
    again = (loader, f"resume={first.folder}", f"+data.writes={made}")
    rest = train(*COMMON, *options, *split(5, 2, 1), *again, folder=tmp_path / "rest")
    assert rest.losses == pytest.approx(whole.losses[4:], rel=LIMIT)
    assert difference(rest.parameters(), whole.parameters()) <= LIMIT
    for rank in range(3):
        assert (READ in (rest.folder / f"logs/rank_{rank}.log").read_text()) == bool(buffer)
    if not buffer:
        # The second epoch's other 45, 16 again, and all 77 of the third; the start looks at two of the first.
        assert made.read_text().count("\n") <= 3 * (16 + 45 + 77 + 3)


def test_a_walk_says_how_many_samples_it_reads(train: Train, tmp_path: Path) -> None:
    first = train(*COMMON, *split(3, 1), "trainer.max_steps=5", folder=tmp_path / "first")
    rest = train(
        *COMMON, *split(3, 1), "trainer.max_steps=6", f"resume={first.folder}", folder=tmp_path / "rest"
    )
    assert (
        f"at sample 64 of epoch 1 by a saved state: 64 {READ}"
        in (rest.folder / "logs/rank_0.log").read_text()
    )


@pytest.mark.parametrize("function", ["generated", "streamed"])
def test_a_function_gives_a_stream(train: Train, function: str) -> None:
    options = (*COMMON, f"data._target_=streaming.{function}", "trainer.max_steps=5")
    run, reference = train(*options, *split(3, 1)), train(*options, "hardware=cpu", "strategy=single")
    assert max(worst(run, reference, 5)) <= LIMIT


def test_epochs_end_the_run(train: Train) -> None:
    """Two epochs of three batches end before step 12."""
    run = train(*COMMON, "hardware=cpu", "strategy=single", "trainer.max_epochs=2")
    assert run.summary["steps"] == 6


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_epochs_end_the_run_on_all_ranks(train: Train, single: Callable[..., Run], strategy: str) -> None:
    """The short last batch has a sample less than some ranks; the last step syncs the weights."""
    options = ("strategy.sync_every=4", "trainer.checkpoint_every=4") if strategy == "local_sgd" else ()
    run = train(*COMMON, *split(5, 2, 1), f"strategy={strategy}", *options, "trainer.max_epochs=2")
    assert run.summary["steps"] == 6
    assert "step 6 is the last one, not step 12" in (run.folder / "logs/rank_0.log").read_text()
    if strategy == "ddp":
        assert_like(run, single("trainer.max_epochs=2"), 6)


def test_a_batch_larger_than_the_stream(train: Train, single: Callable[..., Run]) -> None:
    small = ("+data.count=5", "trainer.max_steps=4")
    assert_like(train(*COMMON, *small, *split(5, 2, 1)), single(*small), 4)


def test_a_stream_that_says_its_length_needs_no_number_of_steps(train: Train) -> None:
    run = train(
        *COMMON,
        "data._target_=streaming.Sized",
        *split(3, 1),
        "trainer.max_steps=null",
        "trainer.max_epochs=2",
    )
    assert run.summary["steps"] == 6


REFUSED = {
    "no max_steps, by the class": (
        ("data._target_=streaming.Rows", "trainer.max_steps=null", "trainer.max_epochs=2"),
        "trainer.max_steps",
    ),
    **{
        f"no max_steps, {how}": (
            (f"data._target_=streaming.{name}", "trainer.max_steps=null", "trainer.max_epochs=2"),
            "trainer.max_steps",
        )
        for how, name in (
            ("by the function", "generated"),
            ("of a function", "streamed"),
            ("of a source", "Source"),
        )
    },
    "dealt out for good": (
        ("data._target_=streaming.Rows", "strategy=independent", *split(1, 1)),
        "strategy",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_a_process_starts(train: Train, tmp_path: Path, name: str) -> None:
    options, key = REFUSED[name]
    with pytest.raises(ConfigError, match=f"`{key}` must be"):
        train(*COMMON, *options, folder=tmp_path / "run")
    assert not list((tmp_path / "run").glob("logs/*"))


FAILING = {
    "nothing in it": (("+data.count=0",), "its stream is empty"),
    "smaller than a batch": (
        ("+data.count=5", "trainer.drop_last=true"),
        "`trainer.global_batch_size` must be",
    ),
    "divided by rank": (("+data.by_rank=true",), "the same stream on every rank"),
    "an end of its own": (("+data.short=20", "trainer.max_epochs=1"), "the same stream on every rank"),
    "an end of its own, local": (
        (
            "+data.short=20",
            "trainer.max_epochs=2",
            "strategy=local_sgd",
            "strategy.sync_every=4",
            "trainer.checkpoint_every=4",
        ),
        "the same stream on every rank",
    ),
    "no seed": (("+data.unseeded=true",), "sample_order"),
}


@pytest.mark.parametrize("name", FAILING)
def test_ends_in_one_sentence(train: Train, name: str) -> None:
    options, sentence = FAILING[name]
    with pytest.raises(RunFailedError) as caught:
        train(*COMMON, *split(3, 1), *options)
    assert sentence in f"{caught.value} {caught.value.details}"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_walks_streams(tmp_path: Path, workers: int) -> None:
    """Each loop over `run.batches()` is an epoch, or what a `break` has left of it."""
    script = Path(streaming_loop.__file__)
    found = []
    for name, options in (("one", ("hardware=cpu", "strategy=single")), ("three", split(5, 2, 1))):
        folder = tmp_path / name
        folder.mkdir()
        start_script(folder / "run", script, options, str(folder), str(workers))
        found.append(torch.load(folder / "state.pt"))
    one, three = found
    assert one["epochs"] == three["epochs"] == [1, 1, 2]
    assert len(one["losses"]) == 6
    assert three["losses"] == pytest.approx(one["losses"], rel=LIMIT)
    assert torch.allclose(three["weight"], one["weight"], rtol=LIMIT, atol=LIMIT)
    assert three["evaluation"] == pytest.approx(one["evaluation"], rel=LIMIT)
    assert three["evaluation"]["samples"] == 41
