"""The document that scripts rely on, as docs/json.md describes it."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.telemetry.snapshot import (
    MEMORY_KINDS,
    PHASES,
    SCHEMA_VERSION,
    AlertThresholds,
    Chunk,
    CollectiveInFlight,
    CollectiveTotal,
    Event,
    ExpertLoad,
    GroupProgress,
    JobSnapshot,
    LiveMicrobatches,
    Memory,
    MemoryKind,
    MetricPoint,
    PeerTotal,
    PipelinePlan,
    RankSnapshot,
    StepRecord,
)
from boltmesh.telemetry.tensor_plan import PlannedBlocks, PlannedParameters, TensorPlanTable
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.commands.top import JobReport, job_json, jobs_json
from boltmesh.tui.devices import DeviceReading, GpuProcess
from boltmesh.tui.metrics.figures import DefinedFigure, Figures
from boltmesh.tui.metrics.findings.finding import Finding, Kind
from tests.tui.samples import demo, summary

TEXT = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([a-z_]+)`", TEXT))


@pytest.mark.parametrize(
    "struct",
    [JobReport, DefinedFigure, Figures, JobSnapshot, RankSnapshot, StepRecord, MetricPoint,
     CollectiveTotal, CollectiveInFlight, Memory, Event, ExpectedTraffic, JobSummary,
     GroupProgress, PeerTotal, MemoryKind, Chunk, LiveMicrobatches, PipelinePlan,
     AlertThresholds, DeviceReading,
     ExpertLoad, GpuProcess, Finding, TensorPlanTable, PlannedParameters, PlannedBlocks],
)  # fmt: skip
def test_every_field_is_described(struct: type[msgspec.Struct]) -> None:
    assert set(struct.__struct_fields__) <= WORDS


def test_every_phase_state_and_kind_is_described() -> None:
    states = {"running", "finished", "failed", "crashed", "starting", "dead", "missing"}
    assert states | set(PHASES) | set(MEMORY_KINDS) | set(get_args(Kind)) <= WORDS


def test_what_the_document_says_of_the_demo_is_not_empty() -> None:
    document = json.loads(job_json(demo()))
    assert document["pipeline"]["order"][0][0] == "0F0"
    for rank in document["ranks"]:
        assert all(rank[field] for field in ("groups", "peers", "memory_kinds", "chunks"))
    assert {device["kind"] for device in document["devices"]} == {"gpu", "process", "host"}
    assert document["findings"] == []


def test_what_is_found_wrong_is_in_the_document() -> None:
    (found,) = json.loads(job_json(demo(scenario="straggler", later_s=30)))["findings"]
    assert (found["kind"], found["severity"], found["ranks"]) == ("straggler", "warn", [5])
    assert 0 < found["cost"] < 1


def test_the_described_version_is_the_one_that_is_written() -> None:
    assert f"| `schema` | integer | {SCHEMA_VERSION} |" in TEXT
    assert json.loads(job_json(demo()))["schema"] == SCHEMA_VERSION
    assert json.loads(jobs_json([]))["schema"] == SCHEMA_VERSION


def test_the_document_is_read_back_as_what_was_written() -> None:
    seen = demo()
    report = msgspec.json.decode(job_json(seen), type=JobReport)
    assert report.devices == seen.devices
    for field in JobSnapshot.__struct_fields__:
        assert getattr(report, field) == getattr(seen.job, field), field


def test_a_list_of_jobs_is_read_back_as_what_was_written() -> None:
    jobs = [summary(1), summary(2)]
    document: dict[str, Any] = msgspec.json.decode(jobs_json(jobs))
    assert msgspec.convert(document["jobs"], list[JobSummary]) == jobs
