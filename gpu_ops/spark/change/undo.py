"""The way back from a change: sinks get the results of the old queries, whose state folder is opened again."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gpu_ops.errors import NotBuiltError, StateError
from gpu_ops.spark.api.query import CHANGED, CHANGING
from gpu_ops.spark.api.statements import StatementSet
from gpu_ops.spark.change.difference import as_changelog, net_changes, write_to_sink
from gpu_ops.spark.change.old_query import OldStatements
from gpu_ops.spark.sinks.changes import View
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files


def undo(old_queries: StatementSet, views: Mapping[str, View]) -> None:
    """Gives sinks the results that old queries had, and opens their state folder again; see `gpu_ops.undo_change`."""
    state = old_queries.state
    assert state is not None
    session, files = old_queries.statements[0].planned.session, Files.at(state)
    content = files.read(CHANGED)
    if content is None:
        raise StateError(
            f"the query of state folder {state} was not changed into another one: there is nothing to undo"
        )
    other = StateAddress.of(json.loads(content.to_pybytes())["other"])
    if Files.at(other).read(CHANGING) is not None:
        raise StateError(f"the change into state folder {other} was not done to its end: run it again first")
    new, old = OldStatements(other, session), OldStatements(state, session)
    for one in (new, old):
        one.check_stopped(session)
    differences = []
    for output in old_queries.outputs if views else ():
        was, now = (one.output(output.name, len(old_queries.outputs)) for one in (old, new))
        if was is None or now is None:
            continue  # the other query had no such sink
        for one, of in ((new, now), (old, was)):
            why = one.why_no_result(of)
            if why is not None:
                raise NotBuiltError(f"the change cannot be undone in the sink: {why}")
        schema = output.changes.schema
        before, after = (one.result(of, lambda x: x.rows(session)) for one, of in ((old, was), (new, now)))
        changes = as_changelog(net_changes(schema, before, after).localCheckpoint(), schema)
        differences.append((views[output.name], changes))
    for view, difference in differences:
        write_to_sink(view, difference, new.query_id, new.version)
    note_other(Files.at(other), state)
    files.delete([CHANGED])


def note_other(files: Files, other: StateAddress) -> None:
    """Notes in a state folder that its query was changed into another one, so that it is not started again.

    Args:
        files: the folder.
        other: the state folder of the other query.
    """
    content = json.dumps({"other": str(other)}).encode()
    files.write(CHANGED, lambda file: file.write(content))
