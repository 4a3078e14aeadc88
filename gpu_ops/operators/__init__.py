"""The operators, a file each; what they share stands in `core`. A description names the module that runs it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_ops.descriptions.description import Description
    from gpu_ops.kernels import Kernels
    from gpu_ops.operators.operator import Make, Operator, Room


def make(described: Description, kernels: Kernels, room: Room) -> Operator:
    """The operator that runs a description.

    Args:
        described: the description, which names the module.
        kernels: the backend.
        room: see `gpu_ops.operators.operator.Operator`.
    """
    own: Make = importlib.import_module(f"gpu_ops.operators.{described.operator}").make
    operator = own(described, kernels)
    operator.room = room
    return operator
