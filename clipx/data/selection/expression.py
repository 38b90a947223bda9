"""Conditions on the columns of a table, `similarity > 0.28 and width >= 200`, parsed without executing anything.

pyarrow evaluates a condition column by column, integers in 64 bits and other numbers in float64; an overflow is an
error. A comparison with a missing value is missing, and a row whose condition is missing is not selected.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from clipx.data.parquet_file import comparable
from clipx.errors import ConfigError, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pyarrow import Table

_RULE = "write columns, numbers, 'texts', comparisons, in, and, or, not, + - * /, len(), min(), max(), abs()"
_FUNCTIONS = ("len", "min", "max", "abs")
_OPERATORS = {ast.Add: "add_checked", ast.Sub: "subtract_checked", ast.Mult: "multiply_checked", ast.Div: "divide"}
_COMPARISONS = {
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
}
_MAX_CHARS = 10_000
_MAX_DEPTH = 100  # levels of a syntax tree, each of which is two calls of Python


@dataclass(frozen=True, slots=True)
class Predicate:
    """A parsed condition. `key` is its option, for messages."""

    key: str
    text: str
    columns: Sequence[str]

    @classmethod
    def parse(cls, key: str, text: str) -> Predicate:
        """Parses a condition. Raises ConfigError for anything that a condition may not contain."""
        require(len(text) <= _MAX_CHARS, f"{key} has {len(text):,} characters, more than {_MAX_CHARS:,}: shorten it")
        reader = _Reader(key, text, None)
        reader.condition(_tree(key, text))
        require(bool(reader.columns), f"{key}={text} names no column: {_RULE}")
        return cls(key, text, tuple(reader.columns))

    def selects(self, table: Table) -> NDArray[np.bool_]:
        """Returns whether each row of a table satisfies the condition; not if it is missing. Raises ConfigError."""
        import pyarrow as pa

        named = f"{self.key}={self.text}"
        try:
            found = _Reader(self.key, self.text, table).condition(_tree(self.key, self.text))
        except pa.ArrowException as error:
            types = ", ".join(f"{name} is {table.schema.field(name).type}" for name in self.columns)
            reason = " ".join(str(error).split())[:150]
            raise ConfigError(f"{named} cannot be evaluated ({types}): {reason}; correct the condition") from None
        require(
            pa.types.is_boolean(found.type) or pa.types.is_null(found.type),
            f"{named} is {found.type}, not true or false: compare it with a value",
        )
        result: NDArray[np.bool_] = found.cast(pa.bool_()).fill_null(False).to_numpy()
        return result


def _tree(key: str, text: str) -> ast.expr:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{key}={text} is not a condition ({getattr(error, 'msg', 'too long')}): {_RULE}") from None
    nodes: list[ast.AST] = [tree]
    for _ in range(_MAX_DEPTH):
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
    require(not nodes, f"{key}={text} is nested in more than {_MAX_DEPTH} levels: shorten it")
    return tree


class _Reader:
    """Evaluates a syntax tree on a table. With `table` None it only checks the tree, so that no pyarrow is imported."""

    def __init__(self, key: str, text: str, table: Table | None) -> None:
        self.key, self.text, self.table = key, text, table
        self.columns: dict[str, None] = {}  # in the order of their first use

    def condition(self, node: ast.expr) -> Any:
        """Evaluates what is true or false."""
        if isinstance(node, ast.BoolOp):
            values = [self.condition(value) for value in node.values]
            return self._reduce("and_kleene" if isinstance(node.op, ast.And) else "or_kleene", values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._call("invert", self.condition(node.operand))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            parts = [self._compare(*part) for part in zip(node.ops, sides, sides[1:], strict=False)]
            return self._reduce("and_kleene", parts)
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
        """Evaluates `column in ('a', 'b')` and `'text' in column`."""
        if isinstance(right, ast.Tuple | ast.List | ast.Set) and right.elts:
            column = self._value(left)
            return self._reduce("or_kleene", [self._call("equal", column, self._literal(item)) for item in right.elts])
        if isinstance(left, ast.Constant) and isinstance(left.value, str):
            return self._call("match_substring", self._value(right), pattern=left.value)
        raise self._error(right)

    def _value(self, node: ast.expr) -> Any:
        """Evaluates a number, a text, a column or a calculation."""
        if isinstance(node, ast.Constant):
            return self._literal(node)
        if isinstance(node, ast.Name):
            return self._column(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._call("negate_checked", self._value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            sides = [self._value(node.left), self._value(node.right)]
            if isinstance(node.op, ast.Div):  # of two integers, pyarrow would return the integer part
                sides = [self._call("cast", side, target_type="float64", safe=False) for side in sides]
            return self._call(_OPERATORS[type(node.op)], *sides)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            values = [self._value(value) for value in node.args]
            single = node.func.id in ("len", "abs")
            if node.keywords or (len(values) != 1 if single else len(values) < 2):
                raise self._error(node)
            if single:
                return self._call("utf8_length" if node.func.id == "len" else "abs_checked", *values)
            return self._call(f"{node.func.id}_element_wise", *values, skip_nulls=False)
        raise self._error(node)

    def _literal(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._call("negate_checked", self._literal(node.operand))
        value = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(value, str | int | float):
            raise self._error(node)
        if isinstance(value, int) and value >= 1 << 63:
            if value >= 1 << 1023:
                raise self._error(node)
            value = float(value)
        if self.table is None:
            return None
        import pyarrow as pa

        return pa.scalar(value)

    def _column(self, node: ast.Name) -> Any:
        """Returns a column with integers as int64, other numbers as float64 and categories as their texts."""
        self.columns.setdefault(node.id)
        if self.table is None:
            return None
        import pyarrow as pa

        column = comparable(self.table[node.id])
        if pa.types.is_integer(column.type):
            try:
                return column.cast(pa.int64())
            except pa.ArrowInvalid:
                return column.cast(pa.decimal128(20))  # uint64 from 2^63
        if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
            return column.cast(pa.float64())
        return column

    def _reduce(self, name: str, values: Sequence[Any]) -> Any:
        return reduce(lambda left, right: self._call(name, left, right), values)

    def _call(self, name: str, *values: Any, **options: Any) -> Any:
        """Calls a function of pyarrow. Its value is missing where an argument is a column without any value."""
        if self.table is None:
            return None
        import pyarrow as pa
        import pyarrow.compute as pc

        if name.endswith("_kleene"):
            values = tuple(value.cast(pa.bool_()) if pa.types.is_null(value.type) else value for value in values)
        elif name not in ("is_null", "is_valid"):
            empty = next((value for value in values if pa.types.is_null(value.type)), None)
            if empty is not None:
                return empty
        return getattr(pc, name)(*values, **options)

    def _error(self, node: ast.AST) -> ConfigError:
        return ConfigError(f"{self.key}={self.text} contains {ast.unparse(node)}: {_RULE}")
