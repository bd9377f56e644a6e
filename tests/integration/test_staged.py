"""S6, S7: pipelines of unequal stages, and several of them in data parallel, equal one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from support import Run, Train, difference, worst

from hetexp.core.errors import ConfigError, RunFailedError

STEPS = 20
COMMON = (
    "data=synthetic",
    "data.num_samples=245",  # batches of 32, and a last one of 21
    "data.num_test_samples=50",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
GPT = (
    "data.kind=tokens",
    "data.mask_fraction=0.6",
    "model=gpt",
    "model.num_layers=5",
    "model.num_heads=2",
    "model.embedding_size=16",
    "model.tie_weights=true",
    "model.num_experts=2",
    "model.experts_per_token=1",
    "model.balance_weight=0.1",
    "trainer.clip_norm=0.5",
)
Options = tuple[str, ...]


def devices(count: int) -> str:
    return f"hardware.devices=[{','.join(['cpu'] * count)}]"


LAYOUTS = {
    "1 + 1 + 3 layers": (
        devices(3),
        "strategy=pipeline",
        "strategy.shard_plan=[[0,1],[1,2],[2,5]]",
        "strategy.schedule=GPipe",
    ),
    "modules of the model, by device": (
        devices(2),
        "strategy=pipeline",
        "strategy.shard_plan=[{device: 'cpu:1', modules: [blocks.0, blocks.1..blocks.3]}, "
        "{device: 'cpu:0', modules: [blocks.4]}]",
    ),
    "a pipeline and a device": (
        devices(3),
        "strategy=hybrid",
        "strategy.groups=[[0,1],[2]]",
        "strategy.shard_plan=[[[0,4],[4,5]],[[0,5]]]",
    ),
    "two pipelines": (
        devices(4),
        "strategy=hybrid",
        "strategy.groups=[[0,2],[1,3]]",
        "strategy.shard_plan=[[[0,3],[3,5]],[[0,1],[1,5]]]",
        "balancing=manual",
        "balancing.weights=[3,1,3,1]",  # 24 samples and 8; some of 8 microbatches of 5 are empty
    ),
}


def test_float64_steps_equal_one_device(train: Train) -> None:
    """Tied weights, a mixture of experts, masks, clipping, indivisible and short batches."""
    reference = train("hardware=cpu", "strategy=single", *COMMON, *GPT)
    expected = reference.summary["final"]["eval"]
    for name, layout in LAYOUTS.items():
        run = train(*COMMON, *GPT, *layout)
        loss, parameters = worst(run, reference, STEPS)
        assert loss <= 1e-12, name
        assert parameters <= 1e-12, name
        found = run.summary["final"]["eval"]
        assert found == pytest.approx(expected, rel=1e-12), name
        assert found["accuracy"] == expected["accuracy"]


def test_coded_gradients_of_two_pipelines(train: Train) -> None:
    """Float32 and int8: fewer bytes of the layers that both have, and nearly the same losses."""
    short = (*COMMON, *GPT, "trainer.precision=float32", "trainer.max_steps=8", "trainer.checkpoint_every=0")
    single = train("hardware=cpu", "strategy=single", *short)
    plain, coded = (
        train(*short, *LAYOUTS["a pipeline and a device"], f"comm.wire={wire}")
        for wire in ("float32", "int8")
    )
    assert plain.losses == pytest.approx(single.losses, rel=1e-5)
    assert coded.losses == pytest.approx(single.losses, rel=2e-2)
    assert coded.losses != plain.losses
    assert coded.summary["comm"]["wire_dtype"] == "int8"
    saved = plain.summary["comm"]["bytes_per_step"] - coded.summary["comm"]["bytes_per_step"]
    # The first stage hands over most: what it sends on, and the gradients of all layers but the last.
    first = sum(t.numel() for name, t in single.parameters().items() if ".4." not in name)
    assert saved == pytest.approx(first * (4 - 260 / 256), rel=0.01)


def test_coded_boundaries(train: Train) -> None:
    """Bfloat16 and int8 are near, with as many bytes fewer as they say; without them steps are exact."""
    short = (*COMMON, *GPT, "trainer.precision=float32", "trainer.checkpoint_every=0")
    cut = (devices(2), "strategy=pipeline", "strategy.shard_plan=[[0,2],[2,5]]")
    usual = train(*short, *cut)
    (plain,) = usual.summary["pipeline"]
    for wire, part, near in (("bfloat16", 0.5, 3e-3), ("int8", 260 / 1024, 1e-2)):
        run = train(*short, *cut, f"comm.boundary_wire={wire}")
        assert run.losses != usual.losses
        assert run.losses == pytest.approx(usual.losses, rel=near)
        expected = usual.summary["final"]["eval"]["loss"]
        assert run.summary["final"]["eval"]["loss"] == pytest.approx(expected, rel=near)
        (found,) = run.summary["pipeline"]
        assert found["boundary_wire"] == wire
        # A second, small tensor fills a block of its own in int8.
        assert part <= found["boundary_bytes"] / plain["boundary_bytes"] < 1.3 * part
        fewer = usual.summary["comm"]["bytes_per_step"] - run.summary["comm"]["bytes_per_step"]
        assert fewer == (plain["boundary_bytes"] - found["boundary_bytes"]) / 2  # a rank's own


def test_checkpoints_are_those_of_any_strategy(train: Train) -> None:
    common = (*COMMON, *GPT, "trainer.checkpoint_every=4")
    pipeline = (devices(2), "strategy=pipeline", "strategy.shard_plan=[[0,4],[4,5]]")
    other = (devices(3), "strategy=pipeline", "strategy.shard_plan=[[0,1],[1,3],[3,5]]")
    whole = train("hardware=cpu", "strategy=single", *common, "trainer.max_steps=8")
    begun = train(*pipeline, *common, "trainer.max_steps=4")
    assert files(begun, 4) == files(whole, 4)
    resumed = train(
        "hardware=cpu", "strategy=single", *common, "trainer.max_steps=8", f"resume={begun.folder}"
    )
    assert difference(resumed.parameters(8), whole.parameters(8)) <= 1e-12
    saved = whole.folder / "checkpoints" / "step_00000004"
    cut_anew = train(*other, *common, "trainer.max_steps=8", f"resume={saved}")
    assert difference(cut_anew.parameters(8), whole.parameters(8)) <= 1e-12
    assert cut_anew.losses == pytest.approx(whole.losses[4:], rel=1e-12)


def files(run: Run, step: int) -> tuple[object, ...]:
    """Return what a checkpoint's files hold: names, tied ones, and the optimizer but for its tensors."""
    folder = run.folder / "checkpoints" / f"step_{step:08}"
    with safe_open(folder / "model.safetensors", "pt") as model:
        tied = model.metadata()
    names = (
        sorted(load_file(folder / "model.safetensors")),
        sorted(load_file(folder / "optimizer.safetensors")),
    )
    return names, tied, json.loads((folder / "state.json").read_text())["optimizer"]


def test_a_stage_that_dies_ends_the_run(train: Train) -> None:
    with pytest.raises(RunFailedError, match="cpu:1") as caught:
        train(
            devices(2),
            "strategy=pipeline",
            *COMMON,
            *GPT,
            "trainer.checkpoint_every=0",
            "fault.events=[{kind: death, device: 'cpu:1', at_step: 2}]",
        )
    assert "SIGKILL" in str(caught.value)


def test_emulated_stages_are_paced_and_told_of(train: Train) -> None:
    run = train(
        "hardware.devices=[emulated:rtx_3090,emulated:arc_a770]",
        "strategy=pipeline",
        "strategy.shard_plan=[[0,3],[3,4]]",
        "strategy.num_microbatches=4",
        "balancing=adaptive",  # it asks how fast the devices are, so that a step can be predicted
        *COMMON[:3],
        "data.kind=tokens",
        "model=gpt",
        "model.num_layers=4",
        "trainer.max_steps=4",
        "trainer.max_epochs=null",
        "trainer.global_batch_size=32",
    )
    assert run.summary["efficiency"] is None
    plan = json.loads((run.folder / "plan.json").read_text())
    predicted = plan["predicted_step_seconds"] * run.summary["time_scale"]
    assert run.summary["predicted_step_s"] == pytest.approx(predicted) and predicted > 0
    (pipeline,) = run.summary["pipeline"]
    first, last = pipeline["stages"]
    assert (first["layers"], last["layers"], pipeline["microbatches"]) == ([0, 3], [3, 4], 4)
    assert 0 < pipeline["bubble"] < 1
    emulation = json.loads((run.folder / "emulation.json").read_text())
    for stage, device in zip((first, last), emulation["devices"], strict=True):
        for phase in ("forward", "backward"):  # a stage's passes last at least as the card's would
            assert stage[f"{phase}_s"] >= 0.9 * device["phases"][phase]["modelled"]
    shares = [device["share"] for device in run.summary["devices"]]  # of the work: the head is with the last
    assert shares == pytest.approx([0.75, 0.25], abs=0.05)


def test_a_stage_dies_while_its_part_is_gathered(train: Train, tmp_path: Path) -> None:
    """The save does not count; the stage comes back, and all go on from the last step that every stage had
    saved, as if nothing had been."""
    common = (
        *COMMON[:3],
        "trainer.max_steps=12",
        *COMMON[4:8],
        "trainer.checkpoint_every=4",
        "trainer.keep_last=0",
        "model=custom",
        "model._target_=leaving_stage.Net",
        devices(2),
        "strategy=pipeline",
        "strategy.shard_plan=[[0,3],[3,4]]",
    )
    usual = train(*common)
    hurt = train(
        *common,
        "+model.dies=1",
        "+model.save=2",
        f"+model.once={tmp_path}/died",
        "fault.survive=true",
        "fault.respawn_seconds=0.1",
        folder=tmp_path / "hurt",
    )
    assert (tmp_path / "died").exists()
    (failure,) = hurt.summary["failures"]
    assert (failure["device"], failure["kind"]) == ("cpu:1", "SIGKILL")
    assert "start again from step 4." in hurt.screen
    assert [row["step"] for row in hurt.metrics if "train/loss" in row] == list(range(1, 13))
    assert hurt.losses == usual.losses
    assert difference(hurt.parameters(), usual.parameters()) == 0.0
    for step in (4, 8, 12):
        folder = hurt.folder / "checkpoints" / f"step_{step:08d}"
        record = json.loads((folder / "manifest.json").read_text())["stages"]
        assert record["layers"] == 4
        found = [(one["stage"], one["layers"], one["device"], one["step"]) for one in record["parts"]]
        assert found == [(0, [0, 3], "cpu:0", step), (1, [3, 4], "cpu:1", step)]


def test_a_step_that_a_stage_did_not_give_is_refused(train: Train, tmp_path: Path) -> None:
    common = (
        *COMMON[:3],
        "trainer.max_steps=8",
        *COMMON[4:8],
        "trainer.checkpoint_every=4",
        "model=custom",
        "model._target_=leaving_stage.Net",
        devices(2),
        "strategy=pipeline",
        "strategy.shard_plan=[[0,3],[3,4]]",
    )
    dies = ("+model.dies=1", "+model.save=2", f"+model.once={tmp_path}/died")
    with pytest.raises(RunFailedError):
        train(*common, *dies, folder=tmp_path / "hurt")
    with pytest.raises(ConfigError) as refused:
        train(*common, f"resume={tmp_path}/hurt/step:8")
    told = "The save of step 8 did not end: stage 1 of pipeline 0 (cpu:1, layer 3) was lost before its part"
    assert "(4), but is 'step:8' instead." in str(refused.value)
    assert told in str(refused.value)
    assert train(*common, f"resume={tmp_path}/hurt").metrics[0]["step"] == 5
