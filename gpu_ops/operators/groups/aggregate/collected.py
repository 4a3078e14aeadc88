"""All values of a group in one: ``collect_list``, ``collect_set`` and ``string_agg``.

Law: the values that are not null, in ascending order, NaN last; of a set each once. An order of arrival is none that a
table has: so a list does not depend on how rows came, or were updated, before they were what they are.

The state of a group is its values, in order. A micro-batch sorts the values of the groups that it touches with its own
and writes them anew: it costs what these groups hold, which is also what comes out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.descriptions.aggregate import AggregateFunction, Measure
from gpu_ops.errors import DescriptionError
from gpu_ops.operators.core.order import one_nan, one_zero, order_codes
from gpu_ops.values import one_array

_VALUES = "values"


class Collected(AggregateFunction):
    """The values of a column as a list, a set or a text; one of a group without values is empty, a text is null.

    Args:
        measure: the aggregate.
        kind: the type of its column.
        result: its own type.
    """

    def __init__(self, measure: Measure, kind: pa.DataType, result: pa.DataType) -> None:
        super().__init__(*measure.columns)
        self.measure, self.result_type = measure, result
        self.state = pa.schema([(_VALUES, pa.list_(pa.string() if measure.function == "string_agg" else kind))])

    def empty(self, groups: int) -> pa.Table:
        """Gives the states of so many groups without values."""
        return self._states(np.zeros(groups, np.int64), pa.array([], self.state.field(_VALUES).type.value_type))

    def add(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        """Gives the states with n values more."""
        group, all_values, order, _ = self._sorted(state, groups, values)
        return self._states(np.bincount(group, minlength=len(state)), all_values.take(pa.array(order)))

    def retract(self, state: pa.Table, groups: pa.Array, values: pa.Table) -> pa.Table:
        """Gives the states without n values, each of which there is."""
        group, all_values, order, codes = self._sorted(state, groups, values)
        held = order < len(one_array(state[_VALUES]).flatten())
        group, codes = group[order], codes[order]
        # of equal values those that are held come first, and then those that go, one of each for each
        begins = np.flatnonzero(np.concatenate([[True], (group[1:] != group[:-1]) | (codes[1:] != codes[:-1])]))
        run = np.repeat(np.arange(begins.size), np.diff(np.append(begins, group.size)))
        going = np.bincount(run, ~held, begins.size).astype(np.int64)
        stays = held & (np.arange(group.size) - begins[run] >= going[run])
        return self._states(np.bincount(group[stays], minlength=len(state)), all_values.take(pa.array(order[stays])))

    def result(self, state: pa.Table) -> pa.Array:
        """Gives the lists, sets or texts of the groups."""
        lists = one_array(state[_VALUES])
        if self.measure.function == "collect_set":
            group, values = _flat(lists)
            codes = order_codes(values)
            first = np.ones(group.size, bool)
            first[1:] = (group[1:] != group[:-1]) | (codes[1:] != codes[:-1])
            return _lists(np.bincount(group[first], minlength=len(lists)), values.filter(pa.array(first)))
        if self.measure.function == "string_agg":
            texts = pc.binary_join(lists, self.measure.second or "")
            return pc.if_else(pc.equal(pc.list_value_length(lists), 0), pa.scalar(None, texts.type), texts)
        return lists

    def _sorted(
        self, state: pa.Table, groups: pa.Array, values: pa.Table
    ) -> tuple[npt.NDArray[np.int64], pa.Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sorts held values and further ones: gives groups, values, their order, and codes, equal where values are."""
        group, held = _flat(one_array(state[_VALUES]))
        column = one_array(values.column(0))
        known = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        more = one_nan(one_zero(column.take(pa.array(known)))).cast(held.type)
        both = pa.concat_arrays([held, more])
        group = np.concatenate([group, groups.to_numpy()[known]])
        codes = order_codes(both)
        return group, both, np.lexsort((codes, group)), codes

    def _states(self, counts: npt.NDArray[Any], values: pa.Array) -> pa.Table:
        return pa.table([_lists(counts, values)], schema=self.state)


def _flat(lists: pa.ListArray) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Flattens lists: gives of each value the number of its list, and the values."""
    return np.repeat(np.arange(len(lists)), lists.value_lengths().to_numpy()), lists.flatten()


def _lists(counts: npt.NDArray[Any], values: pa.Array) -> pa.ListArray:
    """Values as lists of so many each.

    Raises:
        DescriptionError: there are more than a list array has offsets for.
    """
    if len(values) >= 1 << 31:
        raise DescriptionError("collected values of one micro-batch: there are more than 2 ** 31 of them")
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32()), values)
