"""The plans of queries, as text, by the joins they end in: what `gpu_ops.explain` shows first."""

from __future__ import annotations

from collections.abc import Iterable

_texts: dict[str, str] = {}


def remember(plan_id: str, text: str) -> None:
    """Keep the text of a query whose last join has this plan id."""
    _texts[plan_id] = text


def recall(plan_ids: Iterable[str]) -> list[str]:
    """The texts of the queries that end in these joins."""
    return [_texts[plan_id] for plan_id in plan_ids if plan_id in _texts]
