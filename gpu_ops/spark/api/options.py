"""The options that joins share, each described once; what each function takes is a class of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

from gpu_ops.backends import Backend
from gpu_ops.descriptions.description import Emit
from gpu_ops.state.address import Location

How = Literal[
    "inner", "left", "right", "full", "semi", "anti",
    "outer", "fullouter", "full_outer", "leftouter", "left_outer", "rightouter", "right_outer",
    "leftsemi", "left_semi", "leftanti", "left_anti",
]  # fmt: skip
"""A join type, also as Spark spells it."""


class RunOptions(TypedDict, total=False):
    """Where an operator runs and keeps its state."""

    state: Location | None
    """A folder of its own for the state; without it the state lives in memory only."""

    backend: Backend
    """``"auto"``, ``"cpu"`` or ``"gpu"``."""

    partitions: int | None
    """How many; by default what an existing state folder is cut into, or else ``spark.sql.shuffle.partitions``, but not
    more than the application has cores, or with GPUs two for each."""

    name: str | None
    """Of the operator, in ``query.lastProgress["observedMetrics"]``, too; by default ``join_1`` and so on."""


class KeyOptions(RunOptions, total=False):
    """Those of an operator with keys."""

    null_safe: bool | Sequence[bool]
    """Whether null keys match (``IS NOT DISTINCT FROM``), for all keys or one by one."""


class ChangelogOptions(RunOptions, total=False):
    """Those of a join without bounds in time."""

    emit: Emit
    """``"per_batch"`` (net changes), ``"per_event"`` (as Flink emits them), or ``"at_end"``: nothing, until `finish`
    gives the result."""

    backlog: bool
    """A run with ``trigger(availableNow=True)`` takes its input in silently; the first micro-batch of a run with
    another trigger gives the net result, and the join is live from then on."""


class SemiJoinOptions(KeyOptions, ChangelogOptions, total=False):
    """Those of a semi or anti join."""

    where: str | None
    """Residual condition, SQL text over both inputs' columns."""


class TwoSidedOptions(KeyOptions, total=False):
    """Those of a join with the columns of both inputs."""

    where: str | None
    """Residual condition, SQL text over both inputs' columns."""

    suffixes: tuple[str, str] | None
    """For column names that both inputs have."""


class JoinOptions(TwoSidedOptions, ChangelogOptions, total=False):
    """Those of a regular join."""


class IntervalJoinOptions(TwoSidedOptions, total=False):
    """Those that an interval join shares with others."""

    emit: Emit
    """As in `ChangelogOptions`."""


def check_options(function: str, given: Iterable[str], known: type) -> None:
    """Refuses an option that a function does not have.

    Raises:
        TypeError: names it, and the option that is most like it.
    """
    names = list(known.__annotations__)
    for name in given:
        if name not in names:
            (nearest,) = difflib.get_close_matches(name, names, n=1, cutoff=0)
            raise TypeError(
                f"{function}() has no option {name}=; did you mean {nearest}=? There are {', '.join(names)}"
            )
