"""F6: every wrong value is refused before any process starts, by key and value, all at once, no traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf
from refusal import Refusals

from hetexp.app import check_command_line, compose_config, register_resolvers
from hetexp.core.compose.words import KEY_OF, without_hyphens, written_out
from hetexp.core.errors import RunFailedError
from hetexp.hardware.backends.cuda import CudaBackend

TWO = "hardware.devices=[cpu,cpu]"
WRONG = {
    "unknown group option": (
        ["strategy=dpp"],
        ["`strategy` must be one of auto, ddp", "'dpp'", "Did you mean `dp`?"],
    ),
    "unknown group": (["strateggy=ddp"], ["`strateggy`", "ddp", "Did you mean `strategy`?"]),
    "misspelt key": (["trainer.max_stps=5"], ["`trainer.max_stps`", "5", "Did you mean `max_steps`?"]),
    "key that does not exist, added": (["+trainer.speed=9"], ["`trainer.speed`", "9"]),
    "wrong type": (["trainer.max_steps=many"], ["`trainer.max_steps` must be an integer", "'many'"]),
    "a bool for a number": (["trainer.max_steps=true"], ["`trainer.max_steps` must be an integer", "True"]),
    "fraction for a whole number": (
        ["trainer.max_epochs=1.5"],
        ["`trainer.max_epochs` must be an integer", "1.5"],
    ),
    "global batch 0": (
        ["trainer.global_batch_size=0"],
        ["`trainer.global_batch_size` must be greater than 0", "0"],
    ),
    "infinite clip": (["trainer.clip_norm=inf"], ["`trainer.clip_norm` must be a finite number", "inf"]),
    "unknown precision": (
        ["trainer.precision=bf17"],
        ["`trainer.precision`", "'auto'", "'float16' or 'float64'", "'bf17'"],
    ),
    "unknown loss": (
        ["trainer.loss=hinge"],
        ["`trainer.loss`", "cross_entropy, bce, mse, mae", "'hinge'"],
    ),
    "argument of another loss": (
        ["loss.delta=2.0", "loss.class_dim=1"],
        ["`loss.delta` is not an argument of trainer.loss=cross_entropy (its value is 2.0)"],
    ),
    "unknown argument of a loss": (
        ["trainer.loss=huber", "+loss.detla=2.0"],
        ["`loss.detla` is not an argument of trainer.loss=huber", "`delta`"],
    ),
    "a sum without terms": (
        ["trainer.loss=sum"],
        ["`loss.terms` must be the terms of the sum by name", "null"],
    ),
    "a term of no loss": (
        ["trainer.loss=sum", "loss.terms={a:{loss:hinge},b:{loss:mse,factor:two,delta:1.0}}"],
        [
            "`loss.terms.a.loss` must be one of cross_entropy",
            "`loss.terms.b.factor` must be a number, but is 'two'",
            "`loss.terms.b.delta` is not an argument of loss.terms.b.loss=mse",
        ],
    ),
    "a count of no kind": (
        ["trainer.loss=model", "loss.count=tokens"],
        ["`loss.count` must be one of samples, labels, shifted_labels, or the dotted path", "'tokens'"],
    ),
    "a smoothing above 1": (["loss.label_smoothing=1.5"], ["`loss.label_smoothing` must be", "1.5"]),
    "no steps": (["trainer.max_steps=0"], ["`trainer.max_steps` must be greater than 0", "0"]),
    "accumulate twice": (
        ["trainer.accumulate=2", "trainer.microbatch_size=8"],
        ["`trainer.accumulate` must be 1", "2", "microbatch_size"],
    ),
    "two batches": (
        ["trainer.batch_size_per_device=8"],
        ["`trainer.global_batch_size` must be null where `trainer.batch_size_per_device` is set", "64"],
    ),
    "no batch": (["trainer.global_batch_size=null"], ["`trainer.global_batch_size` must be", "null"]),
    "batch a device 0": (
        ["trainer.global_batch_size=null", "trainer.batch_size_per_device=0"],
        ["`trainer.batch_size_per_device` must be greater than 0", "0"],
    ),
    "early stopping without evaluation": (
        ["trainer.early_stopping.patience=2"],
        ["`trainer.eval_every` must be above 0", "0"],
    ),
    "missing weights": (["balancing=manual"], ["`balancing.weights` must be given", "???"]),
    "??? typed": (["trainer.seed=???"], ["`trainer.seed` must be given", "???"]),
    "negative weight": (
        [TWO, "balancing=manual", "balancing.weights=[1,-0.3]"],
        ["`balancing.weights[1]` must be greater than or equal to 0", "-0.3"],
    ),
    "all weights zero": (
        [TWO, "balancing=manual", "balancing.weights=[0,0]"],
        ["`balancing.weights` must be", "above 0", "[0, 0]"],
    ),
    "wrong number of weights": (
        [TWO, "balancing=manual", "balancing.weights=[1,2,3]"],
        ["`balancing.weights` must be 2 numbers", "[1, 2, 3]", "cpu:0, cpu:1"],
    ),
    "weights without brackets": (
        [TWO, "balancing=manual", "balancing.weights=0.5,0.3"],
        ["`balancing.weights` must be one value", "'0.5,0.3'", "[…]"],
    ),
    "device twice": (["hardware.devices=[cpu:0,cpu:0]"], ["`hardware.devices`", "cpu:0 twice"]),
    "unknown device": (
        ["hardware.devices=[cuda:9]"],
        ["`hardware.devices[0].device` must be one of", "'cuda:9'"],
    ),
    "unknown card": (
        ["hardware.devices=[emulated:rtx_3091]"],
        ["`hardware.devices[0]`", "rtx_3091", "rtx_3090"],
    ),
    "no device": (["hardware.devices=[]"], ["`hardware.devices` must be a list with at least one entry"]),
    "vendor and device": (
        ["hardware.devices=[{device: cpu, vendor: nvidia}]"],
        ["`hardware.devices[0]` must name either", "both"],
    ),
    "vendor not there": (
        ["hardware.devices=[{vendor: amd}]", "hardware.missing=error"],
        ["`hardware.devices[0].vendor`", "'amd'", "hardware.missing=emulate"],
    ),
    "no interpreter": (
        ["hardware.devices=[{device: cpu, python: /no/such/python}]"],
        ["`hardware.devices[0].python` must be the path of an interpreter", "/no/such/python"],
    ),
    "two devices, single": ([TWO, "strategy=single"], ["`strategy` must be ddp", "'single'", "cpu:0, cpu:1"]),
    "static graph with accumulation": (
        ["strategy.static_graph=true", "trainer.accumulate=2"],
        ["`strategy.static_graph` must be false where gradients accumulate", "True"],
    ),
    "native group on the CPU": (
        [TWO, "comm=native"],
        ["`comm.backend` must be auto, shm or gloo", "'native'"],
    ),
    "card without fp64": (
        ["hardware.devices=[emulated:arc_a770]", "trainer.precision=float64"],
        ["`trainer.precision`", "Arc A770", "'float64'"],
    ),
    "missing data folder": (
        ["data=text", "data.folder=/no/such/folder"],
        ["`data.folder`", "/no/such/folder"],
    ),
    "unknown model argument": (["+model.depth=3"], ["`model.depth` is not an argument", "3"]),
    "wrong model argument": (["model.widths=[0]"], ["`model.widths[0]` must be greater than 0", "0"]),
    "model that is not there": (
        ["model._target_=my_models.Net"],
        ["`model._target_` must be an importable class", "'my_models.Net'"],
    ),
    "negative learning rate": (["optimizer.lr=-1"], ["`optimizer`", "learning rate", "-1"]),
    "resume from nowhere": (["resume=/no/such/run"], ["`resume`", "/no/such/run"]),
    "a path with =": (["resume=/runs/epoch=9.ckpt"], ["`resume`", "epoch=9.ckpt", "quotes"]),
    "port out of range": (
        ["launch.port=70000"],
        ["`launch.port` must be less than or equal to 65535", "70000"],
    ),
    # What the shell or a web page did to the words.
    "two mixes": (
        ["hardware=nvidia_arc", "hardware=cpu"],
        ["`hardware` must be chosen once", "nvidia_arc and cpu", "hardware.devices=[…]"],
    ),
    "typographic quotes": (
        ["name=“mine”"],
        ["`name`", "'name=“mine”'", "typographic quotes", "type ' or \""],
    ),
    "cut at a space": (
        ["hardware.devices=[{device:", "cpu,", "count:", "2}]"],
        ["`hardware.devices`", "cuts words at spaces", "[{device: cpu, count: 2}]\"'"],
    ),
    "list cut at a space": (
        ["hardware.devices=[cpu,", "cpu]"],
        ["`hardware.devices`", "type 'hardware.devices=[cpu,cpu]'"],
    ),
    "spaces around =": (
        ["trainer.max_steps", "=", "5"],
        ["`trainer.max_steps`", "'trainer.max_steps = 5'", "type 'trainer.max_steps=5'"],
    ),
    "space after =": (["trainer.max_steps=", "5"], ["`trainer.max_steps`", "type 'trainer.max_steps=5'"]),
    "space before =": (["trainer.max_steps", "=5"], ["`trainer.max_steps`", "type 'trainer.max_steps=5'"]),
    "no =": (["trainer.max_steps"], ["`trainer.max_steps` must be given as key=value", "It has no `=`"]),
    "no key": (["=5"], ["`=5` must be given as key=value", "no key before `=`"]),
    "two dots": (["trainer..seed=1"], ["`trainer..seed`", "'trainer..seed=1'", "joined by one dot"]),
    "colon": (["trainer:seed=1"], ["`trainer:seed`", "'trainer:seed=1'", "joined by one dot"]),
    "brackets that do not match": (
        ["hardware.devices=[cpu"],
        ["`hardware.devices`", "brackets do not match"],
    ),
    "round brackets": (
        ["hardware.devices=(cpu,cpu)"],
        ["`hardware.devices`", "'hardware.devices=(cpu,cpu)'", "A list is written [a,b]"],
    ),
    # Keys.
    "key of another option": (
        [TWO, "balancing.weights=[1,2]"],
        ["`balancing.weights` is not a key", "[1,2]", "It is one with balancing=manual."],
    ),
    "key of other models": (
        ["model.dropout=0.5"],
        ["`model.dropout`", "0.5", "model=gpt or model=hf_causal_lm or model=mlp"],
    ),
    "key without its section": (["max_steps=5"], ["`max_steps`", "5", "Did you mean `trainer.max_steps`?"]),
    "key of another framework": (
        ["batch_size=8"],
        ["`batch_size`", "8", "Did you mean `trainer.global_batch_size`?"],
    ),
    "slash for a dot": (["trainer/seed=1"], ["`trainer/seed`", "1", "Did you mean `trainer.seed`?"]),
    "capitals": (["TRAINER.seed=1"], ["`TRAINER.seed`", "1", "Did you mean `trainer`?"]),
    "key added twice over": (["+trainer.seed=5"], ["trainer.seed"]),
    "deleted section": (["~model"], ["`model` must be given"]),
    # Options of groups.
    "unknown experiment": (["experiment=gpt_txt"], ["`experiment`", "'gpt_txt'", "Did you mean `gpt_text`?"]),
    "unknown trainer": (["trainer=fast"], ["`trainer` must be one of default", "'fast'"]),
    "option in capitals": (["strategy=DDP"], ["`strategy`", "'DDP'", "Did you mean `ddp`?"]),
    "two options": (["model=[gpt,mlp]"], ["`model` must be one of ", "not a list", "['gpt', 'mlp']"]),
    "no option": (["model="], ["`model` must be one of ", "''"]),
    "null for an option": (["model=null"], ["`model` must be one of ", "but is null instead"]),
    "number for an option": (["trainer=5"], ["`trainer` must be one of ", "5"]),
    # Types.
    "list for a number": (["trainer.max_steps=[5]"], ["`trainer.max_steps` must be an integer", "[5]"]),
    "number for a list": (["model.widths=32"], ["`model.widths` must be a list", "32", "Write [32]."]),
    "mapping for a list": (
        [TWO, "balancing=manual", "balancing.weights={a: 1}"],
        ["`balancing.weights` must be a list", "{'a': 1}"],
    ),
    "words for weights": (
        [TWO, "balancing=manual", "balancing.weights=[half,half]"],
        ["`balancing.weights[0]` must be a number", "'half'", "`balancing.weights[1]`"],
    ),
    "number for a mapping": (
        ["trainer.early_stopping=5"],
        ["`trainer.early_stopping` must be a mapping", "5"],
    ),
    "number with an exponent": (
        ["trainer.max_steps=1e3"],
        ["`trainer.max_steps` must be an integer", "1000.0", "Write 1000."],
    ),
    "number in quotes": (["optimizer.lr='1e-3'"], ["`optimizer.lr` must be a number", "Write 1e-3 without"]),
    "nothing": (["trainer.max_steps="], ["`trainer.max_steps` must be an integer", "''", "`null`"]),
    "yes": (["trainer.drop_last=yes"], ["`trainer.drop_last` must be a boolean", "'yes'", "Write true."]),
    "not a number": (["trainer.clip_norm=nan"], ["`trainer.clip_norm` must be a finite number", "nan"]),
    "null for a list": (["hardware.devices=null"], ["`hardware.devices`"]),
    "path for a name": (["name=[a]"], ["`name` must be a string", "['a']"]),
    # Values.
    "negative time": (["comm.timeout_seconds=-1"], ["`comm.timeout_seconds` must be greater than 0", "-1"]),
    "seed too large": (["trainer.seed=99999999999"], ["`trainer.seed` must be less than 4294967296"]),
    "W&B mode": (["logger.mode=onlin"], ["`logger.mode`", "'offline', 'online' or 'disabled'", "'onlin'"]),
    "dropout above 1": (["model=mlp", "model.dropout=1.5"], ["`model.dropout` must be less than 1", "1.5"]),
    "heads that do not divide": (
        ["model=gpt", "data=text", "model.embedding_size=30", "model.num_heads=4"],
        ["`model.embedding_size` must be a multiple of `model.num_heads` (4)", "30"],
    ),
    "sequence of nothing": (
        ["data=text", "data.sequence_length=0"],
        ["`data.sequence_length` must be greater than 0", "0"],
    ),
    "start method": (["launch.start_method=spawn"], ["`launch.start_method`", "'forkserver'", "'spawn'"]),
    "class for a loss": (
        ["trainer.loss=torch.nn.CrossEntropyLoss"],
        ["`trainer.loss` must be a class derived from hetexp.training.loss.Loss", "CrossEntropyLoss"],
    ),
    "path for a class": (
        ["model._target_=my_project/net.py"],
        ["`model._target_` must be an importable class", "'my_project/net.py'"],
    ),
    "module for a class": (["model._target_=torch.nn"], ["`model._target_` must be a class", "'torch.nn'"]),
    "custom without a class": (["data=custom"], ["`data._target_` must be given", "???"]),
    # Devices.
    "gpu": (["hardware.devices=[gpu]"], ["`hardware.devices[0].device` must be one of", "cpu", "'gpu'"]),
    "device in capitals": (["hardware.devices=[CPU]"], ["`hardware.devices[0].device`", "cpu", "'CPU'"]),
    "device in a list of lists": (["hardware.devices=[[cpu]]"], ["`hardware.devices[0]`", "['cpu']"]),
    "device below 0": (["hardware.devices=[cpu:-1]"], ["`hardware.devices[0].device`", "'cpu:-1'"]),
    "misspelt key of a device": (
        ["hardware.devices=[{device: cpu, cout: 2}]"],
        ["`hardware.devices[0].cout`", "2", "Did you mean `count`?"],
    ),
    "folder for an interpreter": (
        ["hardware.devices=[{device: cpu, python: /}]"],
        ["`hardware.devices[0].python` must be the path of an interpreter", "'/'"],
    ),
    # Resume and folders.
    "resume from a file": (["resume=/etc/hostname"], ["`resume`", "'/etc/hostname'", "no single files"]),
    "results in a file": (
        ["hydra.run.dir=/etc/hostname/run"],
        ["`hydra.run.dir` must be a folder that can be written", "/etc/hostname is a file"],
    ),
    # Sweeps.
    "a database that is none": (
        ["monitor.url=mysql://host/db"],
        [
            "`monitor.url` must be sqlite:///FILE",
            "or postgresql://USER@HOST/DATABASE, but is 'mysql://host/db'",
        ],
    ),
    "samples too seldom": (
        ["monitor.interval_seconds=60"],
        ["`monitor.interval_seconds`", "less than or equal to 10"],
    ),
    "sweep over a wrong option": (["-m", "strategy=ddp,dpp"], ["`strategy` must be one of", "'dpp'"]),
    "sweep over a wrong key": (["-m", "trainer.sed=0,1"], ["`trainer.sed`", "Did you mean `seed`?"]),
    "sweep over a wrong value": (
        ["-m", "trainer.seed=0,1", "trainer.max_steps=many"],
        ["`trainer.max_steps` must be an integer", "'many'"],
    ),
    "sweep over options that have a key": (
        ["-m", "model=mlp,gpt", "model.dropout=0.1"],
        ["`model.dropout`", "model=gpt or model=hf_causal_lm or model=mlp", "write ++model.dropout=…"],
    ),
    "sweep into a file": (
        ["-m", "trainer.seed=0,1", "hydra.sweep.dir=/etc/hostname/sweep"],
        ["`hydra.sweep.dir`", "/etc/hostname is a file"],
    ),
}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refusals:
    return Refusals(monkeypatch, capfd, tmp_path / "run")


@pytest.mark.parametrize(("overrides", "told"), WRONG.values(), ids=WRONG.keys())
def test_wrong_value_is_named(refused: Refusals, overrides: list[str], told: list[str]) -> None:
    screen = refused(overrides)
    for part in told:
        assert part in screen, screen


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://me:s3cret@host/db", "without a password"),
        ("postgresql+psycopg://me:s3cret@host/db", "without a password"),
        ("postgresql://me:s3c/s3cret@host/db", "without a password"),  # as SQLAlchemy reads it
        ("'postgresql://host/db?password=s3cret'", "without a password"),
        ("'postgresql://me@host/db?connect_timeout=3&Password=s3cret'", "without a password"),
        ("'postgresql://host/db?passw%6frd=s3cret'", "without a password"),
        ("postgresql://host/db?password=s3cret", "key=value that Hydra can read"),
        ("mysql://me:s3cret@host/db", "sqlite:///FILE"),
        ("postgresql://me:s3cret@host", "sqlite:///FILE"),
        ("[postgresql://me:s3cret@host/db]", "a string"),
    ],
)
def test_a_password_is_refused_and_not_shown(refused: Refusals, url: str, told: str) -> None:
    screen = refused([f"monitor.url={url}"])
    assert "`monitor.url` must be" in screen
    assert told in screen
    assert "s3c" not in screen, screen
    assert "***" in screen


def test_all_errors_at_once(refused: Refusals) -> None:
    screen = refused(
        [
            "strategy=dpp",
            "trainer.max_stps=5",
            "trainer.global_batch_size=0",
            "optimizer.lr=-1",
            "balancing=manual",
            "model.widths=[]",
        ]
    )
    for part in ("6 configuration errors", "dpp", "max_stps", "global_batch_size", "balancing.weights"):
        assert part in screen, screen


# ---------------------------------------------------------------- the guide's table

GUIDE = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `` ([^`]+) `` \| (.+) \|$", re.MULTILINE)


def guide() -> list[tuple[str, str]]:
    """Return what is typed and what is said, from the guide's section on wrong values."""
    (page,) = GUIDE.rglob("troubleshooting.md")
    section = page.read_text(encoding="utf-8").partition("\n## Wrong values\n")[2].partition("\n## ")[0]
    return ROW.findall(section)


def answers(words: list[str]) -> str:
    parser = get_args_parser()
    read = written_out(without_hyphens(words, parser._option_string_actions))
    return "\n".join(check_command_line(parser.parse_args(read)))


def test_the_guide_has_a_table() -> None:
    assert len(guide()) >= 22


@pytest.mark.parametrize(("typed", "said"), guide())
def test_the_guide_says_what_a_wrong_value_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CudaBackend, "drivers", ("/no/such/driver",))
    register_resolvers()
    screen = answers(typed.split())
    for part in said.split(" … "):
        assert part.removesuffix("…") in screen, screen


def test_all_words_of_other_trainers_lead_to_keys() -> None:
    config = compose_config([])
    for key in set(KEY_OF.values()) - {"hydra.run.dir"}:
        section, _, name = key.rpartition(".")
        assert name in (OmegaConf.select(config, section) if section else config), key


def test_a_bare_number_after_a_flag() -> None:
    screen = answers(["trainer.max_steps=3", "2", "4"])
    assert "'2 4' instead" in screen
    assert "takes one value only" in screen


@pytest.mark.parametrize("shown", [True, False])
def test_a_failed_run_says_why_once(refused: Refusals, monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    """Without Hydra's list of overrides and its HYDRA_FULL_ERROR."""

    def fail(*_: object, **__: object) -> None:
        raise RunFailedError("the loss does not fit", shown=shown)

    monkeypatch.setattr("hetexp.app.run", fail)
    assert refused([]) == ("" if shown else "the loss does not fit\n")
