"""The contract of `gpu_ops.kernels.Kernels`: which rows are equal, and that equal rows have equal hashes."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.descriptions.keys import key_type
from gpu_ops.kernels import Kernels
from kernels.support import TYPES, every, everything, frame_of, plain_rows, plain_values, rows_of


def _all_pairs(kernels: Kernels, left: pa.Array, right: pa.Array, kind: pa.DataType) -> tuple[np.ndarray, np.ndarray]:
    """Equality of each value with each, and of their hashes."""
    a, b = frame_of(kernels, a=left), frame_of(kernels, b=right)
    i, j = (index.ravel() for index in np.mgrid[: len(left), : len(right)])
    rows_a, rows_b = kernels.take(a, rows_of(kernels, i), ["a"]), kernels.take(b, rows_of(kernels, j), ["b"])
    equal = kernels.asnumpy(kernels.equal_rows(rows_a, ["a"], rows_b, ["b"], [kind]))
    hashes = [kernels.asnumpy(kernels.hash_rows(f, [n], [kind])) for f, n in ((rows_a, "a"), (rows_b, "b"))]
    assert all(h.dtype == np.uint64 for h in hashes)
    shape = len(left), len(right)
    return equal.reshape(shape), (hashes[0] == hashes[1]).reshape(shape)


@pytest.mark.parametrize("name", TYPES)
def test_every_pair_of_values(kernels: Kernels, name: str) -> None:
    array = every(name)
    equal, hashes = _all_pairs(kernels, array, array, array.type)
    plain = plain_values(array)
    wanted = np.array([[a == b for b in plain] for a in plain])
    np.testing.assert_array_equal(equal, wanted)
    assert hashes[equal].all()
    assert (hashes == equal).all(), "so few values should not collide"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.array([1, -1, None, 127], pa.int8()), pa.array([1, -1, None, 1 << 40], pa.int64())),
        (pa.array([1.5, -0.0, float("nan"), 0.1], pa.float32()), pa.array([1.5, 0.0, float("nan"), 0.1], pa.float64())),
        (pa.array(["a", "", None, "ä"]), pa.array(["a", "ä", None, ""], pa.large_string())),
        (pa.array([b"a", b"", None]), pa.array([b"a", None, b""], pa.large_binary())),
        (pa.array([0, 1, None, -1], pa.timestamp("s")), pa.array([0, 1_000_000, None, -1], pa.timestamp("us"))),
        (
            pa.array([Decimal("1.5"), None, Decimal("-0.1")], pa.decimal128(5, 1)),
            pa.array([Decimal("1.500"), Decimal("-0.100"), None], pa.decimal128(20, 3)),
        ),
    ],
    ids=lambda array: str(array.type),
)
def test_two_types_of_one_key(kernels: Kernels, left: pa.Array, right: pa.Array) -> None:
    kind = key_type(pa.field("l", left.type), pa.field("r", right.type))
    equal, hashes = _all_pairs(kernels, left, right, kind)
    wide = [plain_values(side.cast(kind)) for side in (left, right)]
    np.testing.assert_array_equal(equal, np.array([[a == b for b in wide[1]] for a in wide[0]]))
    assert hashes[equal].all()


def test_rows_of_many_columns(kernels: Kernels) -> None:
    rng = np.random.default_rng(4)
    table = everything(300, rng)
    other = table.take(pa.array(rng.permutation(300)))
    for names in (["int8", "string"], ["boolean", "struct", "map"], ["double", "decimal", "array"], list(TYPES)):
        types = [TYPES[name][0] for name in names]
        a, b = kernels.frame(table), kernels.frame(other)
        equal = kernels.asnumpy(kernels.equal_rows(a, names, b, names, types))
        wanted = [x == y for x, y in zip(plain_rows(table.select(names)), plain_rows(other.select(names)), strict=True)]
        assert equal.tolist() == wanted
        hashes = [kernels.asnumpy(kernels.hash_rows(frame, names, types)) for frame in (a, b)]
        assert (hashes[0] == hashes[1])[equal].all()
        assert len(set(hashes[0].tolist())) == len(set(map(repr, plain_rows(table.select(names)))))


def test_the_order_of_columns_matters(kernels: Kernels) -> None:
    frame = frame_of(kernels, a=pa.array([1, 2, 3]), b=pa.array([2, 1, 3]))
    types = [pa.int64(), pa.int64()]
    ab, ba = (kernels.asnumpy(kernels.hash_rows(frame, names, types)) for names in (["a", "b"], ["b", "a"]))
    assert (ab == ba).tolist() == [False, False, True]


def test_no_columns(kernels: Kernels) -> None:
    frame = frame_of(kernels, a=pa.array([1, 2, None]))
    hashes = kernels.asnumpy(kernels.hash_rows(frame, [], []))
    assert hashes.size == 3
    assert len(set(hashes.tolist())) == 1
    assert kernels.asnumpy(kernels.equal_rows(frame, [], frame, [], [])).tolist() == [True] * 3


@pytest.mark.parametrize("name", TYPES)
def test_no_rows(kernels: Kernels, name: str) -> None:
    frame = frame_of(kernels, c=every(name).slice(0, 0))
    assert kernels.hash_rows(frame, ["c"], [TYPES[name][0]]).size == 0
    assert kernels.equal_rows(frame, ["c"], frame, ["c"], [TYPES[name][0]]).size == 0


def test_hashes_spread(kernels: Kernels) -> None:
    """The index looks at the upper half first: neighbours must differ there."""
    for array in (pa.array(range(20_000)), pa.array([f"key-{i}" for i in range(20_000)])):
        hashes = kernels.asnumpy(kernels.hash_rows(frame_of(kernels, c=array), ["c"], [array.type]))
        assert len(set((hashes >> np.uint64(32)).tolist())) > 19_990
        buckets = np.bincount((hashes >> np.uint64(56)).astype(np.int64), minlength=256)
        assert buckets.max() < 160


@pytest.mark.parametrize("name", TYPES)
def test_hashes_of_several_columns_do_not_depend_on_nulls_beside(kernels: Kernels, name: str) -> None:
    column = everything(40, np.random.default_rng(5))[name].combine_chunks()
    known = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    types = [pa.int64(), TYPES[name][0]]
    all_rows, some = (
        kernels.asnumpy(kernels.hash_rows(frame_of(kernels, a=pa.array([1] * len(c)), c=c), ["a", "c"], types))
        for c in (column, column.take(pa.array(known)))
    )
    assert all_rows[known].tolist() == some.tolist()
