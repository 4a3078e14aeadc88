"""What is said of a card, which is the first thing that the backend does on one."""

from __future__ import annotations

from kernels.card import NAME, emulated_card


def test_a_card_is_described() -> None:
    with emulated_card():
        from gpu_ops.cudf_backend.device import describe_device

        found, said = describe_device()
    assert found, said
    assert said.startswith(f"{NAME}, compute capability 9.0, ")
    assert ", pylibcudf " in said


def test_a_process_has_one_pool_whatever_comes_and_goes() -> None:
    """Driver 580 crashes where pools do; the last backend gives the memory of this one back."""
    with emulated_card() as cupy:
        from gpu_ops.backends import make_kernels

        pools = cupy.cuda.runtime.pools
        for limit in (None, 1 << 30):
            first, second = (make_kernels("gpu", memory_limit=limit)[0] for _ in range(2))
            (kept,) = pools
            assert kept > 0
            first.close()
            assert pools == [kept]
            second.close()
            assert pools == [0]
