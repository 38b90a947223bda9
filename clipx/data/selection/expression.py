"""Conditions on the columns of a table, `similarity > 0.28 and width >= 200`, parsed without executing anything.

A condition becomes an expression of pyarrow, which evaluates it column by column. A comparison with a missing value is
missing, and a row whose condition is missing is not selected.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from clipx.errors import ConfigError, require

_RULE = "write columns, numbers, 'texts', comparisons, in, and, or, not, + - * /, len(), min(), max(), abs()"
_FUNCTIONS = ("len", "min", "max", "abs")
_OPERATORS = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
_COMPARISONS = {
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
}
_MAX_CHARS = 10_000


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition. `key` is its option, for messages."""

    key: str
    text: str
    columns: Sequence[str]

    @classmethod
    def parse(cls, key: str, text: str) -> Condition:
        """Parses a condition. Raises ConfigError for anything that a condition may not contain."""
        require(len(text) <= _MAX_CHARS, f"{key} has {len(text):,} characters, more than {_MAX_CHARS:,}: shorten it")
        reader = _Reader(key, text, None)
        reader.condition(_tree(key, text))
        require(bool(reader.columns), f"{key}={text} names no column: {_RULE}")
        return cls(key, text, tuple(reader.columns))

    def expression(self) -> Any:
        """Returns the condition as a pyarrow.compute.Expression."""
        import pyarrow.compute as pc

        return _Reader(self.key, self.text, pc).condition(_tree(self.key, self.text))


def _tree(key: str, text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{key}={text} is not a condition ({getattr(error, 'msg', 'too long')}): {_RULE}") from None


class _Reader:
    """Converts a syntax tree. With `pc` None it only checks the tree, so that no pyarrow is imported."""

    def __init__(self, key: str, text: str, pc: Any) -> None:
        self.key, self.text, self.pc = key, text, pc
        self.columns: dict[str, None] = {}  # in the order of their first use

    def condition(self, node: ast.expr) -> Any:
        """Converts what is true or false."""
        if isinstance(node, ast.BoolOp):
            values = [self.condition(value) for value in node.values]
            return reduce(self._function("and_kleene" if isinstance(node.op, ast.And) else "or_kleene"), values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._call("invert", self.condition(node.operand))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            parts = [self._compare(*part) for part in zip(node.ops, sides, sides[1:], strict=False)]
            return reduce(self._function("and_kleene"), parts)
        if isinstance(node, ast.Name):
            return self._column(node)  # of true and false
        raise self._error(node)

    def _compare(self, operator: ast.cmpop, left: ast.expr, right: ast.expr) -> Any:
        if isinstance(operator, ast.In | ast.NotIn):
            found = self._contains(left, right)
            return self._call("invert", found) if isinstance(operator, ast.NotIn) else found
        if isinstance(operator, ast.Is | ast.IsNot) and isinstance(right, ast.Constant) and right.value is None:
            return self._call("is_null" if isinstance(operator, ast.Is) else "is_valid", self._value(left))
        if type(operator) not in _COMPARISONS:
            raise self._error(right)
        return self._call(_COMPARISONS[type(operator)], self._value(left), self._value(right))

    def _contains(self, left: ast.expr, right: ast.expr) -> Any:
        """Converts `column in ('a', 'b')` and `'text' in column`."""
        if isinstance(right, ast.Tuple | ast.List | ast.Set):
            values = [item.value for item in right.elts if isinstance(item, ast.Constant)]
            if len(values) < len(right.elts) or not values or not all(isinstance(v, str | int | float) for v in values):
                raise self._error(right)
            column = self._value(left)
            return None if self.pc is None else column.isin(values)
        if isinstance(left, ast.Constant) and isinstance(left.value, str):
            column = self._value(right)
            return None if self.pc is None else self.pc.match_substring(column, left.value)
        raise self._error(right)

    def _value(self, node: ast.expr) -> Any:
        """Converts a number, a text, a column or a calculation."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
            return None if self.pc is None else self.pc.scalar(node.value)
        if isinstance(node, ast.Name):
            return self._column(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._call("negate", self._value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._value(node.left), self._value(node.right)
            if isinstance(node.op, ast.Div) and self.pc is not None:
                left = left.cast("float64")  # of two integers, pyarrow would return the integer part
            return self._call(_OPERATORS[type(node.op)], left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            values = [self._value(value) for value in node.args]
            single = node.func.id in ("len", "abs")
            if node.keywords or (len(values) != 1 if single else len(values) < 2):
                raise self._error(node)
            names = {"len": "utf8_length", "abs": "abs", "min": "min_element_wise", "max": "max_element_wise"}
            return self._call(names[node.func.id], *values)
        raise self._error(node)

    def _column(self, node: ast.Name) -> Any:
        self.columns.setdefault(node.id)
        return None if self.pc is None else self.pc.field(node.id)

    def _function(self, name: str) -> Callable[..., Any]:
        return lambda *values: self._call(name, *values)

    def _call(self, name: str, *values: Any) -> Any:
        return None if self.pc is None else getattr(self.pc, name)(*values)

    def _error(self, node: ast.AST) -> ConfigError:
        return ConfigError(f"{self.key}={self.text} contains {ast.unparse(node)}: {_RULE}")
