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
