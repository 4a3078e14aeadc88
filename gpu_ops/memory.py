"""What an engine does about memory: what is over the GPU's budget moves to the host, and what fails is begun again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from gpu_ops.budget import Budget
from gpu_ops.errors import StateError
from gpu_ops.kernels import Kernels
from gpu_ops.operators.operator import InputTable, Operator
from gpu_ops.state.cold import make_room

_log = logging.getLogger("gpu_ops")

Result = TypeVar("Result")


class Memory:
    """An engine's part of a budget.

    Args:
        kernels: the engine's backend.
        limit: bytes of the backend's memory, or a budget, which others may share; None for what there is.
    """

    def __init__(self, kernels: Kernels, limit: int | Budget | None) -> None:
        self._kernels, on_gpu = kernels, kernels.host is not None
        self.budget = limit if isinstance(limit, Budget) else Budget(host=None if on_gpu else limit)
        if on_gpu and self.budget.gpu is None:
            self.budget.gpu = kernels.memory_limit

    @staticmethod
    def bytes(tables: Sequence[InputTable]) -> tuple[int, int]:
        """Bytes of state in GPU memory and in the host's."""
        host = sum(t.host_bytes for t in tables)
        return sum(t.nbytes for t in tables) - host, host

    def charge(self, tables: Sequence[InputTable]) -> None:
        """Note what the state takes now."""
        self.budget.charge(self, *self.bytes(tables))

    def release(self) -> None:
        """Give all of it back."""
        self.budget.release(self)

    def too_much(self, host: int) -> bool:
        """Whether so many bytes are more than the host's budget has left."""
        return self.budget.host_excess(self, host) > 0

    def check(self, tables: Sequence[InputTable]) -> None:
        """Refuse a prepared micro-batch whose state would find no room in either memory.

        Raises:
            StateError: it would not.
        """
        gpu, host = self.bytes(tables)
        self.budget.charge(self, gpu, host)
        self.budget.check_host(self, host + min(gpu, self.budget.gpu_excess()))

    def settle(self, tables: Sequence[InputTable]) -> None:
        """Keep GPU memory free to work in: what is over the state's share of it moves to the host, or back."""
        self.charge(tables)
        if self._kernels.host is None:
            return
        excess = self.budget.gpu_excess()
        if excess:
            make_room(tables, excess)
        elif self.budget.has_room_for(self.bytes(tables)[1]):
            for table in tables:
                table.warm()
        self.charge(tables)

    def within(
        self, what: str, operator: Operator, work: Callable[[], Result], undo: Callable[[], None] | None = None
    ) -> Result:
        """Do what can be begun again; when the GPU's memory runs out, again after moving state to the host.

        Args:
            what: it is, for errors.
            operator: whose state moves.
            work: does it.
            undo: what has to come before it is begun again, if anything.

        Raises:
            StateError: nothing is left to move.
        """
        while True:
            try:
                return work()
            except MemoryError as error:
                if self._kernels.host is None:
                    raise
                why = str(error) or type(error).__name__
            # Out of the handler: the error held on to the memory of all that was in the works.
            if undo is not None:
                undo()
            freed = make_room(operator.tables, max(1, self.bytes(operator.tables)[0] // 2))
            self.charge(operator.tables)
            if not freed:
                raise StateError(
                    f"{what} needs more GPU memory than there is, and no state is left to move to the host ({why}); "
                    "give it more (memory_limit), or smaller micro-batches"
                )
            _log.warning("GPU memory ran out over %s (%s); %d bytes of state moved to the host", what, why, freed)
