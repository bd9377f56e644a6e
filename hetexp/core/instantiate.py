"""Checks and builds what `_target_` names; nothing else in the package does."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from hetexp.core.config import explain, own_arguments
from hetexp.core.config.signature import Signature, signature_from_source, signature_of
from hetexp.core.config.weights import weights_problems
from hetexp.core.errors import ConfigError, did_you_mean, logged, must_be, plain_line

log = logging.getLogger(__name__)

_RESERVED = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
ALWAYS_TRUSTED = frozenset(
    f"hetexp.{name}"
    for name in (
        *("strategy.auto.Auto", "strategy.ddp.DDP", "strategy.dp.DP", "strategy.single.Single"),
        *("strategy.hierarchical_sgd.HierarchicalSGD", "strategy.hybrid.Hybrid"),
        *("strategy.independent.Independent", "strategy.local_sgd.LocalSGD", "strategy.pipeline.Pipeline"),
        *("balancing.adaptive.Adaptive", "balancing.equal.Equal", "balancing.manual.Manual"),
        *("balancing.profiled.Profiled", "balancing.tflops.Tflops", "balancing.vram.Vram"),
        *("model.mlp.MLP", "model.convnet.ConvNet", "model.gpt.GPT", "model.sae.SAE"),
        *("data.digits.Digits", "data.digits.DigitVectors", "data.synthetic.Synthetic", "data.text.Text"),
        *("data.activations.Activations", "data.collate.Pad"),
        "data.collate.collate_list",
    )
) | {"torch.optim.SGD"}
"""Classes that may always be built: whatever their arguments, they run no code but hetexp's own, and write
nothing."""
_LOOKED_AT = ALWAYS_TRUSTED | {"hetexp.model.hf_causal_lm.HFCausalLM"}
"""Classes whose own methods may be called. transformers builds whatever the files of a folder name."""
WITHOUT_TORCH = ("hetexp.strategy", "hetexp.balancing", "hetexp.logger", "hetexp.data")
"""Packages whose shipped options import no torch."""
OF_A_SCHEDULE = ("optimizer", "T_max", "total_steps", "num_training_steps", "total_iters")
"""Arguments that hetexp gives a class of `trainer.schedule`: the optimizer, and the length of the run."""
_ACCEPTED = "a class of hetexp or of a package that you trust"


@dataclass(frozen=True)
class _Limit:
    """What may be built inside one `only_trusted` block."""

    packages: tuple[str, ...]
    how: str

    def covers(self, name: str) -> bool:
        return _inside(name, self.packages)


_limits: ContextVar[tuple[_Limit, ...]] = ContextVar("limits", default=())
"""Of all blocks that the current thread is in."""


_FROM_FACTS = ", or, if the data's `facts` have it, give the argument a default of None."


@contextmanager
def only_trusted(packages: Sequence[str] = (), how: str = "--trust {}") -> Iterator[None]:
    """Inside the block, refuse to build or import what neither hetexp nor a trusted package defines.

    Whatever reads a configuration from a folder does so in such a block: a stranger may have written it. A
    block inside another one allows no more than both do.

    Args:
        packages: names of the packages, or of single modules, that the user trusts.
        how: the words by which the user trusts the package in `{}`.
    """
    before = _limits.set((*_limits.get(), _Limit(tuple(packages), how)))
    try:
        yield
    finally:
        _limits.reset(before)


def untrusted(node: Any, key: str = "") -> list[str]:
    """Return what `only_trusted` refuses in a configuration, one sentence for each value.

    Args:
        node: plain types; every `_target_` counts, however deep.
        key: Hydra key of the node.
    """
    problems = [problem for limit in _limits.get() for problem in _untrusted(node, key, limit)]
    return list(dict.fromkeys(problems))


def instantiate(node: Mapping[str, Any], /, **extra: Any) -> Any:
    """Build the object that `node` describes by Hydra's `instantiate`, lists and dicts as plain types.

    Args:
        node: a mapping with `_target_`; nested nodes are built too.
        extra: arguments added to, or put in place of, those of the node.

    Raises:
        ConfigError: the class refused its arguments with one, or `only_trusted` refuses a class.
        Exception: any other error of a constructor.
    """
    import hydra.utils
    from hydra.errors import InstantiationException

    if problems := untrusted({**dict(node), **extra}):
        raise ConfigError(problems)
    try:
        return hydra.utils.instantiate(dict(node), _convert_="all", **extra)
    except InstantiationException as error:
        # Hydra wraps what a constructor raises, and its message has the reason on a later line.
        cause = error.__cause__ or error
    raise cause  # out of the block, so that it keeps a cause of its own


def locate(target: str, key: str = "_target_", built: bool = True) -> Any:
    """Return the class or function of a dotted path.

    Args:
        target: the path.
        key: Hydra key of the path, for the message of a refusal.
        built: whether it may be called, and not only a method of its own.

    Raises:
        ConfigError: `only_trusted` refuses it.
        Exception: whatever importing its module raises, `ImportError` or `AttributeError` for a wrong path.
    """
    if ":" in target:  # resolve_name's other form, which Hydra does not read
        raise ImportError("a dotted path has no colon")
    if built or target not in _LOOKED_AT:
        for limit in _limits.get():
            _trusted(key, target, limit)
    return pkgutil.resolve_name(target)


def _untrusted(node: Any, key: str, limit: _Limit) -> Iterator[str]:
    if isinstance(node, str) and "${" in node:  # Hydra would resolve it, even to another `_target_`
        yield must_be(plain_line(key), "a plain value in a stored configuration", plain_line(node))
    elif isinstance(node, Mapping):
        for name, value in node.items():
            inner = f"{key}.{name}" if key else str(name)
            if name != "_target_":
                yield from _untrusted(value, inner, limit)
                continue
            try:
                _trusted(inner, value, limit)
            except ConfigError as error:
                yield from error.problems
    elif isinstance(node, (list, tuple)):
        for position, item in enumerate(node):
            yield from _untrusted(item, f"{key}[{position}]", limit)


def _trusted(key: str, target: Any, limit: _Limit) -> None:
    """Check that a dotted path leads to something trusted, by trusted modules only.

    A module has names that it imported from elsewhere (`hetexp.training.loss.torch.load`). So every step of
    the path must be defined inside a trusted package.

    Raises:
        ConfigError: it does not.
    """

    def refusal(why: str) -> ConfigError:
        return ConfigError(must_be(plain_line(key), _ACCEPTED, plain_line(target), why))

    def by_trust(package: str) -> str:
        if not all(name.isidentifier() for name in package.split(".")):
            return "It is no dotted path."
        return f"If you trust its code, add {limit.how.format(package)}."

    if not isinstance(target, str):
        raise refusal("A dotted path is text.")
    if target in ALWAYS_TRUSTED:
        return
    around = target.rpartition(".")[0] or target
    if not limit.covers(target):
        raise refusal(by_trust(around))
    names = target.split(".")
    try:
        found, path, home = importlib.import_module(names[0]), names[0], names[0]
        for name in names[1:]:
            path = f"{path}.{name}"
            if isinstance(found, ModuleType) and not hasattr(found, name):
                found = importlib.import_module(path)
            else:
                found = getattr(found, name)
            if isinstance(found, ModuleType):
                if found.__name__ != path:
                    raise refusal(f"It leads out of the package, into the module {found.__name__}.")
            elif not limit.covers(home := str(getattr(found, "__module__", "an unknown module"))):
                raise refusal(f"It comes from {home}. {by_trust(home)}")
    except ConfigError:
        raise
    except Exception as error:  # an import runs any code and so raises anything
        why = f"It cannot be imported ({_first_line(error)})."
        raise refusal(why) from error
    if not isinstance(found, type) and not _inside(home, limit.packages):
        raise refusal(f"It is no class. {by_trust(around)}")


def _inside(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def parameters(target: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a target by name; empty if it has no Python signature."""
    try:
        return dict(inspect.signature(locate(target)).parameters)
    except (TypeError, ValueError):
        return {}


def accepts(target: str, name: str) -> bool:
    """Return whether a target may take an argument; yes if it cannot be imported or has no signature."""
    if name in _RESERVED:
        return True
    with logged(f"the arguments of {target} are not known"):  # `check_component` reports it
        known = inspect.signature(locate(target)).parameters
        return name in known or any(p.kind is p.VAR_KEYWORD for p in known.values())
    return True


def arguments(target: str, key: str) -> tuple[list[str], bool]:
    """Return the arguments that a configuration may give a class, and whether it takes any others.

    A class that cannot be imported, or has no signature, takes any: `check_component` reports it.

    Args:
        key: Hydra key of an argument, whose section may leave some to hetexp.
    """
    signature = None
    with logged(f"the arguments of {target} are not known"):
        signature = signature_from_source(target) or signature_of(locate(target))
    if signature is None:
        return [], True
    named = signature.named
    later = _given_later(key.partition(".")[0], list(named))
    return [name for name in named if name not in later], signature.accepts_any


def fits_default(target: str, name: str, value: Any) -> bool:
    """Return whether a value is of the kind of an argument's default: a number, a list, a flag or a text.

    A class may give a name of another class another meaning, as Adafactor does with its two `eps`. Yes if the
    argument or the value is null or not known.
    """
    default = None
    with logged(f"the arguments of {target} are not known"):  # `check_component` reports it
        default = parameters(target)[name].default
    kinds = [next((kind for kind in _KINDS if isinstance(one, kind)), None) for one in (default, value)]
    return None in kinds or kinds[0] is kinds[1]


_KINDS: tuple[Any, ...] = (bool, (int, float), (list, tuple), str)


def check_component(key: str, node: Any, imports: bool = True) -> list[str]:
    """Check a `_target_` node against its class's signature without building it.

    Annotations of the signature give types and limits (`pydantic.PositiveInt`,
    `Annotated[float, Field(le=1)]`, …). A static method `check(**arguments) -> list[str]` of the class checks
    clashes between its arguments.

    Args:
        key: Hydra key of the node, for the messages.
        node: plain mapping.
        imports: whether classes may be imported. Otherwise those outside of `WITHOUT_TORCH` are judged by
            their source, as far as it shows their arguments.

    Returns:
        One sentence a problem; empty when the node can be built.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        return [f"`{key}._target_` must be the dotted path of a class, but is missing."]
    target = node["_target_"]
    from_source = not imports and not _inside(target, WITHOUT_TORCH)
    try:
        located = None if from_source else locate(target)
        signature = signature_from_source(target) if from_source else None
    except Exception as error:  # an import runs any code and so raises anything
        return [
            f"`{key}._target_` must be an importable class, but is '{target}' instead ({_first_line(error)})."
        ]
    if not from_source:
        if not callable(located):
            return [f"`{key}._target_` must be a class or function, but is '{target}' instead."]
        signature = signature_of(located)
    if from_source and signature is None:  # neither the arguments nor whose they are can be known
        return []
    known = signature.parameters if signature is not None and key in ("data", "model") else {}
    problems = weights_problems(node, known) if key == "model" else []
    if signature is None:  # the constructor itself will judge
        return problems
    problems += _check_arguments(key, own_arguments(key, node, known), signature, imports)
    judge = inspect.getattr_static(located, "check", None)
    if not problems and isinstance(judge, staticmethod):
        problems += judge.__func__(**_arguments(own_arguments(key, node, known)))
    return problems


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in _RESERVED}


def _check_arguments(key: str, node: Mapping[str, Any], signature: Signature, imports: bool) -> list[str]:
    named = signature.named
    arguments = _arguments(node)
    problems: list[str] = []
    later = _given_later(key, list(named))
    for name, value in arguments.items():
        nested = list(_nodes(f"{key}.{name}", value))
        if nested:  # what they will build is not known yet
            problems += [
                problem for inner, node_ in nested for problem in check_component(inner, node_, imports)
            ]
        elif name in named:
            if value != named[name].default and not (value is None and name in later):
                problems += _check_value(f"{key}.{name}", value, signature.hints.get(name, Any))
        elif not signature.accepts_any:
            has = [known for known in named if known not in later]
            problems.append(
                f"`{key}.{name}` is not an argument of {node['_target_']} (its value is {value!r})."
                + (did_you_mean(name, has) or f" It takes {', '.join(has) or 'no arguments'}.")
            )
    if not node.get("_partial_"):
        problems += [
            f"`{key}.{name}` must be given, but is missing. Add {key}.{name}=…"
            + (_FROM_FACTS if key == "model" else ".")
            for name, p in named.items()
            if p.default is p.empty and name not in arguments and name not in later
        ]
    return problems


def _given_later(key: str, names: Sequence[str]) -> Sequence[str]:
    """Return the arguments that hetexp itself gives the class of a node when it builds it."""
    if key == "optimizer":
        return names[:1]  # the parameters
    return OF_A_SCHEDULE if key.startswith("trainer.schedule") else ()


def _nodes(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the outermost `_target_` nodes in a value, each with its key."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield key, value
            return
        for name, item in value.items():
            yield from _nodes(f"{key}.{name}", item)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _nodes(f"{key}[{position}]", item)


def _check_value(key: str, value: Any, annotation: Any) -> list[str]:
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError as error:
        if error.code != "type-adapter-config-unused":
            return []  # an annotation that pydantic cannot read judges nothing
        adapter = TypeAdapter(annotation)
    except Exception as error:  # forward references and exotic types: the constructor itself will judge
        log.debug("`%s` is not checked: %r", key, error)
        return []
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        return explain(error, value, key, schema=None)
    except (TypeError, ValueError):  # a value that JSON cannot hold was not typed
        return []
    return []


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
