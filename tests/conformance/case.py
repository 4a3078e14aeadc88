"""Golden cases in JSON as join descriptions, events and expectations."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from oracle.drive import Change, Event, Row, canonical

from gpu_ops.joins import Emit, Input, Join, Key

BUILT = ("regular", "semi", "anti")
"""Kinds of join that there is an operator for."""

TYPES = {
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "TIMESTAMP(3)": pa.timestamp("ms"),
    "TIMESTAMP_LTZ(3)": pa.timestamp("ms", "UTC"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden case.

    Attributes:
        name: unique in its folder.
        kind: of join.
        informative: what Flink did is recorded, but not the correct answer.
        data: the whole file.
    """

    name: str
    kind: str
    informative: bool
    data: dict[str, Any] = dataclasses.field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Case:
        """A case from its file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["name"], data["join"]["kind"], bool(data.get("informative")), data)

    @property
    def events(self) -> list[Event]:
        """The changes; their positions are the case's event numbers."""
        found = []
        for side, kind, values in self.data["events"]:
            assert kind in ("+I", "-U", "+U", "-D"), f"{self.name}: a {kind} event in a {self.kind} join"
            found.append((side, kind, tuple(values)))
        return found

    @property
    def expected(self) -> dict[int, Counter[Change]]:
        """What Flink emitted, per event that caused anything."""
        groups: dict[int, Counter[Change]] = {}
        for event, kind, values in self.data["expected"]:
            row: Row = tuple(canonical(v) for v in values)
            groups.setdefault(event, Counter())[kind, row] += 1
        return groups

    def join(self, emit: Emit) -> Join:
        """The description; `NotImplementedError` for a kind that is not built."""
        if self.kind not in BUILT:
            raise NotImplementedError(f"not built: {self.kind} join")
        told = self.data["join"]
        left, right = (self._input(i) for i in self.data["inputs"])
        safe = told.get("null_safe") or [False] * len(told["keys"])
        clash = set(left.schema.names) & set(right.schema.names)
        residual = [f"{left.name}.{a} {op} {right.name}.{b}" for a, op, b in told["residual"]]
        return Join(
            how=told["how"] if self.kind == "regular" else self.kind,
            left=left,
            right=right,
            keys=tuple(Key(a, b, null_safe=s) for (a, b), s in zip(told["keys"], safe, strict=True)),
            where=" AND ".join(residual) or None,
            emit=emit,
            null_aware=bool(told.get("null_aware")),
            suffixes=("_left", "_right") if clash and self.kind == "regular" else None,
        )

    def _input(self, told: dict[str, Any]) -> Input:
        unique = told["unique_key"]
        fields = [pa.field(n, TYPES[t], nullable=n not in (unique or ())) for n, t in told["columns"]]
        return Input(
            told["name"],
            pa.schema(fields),
            unique_key=tuple(unique) if unique else None,
            row_kind="row_kind" if told["mode"] == "all" else None,
        )


def read_cases(folder: Path) -> list[Case]:
    """All cases of a folder, by name.

    Raises:
        FileNotFoundError: there are none.
    """
    found = [Case.read(p) for p in sorted(folder.glob("*.json")) if p.name != "manifest.json"]
    if not found:
        raise FileNotFoundError(f"no golden cases (*.json) in {folder}")
    return found
