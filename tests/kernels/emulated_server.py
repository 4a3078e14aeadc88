"""A state server with an emulated card, which fails as the file that ``CARD_FAULT`` names says, once it is there.

``python -m kernels.emulated_server`` in place of ``python -m gpu_ops.spark.server.server``. The file has one of

- ``sticky``: a kernel has read what is not its own: from then on everything that this process asks of CUDA fails.
- ``memory``: there is no memory left, for a moment.
- ``silent``: as ``sticky``, and nobody has noticed yet.
- ``for good``: every kernel of every process fails so.
- ``gone``: and a process that starts then finds no card.
- ``written``: the process is killed when it has written a file, before it says so.
- ``read``: likewise when it has read one.
- ``recorded``: likewise when a micro-batch is durable.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from gpu_ops import backends
from kernels.card import emulated_card
from kernels.emulated_cupy import CudaError

KILLS = ("written", "read", "recorded")

if __name__ == "__main__":
    fault, broken = Path(os.environ["CARD_FAULT"]), list[bool]()
    with emulated_card() as cupy:
        if fault.exists() and fault.read_text() == "gone":
            backends.gpu_available = lambda: (False, "it is gone")
        from gpu_ops.cudf_backend import CudfKernels
        from gpu_ops.cudf_backend.parquet import CudfFiles
        from gpu_ops.spark.server.server import main
        from gpu_ops.state.durable import PartitionLog

        honest, free = CudfKernels.hash_rows, cupy.cuda.runtime.memGetInfo

        def hash_rows(self: Any, *args: Any) -> Any:
            said = fault.read_text() if fault.exists() else ""
            if said in KILLS:
                return honest(self, *args)
            if said not in ("for good", "gone"):
                fault.unlink(missing_ok=True)
            if said == "memory":
                raise MemoryError("std::bad_alloc: out_of_memory: RMM failure")
            if said:
                broken.append(True)
                raise RuntimeError("parallel_for failed: cudaErrorIllegalAddress: an illegal memory access")
            return honest(self, *args)

        def mem_get_info() -> Any:
            if fault.exists() and fault.read_text() == "silent":
                fault.unlink()
                broken.append(True)
            if broken:
                raise CudaError(700)
            return free()

        def killing(said: str, method: Any) -> Any:
            def called(*args: Any, **options: Any) -> Any:
                done = method(*args, **options)
                if fault.exists() and fault.read_text() == said:
                    fault.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                return done

            return called

        CudfKernels.hash_rows, cupy.cuda.runtime.memGetInfo = hash_rows, mem_get_info
        CudfFiles.write_parquet = killing("written", CudfFiles.write_parquet)  # type: ignore[method-assign]
        CudfFiles.read_parquet = killing("read", CudfFiles.read_parquet)  # type: ignore[method-assign]
        PartitionLog.write_record = killing("recorded", PartitionLog.write_record)  # type: ignore[method-assign]
        sys.exit(main())
