"""Which build of torch is asked for, by vendor, version of torch, driver and cards."""

from __future__ import annotations

from typing import Any

import pytest

from hetexp.core.errors import SetupError
from hetexp.launch.environments.wheels import HOST, choose_wheel, newest_cuda

LINUX: dict[str, Any] = {"system": "linux", "machine": "x86_64"}


@pytest.mark.parametrize(
    ("kind", "torch", "version", "index"),
    [
        ("cpu", "2.13.0", "2.13.0+cpu", f"{HOST}/cpu"),
        ("xpu", "2.13.0", "2.13.0+xpu", f"{HOST}/xpu"),
        ("rocm", "2.9.1", "2.9.1+rocm6.4", f"{HOST}/rocm6.4"),
        ("rocm", "2.13.0", "2.13.0+rocm7.2", f"{HOST}/rocm7.2"),
        ("rocm", "3.0.0", "3.0.0+rocm7.2", f"{HOST}/rocm7.2"),  # newer than the table
        ("cpu", "2.15.0.dev20261101", "2.15.0.dev20261101+cpu", f"{HOST}/nightly/cpu"),
        ("rocm", "2.13.0+rocm7.1", "2.13.0+rocm7.1", f"{HOST}/rocm7.1"),
    ],
)
def test_builds(kind: str, torch: str, version: str, index: str) -> None:
    wheel = choose_wheel(kind, torch, **LINUX)
    assert (wheel.version, wheel.index) == (version, index)
    assert wheel.requirement == f"torch=={version}"


@pytest.mark.parametrize(
    ("torch", "driver", "tag"),
    [
        ("2.8.0", None, "cu128"),
        ("2.10.0", "580.65.06", "cu128"),  # stable, though the driver runs more
        ("2.13.0", None, "cu130"),
        ("2.13.0", "595.58.03", "cu130"),
        ("2.13.0", "580.65.06", "cu130"),
        ("2.13.0", "575.51.03", "cu126"),
        ("2.13.0", "560.28.03", "cu126"),
        ("2.13.0", "535.54.03", "cu126"),  # minor version compatibility
        ("2.13.0", "525.60.13", "cu126"),
        ("2.11.0", "570.26", "cu126"),
        ("2.10.0", "570.26", "cu128"),
        ("2.10.0", "565.57.01", "cu126"),
        ("2.13.0", "what?", "cu130"),
    ],
)
def test_the_driver_decides(torch: str, driver: str | None, tag: str) -> None:
    wheel = choose_wheel("cuda", torch, driver=driver, **LINUX)
    assert (wheel.version, wheel.index) == (f"{torch}+{tag}", f"{HOST}/{tag}")


@pytest.mark.parametrize(
    ("torch", "architectures", "tag", "told"),
    [
        ("2.13.0", ["sm_86"], "cu130", "it drives 1 of 1"),
        ("2.13.0", ["sm_80", "sm_70"], "cu126", "it drives 2 of 2"),  # an A100 beside a V100
        ("2.13.0", ["sm_61"], "cu126", "it drives 1 of 1"),
        ("2.13.0", ["sm_120", "sm_70"], "cu130", "it drives 1 of 2"),  # no build drives both
        ("2.13.0", ["sm_120", "sm_70", "sm_61"], "cu126", "it drives 2 of 3"),
        ("2.10.0", ["sm_120", "sm_70"], "cu128", "it drives 2 of 2"),  # one of the last that do
        ("2.13.0", ["sm_?"], "cu130", "it drives 0 of 1"),
    ],
)
def test_the_cards_decide(torch: str, architectures: list[str], tag: str, told: str) -> None:
    wheel = choose_wheel("cuda", torch, driver="580.65.06", architectures=architectures, **LINUX)
    assert wheel.version == f"{torch}+{tag}"
    assert told in wheel.reason


def test_on_other_processors_the_builds_have_other_code() -> None:
    wheel = choose_wheel("cuda", "2.13.0", architectures=["sm_70"], system="linux", machine="aarch64")
    assert wheel.version == "2.13.0+cu130"


@pytest.mark.parametrize(
    ("index", "version"),
    [
        ("https://mirror.example/whl/cu126", "2.13.0+cu126"),
        ("https://mirror.example/whl/cu126/", "2.13.0+cu126"),
        ("file:///wheels", "2.13.0+cu130"),
    ],
)
def test_a_mirror(index: str, version: str) -> None:
    wheel = choose_wheel("cuda", "2.13.0", index=index, **LINUX)
    assert (wheel.version, wheel.index) == (version, index)


def test_a_build_of_somebody_else() -> None:
    wheel = choose_wheel("rocm", "2.13.0+rocm10.0.0", index="https://amd.example/whl", system="win32")
    assert (wheel.version, wheel.index) == ("2.13.0+rocm10.0.0", "https://amd.example/whl")


def test_macos_has_one_build() -> None:
    wheel = choose_wheel("cpu", "2.13.0", system="darwin", machine="arm64")
    assert (wheel.version, wheel.index) == ("2.13.0", None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"kind": "cuda", "torch": "2.13.0", "system": "darwin"}, "but this is macOS"),
        ({"kind": "rocm", "torch": "2.13.0", "system": "win32"}, "no build for ROCm on Windows"),
        ({"kind": "rocm", "torch": "2.7.1"}, "--torch must be 2.8 or newer, but is '2.7.1' instead"),
        ({"kind": "cuda", "torch": "new"}, "--torch must be a version such as 2.13.0, but is 'new'"),
        ({"kind": "cuda", "torch": "2.13.0", "driver": "470.82"}, "driver must be 525 or newer"),
    ],
)
def test_refusals(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(SetupError) as caught:
        choose_wheel(**({"system": "linux", "machine": "x86_64"} | arguments))
    assert told in str(caught.value)


def test_newest_cuda() -> None:
    assert newest_cuda("580.65.06") == (13, 0)
    assert newest_cuda("700.1") == (13, 3)  # newer than the table
    assert newest_cuda(None) is None
