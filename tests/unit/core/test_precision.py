"""Which precision each device computes in, and what is said about it (case 10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetexp.core.device import DeviceSpec
from hetexp.core.precision import (
    AUTOCAST,
    SHORT_FORMS,
    choose_precisions,
    exchanged_in,
    long_name,
    precision_problems,
    precision_reasons,
)


def device(identity: str, name: str, *precisions: str) -> DeviceSpec:
    backend, _, index = identity.partition(":")
    vendor = {"cuda": "nvidia", "hip": "amd", "xpu": "intel", "mps": "apple"}[backend]
    return DeviceSpec(identity, backend, int(index), name, vendor, precisions=precisions)


SM_86 = device("cuda:0", "RTX 3090", "float64", "float32", "tf32", "bfloat16", "float16")
SM_75 = device("cuda:1", "RTX 2080 Ti", "float64", "float32", "float16")
ARC = replace(device("xpu:0", "Arc A770", "float32", "bfloat16", "float16"), architecture="xe-hpg")
MAC = device("mps:0", "M1", "float32", "float16")
PLAIN = device("hip:0", "Old card", "float64", "float32")
UNKNOWN = replace(device("cuda:2", "Card"), precisions=None)


# ---------------------------------------------------------------- a fixed precision


def test_every_unfit_device_is_named_at_once_with_what_it_can_do() -> None:
    (problem,) = precision_problems("bfloat16", [SM_86, SM_75, ARC, MAC])
    assert problem == (
        "`trainer.precision` must be one that cuda:1 (RTX 2080 Ti) computes in (float64, float32, float16) "
        "and mps:0 (M1) in (float32, float16), but is 'bfloat16' instead. Write trainer.precision=auto, "
        "which chooses for each device, or auto_common, one for all."
    )


@pytest.mark.parametrize(
    ("wanted", "unfit"),
    [
        ("float32", []),
        ("float16", [PLAIN]),
        ("bfloat16", [SM_75, MAC, PLAIN]),
        ("float64", [ARC, MAC]),  # neither Arc nor Apple's GPUs have it
        ("auto", []),
        ("auto_common", []),
    ],
)
def test_who_is_refused(wanted: str, unfit: list[DeviceSpec]) -> None:
    devices = [SM_86, SM_75, ARC, MAC, PLAIN, UNKNOWN]
    problems = precision_problems(wanted, devices)
    assert len(problems) == bool(unfit)
    told = " ".join(problems)
    assert [one for one in devices if str(one) in told] == unfit
    assert not unfit or ("trainer.precision=auto" in told and f"'{wanted}'" in told)


def test_a_device_of_which_nothing_is_known_is_asked_later() -> None:
    assert precision_problems("bfloat16", [UNKNOWN]) == []
    assert any("cuda:2" in r and "asked" in r for r in precision_reasons("bfloat16", [UNKNOWN, SM_86]))
    assert not any("cuda:2" in reason for reason in precision_reasons("float32", [UNKNOWN]))


# ---------------------------------------------------------------- auto


def test_auto_chooses_for_each_device() -> None:
    devices = [SM_86, SM_75, ARC, MAC, PLAIN, UNKNOWN]
    chosen = choose_precisions("auto", devices)
    assert chosen == ("bfloat16", "float16", "bfloat16", "float16", "float32", "float32")
    told = " ".join(precision_reasons("auto", devices))
    for one, precision in zip(devices, chosen, strict=True):
        assert f"{one.id} {precision}" in told
    assert "Which precisions cuda:2 has is not known: float32 is taken." in told
    assert "All ranks share one loss scale, because of float16 on cuda:1, mps:0." in told
    assert "exchange and the optimizer stay in float32" in told


@pytest.mark.parametrize(
    ("devices", "common", "why"),
    [
        ([SM_86, ARC], "bfloat16", "bfloat16 on every device."),
        ([SM_86, SM_75, ARC, MAC], "float16", "cuda:1, mps:0 have no native bfloat16"),
        ([SM_86, PLAIN], "float32", "hip:0 has no native bfloat16; hip:0 has no native float16"),
        ([SM_86, UNKNOWN], "float32", "cuda:2 has is not known"),
    ],
)
def test_auto_common_takes_the_best_that_all_have(devices: list[DeviceSpec], common: str, why: str) -> None:
    assert choose_precisions("auto_common", devices) == (common,) * len(devices)
    assert why in " ".join(precision_reasons("auto_common", devices))


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.sets(st.sampled_from(["float64", "bfloat16", "float16"])).map(lambda s: s | {"float32"}),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_no_choice_is_one_that_a_device_is_not_known_to_have(abilities: list[set[str] | None]) -> None:
    devices = [
        replace(SM_86, id=f"cuda:{i}", precisions=None if able is None else tuple(sorted(able)))
        for i, able in enumerate(abilities)
    ]
    for wanted in ("auto", "auto_common"):
        chosen = choose_precisions(wanted, devices)
        for precision, able in zip(chosen, abilities, strict=True):
            assert precision in (able or {"float32"})
            assert precision != "float64"
        assert exchanged_in(chosen) == "float32"
    common, best = choose_precisions("auto_common", devices), choose_precisions("auto", devices)
    assert len(set(common)) == 1
    if len(set(best)) == 1:
        assert common == best


def test_a_fixed_precision_is_everybodys() -> None:
    assert choose_precisions("float64", [SM_86, SM_75]) == ("float64", "float64")
    assert exchanged_in(("float64", "float64")) == "float64"
    assert precision_reasons("float32", [SM_86]) == []
    assert precision_reasons("float64", [SM_86]) == [
        "Every device computes in float64, as trainer.precision says."
    ]
    assert any("loss scale" in reason for reason in precision_reasons("float16", [SM_75]))
    assert not any("loss scale" in reason for reason in precision_reasons("bfloat16", [SM_86]))


# ---------------------------------------------------------------- names


def test_short_forms() -> None:
    assert {short: long_name(short) for short in SHORT_FORMS} == SHORT_FORMS
    assert [long_name(value) for value in ("float32", "auto", "half", 16, None)] == [
        *("float32", "auto", "half", 16, None)
    ]
    assert set(AUTOCAST) <= set(SHORT_FORMS.values())
