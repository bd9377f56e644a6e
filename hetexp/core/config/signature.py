"""The arguments of a class or function, from the object itself or from its source alone.

The source is read without importing the module, and so without torch, which takes seconds.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import tokenize
import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from hetexp.core.errors import logged

_ANNOTATE = ("typing", "collections.abc", "pydantic", "annotated_types")
"""Modules whose names an annotation may use to be read from source."""
_MOST_ALIASES = 3
"""Most modules that a name is followed through, such as from `torch.optim` to `torch.optim.adamw`."""
Parameters = dict[str, inspect.Parameter]


@dataclass(frozen=True)
class Signature:
    """The arguments of a class or function."""

    parameters: Parameters
    hints: dict[str, Any]
    """Argument → annotation; without an entry any value may be right."""
    accepts_any: bool
    """Whether it takes arguments that the signature does not name."""

    @property
    def named(self) -> Parameters:
        """The parameters that may be given by name."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {name: p for name, p in self.parameters.items() if p.kind in kinds}


def signature_of(located: Callable[..., Any]) -> Signature | None:
    """Return the signature of a class or function; `None` for builtins without one."""
    try:
        parameters = inspect.signature(located).parameters
    except (TypeError, ValueError):
        return None
    return Signature(dict(parameters), _hints(located), _takes_any(located))


def signature_from_source(target: str) -> Signature | None:
    """Return the signature of a dotted path, of which no module is imported.

    `None` if the source alone does not decide it: a decorator, a metaclass or an inherited constructor may
    change the arguments, and a module may make its names when it is imported.

    Raises:
        ModuleNotFoundError: the first module of the path does not exist.
    """
    names = target.split(".")
    if not all(name.isidentifier() for name in names) or len(names) < 2:
        return None
    module, left = _module(names)
    try:
        return _read(module, left[0], _MOST_ALIASES) if len(left) == 1 else None
    except (OSError, SyntaxError, ValueError, UnicodeDecodeError):  # the import will report it
        return None


def _module(names: list[str]) -> tuple[ModuleSpec | None, list[str]]:
    """Return the innermost module of a dotted path, and the names in it.

    Raises:
        ModuleNotFoundError: there is no module of the first name.
    """
    try:
        spec = find_spec(names[0])
    except (ImportError, ValueError):  # a module under way, or one without a spec
        return None, names
    if spec is None:
        raise ModuleNotFoundError(f"No module named {names[0]!r}")
    for place, name in enumerate(names[1:], start=1):
        folders = list(spec.submodule_search_locations or ())
        inner = PathFinder.find_spec(f"{spec.name}.{name}", folders) if folders else None
        if inner is None:
            return spec, names[place:]
        spec = inner
    return spec, []


def _read(spec: ModuleSpec | None, name: str, aliases: int) -> Signature | None:
    """Return the signature of a name in a module's source."""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    with tokenize.open(spec.origin) as file:
        body = ast.parse(file.read()).body
    for node in reversed(body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _assigned(node):
            return None
        if isinstance(node, ast.ClassDef) and node.name == name:
            function = _constructor(node)
            return _signature(function, body, 1) if function is not None else None
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _signature(node, body, 0) if not node.decorator_list else None
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if name == (alias.asname or alias.name) and aliases:
                package = spec.name if Path(spec.origin).name == "__init__.py" else spec.parent or ""
                home = resolve_name("." * node.level + (node.module or ""), package)
                module, left = _module([*home.split("."), alias.name])
                return _read(module, left[0], aliases - 1) if len(left) == 1 else None
    return None


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    """Return a class's own `__init__` if nothing else in the class decides about its arguments."""
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    constructor = own.get("__init__")
    attributes = [
        name
        for item in node.body
        if isinstance(item, (ast.Assign, ast.AnnAssign))
        for name in _assigned(item)
    ]
    decided = node.decorator_list or node.keywords or "__new__" in own or "__signature__" in attributes
    if constructor is None or decided or constructor.decorator_list:
        return None
    return constructor


def _signature(function: ast.FunctionDef, body: list[ast.stmt], skipped: int) -> Signature:
    """Return the signature of a function's source.

    Args:
        body: of its module, whose imports the annotations use.
        skipped: first parameters to leave out (`self`).
    """
    given, parameters, hints = function.args, {}, {}
    names, kind = _names(body), inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    rows = list(zip(positional, [*defaults, *given.defaults], strict=True))[skipped:]
    rows += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    for argument, default in rows:
        keyword = argument in given.kwonlyargs
        by_name = kind.KEYWORD_ONLY if keyword else kind.POSITIONAL_OR_KEYWORD
        how = kind.POSITIONAL_ONLY if argument in given.posonlyargs else by_name
        value: Any = kind.empty
        hint = _evaluated(argument.annotation, names)
        if default is not None:
            try:
                value = ast.literal_eval(default)
            except ValueError:  # only its module knows the value
                value, hint = default, None
        parameters[argument.arg] = kind(argument.arg, how, default=value)
        if hint is not None:
            hints[argument.arg] = hint
    return Signature(parameters, hints, given.kwarg is not None)


def _names(body: list[ast.stmt]) -> dict[str, Any]:
    """Return the names in a module of which its annotations may be made."""
    names: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, tuple)}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module in _ANNOTATE and not node.level:
            module = importlib.import_module(node.module)
            found = {a.asname or a.name: getattr(module, a.name, None) for a in node.names}
            names |= {name: value for name, value in found.items() if value is not None}
    return names


def _evaluated(annotation: ast.expr | None, names: dict[str, Any]) -> Any:
    """Return the value of an annotation; `None` if it has a name of another module."""
    if annotation is None or isinstance(annotation, ast.Constant):  # a name in quotes
        return None
    used = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    if not used <= names.keys():
        return None
    with logged("an annotation is left to the import"):
        return eval(compile(ast.Expression(annotation), "annotation", "eval"), {"__builtins__": {}}, names)
    return None


def _takes_any(located: Callable[..., Any]) -> bool:
    """Return whether a callable takes arguments that its signature does not name.

    A decorator with `functools.wraps` shows the signature of what it decorates, and may take more. Hugging
    Face's configurations do, whose `__post_init__` makes attributes of all other arguments.
    """
    layers: list[Any] = [located]
    if inspect.isclass(located) and not hasattr(located, "__signature__"):
        made = (located.__init__, located.__new__, getattr(located, "__post_init__", None))
        layers += filter(inspect.isfunction, made)
    for layer in layers:  # which grows by what each one decorates
        try:
            shown = inspect.signature(layer, follow_wrapped=False).parameters.values()
        except (TypeError, ValueError):  # a builtin that shows none
            shown = {}.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown):
            return True
        if hasattr(layer, "__wrapped__"):
            layers.append(layer.__wrapped__)
    return False


def _hints(located: Callable[..., Any]) -> dict[str, Any]:
    function = located.__init__ if inspect.isclass(located) else located
    with logged(f"the types of {located!r} are not checked"):  # names that only a type checker sees
        return typing.get_type_hints(function, include_extras=True)
    return {}
