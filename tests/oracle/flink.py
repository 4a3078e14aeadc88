"""The live Flink: random cases as scripts of the oracle, and its answers.

The oracle is a folder with ``build_and_run.sh``, which runs the join operators of a released Flink on
scripts of changes; ``GPU_JOIN_ORACLE`` names it. Flink's jars have to be in the oracle's cache already
(``FLINK_ORACLE_HOME``, default ``~/.cache/flink-oracle``): a test downloads nothing.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.multi_join import MultiJoin
from oracle.drive import Change, Event, Row, canonical
from oracle.interval_rules import LATE, WATERMARK, TimedEvent
from oracle.interval_traces import BOUNDS, IntervalShape, TimedRecipe
from oracle.interval_traces import HOWS as INTERVAL_HOWS
from oracle.multi_traces import MultiShape, multi_recipe, random_shape
from oracle.rules import Residual
from oracle.traces import HOWS, LAYOUTS, Recipe, Shape, trace

TYPES = {
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
    pa.timestamp("ms"): "TIMESTAMP(3)",
    pa.timestamp("ms", "UTC"): "TIMESTAMP_LTZ(3)",
}
RESIDUALS: tuple[tuple[Residual, ...], ...] = (
    (),
    (),
    (("a_x", ">", "b_x"),),
    (("a_d", "<=", "b_d"),),
    (("a_s", "<>", "b_s"),),
)
INTERVAL_RESIDUALS: tuple[tuple[Residual, ...], ...] = ((), (), (("a_x", ">", "b_x"),), (("a_x", "<>", "b_x"),))
NAP = 50
"""Milliseconds; timers of processing time fire between events, so a longer sleep would hold up all but the first."""
_LINE = re.compile(r"(\d+) ([+-][IUD])\[(.*)\]")
_TIMED_LINE = re.compile(r"(\d+) (\+I|LATE-LEFT|LATE-RIGHT)\[(.*)\](?: ts=(-?\d+))?")
_WATERMARK_LINE = re.compile(r"(\d+) WM (-?\d+)")


def missing() -> str | None:
    """Why the oracle cannot be asked; None if it can."""
    folder = os.environ.get("GPU_JOIN_ORACLE")
    if not folder:
        return "GPU_JOIN_ORACLE is not set: the folder of the oracle's build_and_run.sh"
    if not (Path(folder) / "build_and_run.sh").exists():
        return f"there is no build_and_run.sh in GPU_JOIN_ORACLE={folder}"
    home = Path(os.environ.get("FLINK_ORACLE_HOME") or Path.home() / ".cache" / "flink-oracle")
    if not list(home.glob("flink-*/lib/.complete")):
        return f"Flink's jars are not in {home}; run the oracle's build_and_run.sh once to fetch them"
    return None


def random_case(seed: int, number: int) -> tuple[Shape, Recipe]:
    """One case: all join types and layouts come by turns, the rest is drawn."""
    rng = random.Random(f"{seed}-{number}")
    how = HOWS[number % len(HOWS)]
    keys = "int" if how == "null_aware_anti" else rng.choice(("int", "string", "composite"))
    shape = Shape(
        how,
        left=rng.choice(LAYOUTS),
        right=rng.choice(LAYOUTS),
        keys=keys,
        null_safe=how not in ("semi", "anti", "null_aware_anti") and rng.random() < 0.25,
        residual=() if how == "null_aware_anti" else rng.choice(RESIDUALS),
    )
    recipe = Recipe(
        events=rng.choice((80, 160)),
        seed=rng.randrange(1 << 30),
        live=rng.choice((6, 12, 25)),
        fan_out=0.8 if "anti" in how else rng.choice((1.0, 2.0, 4.0)),
        null_keys=0.01 if how == "null_aware_anti" else 0.06,
        special=False,
    )
    return shape, recipe


def query(shape: Shape) -> str:
    """The join in Flink's SQL."""
    join = shape.join()
    if join.null_aware:
        return f"SELECT * FROM A WHERE {join.keys[0].left} NOT IN (SELECT {join.keys[0].right} FROM B)"
    equal = [f"A.{k.left} {'IS NOT DISTINCT FROM' if k.null_safe else '='} B.{k.right}" for k in join.keys]
    on = " AND ".join(equal + ([str(join.where)] if join.where else []))
    if join.how in ("semi", "anti"):
        return f"SELECT * FROM A WHERE {'NOT ' if join.how == 'anti' else ''}EXISTS (SELECT 1 FROM B WHERE {on})"
    return f"SELECT * FROM A {join.how.upper()} JOIN B ON {on}"


def script(shape: Shape, events: Sequence[Event]) -> str:
    """The case in the oracle's language."""
    return _script(shape.join(), query(shape), events)


def _script(join: Join | MultiJoin, sql: str, events: Sequence[Event]) -> str:
    lines = []
    for source in join.inputs:
        unique = source.unique_key or ()
        columns = [f"{f.name} {TYPES[f.type]}{' NOT NULL' * (f.name in unique)}" for f in source.schema]
        lines.append(f"input {source.name} {'; '.join(columns)}{' PK ' + ','.join(unique) if unique else ''}")
    lines.append(f"sql {sql}")
    for side, kind, row in events:
        lines.append(f"{side} {kind} {','.join('null' if v is None else str(v) for v in row)}")
    return "\n".join(lines) + "\n"


def answers(text: str, join: Join) -> dict[int, Counter[Change]]:
    """What the oracle wrote, per event."""
    assert "# ERROR" not in text, text
    types = [f.type for f in join.output_schema][1:]
    groups: dict[int, Counter[Change]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        assert found, f"not understood: {line}"
        values = found.group(3).split(", ")
        row: Row = tuple(_value(v, t) for v, t in zip(values, types, strict=True))
        groups.setdefault(int(found.group(1)), Counter())[found.group(2), row] += 1
    return groups


def _value(text: str, kind: pa.DataType) -> object:
    if text == "null":
        return None
    if pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
        return int(text)
    return canonical(float(text)) if pa.types.is_floating(kind) else text


def ask(scripts: dict[str, str], folder: Path) -> dict[str, str]:
    """Run scripts in one JVM; the answer of each by its name."""
    for name, text in scripts.items():
        (folder / f"{name}.txt").write_text(text)
    command = [str(Path(os.environ["GPU_JOIN_ORACLE"]) / "build_and_run.sh")]
    environment = {**os.environ, "ORACLE_HEAP": os.environ.get("ORACLE_HEAP", "1g")}
    done = subprocess.run(
        command + [str(folder / f"{name}.txt") for name in scripts],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 + 20 * len(scripts),
        check=False,
    )
    results = {name: folder / f"{name}.out" for name in scripts}
    absent = [name for name, path in results.items() if not path.exists()]
    assert not absent, f"no answer for {absent}: {done.stderr[-2000:]}"
    return {name: path.read_text() for name, path in results.items()}


def case_events(shape: Shape, recipe: Recipe) -> tuple[Event, ...]:
    """The changes of a case."""
    return trace(shape, recipe)


# --- multi-way joins -------------------------------------------------------------------------


def random_multi(seed: int, number: int, events: int) -> tuple[MultiShape, Recipe]:
    """One case: 2 to 5 inputs by turns, the rest is drawn."""
    rng = random.Random(f"multi-flink-{seed}-{number}")
    shape = random_shape(rng, 2 + number % 4, plain=True)
    return shape, multi_recipe(shape, events, rng.randrange(1 << 30), special=False)


def multi_query(join: MultiJoin) -> str:
    """The join in Flink's SQL."""
    text = f"SELECT * FROM {join.inputs[0].name}"
    for source, step in zip(join.inputs[1:], join.steps, strict=True):
        on = [
            f"{join.inputs[k.input].name}.{k.column} {'IS NOT DISTINCT FROM' if k.null_safe else '='} "
            f"{source.name}.{k.own}"
            for k in step.on
        ]
        on += [str(step.where)] if step.where else []
        text += f" {step.how.upper()} JOIN {source.name} ON {' AND '.join(on)}"
    return text


def multi_script(shape: MultiShape, events: Sequence[Event]) -> str:
    """The case in the oracle's language."""
    join = shape.join()
    return "conf table.optimizer.multi-join.enabled=true\n" + _script(join, multi_query(join), events)


# --- interval joins --------------------------------------------------------------------------


def random_interval(seed: int, number: int, events: int) -> tuple[IntervalShape, TimedRecipe]:
    """One case: SQL's join types and the DataStream join come by turns, the rest is drawn."""
    rng = random.Random(f"interval-{seed}-{number}")
    keyed = number % (len(INTERVAL_HOWS) + 1) == len(INTERVAL_HOWS)
    lower, upper = rng.choice(BOUNDS)
    # An interval that its open ends make empty is never planned as a join.
    openable = upper - lower >= 2
    shape = IntervalShape(
        "inner" if keyed else INTERVAL_HOWS[number % (len(INTERVAL_HOWS) + 1)],
        lower,
        upper,
        inclusive=(not (openable and rng.random() < 0.25), not (openable and rng.random() < 0.25)),
        late="tag" if keyed else "join",
        keyed=keyed,
        min_cleanup=0 if keyed else rng.choice((0, 0, 0, 1, 7, 40)),
        keys="int" if keyed else rng.choice(("int", "string", "composite")),
        null_safe=not keyed and rng.random() < 0.2,
        residual=() if keyed else rng.choice(INTERVAL_RESIDUALS),
        clock="int64" if keyed else rng.choice(("ms", "utc")),
        stamped=keyed,
    )
    recipe = TimedRecipe(
        events,
        seed=rng.randrange(1 << 30),
        keys=rng.choice((2, 5, 15)),
        skew=rng.choice((0.0, 0.3, 0.7)),
        null_keys=0.0 if keyed else 0.06,
        disorder=rng.choice((0, 5, 15, 40)),
        late=rng.choice((0.0, 0.1, 0.3)),
        watermarks=rng.choice((0.05, 0.15, 0.3)),
    )
    return shape, recipe


def late_interval(seed: int, number: int, events: int) -> tuple[IntervalShape, TimedRecipe]:
    """One case of SQL's join, of whose rows many are late or come just when their time is over."""
    rng = random.Random(f"late-{seed}-{number}")
    lower, upper = rng.choice((*BOUNDS, (0, 0)))
    shape = IntervalShape(
        INTERVAL_HOWS[number % len(INTERVAL_HOWS)],
        lower,
        upper,
        min_cleanup=rng.choice((0, 0, 0, 1, 7, 40)),
        residual=rng.choice(INTERVAL_RESIDUALS),
        clock=rng.choice(("ms", "utc")),
    )
    recipe = TimedRecipe(
        events,
        seed=rng.randrange(1 << 30),
        keys=rng.choice((1, 2, 5)),
        null_keys=0.02,
        disorder=rng.choice((0, 5, 40)),
        late=rng.choice((0.3, 0.5, 0.8)),
        edges=rng.choice((0.0, 0.2, 0.5)),
        watermarks=rng.choice((0.05, 0.15, 0.4)),
    )
    return shape, recipe


def interval_script(shape: IntervalShape, events: Sequence[TimedEvent]) -> str:
    """The case in the oracle's language."""
    lines = _stream_head(shape) if shape.keyed else _sql_head(shape)
    for side, kind, value in events:
        if kind == WATERMARK:
            lines.append(f"{side} W {value}")
            continue
        # The DataStream join has columns k, ts and v: what is left goes into v.
        row = (*value[:2], f"{'null' if value[2] is None else value[2]};{value[3]}") if shape.keyed else value
        lines.append(f"{side} {kind} {','.join('null' if v is None else str(v) for v in row)}")
    return "\n".join(lines) + "\n"


def _stream_head(shape: IntervalShape) -> list[str]:
    opens = [str(not inclusive).lower() for inclusive in shape.inclusive]
    bounds = f"lower={shape.lower} upper={shape.upper}"
    return [f"intervaljoin {bounds} lowerExclusive={opens[0]} upperExclusive={opens[1]}"]


def _sql_head(shape: IntervalShape) -> list[str]:
    join = shape.join()
    lines = [f"conf table.exec.interval-join.min-cleanup-interval={shape.min_cleanup} ms"]
    columns = []
    for source in join.inputs:
        time = source.event_time
        declared = [f"{f.name} {TYPES[f.type]}" for f in source.schema]
        declared.append(f"WATERMARK {time} {time} - INTERVAL '0' SECOND")
        lines.append(f"input {source.name} {'; '.join(declared)} MODE insert")
        for field in source.schema:
            full = f"{source.name}.{field.name}"
            columns.append(f"CAST({full} AS {TYPES[field.type]}) AS {field.name}" if field.name == time else full)
    on = [f"A.{k.left} {'IS NOT DISTINCT FROM' if k.null_safe else '='} B.{k.right}" for k in join.keys]
    for bound, inclusive, word in zip((shape.lower, shape.upper), shape.inclusive, "><", strict=True):
        ms = f"{'-' if bound < 0 else '+'} INTERVAL '{abs(bound) / 1000:.3f}' SECOND"
        on.append(f"B.b_t {word}{'=' if inclusive else ''} A.a_t {ms}")
    on += [str(join.where)] if join.where else []
    return [*lines, f"sql SELECT {', '.join(columns)} FROM A {shape.how.upper()} JOIN B ON {' AND '.join(on)}"]


def temporal_script(
    shape: IntervalShape,
    events: Sequence[TimedEvent],
    mode: str,
    *,
    ttl: int | None = None,
    sleeps: Mapping[int, int] | None = None,
) -> str:
    """The temporal join of an interval join's inputs in the oracle's language; what the left shows and the right has.

    Args:
        shape: of the interval join; its bounds mean nothing.
        events: rows and watermarks; of an update only what comes: Flink's planner drops the rest before the join.
        mode: of the right input, ``upsert`` or ``all``.
        ttl: the state TTL, ms.
        sleeps: before which events Flink waits, and how long, ms: a line for each `NAP`.
    """
    join, lines, columns = shape.join(), list[str](), list[str]()
    if ttl is not None:
        lines.append(f"conf table.exec.state.ttl={ttl} ms")
    keys = [key.right for key in join.keys]
    for source in join.inputs:
        time, own = source.event_time, keys if source.name == "B" else []
        declared = [f"{f.name} {TYPES[f.type]}{' NOT NULL' * (f.name in own)}" for f in source.schema]
        declared.append(f"WATERMARK {time} {time} - INTERVAL '0' SECOND")
        primary = f" PK {', '.join(own)} MODE {mode}" if own else " MODE insert"
        lines.append(f"input {source.name} {'; '.join(declared)}{primary}")
        for field in source.schema:
            full = f"{source.name}.{field.name}"
            columns.append(f"CAST({full} AS {TYPES[field.type]}) AS {field.name}" if field.name == time else full)
    on = " AND ".join([f"A.{k.left} = B.{k.right}" for k in join.keys] + ([str(join.where)] if join.where else []))
    how = "LEFT JOIN" if shape.how == "left" else "JOIN"
    lines.append(f"sql SELECT {', '.join(columns)} FROM A {how} B FOR SYSTEM_TIME AS OF A.a_t ON {on}")
    for number, (side, kind, value) in enumerate(events):
        if sleeps and number in sleeps:
            lines += [f"0 S {NAP}"] * (sleeps[number] // NAP)
        row = value if kind == WATERMARK else ",".join("null" if v is None else str(v) for v in value)
        lines.append(f"{side} {kind} {row}")
    return "\n".join(lines) + "\n"


def interval_answers(text: str, shape: IntervalShape) -> tuple[dict[int, Counter[Change]], dict[int, int]]:
    """What the oracle wrote, per event: changes as the engine says them, and watermarks."""
    assert "# ERROR" not in text, text
    join = shape.join()
    types = [[f.type for f in source.schema] for source in join.inputs]
    groups: dict[int, Counter[Change]] = {}
    watermarks: dict[int, int] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        mark = _WATERMARK_LINE.fullmatch(line)
        if mark:
            watermarks[int(mark.group(1))] = int(mark.group(2))
            continue
        found = _TIMED_LINE.fullmatch(line)
        assert found, f"not understood: {line}"
        event, kind, listed, stamp = found.groups()
        values = [part for value in listed.split(", ") for part in value.split(";")]
        sides = [1] if kind == "LATE-RIGHT" else [0] if kind == "LATE-LEFT" else [0, 1]
        own = [t for side in sides for t in types[side]]
        row: Row = tuple(_value(v, t) for v, t in zip(values, own, strict=True))
        if kind != "+I":
            pad = (None,) * len(types[1 - sides[0]])
            stamp, kind, row = row[1], LATE, row + pad if sides == [0] else pad + row
        change = (kind, (*row, int(stamp)) if shape.stamped else row)
        groups.setdefault(int(event), Counter())[change] += 1
    return groups, watermarks
