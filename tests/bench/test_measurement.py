"""Figures from recorded steps, with the sums done by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from boltmesh.bench.command import BenchRow, as_csv, as_markdown, as_text, compare_losses
from boltmesh.bench.job import Ended
from boltmesh.bench.measurement import BenchRun, JobWatch, measure
from boltmesh.telemetry.snapshot import Chunk, CollectiveTotal, Memory, RankSnapshot, StepRecord


def step(index: int, seconds: float, *, after: int, loss: float = 1.0, samples: int = 4) -> Any:
    return StepRecord(index, after, 0, 0.0, seconds, (), loss, samples, None)


def rank(
    number: int, coordinates: dict[str, int], steps: list[StepRecord], **more: Any
) -> RankSnapshot:
    return RankSnapshot(
        rank=number, pid=1, host="h", device="cpu", device_uuid=None, state="finished",
        coordinates=coordinates, phase=None, global_step=0, epoch=0, last_seen=0.0,
        steps=tuple(steps), samples_per_second=None, tokens_per_second=None,
        memory=more.pop("memory", Memory(None, None, None, None)),
        collectives=more.pop("collectives", ()), in_flight=None, error=None, **more,
    )  # fmt: skip


def watched(ranks: list[RankSnapshot], mesh: dict[str, int]) -> JobWatch:
    watch = JobWatch("job")
    for each in ranks:
        watch._take(each)
    newest: Any = SimpleNamespace(ranks=tuple(ranks), mesh=mesh, versions={})
    watch.newest = newest
    return watch


def moved(axis: str, count: float) -> CollectiveTotal:
    return CollectiveTotal(axis, "0", "allreduce", 9, 9, 1.0, count, None)


def test_a_step_is_all_of_its_batches_on_the_slowest_rank() -> None:
    # Two batches accumulate to a step; the first of the two steps is warm-up.
    data = [
        rank(0, {"data": 0}, [step(0, 9.0, after=0), step(1, 9.0, after=1),
                              step(2, 1.0, after=1, loss=2.0), step(3, 2.0, after=2, loss=4.0)],
             collectives=(moved("data", 5.0), moved("data", 7.0))),
        rank(1, {"data": 1}, [step(0, 9.0, after=0), step(1, 9.0, after=1),
                              step(2, 1.0, after=1, loss=6.0), step(3, 4.0, after=2, loss=8.0)],
             collectives=(moved("data", 6.0), moved("world", 1.0))),
    ]  # fmt: skip
    run = measure(watched(data, {"data": 2}), warmup=1)
    assert run is not None
    assert run.step_s == (5.0,)
    assert run.samples == 16
    assert run.tokens is None
    assert run.loss == 5.0
    assert run.last_step == 2
    assert run.bubble == ()
    assert run.axis_bytes == {"data": 12.0, "world": 1.0}
    assert measure(watched(data, {"data": 2}), warmup=2) is None


def test_a_pipeline_counts_its_samples_once_and_has_a_bubble() -> None:
    def chunk(stage: int, start: float, end: float, microbatch: int = 0) -> Chunk:
        return Chunk(1, stage, microbatch, "F", start, end)

    ranks = [
        rank(0, {"pipeline": 0, "data": 0}, [step(0, 3.0, after=1, loss=0.5)],
             chunks=(chunk(0, 0.0, 1.0), chunk(0, 1.0, 2.0, 1))),
        rank(1, {"pipeline": 1, "data": 0}, [step(0, 2.0, after=1, loss=0.7)],
             chunks=(chunk(1, 1.0, 2.0), chunk(1, 3.0, 4.0, 1))),
    ]  # fmt: skip
    run = measure(watched(ranks, {"pipeline": 2, "data": 1}), warmup=0)
    assert run is not None
    assert run.samples == 4
    assert run.loss == 0.7
    assert list(run.bubble) == pytest.approx([1 - 4.0 / (4.0 * 2)])


def test_the_most_that_was_seen_is_kept() -> None:
    first = rank(0, {}, [], memory=Memory(100, None, None, 7))
    second = rank(0, {}, [step(0, 1.0, after=1)], memory=Memory(90, None, None, 8))
    watch = watched([first, second], {})
    assert watch.host_bytes == {0: 100}
    assert watch.device_bytes == {0: 8}


def ran(loss: float, *, data: int = 2, times: tuple[float, ...] = (0.1, 0.2, 0.3)) -> Ended:
    mesh = {"pipeline": 1, "data": data, "tensor": 1}
    memory = {("parameters", "host"): 3_000_000, ("optimizer", "disk"): 12_000_000}
    return Ended(
        BenchRun(mesh, times, 8.0, None, loss, 25, (), memory, 9_000_000, None, {"data": 4e6})
    )


def rows(*ended: tuple[str, list[Ended]]) -> list[BenchRow]:
    made = []
    for label, each in ended:
        row = BenchRow(label)
        for one in each:
            row.add(one)
        made.append(row)
    return made


def test_losses_of_equal_layouts_are_compared_and_a_difference_is_flagged() -> None:
    table = rows(
        ("a", [ran(2.0), ran(2.0)]),
        ("alike", [ran(2.0001)]),
        ("other", [ran(2.1)]),
        ("other share", [ran(3.0, data=1)]),
        ("unsteady", [ran(2.0), ran(2.5)]),
    )
    compare_losses(table, is_coarse=False)
    notes = {row.label: row.notes for row in table}
    assert notes["a"] == notes["alike"] == notes["other share"] == []
    assert notes["other"] == [
        "LOSS DIFFERS: 2.1 after step 25, and 2 is that of a on the same data"
    ]
    assert len(notes["unsteady"]) == 1
    coarse = rows(("a", [ran(2.0)]), ("rounded", [ran(2.02)]))
    compare_losses(coarse, is_coarse=True)
    assert coarse[1].notes == []


def test_the_table_says_the_same_in_three_forms() -> None:
    table = rows(
        ("a", [ran(2.0, times=(0.1, 0.2)), ran(2.0, times=(0.3, 0.4, 0.5))]),
        ("b|c", [Ended(None, "it cannot", is_refused=True)]),
        ("d", [Ended(None, "it broke")]),
    )
    text = as_text(table, last_step=25).splitlines()
    assert text[0].split("  ")[0] == "strategy"
    assert "300.0" in text[1]
    assert "200.0 to 400.0" in text[1]
    assert text[-2:] == ["  b|c: refused: it cannot", "  d: failed: it broke"]
    assert "tokens/s" not in text[0]
    assert "bubble" not in text[0]

    lines = as_markdown(table, last_step=25, about=["measured so"]).splitlines()
    cells = [each.replace("\\|", "").count("|") for each in lines[:5]]
    assert len(set(cells)) == 1
    titles, shown = ([each.strip() for each in line.split("|")[1:-1]] for line in lines[:3:2])
    found = dict(zip(titles, shown, strict=True))
    assert found["mesh"] == "data 2"
    assert found["step ms"] == "300.0"
    assert found["samples/s"] == "26.67"
    assert found["parameters MB"] == "3.000"
    assert found["optimizer MB (disk)"] == "12.0"
    assert found["data MB/step"] == "4.000"
    assert found["loss at 25"] == "2.00000"
    assert "refused: it cannot" in lines[3]
    assert lines[-1] == "- measured so"

    first, a, b, _ = as_csv(table).splitlines()
    values = dict(zip(first.split(","), a.split(","), strict=True))
    assert float(values["step_s_median"]) == pytest.approx(0.3)
    assert values["optimizer_bytes_disk"] == "12000000"
    assert values["jobs"] == "2"
    assert values["steps"] == "5"
    assert values["note"] == ""
    assert "it cannot" in b
