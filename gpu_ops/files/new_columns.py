"""Columns that files and messages get while a query runs and its schema does not name: left out, and logged once.

What the first file or message has besides the schema may be left out by intention, so it is not logged. What later ones
have besides that was added at the source. All Python workers of an executor log it once among them: the folder of the
executor's blocks, which goes when it does, has an empty file for each name that is known.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

_log = logging.getLogger(__name__)

_MOST: Final = 100
"""Names of one input that are looked at; objects with ever other names have no columns."""

_known: dict[tuple[str, ...], set[str]] = {}
"""By an input's name and columns, the names that are not among these, as far as this process has met them."""


def log_new_columns(
    input_name: str,
    place: str,
    declared: pa.Schema,
    names: Mapping[str, Any],
    plain: Callable[[str], str] = str,
) -> None:
    """Logs columns and fields that a source has got since its first file or message, and that the schema does not name.

    Args:
        input_name: the input's name.
        place: the file, or the messages.
        declared: the schema.
        names: of the columns there, and what is within each: a mapping of names again, a list of such, or anything.
        plain: makes one of names that are taken for the same one.
    """
    key = (input_name, *declared.names)
    known, first = _known.get(key), key not in _known and _is_new(*key)
    known = _known.setdefault(key, set()) if known is None else known
    others = [name for name in undeclared(names, pa.struct(list(declared)), plain) if name not in known]
    others = others[: _MOST - len(known)]
    known.update(others)
    added = [name for name in others if _is_new(*key, name)]
    if added and not first:
        _log.warning(
            "input '%s': %s has columns that the query's schema does not name, and that are left out: %s",
            input_name,
            place,
            ", ".join(added),
        )


def undeclared(names: Any, declared: pa.DataType, plain: Callable[[str], str] = str, path: str = "") -> list[str]:
    """The names that a declared type does not have, with the way to each: ``s.a`` is a field of a struct.

    Args:
        names: see `log_new_columns`.
        declared: the type; lists are looked at by what they hold, maps are not.
        plain: see there, too.
        path: where the names are, with a dot behind it.
    """
    while pa.types.is_list(declared):
        declared = declared.value_type
        names = names[0] if isinstance(names, list) and names else names
    if not (pa.types.is_struct(declared) and isinstance(names, Mapping)):
        return []
    kinds = {plain(field.name): field.type for field in declared}
    found = list[str]()
    for name, within in names.items():
        kind = kinds.get(plain(name))
        found += [f"{path}{name}"] if kind is None else undeclared(within, kind, plain, f"{path}{name}.")
    return found


def _is_new(*what: str) -> bool:
    """True if no process of this executor has asked this before; where there is no executor, always."""
    folder = Path(os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0])
    if not folder.name.startswith("blockmgr-"):
        return True
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:32]
    try:
        (folder / f"gpu-join-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        _log.debug("whether a column was logged cannot be noted: %s", error)
    return True
