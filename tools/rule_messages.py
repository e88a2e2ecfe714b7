"""Reads the messages of a rule from its source, without running the rule.

Loops over constants are unrolled, and both branches of a condition are read. A message that another
function composes, or that is the text of an exception, is read there. What depends on the
configuration is shown as VALUE, FLAG or `…`.
"""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, TypeGuard

from megatron.config.fields import all_fields
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.pipeline_schedule import PipelineSchedule

UNKNOWN = "…"
_MOST_ALTERNATIVES = 6
"""A text with more alternatives is shown as `…`."""
_DEEPEST_CALL = 4
_CLASSES = {"schedule": PipelineSchedule, "curriculum": Curriculum}
"""Variable of a rule -> class whose methods compose a part of the message."""
# Any two of the given fields may be neighbours.
_ITERTOOLS = SimpleNamespace(
    combinations=itertools.combinations, pairwise=lambda items: itertools.combinations(items, 2)
)


class _NotConstantError(Exception):
    """An expression depends on the configuration."""


def show_field(dotted: str) -> str:
    """Return the flag of a field as a message names it, with VALUE for its value."""
    described = all_fields()[dotted]
    if described.is_bool:
        return described.negative_flag if described.default else described.flag
    return f"{described.flag} VALUE"


@dataclass(frozen=True)
class _Scope:
    """What is known at a place of a function."""

    names: Mapping[str, Any]
    """The names of the module."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Variables of loops, and arguments, whose values are known."""
    expressions: Mapping[str, list[ast.expr]] = field(default_factory=dict)
    """Variable -> the expressions that are assigned to it, in different branches."""
    raised: Mapping[str, list[str]] = field(default_factory=dict)
    """Variable of an exception -> the texts that it can have."""
    depth: int = 0

    def evaluate(self, node: ast.expr) -> Any:
        """Return the value of an expression of constants.

        Raises:
            _NotConstantError: It depends on the configuration.
        """
        constants = dict(self.constants)
        for name in {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}:
            values = self.expressions.get(name, [])
            if name not in constants and values:
                if len(values) > 1:
                    raise _NotConstantError
                constants[name] = self.without(name).evaluate(values[0])
        code = compile(ast.Expression(_drop_conditions(node)), "<rule>", "eval")
        try:
            # One dictionary, because a comprehension does not see the locals of `eval`.
            return eval(code, {**self.names, "itertools": _ITERTOOLS, **constants})
        except Exception as failure:
            raise _NotConstantError from failure

    def without(self, name: str) -> "_Scope":
        """Return this scope without the expressions of a variable, which may use its old value."""
        others = {other: found for other, found in self.expressions.items() if other != name}
        return replace(self, expressions=others)

    def bind(self, target: ast.expr, value: Any) -> "_Scope":
        """Return this scope with the value of a loop's variables.

        Args:
            target: The variables.
            value: Their value, or its expression if it is no constant.
        """
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else value
            scope = self
            for each, part in zip(target.elts, parts, strict=True):
                scope = scope.bind(each, part)
            return scope
        assert isinstance(target, ast.Name), ast.dump(target)
        if isinstance(value, ast.expr):
            try:
                value = self.evaluate(value)
            except _NotConstantError:
                return replace(self, expressions={**self.expressions, target.id: [value]})
        return replace(self, constants={**self.constants, target.id: value})


def _drop_conditions(node: ast.expr) -> ast.expr:
    """Return a copy of an expression whose comprehensions have no conditions.

    Fields that are given are then all fields that may be given.
    """
    copied = ast.parse(ast.unparse(node), mode="eval").body
    for each in ast.walk(copied):
        if isinstance(each, ast.comprehension):
            each.ifs = []
    return copied


@cache
def _parse(function: FunctionType) -> ast.FunctionDef:
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def _enter(function: FunctionType, constants: Mapping[str, Any], depth: int) -> _Scope:
    """Return what is known at the start of a function."""
    expressions: dict[str, list[ast.expr]] = {}
    growing: dict[str, list[ast.expr]] = {}
    for node in ast.walk(_parse(function)):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                expressions.setdefault(name, []).append(value)
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                growing.setdefault(name, []).append(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "insert")):
                growing.setdefault(name, []).append(ast.Name("_unknown"))
    for name, added in growing.items():
        parts = [_make_optional(value) for value in added]
        expressions[name] = [
            ast.JoinedStr([ast.FormattedValue(value, -1), *parts])
            for value in expressions.get(name, [])
        ]
    return _Scope(function.__globals__, constants, expressions, depth=depth)


def _make_optional(value: ast.expr) -> ast.expr:
    """Return the expression of a text that is left out under an unknown condition."""
    return ast.FormattedValue(ast.IfExp(ast.Name("_unknown"), value, ast.Constant("")), -1)


def find_messages(
    function: FunctionType, constants: Mapping[str, Any] | None = None, depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield level and message of each finding of a function, and of those that it calls.

    Args:
        function: A rule, or a function that yields or returns findings.
        constants: Values of its arguments that are known.
        depth: Number of calls between the rule and this function.
    """
    if depth <= _DEEPEST_CALL:
        yield from _read_body(_parse(function).body, _enter(function, constants or {}, depth))


def _read_body(body: list[ast.stmt], scope: _Scope) -> Iterator[tuple[str, str]]:
    for index, statement in enumerate(body):
        match statement:
            case ast.Assign(
                targets=[ast.Tuple() as target],
                value=ast.IfExp(body=ast.Tuple() as first, orelse=ast.Tuple() as second),
            ):
                # Its values belong together, so the rest is read once for each of them.
                for value in (first, second):
                    yield from _read_body(body[index + 1 :], scope.bind(target, value))
                return
            case ast.Expr(value=result) | ast.Return(value=ast.expr() as result):
                yield from _read_findings(result, scope)
            case _:
                for part, inner in _list_parts(statement, scope):
                    yield from _read_body(part, inner)


def _list_parts(statement: ast.stmt, scope: _Scope) -> Iterator[tuple[list[ast.stmt], _Scope]]:
    """Yield the statements inside a statement, and what is known there."""
    match statement:
        case ast.For(body=body):
            for inner in _unroll(statement, scope):
                yield body, inner
        case ast.If():
            for branch in _choose_branches(statement, scope):
                yield branch, scope
        case ast.Try(body=tried, handlers=handlers):
            yield tried, scope
            for handler in handlers:
                yield handler.body, _catch(tried, handler, scope)


def _choose_branches(statement: ast.If, scope: _Scope) -> list[list[ast.stmt]]:
    """Return the branch that is taken, or both."""
    try:
        return [statement.body] if scope.evaluate(statement.test) else [statement.orelse]
    except _NotConstantError:
        return [statement.body, statement.orelse]


def _catch(tried: list[ast.stmt], handler: ast.ExceptHandler, scope: _Scope) -> _Scope:
    """Return what is known in a handler of exceptions."""
    handled = scope.evaluate(handler.type or ast.Name("Exception"))
    texts = list(_list_raised(tried, handled, scope))
    return replace(scope, raised={**scope.raised, handler.name or "": texts})


def _unroll(loop: ast.For, scope: _Scope) -> Iterator[_Scope]:
    """Yield what is known in each pass of a loop, or once if its items are not known."""
    iterables = [loop.iter]
    if isinstance(loop.iter, ast.Name):
        iterables = scope.expressions.get(loop.iter.id, iterables)
    for iterable in iterables:
        try:
            items = list(scope.evaluate(iterable))
        except _NotConstantError:
            if not isinstance(iterable, ast.Tuple | ast.List):
                yield scope
                continue
            items = [_get_item(each) for each in iterable.elts]
        for item in items:
            yield scope.bind(loop.target, item)


def _get_item(node: ast.expr) -> ast.expr:
    """Return an item of a list, or what a comprehension in it makes."""
    match node:
        case ast.Starred(value=ast.GeneratorExp(elt=element) | ast.ListComp(elt=element)):
            return element
    return node


def _read_findings(node: ast.expr, scope: _Scope) -> Iterator[tuple[str, str]]:
    """Yield the findings that an expression makes, in the order of its text."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    for call in sorted(calls, key=lambda each: (each.lineno, each.col_offset)):
        match call:
            case ast.Call(func=ast.Name(id="error" | "warning" as level), args=[text]):
                yield from ((level, message) for message in _render(text, scope))
            case ast.Call(
                func=ast.Name(id="map"), args=[ast.Name(id="error" | "warning" as level), texts]
            ):
                yield from ((level, message) for message in _render(texts, scope))
            case ast.Call(func=ast.Name(id=name)) if _is_ours(scope.names.get(name)):
                called = scope.names[name]
                yield from find_messages(
                    called, _bind_arguments(call, called, scope), scope.depth + 1
                )


def _is_ours(value: object) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and value.__module__.startswith("megatron.")


def _bind_arguments(call: ast.Call, function: FunctionType, scope: _Scope) -> dict[str, Any]:
    """Return the arguments of a call that are constants."""
    found = {}
    names = [argument.arg for argument in _parse(function).args.args]
    for name, value in zip(names, call.args, strict=False):
        try:
            found[name] = scope.evaluate(value)
        except _NotConstantError:
            continue
    return found


def _list_raised(
    body: list[ast.stmt], handled: type | tuple[type, ...], scope: _Scope
) -> Iterator[str]:
    """Yield the texts of the exceptions of some classes that functions of the package raise."""
    if scope.depth > _DEEPEST_CALL:
        return
    for node in itertools.chain.from_iterable(map(ast.walk, body)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        function = scope.names.get(node.func.id)
        if not _is_ours(function):
            continue
        inner = _enter(function, _bind_arguments(node, function, scope), scope.depth + 1)
        for each in ast.walk(_parse(function)):
            match each:
                case ast.Raise(exc=ast.Call(func=raised, args=[text])):
                    if issubclass(inner.evaluate(raised), handled):
                        yield from _render(text, inner)
        yield from _list_raised(_parse(function).body, handled, inner)


def _render(node: ast.expr, scope: _Scope) -> list[str]:
    """Return the texts that an expression can have, as far as they are known.

    A part that is only in some messages is in brackets.
    """
    found = list(dict.fromkeys(_list_texts(node, scope)))
    if "" in found and len(found) == 2:
        found = [f"[{''.join(found)}]"]
    return found if 0 < len(found) <= _MOST_ALTERNATIVES else [UNKNOWN]


def _list_texts(node: ast.expr, scope: _Scope) -> list[str]:
    """Return the texts of an expression in its branches, some of them perhaps twice."""
    match node:
        case ast.JoinedStr(values=parts):
            return _join(_render(part, scope) for part in parts)
        case ast.FormattedValue(value=part) | ast.ListComp(elt=part):
            return _render(part, scope)
        case ast.Name(id=name) if name in scope.raised:
            return scope.raised[name]
        case ast.Name(id=name) if name in scope.expressions and name not in scope.constants:
            others = scope.without(name)
            return [text for value in scope.expressions[name] for text in _render(value, others)]
        case ast.IfExp(body=first, orelse=second):
            return _render(first, scope) + _render(second, scope)
        case ast.Subscript(value=table) if texts := _find_texts(table, scope):
            return texts
        case ast.Call():
            return _render_call(node, scope)
    return [_render_constant(node, scope)]


def _render_call(call: ast.Call, scope: _Scope) -> list[str]:
    """Return the texts that a call can return."""
    match call:
        case ast.Call(func=ast.Name(id="str"), args=[value]):
            return _render(value, scope)
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="settings" | "context"), attr="describe"),
            args=arguments,
        ):
            return [" and ".join(shown) for shown in _describe(arguments, scope)]
        case ast.Call(func=ast.Name(id=name)) if _is_ours(scope.names.get(name)):
            return _render_results(scope.names[name], call, scope)
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)):
            owner = _CLASSES.get(ast.unparse(receiver).rpartition(".")[2])
            if owner is not None:
                return _render_results(vars(owner)[name], call, scope)
    return [_render_constant(call, scope)]


def _find_texts(table: ast.expr, scope: _Scope) -> list[str]:
    """Return the texts of a dictionary of which one is shown, or nothing."""
    try:
        value = scope.evaluate(table)
    except _NotConstantError:
        return []
    texts = list(value.values()) if isinstance(value, dict) else []
    return texts if all(isinstance(text, str) for text in texts) else []


def _join(parts: Iterable[list[str]]) -> list[str]:
    return ["".join(texts) for texts in itertools.product(*parts)]


def _describe(arguments: list[ast.expr], scope: _Scope) -> list[list[str]]:
    """Return the flags that `describe` can show, one list for each alternative."""
    shown: list[list[str]] = [[]]
    for argument in arguments:
        if isinstance(argument, ast.Starred):
            # All fields that may be given.
            shown = [
                [*before, *map(show_field, scope.evaluate(argument.value))] for before in shown
            ]
            continue
        alternatives = _render(argument, scope)
        if not set(alternatives) <= all_fields().keys():
            return [["FLAG VALUE"]]
        shown = [[*before, show_field(name)] for before in shown for name in alternatives]
    return shown


def _render_results(function: FunctionType, call: ast.Call, scope: _Scope) -> list[str]:
    """Return the texts that a function can return."""
    if scope.depth >= _DEEPEST_CALL:
        return [UNKNOWN]
    inner = _enter(function, _bind_arguments(call, function, scope), scope.depth + 1)
    results = [
        each.value
        for each in ast.walk(_parse(function))
        if isinstance(each, ast.Return) and ast.unparse(each) not in ("return", "return None")
    ]
    return [text for value in results if value is not None for text in _render(value, inner)]


def _render_constant(node: ast.expr, scope: _Scope) -> str:
    try:
        value = scope.evaluate(node)
    except _NotConstantError:
        # The flag of a field that only the configuration knows.
        return "FLAG" if isinstance(node, ast.Attribute) and node.attr == "flag" else UNKNOWN
    return str(value) if isinstance(value, str | int | float) else UNKNOWN
