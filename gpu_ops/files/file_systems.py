"""Where files lie, by Hadoop's names for them."""

from __future__ import annotations

import functools
import re

import pyarrow as pa
import pyarrow.fs as pafs

from gpu_ops.errors import BadInputError


@functools.lru_cache(maxsize=64)
def _file_system(root: str) -> tuple[pafs.FileSystem, str]:
    file_system, base = pafs.FileSystem.from_uri(root)
    return file_system, base.rstrip("/")


def file_system_of(uri: str, input_name: str) -> tuple[pafs.FileSystem, str]:
    """Finds the file system of a file by Hadoop's name for it, and its path there.

    Args:
        uri: as Hadoop writes it, that is without escapes: ``file:/a b``, ``s3a://bucket/a``, ``hdfs://host/a``.
        input_name: for the error.

    Raises:
        BadInputError: a file system that Arrow does not know.
    """
    parts = re.fullmatch(r"([a-z][a-z0-9+.-]*):(?://([^/]*))?(/.*)", uri, re.DOTALL)
    if parts is None or parts.group(1) == "file":
        return pafs.LocalFileSystem(), uri if parts is None else re.sub("^/+", "/", parts.group(3))
    scheme, host, path = parts.groups()
    scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
    try:
        file_system, base = _file_system(f"{scheme}://{host or ''}/")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInputError(
            input_name, None, f"cannot open {uri}: {error}. Read it with spark.readStream instead"
        ) from error
    return file_system, base + path
