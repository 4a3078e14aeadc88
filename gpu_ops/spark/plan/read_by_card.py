"""Whether the Parquet files of an input are read by the card of its state server: what of that a query's plan says.

Of each file a task looks whether its columns have the declared types (`gpu_ops.files.binary_files.plain_parquet`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.driver.queries import BY_CARD, JoinPlan
from gpu_ops.spark.tasks.packing import FileRows, Pack
from gpu_ops.spark.wire.files_request import in_both
from gpu_ops.state.address import StateAddress
from gpu_ops.state.blocks import Blocks
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest


def read_by_card(
    directory: Directory, plans: Mapping[str, JoinPlan], folders: Mapping[str, StateAddress | None]
) -> Callable[[str, Pack], str | None]:
    """Makes a function that tells who reads the files of an input: `BY_CARD`, or why Spark's tasks do.

    It takes the input's use and the function that packs its rows, and gives None where no Parquet files are read, or
    no state server has a card.

    Args:
        directory: the directory that knows the state servers.
        plans: the operators of the task, by their plan ids.
        folders: the state folders that have their state.
    """

    def why(use: str, pack: Pack) -> str | None:
        plan_id, _, number = use.rpartition(".")
        plan, reader = plans[plan_id], pack.reader
        if not isinstance(reader, FileRows) or reader.format.name != "parquet":
            return None
        if directory.blocks is None or directory.servers.pool(plan.backend).kind != "gpu":
            return None
        folder = folders[plan_id]
        return _why_not(plan, int(number), pack, reader) or _why_not_kept(folder, directory.blocks) or BY_CARD

    return why


def _why_not(plan: JoinPlan, number: int, pack: Pack, reader: FileRows) -> str | None:
    """The reason why a card does not read the files of an input; None where it can."""
    description = plan.description
    source = description.inputs[number]
    if plan.partitions > 1:
        return f"there are {plan.partitions} partitions"
    if description.emit == "at_end" or plan.backlog or number in plan.loaded:
        return "rows are kept on the host"
    if source.bad_rows != "fail":
        return "bad rows are told apart on the host"
    if source.parts is not None or reader.file_columns is None:
        return "rows are filtered or made of them by Arrow"
    return next((f"column {x.name} is {x.type}" for x in pack.packer.schema if not in_both(x.type)), None)


def _why_not_kept(folder: StateAddress | None, blocks: Blocks) -> str | None:
    """The reason why the log keeps no copies of files; None where it does."""
    if folder is None or folder.path is None:
        return "the log of inputs is on no local disk"
    there = next(path for path in (Path(folder.path), *Path(folder.path).parents) if path.exists())
    if os.stat(there).st_dev != os.stat(blocks.folder).st_dev:
        return "the log of inputs is on another file system than spark.local.dir"
    stored = Manifest.read(Files.at(folder))
    return None if stored is None or stored.keeps_copies else "the state folder was begun when tasks read them"
