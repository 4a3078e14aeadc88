"""Random multi-way joins, asked of the live Flink.

    GPU_JOIN_ORACLE=FOLDER pytest tests/oracle/test_flink_multi.py

``GPU_JOIN_ORACLE_MULTI`` says how many (default 20), ``GPU_JOIN_ORACLE_SEED`` which (default 0), and
``GPU_JOIN_ORACLE_MULTI_EVENTS`` how long they are (default 1000).
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import Any

import pytest

from oracle import flink
from oracle.drive import Backend, Change, by_event, run_all, same_by_event
from oracle.flink import multi_script, random_multi
from oracle.multi_traces import SHAPES, MultiShape, multi_recipe, multi_trace, shape
from oracle.traces import Recipe

SEED = int(os.environ.get("GPU_JOIN_ORACLE_SEED", "0"))
EVENTS = int(os.environ.get("GPU_JOIN_ORACLE_MULTI_EVENTS", "1000"))
NULL_SAFE = (
    shape("ll", extra="g~"),
    shape("li", unique="012", extra="x~"),
    shape("lil", "chain", extra="g~"),
    SHAPES[17],
)
RANDOM = int(os.environ.get("GPU_JOIN_ORACLE_MULTI", "20"))
NUMBERS = range(RANDOM + len(NULL_SAFE))

needs_flink = pytest.mark.skipif(bool(flink.missing()), reason=str(flink.missing()))


@functools.cache
def case(number: int) -> tuple[MultiShape, Recipe]:
    """The random ones, then the null-safe ones."""
    if number < RANDOM:
        return random_multi(SEED, number, EVENTS)
    made = NULL_SAFE[number - RANDOM]
    return made, multi_recipe(made, 300, SEED, special=False)


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Counter[Change]]]:
    """Flink's answer to every case; one JVM for all of them."""
    scripts = {
        f"multi{n}": multi_script(made, multi_trace(made, told)) for n, (made, told) in enumerate(map(case, NUMBERS))
    }
    texts = flink.ask(scripts, tmp_path_factory.mktemp("multi"))
    for name, text in texts.items():
        assert "# operator MultiJoin" in text, f"{name}:\n{scripts[name][:800]}\n{text[:2000]}"
    return [flink.answers(texts[f"multi{n}"], made.join()) for n, (made, _) in enumerate(map(case, NUMBERS))]


@needs_flink
@pytest.mark.parametrize("number", NUMBERS)
def test_flink_says_the_same(number: int, answers: list[Any], backend: Backend) -> None:
    made, told = case(number)
    events = multi_trace(made, told)
    sizes = ((1,), (7, 1, 20), (50,), (len(events),))[number // 4 % 4]
    compare(answers[number], by_event(*run_all(backend, made.join("per_event"), events, sizes)), number)


@needs_flink
@pytest.mark.parametrize("number", NUMBERS)
def test_the_rules_are_flinks(number: int, answers: list[Any]) -> None:
    """The record-by-record transcription that other tests go by."""
    made, told = case(number)
    rules = made.rules()
    compare(answers[number], {n: Counter(rules.process(e)) for n, e in enumerate(multi_trace(made, told))}, number)


def compare(expected: dict[int, Any], found: dict[int, Any], number: int) -> None:
    made, told = case(number)
    events = multi_trace(made, told)
    same_by_event(expected, found, events, f"case {SEED}-{number} {made} {told}")
    assert sum(group.total() for group in expected.values()) > 5, "a case that says next to nothing"


def test_a_multi_way_join_is_asked_for_in_flinks_words() -> None:
    made = shape("li", "chain", "010", s2=((("A.a_x", ">", "C.c_x"),),))
    text = multi_script(made, [(1, "-U", (1, 2, "x", None, 0.5))])
    assert text.startswith("conf table.optimizer.multi-join.enabled=true\ninput A a_k BIGINT; a_g STRING;")
    assert "\ninput B b_id BIGINT NOT NULL; b_k BIGINT; b_g STRING; b_x INT; b_d DOUBLE PK b_id\n" in text
    sql = "SELECT * FROM A LEFT JOIN B ON A.a_k = B.b_k INNER JOIN C ON B.b_k = C.c_k AND A.a_x > C.c_x"
    assert text.endswith(f"\nsql {sql}\n1 -U 1,2,x,null,0.5\n")
