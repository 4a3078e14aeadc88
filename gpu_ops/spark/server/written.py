"""Files of a micro-batch's changes that a server writes out of its card's memory, where no row passes the host."""

from __future__ import annotations

import functools
import os
import uuid
from typing import IO

from gpu_ops.descriptions.projection import Projection
from gpu_ops.kernels import Frame, FrameFiles, Kernels
from gpu_ops.operators.core.projection import project_frame
from gpu_ops.spark.wire.files_request import ATTEMPT, NUMBER, FilesRequest, PlacedFile
from gpu_ops.state.files import Files, seen_during


def write_changes(
    kernels: Kernels, writer: FrameFiles, changes: Frame, projection: Projection, request: FilesRequest
) -> list[PlacedFile]:
    """Writes changes into files of new names, which nobody knows before this returns.

    Args:
        kernels: the backend that has the changes.
        writer: writes frames of that backend.
        changes: the changelog.
        projection: what is taken of it.
        request: where the files lie, and how they are made.
    """
    schema = request.arrow_schema
    rows = project_frame(kernels, projection, changes, schema.names)
    count, place = kernels.num_rows(rows), Files.at(request.folder, shared=True)
    path = request.path.replace(ATTEMPT, uuid.uuid4().hex)
    step = max(1, request.file_bytes * count // max(1, writer.nbytes(rows)))

    def write(part: range, sink: str | IO[bytes]) -> None:
        per_group = min(request.rows_per_group, len(part))
        writer.write_parquet(rows, schema, part, sink, compression=request.compression, rows_per_group=per_group)

    files = list[PlacedFile]()
    for number, start in enumerate(range(0, count, step)):
        lies, part = path.replace(NUMBER, str(number)), range(start, min(start + step, count))
        if place.local:
            target = f"{place.root}/{lies}"
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with seen_during("writing", place.name(lies)):
                write(part, target)
            size = os.path.getsize(target)
        else:
            size = place.write(lies, functools.partial(write, part))
        files.append(PlacedFile(lies, size))
    return files
