"""Where keys are, beside a dictionary that does the same: micro-batches come, are taken back, and end keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.kernels import Kernels
from gpu_ops.operators.core.key_table import KeyTable

SCHEMA = pa.schema([("a", pa.int32()), ("b", pa.string())])


@pytest.mark.parametrize("most", [3, 40, 3000], ids=lambda most: f"{most} keys")
@pytest.mark.parametrize("seed", range(4))
def test_each_key_once_as_a_dictionary_has_it(
    kernels: Kernels, seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # many rows, which have few places to look for an earlier one of their key
        monkeypatch.setattr("gpu_ops.operators.core.key_table._MANY", 20)
        monkeypatch.setattr("gpu_ops.operators.core.key_table._NEAR", 256)
    rng = np.random.default_rng(seed)
    table, known = KeyTable(kernels, SCHEMA, {"rows": np.int64}, "keys"), dict[tuple[int | None, str], int]()
    for _ in range(14):
        size = int(rng.choice([1, 2, 30, 400]))
        numbers = rng.integers(0, most, size)
        keys = [(None if n % 7 == 0 else int(n), str(n % 5)) for n in numbers]
        rows = [dict(zip(SCHEMA.names, key, strict=True)) for key in keys]
        found = table.locate(kernels.frame(pa.Table.from_pylist(rows, SCHEMA)))
        slots, number = kernels.asnumpy(found.slots), kernels.asnumpy(found.number)
        first = len(table) - len(set(keys) - known.keys())
        now = known | {key: first + n for n, key in enumerate(k for k in dict.fromkeys(keys) if k not in known)}
        assert slots[number].tolist() == [now[key] for key in keys]
        assert slots.tolist() == sorted({now[key] for key in keys})
        if rng.random() < 0.3:
            table.discard()
            continue
        ends = slots[rng.random(slots.size) < 0.4]
        table.end(kernels.asarray(ends))
        kept = {key: slot for key, slot in now.items() if slot not in set(ends.tolist())}
        before = len(table)
        table.commit(0)
        if len(table) < before:  # without the dead ones
            kept = {key: place for place, key in enumerate(sorted(kept, key=kept.__getitem__))}
        known = kept
