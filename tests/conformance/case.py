"""Golden cases in JSON as join descriptions, events and expectations."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from oracle.drive import Backend, Change, Event, Row, by_event, canonical, run_all, same_by_event
from oracle.interval_drive import timed_run_all
from oracle.interval_rules import LATE, WATERMARK, TimedEvent

from gpu_ops.descriptions.by_time import Asof, AsofJoin, IntervalJoin, TemporalJoin
from gpu_ops.descriptions.description import Description, Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.interval import Interval
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.descriptions.multi_join import MultiJoin
from gpu_ops.descriptions.times import parse_bound

BUILT = (
    "regular", "semi", "anti", "interval_sql", "interval_semi", "interval_anti", "interval_datastream", "multi",
    "temporal", "asof",
)  # fmt: skip
"""Kinds of join that there is an operator for."""

LATE_SIDES = ("LATE-LEFT", "LATE-RIGHT")

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
    def timed(self) -> bool:
        """Whether watermarks are among the events."""
        return self.kind == "temporal" or self.kind.startswith("interval_")

    @property
    def timed_events(self) -> list[TimedEvent]:
        """The rows and watermarks of an interval join; their positions are the case's event numbers."""
        found: list[TimedEvent] = []
        for side, kind, value in self.data["events"]:
            assert kind in ("+I", WATERMARK) or (side == 1 and self.kind == "temporal"), f"{self.name}: a {kind} event"
            found.append((side, kind, value if kind == WATERMARK else tuple(value)))
        return found

    @property
    def expected(self) -> dict[int, Counter[Change]]:
        """What Flink emitted, per event that caused anything.

        The output timestamp of a DataStream join is the row's last column. A late row is padded, and its
        timestamp is its own.
        """
        groups: dict[int, Counter[Change]] = {}
        for event, kind, values, *stamp in self.data["expected"]:
            row: Row = (*(canonical(v) for v in values), *stamp)
            change = self._late(LATE_SIDES.index(kind), row) if kind in LATE_SIDES else (kind, row)
            groups.setdefault(event, Counter())[change] += 1
        return groups

    def _late(self, side: int, row: Row) -> Change:
        names = [[n for n, _ in i["columns"]] for i in self.data["inputs"]]
        pad = (None,) * len(names[1 - side])
        time = row[names[side].index(self.data["join"]["time_columns"][side])]
        return LATE, (*(row + pad if side == 0 else pad + row), time)

    def join(self, emit: Emit) -> Description:
        """The description; `NotImplementedError` for a kind that is not built."""
        if self.kind not in BUILT:
            raise NotImplementedError(f"not built: {self.kind} join")
        if self.kind == "multi":
            return self._multi(emit)
        told = self.data["join"]
        times = told.get("time_columns") or (None, None)
        left, right = (self._input(i, t) for i, t in zip(self.data["inputs"], times, strict=True))
        if self.kind == "asof":
            on = tuple(Key(a, b) for a, b in told["keys"])
            return AsofJoin(told["how"], left, right, keys=on, emit=emit, asof=Asof(**told["asof"]))
        safe = told.get("null_safe") or [False] * len(told["keys"])
        clash = set(left.schema.names) & set(right.schema.names)
        residual = [f"{left.name}.{a} {op} {right.name}.{b}" for a, op, b in told.get("residual", ())]
        if self.kind == "temporal":
            keys = tuple(Key(a, b) for a, b in told["keys"])
            return TemporalJoin(told["how"], left, right, keys, " AND ".join(residual) or None)
        both = self.kind not in ("semi", "anti", "interval_semi", "interval_anti")
        more: dict[str, Any] = {"interval": self._interval()} if self.timed else {}
        return (IntervalJoin if self.timed else Join)(
            how=told["how"] if both or self.timed else self.kind,
            left=left,
            right=right,
            keys=tuple(Key(a, b, null_safe=s) for (a, b), s in zip(told["keys"], safe, strict=True)),
            where=" AND ".join(residual) or None,
            emit=emit,
            null_aware=bool(told.get("null_aware")),
            suffixes=("_left", "_right") if clash and both else None,
            **more,
        )

    def _multi(self, emit: Emit) -> MultiJoin:
        steps = self.data["join"]["steps"]
        assert [s["input"] for s in steps] == list(range(1, len(steps) + 1)), f"{self.name}: inputs out of order"
        return MultiJoin.of(
            [self._input(told) for told in self.data["inputs"]],
            [[(a, b) for a, b in s["on"]] for s in steps],
            [s["how"] for s in steps],
            where=[" AND ".join(map(" ".join, s["residual"])) or None for s in steps],
            emit=emit,
        )

    def _interval(self) -> Interval:
        told = self.data["join"]
        if self.kind != "interval_datastream":
            # left - right there, right - left here
            kept = self.data["conf"].get("table.exec.interval-join.min-cleanup-interval", "0 s")
            return Interval(
                -told["upper_ms"],
                -told["lower_ms"],
                min_cleanup_ms=parse_bound(kept.replace(" ms", " milliseconds").replace(" s", " seconds")),
            )
        return Interval(
            told["lower_ms"],
            told["upper_ms"],
            lower_inclusive=not told["lower_exclusive"],
            upper_inclusive=not told["upper_exclusive"],
            late="tag",
            keyed=True,
            timestamp="ts_out",
        )

    def _input(self, told: dict[str, Any], time: str | None = None) -> Input:
        unique = told["unique_key"]
        fields = [pa.field(n, TYPES[t], nullable=n not in (unique or ())) for n, t in told["columns"]]
        return Input(
            told["name"],
            pa.schema(fields),
            unique_key=tuple(unique) if unique else None,
            row_kind="row_kind" if told["mode"] == "all" else None,
            event_time=time,
        )


@functools.cache
def read_cases(folder: Path) -> tuple[Case, ...]:
    """All cases of a folder, by name.

    Raises:
        FileNotFoundError: there are none.
    """
    found = tuple(Case.read(p) for p in sorted(folder.glob("*.json")) if p.name != "manifest.json")
    if not found:
        raise FileNotFoundError(f"no golden cases (*.json) in {folder}")
    return found


def check_events(case: Case, backend: Backend, split: int) -> None:
    """Per event, the multiset of (kind, values) is Flink's; of joins by time late rows and output times too."""
    events: Any = case.timed_events if case.timed else case.events
    run = timed_run_all if case.timed else run_all
    found = by_event(*run(backend, case.join("per_event"), events, split))  # type: ignore[arg-type]
    same_by_event(case.expected, found, events)
