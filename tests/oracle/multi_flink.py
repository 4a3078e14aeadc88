"""Random multi-way joins as scripts for the live Flink; see `oracle.flink` for the oracle and its answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gpu_ops.descriptions.multi_join import MultiJoin
from oracle.drive import Event
from oracle.flink import TYPES
from oracle.multi_traces import MultiShape, multi_recipe, random_shape
from oracle.traces import Recipe


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
    lines = ["conf table.optimizer.multi-join.enabled=true"]
    for source in join.inputs:
        unique = source.unique_key or ()
        columns = [f"{f.name} {TYPES[f.type]}{' NOT NULL' * (f.name in unique)}" for f in source.schema]
        lines.append(f"input {source.name} {'; '.join(columns)}{' PK ' + ','.join(unique) if unique else ''}")
    lines.append(f"sql {multi_query(join)}")
    for side, kind, row in events:
        lines.append(f"{side} {kind} {','.join('null' if v is None else str(v) for v in row)}")
    return "\n".join(lines) + "\n"
