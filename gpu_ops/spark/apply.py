"""A user's function over joined rows, as ``mapInArrow`` runs it in the Spark task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import types as st

from gpu_ops.errors import DescriptionError


class Applied:
    """Gives each record batch to a function, and checks what comes back.

    Args:
        function: record batch in, record batch out.
        schema: what it gives.
    """

    def __init__(self, function: Callable[[pa.RecordBatch], pa.RecordBatch], schema: st.StructType) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function, self._names = function, schema.fieldNames()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives what the function makes of batches that have rows.

        Raises:
            DescriptionError: something else than a record batch with the columns of its schema.
        """
        for batch in batches:
            if not batch.num_rows:
                continue
            made = self._function(batch)
            if not isinstance(made, pa.RecordBatch):
                raise DescriptionError(
                    f"process= function {self.__name__} gives a record batch, not {type(made).__name__}"
                )
            if sorted(made.schema.names) != sorted(self._names):
                raise DescriptionError(
                    f"process= function {self.__name__} gives the columns {', '.join(made.schema.names)}; "
                    f"its schema says {', '.join(self._names)}"
                )
            yield made.select(self._names)


def applied_schema(schema: st.StructType | str) -> st.StructType:
    """A schema as the user gave it.

    Raises:
        DescriptionError: it is none.
    """
    if isinstance(schema, st.StructType):
        return schema
    try:
        parsed = st._parse_datatype_string(schema)
    except Exception as error:  # pyspark's error classes differ between versions
        raise DescriptionError(f"process_schema={schema!r} is no schema: {error}") from error
    if not isinstance(parsed, st.StructType):
        raise DescriptionError(f"process_schema={schema!r} is no schema; write for example 'id bigint, gap double'")
    return parsed
