"""The names of this pack's functions in Spark's plans: by them it finds again what it has built."""

from __future__ import annotations

import re
from typing import Final

MAPS: Final = {"MapInArrow", "PythonMapInArrow", "MapInPandas"}
"""What Spark calls the logical nodes that hold them."""

JOIN: Final = "gpu_join"
FILES: Final = "gpu_files"

_JOIN_NAME: Final = re.compile(JOIN + r"_([0-9a-f]{12})\b")
_FILES_NAME: Final = re.compile(FILES + r"_([0-9a-f]{12})\b")


def joins_in(text: str) -> list[str]:
    """The ids of joins in the text of a plan, the nearest first, each once."""
    return list(dict.fromkeys(_JOIN_NAME.findall(text)))


def files_in(text: str) -> list[str]:
    """The ids of streams of files, likewise."""
    return list(dict.fromkeys(_FILES_NAME.findall(text)))
