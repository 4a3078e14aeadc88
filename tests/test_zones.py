"""Local times as instants in all zones, also where Arrow's list of a zone's changes has ended."""

from __future__ import annotations

import datetime as dt
import os
import random
from zoneinfo import ZoneInfo, available_timezones

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from gpu_ops.zones import _by_arrow, first_change, in_zone, offsets_of

LOCAL, UTC = pa.timestamp("us"), pa.timestamp("us", "UTC")
SEED = int(os.environ.get("SEED", "7"))
ROUNDS = int(os.environ.get("ROUNDS", "1"))


def instants(times: list[dt.datetime | None], zone: str, fold: int) -> list[dt.datetime | None]:
    clock = ZoneInfo(zone)
    return [at and at.replace(tzinfo=clock, fold=fold).astimezone(dt.UTC) for at in times]


def test_the_summer_of_2050_has_its_time() -> None:
    """Arrow has the time of winter after 2037."""
    (at,) = in_zone(pa.array([dt.datetime(2050, 7, 1, 8)]), UTC, "America/New_York").to_pylist()
    assert at == dt.datetime(2050, 7, 1, 12, tzinfo=dt.UTC)
    (arrow,) = pc.assume_timezone(pa.array([dt.datetime(2050, 7, 1, 8)]), "America/New_York").cast(UTC).to_pylist()
    assert arrow in {at, at + dt.timedelta(hours=1)}  # when it is the first, gpu_ops.zones has half of its reason left


@pytest.mark.parametrize("unit", [*(pytest.param(x, marks=pytest.mark.thorough) for x in ("s", "ms")), "us"])
def test_local_times_of_random_zones(unit: str) -> None:
    choice = random.Random(f"{SEED} {unit}")
    zones = [z for z in sorted(available_timezones()) if "/" in z and not z.startswith(("right/", "posix/"))]
    for zone in ["Europe/Berlin", "Africa/Casablanca", "Australia/Lord_Howe", *choice.sample(zones, 5 * ROUNDS)]:
        years = [choice.choice([1990, 2036, 2037, 2038, 2088, 2300, 2600, 9998]) for _ in range(60)]
        times: list[dt.datetime | None] = [
            dt.datetime(year, choice.randrange(1, 13), choice.randrange(1, 29), choice.randrange(24), 30)
            for year in years
        ]
        times += [
            dt.datetime(2060, month, day, hour, 30) for month in (3, 10, 11) for day in range(1, 29) for hour in (1, 2)
        ]
        times.append(None)
        local = pa.array(times, pa.timestamp(unit))
        for fold, which in ((0, "earliest"), (1, "latest")):
            found = in_zone(local, pa.timestamp(unit, "UTC"), zone, which).to_pylist()
            expected = instants(times, zone, fold)
            if which == "latest":  # of an hour that is skipped there is one reading
                earliest = instants(times, zone, 0)
                clock = ZoneInfo(zone)
                expected = [
                    late if late is None or late.astimezone(clock).replace(tzinfo=None) == at else early
                    for late, early, at in zip(expected, earliest, times, strict=True)
                ]
            assert found == expected, zone


def test_times_of_a_day_are_those_that_they_are_one_by_one() -> None:
    """Where both ends have one offset all have: a day on which clocks change is no such day."""
    choice = random.Random(SEED)
    zones = [z for z in sorted(available_timezones()) if "/" in z and not z.startswith(("right/", "posix/"))]
    for zone in [
        "Europe/Berlin",
        "Africa/Casablanca",
        "Africa/Cairo",
        *choice.sample(zones, min(len(zones), 20 * ROUNDS)),
    ]:
        for change, offset in zip(*offsets_of(zone, 0, 2_000_000_000), strict=True):
            first = int(change + offset) - choice.randrange(100_000)
            last = first + choice.choice([3_600, 86_400, 86_401])
            local = pa.array([*range(first, last, 1_200), None, last], pa.timestamp("s")).cast(LOCAL)
            for which in ("earliest", "latest"):
                assert in_zone(local, UTC, zone, which).equals(_by_arrow(local, UTC, zone, which)), (zone, change)


@pytest.mark.parametrize("wanted", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("given", ["s", "ms", "us", "ns"])
def test_times_of_one_unit_as_instants_of_another(given: str, wanted: str) -> None:
    at = pa.array([1_700_000_000, None, 1_700_000_000], pa.timestamp("s"))
    kind = pa.timestamp(wanted, "UTC")
    found = in_zone(at.cast(pa.timestamp(given)), kind, "Europe/Berlin")
    assert found.equals(pc.assume_timezone(at, "Europe/Berlin").cast(kind))


def test_when_clocks_were_first_changed() -> None:
    assert first_change("UTC") is first_change("+02:00") is first_change("Etc/GMT+5") is None
    assert first_change("Europe/Berlin") == -2_422_054_408_000_000
