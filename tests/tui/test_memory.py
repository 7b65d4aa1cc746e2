"""Memory by kind and place: over the ranks, beside what was predicted, and what is not known."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import MEMORY_KINDS, JobSnapshot, Memory, MemoryKind
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.panels.memory import (
    COLUMNS,
    MemoryRow,
    Spread,
    draw_memory,
    memory_figures,
    shown_memory,
)
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.state import State
from boltmesh.tui.view import TableView
from tests.tui.meshes import GIB, mesh_job
from tests.tui.samples import job, rank, state

LOOK = Style(UNICODE)
MIB = 2**20


def _job(*ranks: tuple[MemoryKind, ...]) -> JobSnapshot:
    return job(ranks=tuple(rank(n, memory_kinds=kinds) for n, kinds in enumerate(ranks)))


def _rows(snapshot: JobSnapshot) -> dict[tuple[str, str], MemoryRow]:
    return {(row.place, row.kind): row for row in memory_figures(state(snapshot)).rows}


def _with_limits(snapshot: JobSnapshot, *, used: int | None = 14 * GIB) -> State:
    ranks = tuple(
        msgspec.structs.replace(each, device_uuid=f"GPU-{each.rank}") for each in snapshot.ranks
    )
    devices = [
        DeviceReading(
            kind="gpu", ranks=(each.rank,), name="H100", uuid=f"GPU-{each.rank}",
            memory_used_bytes=used, memory_total_bytes=(16 + each.rank) * GIB,
        )
        for each in ranks
    ]  # fmt: skip
    host = DeviceReading(
        kind="host", ranks=tuple(each.rank for each in ranks), name="node",
        memory_used_bytes=31 * GIB, memory_total_bytes=32 * GIB,
    )  # fmt: skip
    seen = state(msgspec.structs.replace(snapshot, ranks=ranks))
    return msgspec.structs.replace(seen, devices=(*devices, host))


def _drawn(seen: State, width: int = 130, height: int = 30, look: Style = LOOK) -> str:
    return "\n".join(line.plain for line in draw_memory(seen, width, height, look))


def test_a_kind_is_spread_over_the_ranks_and_the_fullest_is_named() -> None:
    kinds = [(MemoryKind("parameters", "device", size, None),) for size in (5, 9, 1, 9)]
    row = _rows(_job(*kinds))["device", "parameters"]
    assert row.measured == Spread(least=1, median=5, most=9, fullest=1)


def test_ranks_that_do_not_measure_are_left_out_and_not_zero() -> None:
    kinds = [(MemoryKind("cache", "host", size, None),) for size in (None, 7 * GIB)]
    row = _rows(_job(*kinds))["host", "cache"]
    assert row.measured == Spread(7 * GIB, 7 * GIB, 7 * GIB, 1)


@pytest.mark.parametrize(
    ("measured", "predicted", "verdict", "words"),
    [
        (100 * MIB, 100 * MIB, "met", "✓ as predicted"),
        (104 * MIB, 100 * MIB, "met", "✓ as predicted"),
        (150 * MIB, 100 * MIB, "more", "≠ 50% more"),
        (50 * MIB, 100 * MIB, "less", "≠ 50% less"),
        (3 * MIB, 0, "more", "≠ 3.00 MiB more"),
        (1000, 10, "met", "✓ as predicted"),
        (100 * MIB, None, "unpredicted", "not predicted"),
        (None, 100 * MIB, "unmeasured", "not measured"),
    ],
)
def test_the_measured_is_judged_by_the_predicted(
    measured: int | None, predicted: int | None, verdict: str, words: str
) -> None:
    snapshot = _job((MemoryKind("optimizer", "device", measured, predicted),))
    assert _rows(snapshot)["device", "optimizer"].verdict == verdict
    assert words in _drawn(state(snapshot))


def test_the_prediction_is_that_of_the_fullest_rank() -> None:
    snapshot = _job(
        (MemoryKind("parameters", "device", 3 * GIB, 3 * GIB),),
        (MemoryKind("parameters", "device", 5 * GIB, 5 * GIB),),
    )
    row = _rows(snapshot)["device", "parameters"]
    assert (row.predicted, row.verdict) == (5 * GIB, "met")


def test_places_and_kinds_keep_their_order_and_unknown_kinds_come_last() -> None:
    kinds = [MemoryKind(kind, "device", 1, None) for kind in reversed(MEMORY_KINDS)]
    more = (MemoryKind("new kind", "device", 1, None), MemoryKind("cache", "host", 1, None))
    rows = memory_figures(state(_job((*more, *kinds)))).rows
    assert [row.kind for row in rows] == [*MEMORY_KINDS, "new kind", "cache"]


def test_the_total_of_a_place_is_that_of_its_fullest_rank() -> None:
    (device, *_) = memory_figures(state(mesh_job({"data": 4}))).totals
    assert device.measured == Spread(11 * GIB, 11 * GIB, 13 * GIB, 1)
    assert sum(device.parts.values()) == 13 * GIB
    assert device.predicted == {"parameters": 2 * GIB, "gradients": 2 * GIB, "optimizer": 4 * GIB}


def test_the_limit_is_that_of_the_fullest_ranks_device_and_host() -> None:
    seen = _with_limits(mesh_job({"data": 4}))
    device, host, disk = memory_figures(seen).totals
    assert (device.limit, device.in_use) == (17 * GIB, 14 * GIB)
    assert (host.limit, disk.limit) == (32 * GIB, None)
    text = _drawn(seen)
    assert "max, rank 1, 13.0 GiB" in text
    assert "the device 14.0 GiB of 17.0 GiB in use, 82%" in text
    assert "its host 31.0 GiB of 32.0 GiB in use, 97%, nearly full" in text
    assert "limit not known" in _drawn(state(mesh_job({"data": 4})))
    unread = _drawn(_with_limits(mesh_job({"data": 4}), used=None))
    assert "the device has 17.0 GiB" in unread


def test_the_bars_of_a_device_are_shares_of_its_limit() -> None:
    seen = _with_limits(mesh_job({"data": 2}), used=None)
    measured = _drawn(seen, width=10 + 170).splitlines()[2]
    assert measured.startswith("measured  █")
    assert measured.count("░") == 40
    assert measured.count(UNICODE.bar_rest) == 40
    predicted = _drawn(seen, width=10 + 170).splitlines()[3]
    assert predicted.count("▒") == 40
    assert "░" not in predicted


def test_what_is_not_known_is_said_with_its_reason() -> None:
    text = _drawn(state(mesh_job({"data": 2})))
    assert (
        "activations, cache (device), predicted: not known: the strategy does not predict it"
        in text
    )
    assert "optimizer (disk), measured: not known: no rank measures it" in text
    assert "predicted 8.00 GiB without activations, cache" in text


def test_a_rank_that_does_not_split_its_memory_shows_it_whole() -> None:
    memory = Memory(GIB, 3 * GIB, 5 * GIB, None)
    snapshot = job(ranks=(rank(0, memory=memory),))
    rows = _rows(snapshot)
    sizes = {key: row.measured.most for key, row in rows.items() if row.measured is not None}
    assert sizes == {
        ("device", "cache"): 2 * GIB,
        ("device", "not split"): 3 * GIB,
        ("host", "not split"): GIB,
    }
    assert "by kind: not known: no rank says what its memory is for" in _drawn(state(snapshot))


def test_nothing_known_is_said_too() -> None:
    nothing = job(ranks=(rank(0, memory=Memory(None, None, None, None)),))
    assert "no rank has reported its memory yet" in _drawn(state(nothing))


def test_the_kinds_can_be_sorted_by_every_column_and_filtered() -> None:
    seen = state(mesh_job({"data": 2}))
    for title in COLUMNS:
        assert len(shown_memory(seen, TableView(sort=title))) == 7
    fullest = shown_memory(seen, TableView(sort="max", is_descending=True))
    assert (fullest[0].place, fullest[0].kind) == ("host", "optimizer")
    assert [row.place for row in shown_memory(seen, TableView(filter="place=disk"))] == ["disk"]
    assert len(shown_memory(seen, TableView(filter="max>3e9 device"))) == 2


def test_every_kind_has_a_pattern_of_its_own_in_both_sets() -> None:
    for glyphs in (UNICODE, ASCII):
        assert len({glyphs.kinds[kind] for kind in MEMORY_KINDS}) == len(MEMORY_KINDS)
    assert _drawn(state(mesh_job({"data": 2})), look=Style(ASCII)).isascii()


@pytest.mark.parametrize("height", range(1, 14))
def test_the_table_is_the_last_to_give_way(height: int) -> None:
    text = _drawn(state(mesh_job({"data": 2})), height=height)
    assert len(text.splitlines()) <= height
    assert ("parameters" in text) == (height >= 3)
