"""The golden cases of the ASOF join, made by `oracle.asof_rules`: ``python -m oracle.asof_cases FOLDER``, in tests."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from gpu_ops.descriptions.by_time import Asof
from oracle.asof_rules import ByHand, described, trace

CASES = {
    "asof_backward": ("left", Asof(), ("insert_only", "insert_only")),
    "asof_backward_changelogs": ("inner", Asof("backward", 5), ("unique_key", "multiset")),
    "asof_forward_changelogs": ("left", Asof("forward", exact=False), ("multiset", "unique_key")),
    "asof_nearest_changelogs": ("left", Asof("nearest", 4), ("multiset", "multiset")),
}
EVENTS = 120
_TYPES = {"double": "DOUBLE", "int64": "BIGINT"}


def case(number: int, name: str) -> dict[str, Any]:
    """One case as JSON has it; NaN has no place there."""
    how, asof, layouts = CASES[name]
    join = described(how, asof, "per_event", layouts)  # type: ignore[arg-type]
    hand, expected = ByHand(join), []
    events = [e for e in trace(join, EVENTS, 100 + number) if e[2][0] is None or e[2][0] == e[2][0]]
    for at, event in enumerate(events):
        expected += [[at, kind, row] for kind, row in hand.apply(event)]
    told = {
        "kind": "asof",
        "how": how,
        "keys": [["k", "rk"]],
        "time_columns": ["t", "s"],
        "asof": dataclasses.asdict(asof),
    }
    inputs = [
        {
            "name": source.name,
            "columns": [[field.name, _TYPES[str(field.type)]] for field in source.schema],
            "unique_key": source.unique_key,
            "mode": "insert_only" if source.insert_only else "all",
        }
        for source in join.inputs
    ]
    return {"name": name, "family": "asof", "join": told, "inputs": inputs, "conf": {}, "events": events,
            "expected": expected}  # fmt: skip


def write(folder: Path) -> None:
    """Write all cases, and their lines of the manifest."""
    manifest = folder / "manifest.json"
    lines = manifest.read_text().splitlines()
    head, *listed, end = [line.rstrip(",") for line in lines if '"name": "asof_' not in line]
    for number, name in enumerate(CASES):
        made = case(number, name)
        text = (
            json.dumps(made, separators=(",", ":")).replace('"events":', '\n"events":').replace("],[", "],\n[") + "\n"
        )
        (folder / f"{name}.json").write_text(text)
        line = {"name": name, "file": f"{name}.json", "family": "asof", "informative": False, "kind": "asof",
                "inputs": 2,
                "events": len(made["events"]), "expected": len(made["expected"]), "bytes": len(text)}  # fmt: skip
        listed.append(json.dumps(line))
    manifest.write_text(head + "\n" + ",\n".join(sorted(listed)) + "\n" + end + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
