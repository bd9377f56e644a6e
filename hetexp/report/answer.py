"""The comparison in a sentence or two."""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.core.device import plain_name
from hetexp.report.intervals import overlap
from hetexp.report.results import Comparison, Interval, Variant
from hetexp.report.words import counted, interval_text, number


def answer_of(comparison: Comparison, candidates: Sequence[Variant]) -> str:
    """Return the result in a few sentences, the most important first; labels stand in backticks.

    Args:
        candidates: variants that can be the best, the fastest first.
    """
    if not comparison.variants:
        return f"No run completed, {len(comparison.failed)} did not: there is nothing to compare."
    best = comparison.best
    if best is None:
        return (
            f"None of {counted(len(comparison.variants), 'variant')} can be called the best: "
            f"{_why_none(comparison.variants)}."
        )
    rivals = [variant for variant in candidates if variant is not best and _same_work(variant, best)]
    equals = [variant for variant in rivals if variant.exact is best.exact]
    sentences = [_lead(best, len(comparison.variants) - (len(rivals) - len(equals)))]
    if equals:
        sentences += _against(best, equals[0])
    if not best.exact:
        sentences.append("Its steps are not those of one device, so compare its loss, too.")
    elif rivals and not rivals[0].exact and rivals[0].speed > best.speed:
        sentences.append(_other_steps(rivals[0], best))
    return " ".join(sentences)


def _other_steps(variant: Variant, best: Variant) -> str:
    """Return a sentence on a faster variant whose steps are not those of one device."""
    ratio = variant.speed / best.speed
    text = f"`{variant.label}` takes {ratio:.2f}× as many samples a second, but its steps are not "
    text += "those of one device"
    if variant.eval_loss is not None and best.eval_loss is not None:
        text += (
            f": its evaluation loss ends at {number(variant.eval_loss.mean, 3)} instead of "
            f"{number(best.eval_loss.mean, 3)}"
        )
    return f"{text}."


def _lead(best: Variant, count: int) -> str:
    """Return the first sentence: the best variant, and its gain."""
    emulated = ", emulated" if best.emulated else ""
    gain, speed = best.gain_over_single, best.samples_per_second
    assert speed is not None
    fast = f"{number(speed.mean, 4)} samples/s{_seeds(speed)}"
    if best.num_devices == 1 and count > 1:
        name = plain_name(best.devices[0])
        return f"`{best.label}`, the {name} alone, is the fastest of {count} variants: {fast}{emulated}."
    if gain is None or best.single_device is None or best.num_devices == 1:
        several = f" is the fastest of {count} variants:" if count > 1 else " trains"
        return f"`{best.label}`{several} {fast}{emulated}."
    if gain.mean < 1:
        return (
            f"`{best.label}` is the fastest of {count} variants: {fast}{emulated}. But the "
            f"{plain_name(best.single_device)} alone is {1 / gain.mean:.2f}× as fast."
        )
    equal = best.gain_over_equal
    more = ""
    if equal is not None and best.settings.get("balancing") != "equal":
        more = f", and {equal.mean:.2f}× as fast as with an equal split"
    return (
        f"`{best.label}` trains {gain.mean:.2f}× as fast as the {plain_name(best.single_device)} alone"
        f"{_seeds(gain, 3)}{more}{emulated}."
    )


def _seeds(value: Interval, digits: int = 4) -> str:
    """Return the bounds and the number of seeds in brackets."""
    inside = [part for part in (interval_text(value, digits), counted(value.count, "seed")) if part]
    return f" [{', '.join(inside)}]"


def _against(best: Variant, rival: Variant) -> list[str]:
    """Return whether the seeds distinguish the best variant from the next one, in a sentence if not."""
    speed, rival_speed = best.samples_per_second, rival.samples_per_second
    if speed is None or rival_speed is None:
        return []
    runner_up = f"`{rival.label}` ({1 - rival_speed.mean / speed.mean:.1%} slower)"
    shared = overlap(speed, rival_speed)
    if shared is None:
        return [f"One seed does not show whether {runner_up} differs by more than chance."]
    return [f"From these seeds it cannot be distinguished from {runner_up}."] if shared else []


def _same_work(variant: Variant, other: Variant) -> bool:
    """Return whether two variants have the same single-device baseline, or both none."""
    return variant.single_samples_per_second == other.single_samples_per_second


def _why_none(variants: Sequence[Variant]) -> str:
    counts = {
        "{} invalid": sum(not variant.valid for variant in variants),
        "{} fell back to another strategy": sum(variant.fallback is not None for variant in variants),
        "{} diverged": sum(variant.num_diverged > 0 for variant in variants),
        "{} without a throughput": sum(variant.samples_per_second is None for variant in variants),
    }
    return ", ".join(text.format(count) for text, count in counts.items() if count)
