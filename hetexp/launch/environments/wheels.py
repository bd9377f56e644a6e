"""Chooses the build of torch for a vendor's cards, and its index.

PyTorch publishes one wheel for each vendor (for NVIDIA and AMD: for each version of CUDA and ROCm), each on
its own index. The local part of the version names the build: `2.13.0+cu130`. With that part in the
requirement, an installer cannot take another build.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetexp.core.errors import SetupError

KINDS = {"cuda": "cuda", "rocm": "hip", "xpu": "xpu", "cpu": "cpu"}
"""Kind on the command line → `TorchBuild.kind` of the wheel."""
HOST = "https://download.pytorch.org/whl"

Version = tuple[int, int]

_CUDA: dict[Version, tuple[Version, ...]] = {
    (2, 8): ((12, 8), (12, 6), (12, 9)),
    (2, 9): ((12, 8), (12, 6), (13, 0)),
    (2, 10): ((12, 8), (12, 6), (13, 0)),
    (2, 11): ((13, 0), (12, 6), (12, 8)),
    (2, 12): ((13, 0), (12, 6), (13, 2)),
    (2, 13): ((13, 0), (12, 6), (13, 2)),
    (2, 14): ((13, 0), (12, 6), (13, 2)),
}
"""torch → versions of CUDA of its wheels for Linux and Windows, PyTorch's stable one first
(https://pytorch.org/get-started/previous-versions, RELEASE.md of github.com/pytorch/pytorch)."""
_ROCM: dict[Version, Version] = {
    (2, 8): (6, 4),
    (2, 9): (6, 4),
    (2, 10): (7, 1),
    (2, 11): (7, 2),
    (2, 12): (7, 2),
    (2, 13): (7, 2),
    (2, 14): (7, 2),
}
"""torch → newest version of ROCm of its wheels (same sources)."""
_DRIVERS: tuple[tuple[int, Version], ...] = (
    (525, (12, 0)),
    (530, (12, 1)),
    (535, (12, 2)),
    (545, (12, 3)),
    (550, (12, 4)),
    (555, (12, 5)),
    (560, (12, 6)),
    (570, (12, 8)),
    (575, (12, 9)),
    (580, (13, 0)),
    (590, (13, 1)),
    (595, (13, 2)),
    (610, (13, 3)),
)
"""Branch of NVIDIA's driver → its newest CUDA ("CUDA Toolkit and Corresponding Driver Versions" in
https://docs.nvidia.com/cuda/cuda-toolkit-release-notes)."""
_TAG = re.compile(r"cu\d+|rocm[\d.]+|xpu|cpu")


@dataclass(frozen=True)
class Wheel:
    """One build of torch."""

    version: str
    """With the local part, if there is one: `2.13.0+cu130`."""
    index: str | None
    """Package index besides the installer's own sources."""
    reason: str
    """Why this build was chosen."""

    @property
    def requirement(self) -> str:
        """Requirement for an installer."""
        return f"torch=={self.version}"


def choose_wheel(
    kind: str,
    torch: str,
    *,
    index: str | None = None,
    driver: str | None = None,
    architectures: Sequence[str] = (),
    system: str = sys.platform,
    machine: str = "",
) -> Wheel:
    """Return the build of torch for a vendor's cards.

    Args:
        kind: a key of `KINDS`.
        torch: version of torch: `2.13.0`, or `2.13.0+rocm6.4`, whose local part chooses the build.
        index: a mirror instead of PyTorch's index; `…/cu128` at its end also chooses the build.
        driver: version of NVIDIA's driver, such as `580.65.06`; `None` if it is not known.
        architectures: of the machine's NVIDIA cards, such as `sm_70`.
        system: `sys.platform`.
        machine: `platform.machine()`; this machine's by default.

    Raises:
        SetupError: there is no such build for this system or driver.
    """
    public, _, local = torch.partition("+")
    if local:
        return Wheel(torch, index or f"{_host(public)}/{local}", "as --torch says")
    _check_system(kind, system)
    if system == "darwin":
        return Wheel(public, index, "macOS has one build, which drives Apple's GPUs and the CPU")
    named = (index or "").rstrip("/").rpartition("/")[2]
    if _TAG.fullmatch(named):
        return Wheel(f"{public}+{named}", index, "as --index says")
    if kind == "cuda":
        machine = machine or platform.machine()
        tag, reason = _cuda_tag(public, driver, architectures if machine in ("x86_64", "AMD64") else ())
    elif kind == "rocm":
        rocm = _latest(_ROCM, public)
        tag, reason = f"rocm{_dotted(rocm)}", f"the newest ROCm that torch {public} is built for"
    else:
        tag, reason = kind, "the only build of this kind"
    return Wheel(f"{public}+{tag}", index or f"{_host(public)}/{tag}", reason)


def newest_cuda(driver: str | None) -> Version | None:
    """Return the newest CUDA of a version of NVIDIA's driver; `None` if the driver is not known.

    Raises:
        SetupError: the driver is older than CUDA 12.
    """
    match = re.match(r"\d+", driver or "")
    if match is None:
        return None
    branch = int(match.group())
    supported = [cuda for oldest, cuda in _DRIVERS if oldest <= branch]
    if not supported:
        raise SetupError(
            f"NVIDIA's driver must be {_DRIVERS[0][0]} or newer for a torch that hetexp can use, but is "
            f"{driver}. Install a newer driver."
        )
    return supported[-1]


def _check_system(kind: str, system: str) -> None:
    if system == "darwin" and kind != "cpu":
        raise SetupError(
            f"torch for {kind} must be installed on Linux or Windows, but this is macOS. "
            "Run: hetexp env create cpu"
        )
    if kind == "rocm" and system == "win32":
        raise SetupError(
            "PyTorch has no build for ROCm on Windows. Use Linux or WSL, or name AMD's own index and "
            "version: --index URL --torch 2.13.0+rocm…"
        )


def _cuda_tag(torch: str, driver: str | None, architectures: Sequence[str]) -> tuple[str, str]:
    """Return the build that the driver can run and that drives most of the cards, and the reason."""
    newest = newest_cuda(driver)
    built = _latest(_CUDA, torch)
    fitting = [cuda for cuda in built if newest is None or cuda <= newest]
    if not fitting and newest is not None:
        # A driver runs builds of newer toolkits with its major version ("minor version compatibility").
        fitting = sorted(cuda for cuda in built if cuda[0] == newest[0])[:1]
    if not fitting:
        needed = min(branch for branch, cuda in _DRIVERS if cuda >= min(built))
        raise SetupError(
            f"NVIDIA's driver must be {needed} or newer for torch {torch}, but is {driver}. Install a newer "
            "driver, or an older torch: --torch"
        )
    driven = {cuda: sum(_drives(cuda, torch, name) for name in architectures) for cuda in fitting}
    best = max(fitting, key=lambda cuda: driven[cuda])  # of equal ones the first, which is the stable one
    known = "the driver is not known" if newest is None else f"driver {driver} runs CUDA {_dotted(newest)}"
    drives = f" and it drives {driven[best]} of {len(architectures)} NVIDIA cards" if architectures else ""
    return f"cu{best[0]}{best[1]}", f"{known}{drives}"


def _drives(cuda: Version, torch: str, architecture: str) -> bool:
    """Return whether a wheel has code for a card ("PyTorch CUDA Support Matrix" in PyTorch's RELEASE.md)."""
    number = re.fullmatch(r"sm_(\d+)(\d)", architecture)
    if number is None:
        return False
    capability = (int(number[1]), int(number[2]))
    if cuda < (12, 8):
        return (5, 0) <= capability < (10, 0)
    volta = cuda < (13, 0) and _major_minor(torch) < (2, 11)
    return ((7, 0) if volta else (7, 5)) <= capability


def _latest(table: dict[Version, Version] | dict[Version, tuple[Version, ...]], torch: str) -> Any:
    """Return a release's entry; a release newer than the table has the last entry."""
    release = _major_minor(torch)
    releases = [entry for entry in table if entry <= release]
    if not releases:
        oldest = _dotted(min(table))
        raise SetupError(f"--torch must be {oldest} or newer, but is '{torch}' instead.")
    return table[max(releases)]


def _host(torch: str) -> str:
    return f"{HOST}/nightly" if ".dev" in torch else HOST


def _major_minor(version: str) -> Version:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise SetupError(f"--torch must be a version such as 2.13.0, but is '{version}' instead.")
    return int(match[1]), int(match[2])


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
