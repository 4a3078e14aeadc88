"""Values in a job's options that stand elsewhere: ``${NAME}`` in the environment, ``${file:/path}`` in a file.

They are read before Spark starts, and hidden in what is printed. ``$${`` is ``${`` as it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import quote

from gpu_ops.errors import DescriptionError

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^}']*)\}?")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FILE: Final = "file:"
_HIDDEN: Final = "***"
_WORD: Final = 8
"""Length from which a value is hidden within words, too."""


@dataclasses.dataclass
class Secrets:
    """The values that a job takes from elsewhere.

    Attributes:
        options: Spark's names of options that have such values.
    """

    options: set[str] = dataclasses.field(default_factory=set)
    _values: set[str] = dataclasses.field(default_factory=set, repr=False)

    def resolved(self, text: str) -> str:
        """An option's value with what its references stand for.

        Raises:
            DescriptionError: there is no such variable or file, or another word in the braces.
        """
        return _REFERENCE.sub(self._value, text)

    def _value(self, reference: re.Match[str]) -> str:
        name = reference[1]
        if name is None:
            return "${"
        if not reference[0].endswith("}") or not (_NAME.fullmatch(name) or name.startswith(_FILE)):
            raise DescriptionError(
                f"{reference[0]!r}: write ${{NAME}} for a variable of the environment, ${{file:/path}} for a file's "
                "text, and $${ for ${ as it is"
            )
        value = os.environ.get(name) if not name.startswith(_FILE) else _text_of(name.removeprefix(_FILE))
        if value is None:
            raise DescriptionError(f"the environment has no variable {name}, which ${{{name}}} stands for")
        self._values.add(value)
        return value

    def hidden(self, text: str) -> str:
        """A text to be printed, without the values."""
        spelled = {
            form
            for value in self._values
            for form in (value, quote(value), quote(value, safe=""), repr(value)[1:-1], json.dumps(value)[1:-1])
        }
        for form in sorted(spelled - {""}, key=len, reverse=True):
            around = ("", "") if len(form) >= _WORD else (r"(?<!\w)", r"(?!\w)")
            text = re.sub(f"{around[0]}{re.escape(form)}{around[1]}", _HIDDEN, text)
        return text


def _text_of(path: str) -> str:
    """The text of a file, without a line's end behind it.

    Raises:
        DescriptionError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DescriptionError(f"${{file:{path}}} cannot be read: {why}") from None
