"""How changelogs and state look: as text, and as HTML whose content is escaped."""

from __future__ import annotations

import io

import pandas as pd
import pyarrow as pa
import pytest
from rich.console import Console

from gpu_ops import DescriptionError, Input, Join, JoinEngine, Key, MultiJoin, progress, show
from gpu_ops.display import Explanation, operator_box, source_box

ORDERS = Input("orders", pa.schema([("id", pa.int64()), ("item", pa.string())]))
PRICES = Input("prices", pa.schema([("id", pa.int64()), ("price", pa.float64())]), row_kind="op")


def test_a_changelog():
    engine = JoinEngine(Join("left", ORDERS, PRICES, (Key("id", "id", using=True),), emit="per_event"), "cpu")
    batch = engine.prepare(pa.table({"id": [1, 2, 3], "item": ["<b>", None, "pen"]}))
    shown = show(batch, rows=2)
    assert str(shown) == "row_kind  id  item  price\n+I        1   <b>   null\n+I        2   null  null\nand 1 more"
    html = shown._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert html.count("color:#1a7f37") == 2  # insertions
    engine.commit()
    taken_back = show(engine.process(right=pa.table({"op": ["+I"], "id": [1], "price": [2.0]})))._repr_html_()
    assert taken_back.count("color:#cf222e") == taken_back.count("color:#1a7f37") == 1


def test_state_has_its_counts_of_matches():
    engine = JoinEngine(Join("left", ORDERS, PRICES, (Key("id", "id", using=True),)), "cpu")
    engine.process(pa.table({"id": [1], "item": ["pen"]}), pa.table({"op": ["+I"], "id": [1], "price": [2.0]}))
    assert str(show(engine)) == "state of left\nid  item  matches\n1   pen   1\n\nstate of right\nid  price\n1   2.0"
    assert "<caption style='white-space:nowrap'>state of left</caption>" in show(engine)._repr_html_()
    several = JoinEngine(MultiJoin.of([ORDERS, PRICES], "id", "left"), "cpu")
    assert "matches in step 1" in str(show(several))


def test_frames_of_others():
    assert str(show(pd.DataFrame({"row_kind": ["-D"], "k": [1]}))) == "row_kind  k\n-D        1"
    with pytest.raises(DescriptionError, match="not a int"):
        show(3)


def test_an_explanation_is_a_text():
    text = Explanation("a < b", operator_box("join", [operator_box("latest", [source_box("<l>")]), source_box("r")]))
    assert text == "a < b"
    html = text._repr_html_()
    assert "a &lt; b" in html
    assert html.index("&lt;l&gt;") < html.index("latest") < html.index("join")


class _Query:
    """A stand-in for Spark's query: two micro-batches, then it has ended."""

    name = "orders"

    def __init__(self):
        self.recentProgress, self.waited = [], False
        self._steps = iter([(0, 1_000), (1, 500), None])

    @property
    def isActive(self):  # noqa: N802 - Spark's names
        step = next(self._steps)
        if step is not None:
            self.recentProgress.append(dict(zip(("batchId", "numInputRows"), step, strict=True)))
        return step is not None

    def awaitTermination(self):  # noqa: N802
        self.waited = True


def test_progress_ends_with_the_query():
    query, out = _Query(), io.StringIO()
    progress(query, total=1_500, console=Console(file=out, width=120))
    assert "1,500 rows" in out.getvalue()
    assert "100%" in out.getvalue()
    assert query.waited  # where it raises what the query has failed with
