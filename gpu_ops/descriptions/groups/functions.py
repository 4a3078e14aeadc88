"""Aggregate functions of one's own, on Arrow."""

from __future__ import annotations

import abc
import copy
import importlib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from gpu_ops.errors import DescriptionError


class AggregateFunction(abc.ABC):
    """An aggregate function: a state per group, rows of which are added and taken away many at once.

    A subclass says what a group's state is, and works on the states of many groups and many rows in one call; there is
    no call per row. It is given Arrow of the host's memory, with a GPU as well. State servers import its module by
    name, as no code travels: it stands in a module that they find, not in ``__main__``.

    What comes and goes within a micro-batch is added before anything is retracted, in any other order: the result must
    not depend on it.

    Args:
        columns: of the input, whose values it is given, in this order.
        parameters: what else it goes by: what JSON holds.

    Attributes:
        state: the columns of a group's state.
        result_type: the type of what `result` gives.

    Example:
        >>> class Bits(AggregateFunction):
        ...     state = pa.schema([("bits", pa.int64())])
        ...     result_type = pa.int64()
        ...
        ...     def add(self, state, groups, values):
        ...         bits = state["bits"].fill_null(0).to_numpy().copy()
        ...         np.bitwise_or.at(bits, groups.to_numpy(), values[0].to_numpy())
        ...         return pa.table({"bits": bits})
        ...
        ...     def result(self, state):
        ...         return state["bits"]
        >>> gpu_ops.aggregate(events, by="user", aggregates={"flags": Bits("flag")})
    """

    state: pa.Schema
    result_type: pa.DataType

    def __init__(self, *columns: str, **parameters: Any) -> None:
        self.columns, self.parameters = columns, parameters

    def empty(self, groups: int) -> pa.Table:
        """The states of so many groups without rows; by default all null."""
        return pa.table([pa.nulls(groups, field.type) for field in self.state], schema=self.state)

    @abc.abstractmethod
    def add(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        """States after n rows have come.

        Args:
            state: the states of g groups, a row each.
            groups: of each of n rows the number of its group, from 0 (int64).
            values: their values, a column for each of ``columns``, nulls among them.

        Returns:
            G rows, of the columns of ``state``.
        """

    def retract(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        """States after n rows have been taken back; as `add`. Without it the input may only grow."""
        raise NotImplementedError

    @abc.abstractmethod
    def result(self, state: pa.Table) -> pa.Array | pa.ChunkedArray:
        """The results of g groups."""

    @property
    def retracts(self) -> bool:
        """Whether rows can be taken back."""
        return type(self).retract is not AggregateFunction.retract

    def of(self, columns: tuple[str, ...]) -> AggregateFunction:
        """The same of other columns."""
        made = copy.copy(self)
        made.columns = columns
        return made

    def __str__(self) -> str:
        given = [*self.columns, *(f"{name}={value!r}" for name, value in self.parameters.items())]
        return f"{type(self).__name__}({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.columns))

    # --- as JSON -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What JSON has of it.

        Raises:
            DescriptionError: it cannot be imported by name, or a parameter is not JSON.
        """
        kind = type(self)
        where = f"{kind.__module__}:{kind.__qualname__}"
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise DescriptionError(
                f"{self}: state servers import an aggregate function by its name, and {where} has none: put the class "
                "into a module of its own, beside the program or on PYTHONPATH"
            )
        try:
            json.dumps(self.parameters)
        except (TypeError, ValueError) as error:
            raise DescriptionError(f"{self}: parameters are what JSON holds: {error}") from error
        return {"class": where, "columns": list(self.columns), "parameters": self.parameters}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> AggregateFunction:
        """From what `to_dict` gave.

        Raises:
            DescriptionError: there is no such class here.
        """
        module, _, name = str(data["class"]).partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise DescriptionError(
                f"the aggregate function {data['class']} cannot be imported here: {error}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, AggregateFunction)):
            raise DescriptionError(f"{data['class']} is no gpu_ops.AggregateFunction")
        try:
            made: AggregateFunction = found(*data["columns"], **data["parameters"])
        except TypeError as error:
            raise DescriptionError(f"{data['class']} is made of columns and parameters: {error}") from error
        return made


def check_function(function: AggregateFunction, name: str) -> None:
    """Refuses one whose state or result is not declared.

    Raises:
        DescriptionError: says what is missing.
    """
    if not hasattr(function, "columns"):
        kind = type(function).__name__
        raise DescriptionError(f"{name}: {kind}.__init__() does not call that of gpu_ops.AggregateFunction")
    if not isinstance(getattr(function, "state", None), pa.Schema) or not len(function.state):
        raise DescriptionError(f"{name} = {function}: state is a pyarrow schema with a column at least")
    if not isinstance(getattr(function, "result_type", None), pa.DataType):
        raise DescriptionError(f"{name} = {function}: result_type is a pyarrow type")
    if not all(isinstance(column, str) for column in function.columns):
        raise DescriptionError(f"{name} = {function}: columns are names")
