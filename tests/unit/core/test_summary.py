"""The record of a run, and its metrics in the devices' own time."""

from __future__ import annotations

from hetexp.core.summary import modelled


def test_speeds_of_emulated_devices_are_in_modelled_seconds() -> None:
    """Ten real seconds of a modelled one: the device does ten times as much in its own second."""
    line = {"time_scale": 10.0, "samples_per_second": 4.0, "train/loss": 2.0, "step": 3}
    devices = {"device/emulated:0/samples_per_second": 3.0, "device/emulated:1/samples_per_second": None}
    assert modelled({**line, **devices}) == {
        "emulation/time_scale": 10.0,
        "samples_per_second": 40.0,
        "train/loss": 2.0,
        "step": 3,
        "device/emulated:0/samples_per_second": 30.0,
        "device/emulated:1/samples_per_second": None,
    }
    del line["time_scale"]
    assert modelled(line) == line
