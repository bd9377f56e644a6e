"""Builds the loss that `trainer.loss` names, with the arguments of the section `loss`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetexp.core.errors import must_be
from hetexp.core.instantiate import check_component, locate
from hetexp.training.loss.base import CrossEntropy, Loss
from hetexp.training.loss.elements import (
    BinaryCrossEntropy,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    Reconstruction,
)
from hetexp.training.loss.model_loss import ModelLoss
from hetexp.training.loss.several import WeightedSum

SUM = "sum"
_SHIPPED: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropy,
    "bce": BinaryCrossEntropy,
    "mse": MeanSquaredError,
    "mae": MeanAbsoluteError,
    "huber": Huber,
    "reconstruction": Reconstruction,
    "model": ModelLoss,
}
_OF_TERM = {"loss", "factor", "output", "target"}


def build_loss(name: str, arguments: Mapping[str, Any] | None = None) -> Loss:
    """Return the loss of that name, or an object of the class at that dotted path.

    Args:
        arguments: of its constructor.

    Raises:
        ConfigError: `only_trusted` refuses it.
    """
    if name == SUM:
        return WeightedSum.of((arguments or {})["terms"], build_loss)
    loss_class = _SHIPPED.get(name) or locate(name, "trainer.loss")
    loss: Loss = loss_class(**(arguments or {}))
    return loss


def check_loss(name: str, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """Return the problems of `trainer.loss` and of the section `loss`, one sentence each."""
    arguments = arguments or {}
    if name == SUM:
        return _check_sum(arguments)
    return _check("trainer.loss", "loss", name, arguments, [*_SHIPPED, SUM])


def _check(key: str, section: str, name: str, arguments: Mapping[str, Any], known: list[str]) -> list[str]:
    """Return the problems of one loss.

    Args:
        key: of its name.
        section: the key before its arguments.
        known: accepted names.
    """
    shipped = _SHIPPED.get(name)
    try:
        found = shipped or locate(name, key)
    except Exception as error:  # an import runs any code and so raises anything
        return [_unknown(key, name, known, error)]
    target = f"{found.__module__}.{found.__qualname__}" if shipped is not None else name
    problems = check_component(section, {"_target_": target, **arguments}) if callable(found) else []
    if not problems and found is ModelLoss:
        problems = ModelLoss.check_arguments(**arguments)
    if problems:
        return [problem.replace(f"of {target} ", f"of {key}={name} ") for problem in problems]
    try:
        loss = build_loss(name, arguments)
    except Exception as error:  # a constructor raises anything
        return [_unknown(key, name, known, error)]
    if not isinstance(loss, Loss):
        return [f"`{key}` must be a class derived from hetexp.training.loss.Loss, but is '{name}' instead."]
    return []


def _unknown(key: str, name: str, known: list[str], error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return (
        f"`{key}` must be one of {', '.join(known)} or the dotted path of a class, but is '{name}' instead "
        f"({reason})."
    )


def _check_sum(arguments: Mapping[str, Any]) -> list[str]:
    terms = arguments.get("terms")
    problems = [
        f"`loss.{name}` is not an argument of trainer.loss=sum (its value is {value!r}). A term takes it: "
        f"loss.terms.NAME.{name}."
        for name, value in arguments.items()
        if name != "terms"
    ]
    if not isinstance(terms, Mapping) or not terms:
        fix = "Write loss.terms={NAME:{loss:cross_entropy,factor:1.0,output:KEY,target:KEY}, …}."
        return [*problems, must_be("loss.terms", "the terms of the sum by name", terms, fix)]
    for name, term in terms.items():
        problems += _check_term(f"loss.terms.{name}", term)
    return problems


def _check_term(key: str, term: Any) -> list[str]:
    if not isinstance(term, Mapping) or not isinstance(term.get("loss"), str):
        fix = "Write {loss:cross_entropy,factor:1.0,output:KEY,target:KEY}."
        return [must_be(key, "a mapping with the name of a loss", term, fix)]
    problems = []
    factor = term.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        problems.append(must_be(f"{key}.factor", "a number", factor))
    for name in ("output", "target"):
        if not isinstance(term.get(name), (str, int, type(None))):
            problems.append(must_be(f"{key}.{name}", "a name, a number or null", term[name]))
    if term["loss"] == SUM:
        return [*problems, must_be(f"{key}.loss", f"one of {', '.join(_SHIPPED)}", SUM)]
    more = {name: value for name, value in term.items() if name not in _OF_TERM}
    return problems + _check(f"{key}.loss", key, term["loss"], more, list(_SHIPPED))
