"""What ``--once`` and ``--json`` print: the same figures without a screen.

``--once`` is also the form for screen readers: words and numbers in aligned columns, no bars, no
charts, no escape sequences.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from boltmesh.telemetry.snapshot import SCHEMA_VERSION, JobSnapshot
from boltmesh.tui import units
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.figures import Figures, figures, job_flops
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.findings.finding import Finding
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.status import job_stalled_seconds
from boltmesh.tui.metrics.step_time import phase_split
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.panels.chart import newest_metrics
from boltmesh.tui.panels.diagnosis import diagnosis_text
from boltmesh.tui.panels.differences import differences, differences_report, draw_differences
from boltmesh.tui.panels.events import draw_events
from boltmesh.tui.panels.header import draw_header
from boltmesh.tui.panels.jobs import draw_jobs
from boltmesh.tui.panels.throughput import (
    flops_words,
    hardware_words,
    phase_label,
    phase_share,
    phases_title,
    rate_now,
)
from boltmesh.tui.panels.traffic import draw_communication
from boltmesh.tui.render.line import Line, to_ascii
from boltmesh.tui.render.ranks import ranks_table
from boltmesh.tui.render.style import Style, labelled, wrap_facts
from boltmesh.tui.render.table import Column, draw_table
from boltmesh.tui.sanitize import clean_json
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State, fold

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.reader import JobSummary

MAX_EVENTS = 5


class JobReport(JobSnapshot, frozen=True, kw_only=True):
    """What ``boltmesh top --json`` writes: a JobSnapshot and what the viewer adds to it.

    ``schema`` numbers the whole document; docs/json.md describes it.
    """

    devices: tuple[DeviceReading, ...]
    findings: tuple[Finding, ...]
    figures: Figures
    stalled_s: float | None
    """Seconds without progress; None if the job is not stalled."""
    stopped: bool
    """A signal or a time limit ended it before its last step."""


class JobList(msgspec.Struct, frozen=True):
    """What ``boltmesh jobs --json`` writes."""

    schema: int
    jobs: tuple["JobSummary", ...]


def job_json(seen: Observation) -> str:
    """Return one JSON object on one line."""
    return state_json(fold(None, seen))


def state_json(state: State) -> str:
    """Return the same of a state, whose findings know those of the look before."""
    known = {name: getattr(state.job, name) for name in JobSnapshot.__struct_fields__}
    return _encode(
        JobReport(
            **known,
            devices=state.devices,
            figures=figures(state),
            findings=diagnose(state),
            stalled_s=job_stalled_seconds(state),
            stopped=state.job.stop_reason is not None,
        )
    )


def differences_json(state: State) -> str:
    """Return what differs from the other run, as one JSON object on one line."""
    return _encode(differences_report(state))


def differences_text(state: State, width: int, look: Style) -> str:
    """Return the same as a table."""
    num_rows = len(differences(state))
    return _join([draw_differences(state, width, num_rows + 2, look)], look)


def jobs_json(jobs: Sequence["JobSummary"]) -> str:
    """Return one JSON object on one line."""
    return _encode(JobList(schema=SCHEMA_VERSION, jobs=tuple(jobs)))


def _encode(document: object) -> str:
    return clean_json(msgspec.json.encode(document, enc_hook=_encode_other))


def _encode_other(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot write {type(value).__name__} as JSON")


def job_text(state: State, width: int, look: Style) -> str:
    """Return the summary of one job."""
    blocks = [
        [
            *draw_header(state, width, 2, look, has_bar=False),
            *diagnosis_text(state, width, look),
        ],
        _rates_and_metrics(state, width),
        _phases(state, width, look),
        ranks_table(state, rank_rows(state), width, look),
        _communication(state, width, look),
        draw_events(state, width, MAX_EVENTS, look),
    ]
    return _join(blocks, look)


def jobs_text(jobs: Sequence["JobSummary"], width: int, look: Style, *, now: float) -> str:
    """Return the table of jobs."""
    return _join([draw_jobs(jobs, width, len(jobs) + 1, look, now=now)], look)


def _join(blocks: Sequence[Sequence[Line]], look: Style) -> str:
    text = "\n\n".join(
        "\n".join(line.plain.rstrip() for line in block) for block in blocks if block
    )
    return to_ascii(text) if look.glyphs.is_ascii else text


def _rates_and_metrics(state: State, width: int) -> list[Line]:
    parts = [
        labelled("samples/s", rate_now(state, "samples")),
        labelled("tokens/s", rate_now(state, "tokens")),
    ]
    is_stalled = job_stalled_seconds(state) is not None
    if not is_stalled and (flops := job_flops(state.job)) is not None:
        parts.append(labelled(*flops_words(flops)))
        if (hardware := hardware_words(flops)) is not None:
            parts.append(labelled(*hardware))
    if (ratio := figures(state).bubble_ratio.value) is not None:
        parts.append(labelled("bubble", units.share(ratio)))
    parts += [labelled(name, units.number(value)) for name, value in newest_metrics(state).items()]
    return wrap_facts(parts, width)


def _phases(state: State, width: int, look: Style) -> list[Line]:
    split = phase_split(state.job)
    if split is None:
        return [Line("no step yet")]
    columns = [
        Column(phases_title(state)),
        Column(units.seconds(split.seconds), is_number=True),
        Column("share", is_number=True),
    ]
    cells = [
        [
            phase_label(phase.name),
            units.seconds(phase.seconds),
            phase_share(phase, split),
        ]
        for phase in split.phases
    ]
    return draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)


def _communication(state: State, width: int, look: Style) -> list[Line]:
    num_rows = len(traffic_rows(state.job))
    return draw_communication(state, width, num_rows + 2, look)
