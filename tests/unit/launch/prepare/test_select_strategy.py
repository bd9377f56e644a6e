"""What `strategy=auto` takes, on which devices, and what it says; nothing is started."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support import checked

from hetexp.core.errors import ConfigError
from hetexp.launch.prepare.select_strategy import select_strategy
from hetexp.plan.run_spec import RunSpec

TINY = ("model=mlp", "data=synthetic", "logger=none", "hardware.check_memory=false")
MIX = ("hardware=nvidia_arc", *TINY, "model.hidden_sizes=[512,512]")
LARGE, SMALL = "trainer.global_batch_size=16384", "trainer.global_batch_size=64"


def choose(*words: str, console: Console | None = None) -> RunSpec:
    spec = checked("strategy=auto", *words, choices={"strategy": "auto", "model": "mlp"}).accepted()
    return select_strategy(spec, console or Console(file=io.StringIO()))


def test_two_devices_where_both_pay() -> None:
    screen = io.StringIO()
    run = choose(*MIX, LARGE, "balancing=profiled", console=Console(file=screen, width=140))
    assert run.config.strategy["_target_"] == run.raw["strategy"]["_target_"] == "hetexp.strategy.ddp.DDP"
    assert run.request.choices == {"strategy": "ddp", "model": "mlp"}
    assert len(run.selection.devices) == 2
    reason = run.selection.reasons[-1]
    assert reason.startswith("strategy=auto takes ddp: 16384 samples are predicted to take ")
    assert "(from the catalogue); " in reason
    assert "single 0." in reason
    assert f"→ {reason}" in screen.getvalue()
    assert "→ ddp" in screen.getvalue()  # the table


def test_one_device_where_the_second_makes_it_slower() -> None:
    run = choose(*MIX, SMALL, "balancing=tflops")
    assert run.config.strategy["_target_"] == "hetexp.strategy.single.Single"
    assert [device.id for device in run.selection.devices] == ["emulated:0"]
    assert run.selection.reasons[-1].startswith("strategy=auto takes single: ")


def test_what_cannot_run_is_not_taken() -> None:
    """Weights for two devices refuse a single one, however fast."""
    run = choose(*MIX, SMALL, "balancing=manual", "balancing.weights=[3,1]", "strategy.among=[single,ddp]")
    assert run.config.strategy["_target_"] == "hetexp.strategy.ddp.DDP"


@pytest.mark.parametrize(("devices", "takes"), [("[cpu,cpu]", "ddp"), ("[cpu]", "single")])
def test_where_nothing_is_known(devices: str, takes: str) -> None:
    run = choose(*TINY, f"hardware.devices={devices}")
    assert run.request.choices["strategy"] == takes
    assert run.selection.reasons[-1] == (
        f"strategy=auto takes {takes}: nothing is known of the devices' speeds, neither by measurement nor "
        "by the catalogue, so that nothing else is predicted to be faster."
    )


def test_a_model_that_no_card_holds_is_refused() -> None:
    words = ["hardware.devices=[{device: emulated:rtx_3090, memory_gib: 0.4}]", "hardware.check_memory=true"]
    with pytest.raises(ConfigError, match="does not fit|holds"):
        choose("model=mlp", "model.hidden_sizes=[4096,4096]", "data=synthetic", "logger=none", *words)


def test_any_other_strategy_stays() -> None:
    spec = checked("strategy=ddp", *MIX).accepted()
    assert select_strategy(spec, Console(file=io.StringIO())) is spec


def test_wrong_names_are_told() -> None:
    with pytest.raises(ConfigError, match=r"`strategy.among` must be a list of .*Did you mean `dp`\?"):
        choose(*MIX, "strategy.among=[dpp]")
    problems = checked("strategy=auto", "strategy.among=[]", *MIX).problems
    assert problems == [
        "`strategy.among` must name at least one strategy, but is [] instead. null means all."
    ]


HOSTS = (
    "hardware=auto",
    "hardware.devices=[{device: emulated:rtx_3090, host: a},{device: emulated:rtx_3090, host: a},"
    "{device: emulated:rtx_3090, host: b},{device: emulated:rtx_3090, host: b}]",
    *TINY,
    "model.hidden_sizes=[2048,2048]",
    "trainer.global_batch_size=65536",
    "data.num_samples=65536",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=0",
    "balancing=tflops",
    "strategy.among=[ddp]",
)


@pytest.mark.parametrize(
    ("network", "takes"),
    [("ethernet_100m", "hierarchical_sgd"), ("ethernet_1g", "hierarchical_sgd"), ("ethernet_100g", "ddp")],
)
def test_hosts_on_slow_and_fast_networks(network: str, takes: str) -> None:
    run = choose(*HOSTS, f"hardware.network={network}")
    assert run.request.choices["strategy"] == takes
    told = "exact" in run.selection.reasons[-1] or "inside each host only" in run.selection.reasons[-1]
    assert told == (takes != "ddp")


def test_exact_ones_only() -> None:
    run = choose(*HOSTS, "hardware.network=ethernet_100m", "strategy.between_hosts=false")
    assert run.request.choices["strategy"] == "ddp"
