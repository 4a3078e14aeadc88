"""Nexmark's three streams, made whole columns at a time, and written as Parquet files in the order of time.

    python -m benchmarks.nexmark.generator DATA [--events 1000000] [--files 8] [--seed 1]

Of 50 events one is a new person, three are new auctions, 46 are bids. Proportions, the ways in which auctions,
sellers and bidders are drawn, the sizes and the times follow nexmark/nexmark (nexmark-flink, package `generator`, with
its default configuration); names and numbers below are its. Two things differ. Its bid generator adds the first person
id to a bidder twice, so that bids come from people who do not exist yet; here it is added once. And random text is
drawn otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

PERSONS, AUCTIONS, BIDS = 1, 3, 46
EPOCH: Final = PERSONS + AUCTIONS + BIDS
"""Events in which each kind comes as often as its proportion says."""

FIRST_ID: Final = 1000
"""Of persons, and of auctions."""
FIRST_CATEGORY: Final = 10
CATEGORIES: Final = 5
ACTIVE_PEOPLE: Final = 1000
IN_FLIGHT_AUCTIONS: Final = 100
LEAD: Final = 10
"""Ids that may be used before they are there."""
BATCH: Final = 100
"""A hot id is the first (of bidders: the second) of the last so many."""
HOT_SELLERS, HOT_AUCTIONS, HOT_BIDDERS, HOT_CHANNELS = 4, 2, 4, 2
"""One in so many is drawn from all, the others are hot."""
RATE: Final = 10_000
"""Events in a second of event time."""
START_US: Final = 1_767_225_600_000_000
"""2026-01-01 00:00:00 UTC."""

STATES: Final = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES: Final = (
    "Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland",
    "Bend", "Redmond", "Seattle", "Kent", "Cheyenne",
)  # fmt: skip
FIRST_NAMES: Final = (
    "Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter",
)  # fmt: skip
LAST_NAMES: Final = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
CHANNELS: Final = ("Google", "Facebook", "Baidu", "Apple")
OTHER_CHANNELS: Final = 10_000

Ints = npt.NDArray[np.int64]
TABLES: Final = ("person", "auction", "bid")


@dataclass(frozen=True)
class Events:
    """The rows of one kind.

    Attributes:
        number: of each row's event among all, rising; n integers.
        rows: n rows.
    """

    number: Ints
    rows: pa.Table


def generate(events: int, seed: int = 1) -> dict[str, Events]:
    """Generates all three tables of Nexmark.

    Args:
        events: how many, all kinds together.
        seed: the same seed and number make the same rows.
    """
    number = np.arange(events, dtype=np.int64)
    place = number % EPOCH
    kinds = (place < PERSONS, (place >= PERSONS) & (place < PERSONS + AUCTIONS), place >= PERSONS + AUCTIONS)
    made = {}
    for kind, (name, make) in enumerate(zip(TABLES, (_persons, _auctions, _bids), strict=True)):
        of_kind = number[kinds[kind]]
        made[name] = Events(of_kind, make(of_kind, np.random.default_rng([seed, kind])))
    return made


def write(data: Path, *, events: int, files: int = 8, seed: int = 1) -> dict[str, int]:
    """Writes ``person/``, ``auction/`` and ``bid/``, in each as many files, cut at the same events.

    Args:
        data: a folder.
        events: how many, all kinds together.
        files: of each table; the file's time, by which Spark takes files, rises with its number.
        seed: see `generate`.

    Returns:
        Rows by table.
    """
    cuts = np.linspace(0, events, files + 1).astype(np.int64)
    rows = {}
    for name, made in generate(events, seed).items():
        (data / name).mkdir(parents=True, exist_ok=True)
        bounds = np.searchsorted(made.number, cuts)
        for file, (begin, end) in enumerate(itertools.pairwise(bounds)):
            path = data / name / f"{file:04d}.parquet"
            pq.write_table(made.rows.slice(begin, end - begin), path)
            os.utime(path, (START_US // 10**6 + file,) * 2)
        rows[name] = made.rows.num_rows
    return rows


def last_person(number: Ints) -> Ints:
    """The last person there is at an event, from 0."""
    return number // EPOCH


def last_auction(number: Ints) -> Ints:
    """The last auction there is at an event, from 0; before the first there is none, and it is -1."""
    place = number % EPOCH
    of_epoch = np.clip(place - PERSONS, -1, AUCTIONS - 1)
    return number // EPOCH * AUCTIONS + of_epoch


def _times(number: Ints) -> Ints:
    """Milliseconds since the first event."""
    return number * 1000 // RATE


def _active_person(number: Ints, rng: np.random.Generator) -> Ints:
    people = last_person(number) + 1
    active = np.minimum(people, ACTIVE_PEOPLE)
    return people - active + rng.integers(0, active + LEAD)


def _persons(number: Ints, rng: np.random.Generator) -> pa.Table:
    n = len(number)
    first, last = _pick(rng, FIRST_NAMES, n), _pick(rng, LAST_NAMES, n)
    four = [_pick(rng, [f"{i:04d}" for i in range(10_000)], n) for _ in range(4)]
    email = pc.binary_join_element_wise(
        pc.binary_join_element_wise(_words(rng, n, 7), _words(rng, n, 5), "@"), pa.repeat("com", n), "."
    )
    columns = {
        "id": last_person(number) + FIRST_ID,
        "name": pc.binary_join_element_wise(first, last, " "),
        "emailAddress": email,
        "creditCard": pc.binary_join_element_wise(*four, " "),
        "city": _pick(rng, CITIES, n),
        "state": _pick(rng, STATES, n),
    }
    size = 8 + sum(_lengths(columns[c]) for c in ("name", "emailAddress", "creditCard", "city", "state"))
    columns |= {"dateTime": _timestamps(_times(number)), "extra": _extra(rng, size, 200)}
    return pa.table(columns)


def _auctions(number: Ints, rng: np.random.Generator) -> pa.Table:
    n = len(number)
    hot = rng.integers(0, HOT_SELLERS, n) > 0
    seller = np.where(hot, last_person(number) // BATCH * BATCH, _active_person(number, rng))
    first_bid = _prices(rng, n)
    times = _times(number)
    # as long as it takes, on average, until so many more auctions are there
    horizon = _times(number + IN_FLIGHT_AUCTIONS * EPOCH // AUCTIONS) - times
    expires = times + 1 + rng.integers(0, np.maximum(horizon * 2, 1))
    name, description = _words(rng, n, 20), _words(rng, n, 100)
    size = 8 + _lengths(name) + _lengths(description) + 5 * 8
    return pa.table(
        {
            "id": last_auction(number) + FIRST_ID,
            "itemName": name,
            "description": description,
            "initialBid": first_bid,
            "reserve": first_bid + _prices(rng, n),
            "dateTime": _timestamps(times),
            "expires": _timestamps(expires),
            "seller": seller + FIRST_ID,
            "category": FIRST_CATEGORY + rng.integers(0, CATEGORIES, n),
            "extra": _extra(rng, size, 500),
        }
    )


def _bids(number: Ints, rng: np.random.Generator) -> pa.Table:
    n = len(number)
    last = last_auction(number)
    oldest = np.maximum(last - IN_FLIGHT_AUCTIONS, 0)
    any_auction = oldest + rng.integers(0, last - oldest + 1 + LEAD)
    auction = np.where(rng.integers(0, HOT_AUCTIONS, n) > 0, last // BATCH * BATCH, any_auction)
    # the second person, so that hot bidders are no hot sellers
    hot_bidder = last_person(number) // BATCH * BATCH + 1
    bidder = np.where(rng.integers(0, HOT_BIDDERS, n) > 0, hot_bidder, _active_person(number, rng))
    channels, urls = _channels()
    hot = rng.integers(0, HOT_CHANNELS, n) > 0
    other = len(CHANNELS) + rng.integers(0, OTHER_CHANNELS, n)
    channel = pa.array(np.where(hot, rng.integers(0, len(CHANNELS), n), other))
    return pa.table(
        {
            "auction": auction + FIRST_ID,
            "bidder": bidder + FIRST_ID,
            "price": _prices(rng, n),
            "channel": channels.take(channel),
            "url": urls.take(channel),
            "dateTime": _timestamps(_times(number)),
            "extra": _extra(rng, np.full(n, 4 * 8), 100),
        }
    )


def _channels() -> tuple[pa.Array, pa.Array]:
    """Names and addresses; the same for every seed."""
    rng = np.random.default_rng(0)
    n = len(CHANNELS) + OTHER_CHANNELS
    names = [*CHANNELS, *(f"channel-{i}" for i in range(OTHER_CHANNELS))]
    parts = [pc.replace_substring(_words(rng, n, 5), " ", "_") for _ in range(3)]
    url = pc.binary_join_element_wise(pa.repeat("https://www.nexmark.com", n), *parts, "item.htm?query=1", "/")
    # nine in ten say their channel
    said = np.concatenate([np.zeros(len(CHANNELS), bool), rng.integers(0, 10, OTHER_CHANNELS) > 0])
    numbers = pc.cast(pa.array(np.arange(n) - len(CHANNELS)), pa.string())
    tagged = pc.binary_join_element_wise(url, numbers, "&channel_id=")
    return pa.array(names), pc.if_else(pa.array(said), tagged, url)


def _prices(rng: np.random.Generator, n: int) -> Ints:
    """In cents, evenly spread by their logarithm."""
    return np.rint(10.0 ** (rng.random(n) * 6.0) * 100.0).astype(np.int64)


def _pick(rng: np.random.Generator, words: tuple[str, ...] | list[str], n: int) -> pa.Array:
    return pa.array(words).take(pa.array(rng.integers(0, len(words), n)))


def _words(rng: np.random.Generator, n: int, longest: int) -> pa.Array:
    """Texts of 3 to ``longest`` - 1 letters, one in 13 a space; none at the ends."""
    lengths = rng.integers(3, longest, n)
    letters = rng.integers(ord("a"), ord("z") + 1, int(lengths.sum()), dtype=np.uint8)
    letters[rng.integers(0, 13, len(letters)) == 0] = ord(" ")
    return pc.utf8_trim(_strings(letters, lengths), " ")


def _extra(rng: np.random.Generator, size: Ints, wanted: int) -> pa.Array:
    """Letters that fill up rows to the bytes wanted on average, give or take a fifth of what is missing."""
    missing = np.maximum(wanted - size, 0)
    delta = np.rint(missing * 0.2).astype(np.int64)
    lengths = missing - delta + rng.integers(0, np.maximum(2 * delta, 1))
    return _strings(rng.integers(ord("a"), ord("z") + 1, int(lengths.sum()), dtype=np.uint8), lengths)


def _strings(letters: npt.NDArray[np.uint8], lengths: Ints) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    array = pa.LargeStringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(letters))
    return array.cast(pa.string())


def _lengths(texts: pa.Array) -> Ints:
    return np.asarray(pc.utf8_length(texts)).astype(np.int64)


def _timestamps(ms: Ints) -> pa.Array:
    return pa.array(START_US + ms * 1000, pa.timestamp("us", "UTC"))


def main() -> None:
    """Generates the tables, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = write(options.data, events=options.events, files=options.files, seed=options.seed)
    print(*(f"{name}: {n} rows" for name, n in rows.items()), sep="\n")


if __name__ == "__main__":
    main()
