"""``boltmesh top``: a job on a screen, or as text or JSON; ``boltmesh jobs``: the list of jobs.

``--once`` and ``--json`` print the same figures without a screen. ``--once`` is also the form for
screen readers: words and numbers in aligned columns, no bars, no charts, no escape sequences.
"""

import contextlib
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from boltmesh.errors import ConfigError
from boltmesh.telemetry.snapshot import SCHEMA_VERSION, JobSnapshot, operator_name
from boltmesh.tui import units
from boltmesh.tui.commands import targets
from boltmesh.tui.commands.console import (
    OK,
    as_exit_code,
    narrate,
    print_line,
    terminal_look,
    width,
)
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.figures import Figures, figures, job_flops
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.findings.finding import Finding
from boltmesh.tui.metrics.pipelines import bubble
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.status import job_stalled_seconds, rates_are_current
from boltmesh.tui.metrics.step_time import phase_split
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.panels.chart import newest_metrics
from boltmesh.tui.panels.diagnosis import diagnosis_text
from boltmesh.tui.panels.differences import differences, differences_report, draw_differences
from boltmesh.tui.panels.events import events_text
from boltmesh.tui.panels.header import draw_header
from boltmesh.tui.panels.jobs import draw_jobs
from boltmesh.tui.panels.throughput import (
    flops_words,
    hardware_words,
    phase_label,
    phase_share,
    phases_title,
    rate_line,
)
from boltmesh.tui.panels.traffic import draw_communication
from boltmesh.tui.render.line import Line, to_ascii
from boltmesh.tui.render.ranks import ranks_table
from boltmesh.tui.render.style import Style, labelled, sentence, wrap_facts
from boltmesh.tui.render.table import Column, draw_table
from boltmesh.tui.sanitize import clean_json
from boltmesh.tui.sources.live import InterruptionError, Observation, Source
from boltmesh.tui.state import State, fold

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.reader import JobSummary
    from boltmesh.tui.sources.replay import ReplaySource


THEMES = ("night", "day", "terminal", "mono")
INTERVAL_S = 1.0
SSH_INTERVAL_S = 2.0
OBJECTS_BETWEEN_COLLECTIONS = 20_000
"""Threshold of Python's garbage collector while a screen is open; the default is 700."""


def top(
    job: str | None = None,
    other: str | None = None,
    *,
    once: bool = False,
    as_json: bool = False,
    demo: bool = False,
    replay: Path | None = None,
    at_s: float | None = None,
    on_alert: str | None = None,
    ssh: Sequence[str] = (),
    slurm: str | None = None,
    remote_command: str | None = None,
    has_mouse: bool = True,
    ascii_only: bool = False,
    theme: str | None = None,
    run_dir: Path | None = None,
    interval_s: float | None = None,
) -> int:
    """Show a job: on a screen, or as text or JSON on stdout.

    Args:
        job: Id, name, unique prefix of either, or folder of a job. None: the running one; where
            several run, the screen lets the user choose and text takes the newest; where none
            runs, the newest that ended.
        other: A job to compare it with; then both may be recordings.
        once: Print one summary and return.
        as_json: Print JSON instead of text; without ``once``, a line each interval until the job
            ends.
        demo: Show a synthetic job; ``job`` may name what happens to it, or ``gpu``.
        replay: Show a recording. ``once`` takes its last frame, JSON without ``once`` each frame.
        at_s: The moment of the recording to begin with, or to take, in seconds from its begin.
        on_alert: Command for ``/bin/sh``, run for each alert.
        ssh: Hosts that run the job, as ssh takes them; none for this one.
        slurm: Number of the SLURM job whose hosts are added to these.
        remote_command: Command that runs boltmesh there; None: it is searched.
        has_mouse: Take the mouse; without it the terminal's own selection and copying work.
        ascii_only: Draw with ASCII; also chosen where the terminal's encoding has nothing else.
        theme: One of ``THEMES``. None: what the terminal can show.
        run_dir: Where jobs keep their telemetry, here or there. None: the default of this user.
        interval_s: Time between two looks. None: a second, or two over ssh.

    Returns:
        The exit code: 0, 2 where the user has to change something, 130 after Ctrl-C.
    """
    with as_exit_code() as exit_code:
        if theme is not None and theme not in THEMES:
            raise ConfigError(f"--theme {theme}: there is no such theme. Use {', '.join(THEMES)}.")
        if other is not None:
            _check_two_runs(once=once, as_json=as_json, demo=demo, replay=replay, at_s=at_s)
        if slurm is not None:
            ssh = targets.with_slurm(ssh, slurm)
        targets.check_replay(job, demo=demo, replay=replay, at_s=at_s, on_alert=on_alert, once=once)
        if ssh and (demo or replay is not None):
            shown = "--demo" if demo else "--replay"
            raise ConfigError(f"{shown} shows nothing of another host. Leave out {shown} or --ssh.")
        if interval_s is None:
            interval_s = SSH_INTERVAL_S if ssh else INTERVAL_S
        place = targets.place_of(
            ssh, remote_command, run_dir, interval_s=targets.CPU_SAMPLE_S if once else interval_s
        )
        is_screen = not (once or as_json)
        _check_screen(is_screen=is_screen, once=once, theme=theme, has_mouse=has_mouse)
        look = terminal_look(ascii_only=ascii_only)
        if is_screen:
            _open_screen(
                job,
                other,
                demo=demo,
                replay=replay,
                at_s=at_s,
                on_alert=on_alert,
                has_mouse=has_mouse,
                look=look,
                theme=theme,
                place=place,
                interval_s=interval_s,
            )
            return OK
        if replay is not None:
            with contextlib.closing(targets.open_replay(replay, at_s, has_end=once)) as recording:
                _print_recording(recording, once=once, as_json=as_json, look=look)
            return exit_code()
        if other is not None:
            _print_differences(job, other, place=place, as_json=as_json, look=look)
            return exit_code()
        with contextlib.closing(targets.open_source(job, demo=demo, place=place)) as source:
            if once:
                _print_once(source, as_json=as_json, look=look)
            else:
                _print_until_the_end(source, interval_s=interval_s, on_alert=on_alert)
    return exit_code()


def _check_two_runs(
    *, once: bool, as_json: bool, demo: bool, replay: Path | None, at_s: float | None
) -> None:
    """Refuse options that are about one run."""
    if as_json and not once:
        raise ConfigError("--json of two runs is one document. Add --once.")
    if at_s is not None or demo or replay is not None:
        used = "--demo" if demo else "--at" if at_s is not None else "--replay"
        raise ConfigError(
            f"{used} shows one run. Leave it out to compare two; a recording is named like a job."
        )


def _check_screen(*, is_screen: bool, once: bool, theme: str | None, has_mouse: bool) -> None:
    """Refuse options of the screen without one, and a screen without a terminal."""
    if not is_screen and (theme is not None or not has_mouse):
        option = "--no-mouse" if theme is None else "--theme"
        text = "--once" if once else "--json"
        raise ConfigError(f"{option} is for the screen. Leave out {option} or {text}.")
    if is_screen and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "The dashboard needs a terminal. Use 'boltmesh top --once' for text or "
            "'boltmesh top --once --json' for JSON."
        )


def _open_screen(
    job: str | None,
    other: str | None,
    *,
    demo: bool,
    replay: Path | None,
    at_s: float | None,
    on_alert: str | None,
    has_mouse: bool,
    look: Style,
    theme: str | None,
    place: targets.Place,
    interval_s: float,
) -> None:
    source: Source | None
    if replay is not None:
        source = targets.open_replay(replay, at_s)
    elif demo:
        source = targets.open_source(job, demo=True, place=None)
    else:
        several = other is None and targets.other_running(job, place)
        source = None if several else targets.open_named(job, place)
    if source is not None and not targets.is_here(place):
        _wait_for_first_look(source)

    gc.disable()
    from boltmesh.tui.app import DashboardApp
    from boltmesh.tui.settings import settings_path

    is_alone = demo or replay is not None
    first_page = None if other is None else "compare"
    if demo:  # the screen that this demo is about
        first_page = {targets.GPU_DEMO: "devices", "experts": "experts"}.get(job or "")
    app = DashboardApp(
        source,
        list_jobs=None if is_alone else lambda: targets.list_jobs(place),
        open_source=None if is_alone else lambda job_id: targets.attach(job_id, place),
        is_ascii=look.glyphs.is_ascii,
        palette=theme,
        interval_s=interval_s,
        settings_path=None if demo else settings_path(),
        on_alert=on_alert,
        other=None if other is None else targets.open_named(other, place),
        first_page=first_page,
    )
    # Modules stay, and objects of a look live until the next look: by default the collector visits
    # both again and again, which takes a tenth of the CPU.
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    gc.enable()
    for name in ("COLUMNS", "LINES"):
        # Where a shell exports them they are the size of its start, and the terminal's own counts.
        os.environ.pop(name, None)
    app.run(mouse=has_mouse)
    if replay is not None and (note := getattr(source, "note", None)) is not None:
        narrate(note)
    if app.settings_note is not None:
        narrate(app.settings_note)
    if app.detached_from is not None and not is_alone:
        there = "" if targets.is_here(place) else f" --ssh {place.remotes[0].host}"
        narrate(
            f"detached from {app.detached_from}, which goes on. 'boltmesh top{there}' attaches "
            f"again."
        )


def _wait_for_first_look(source: Source) -> None:
    """Report a connection that fails before there is a screen."""
    try:
        source.read()
    except BaseException:
        source.close()
        raise


def _print_once(source: Source, *, as_json: bool, look: Style) -> None:
    seen = targets.settled(source)
    print_line(job_json(seen) if as_json else job_text(fold(None, seen), width(), look))


def _print_differences(
    job: str | None, other: str, *, place: targets.Place, as_json: bool, look: Style
) -> None:
    with (
        contextlib.closing(targets.open_named(job, place)) as this,
        contextlib.closing(targets.open_named(other, place)) as that,
    ):
        seen, beside = targets.settled(this), targets.settled(that)
    state = msgspec.structs.replace(fold(None, seen), other=fold(None, beside))
    print_line(differences_json(state) if as_json else differences_text(state, width(), look))


def _print_until_the_end(source: Source, *, interval_s: float, on_alert: str | None) -> None:
    with contextlib.ExitStack() as stack:
        alerts = None
        if on_alert is not None:
            from boltmesh.tui.alerts.hook import HeadlessAlerts

            alerts = stack.enter_context(contextlib.closing(HeadlessAlerts(on_alert, say=narrate)))
        is_interrupted = False
        state = None
        while True:
            try:
                seen = source.read()
            except InterruptionError as error:
                if not is_interrupted:
                    narrate(str(error))
                is_interrupted = True
                time.sleep(interval_s)
                continue
            if is_interrupted:
                narrate("connected again.")
                is_interrupted = False
            state = fold(state, seen)
            print_line(state_json(state))
            if alerts is not None:
                alerts.take(state)
            if seen.job.is_over:
                return
            time.sleep(interval_s)


def _print_recording(recording: "ReplaySource", *, once: bool, as_json: bool, look: Style) -> None:
    """Print the requested frame, or all of them, without waiting for a clock."""
    if not once:
        for seen in recording.frames():
            print_line(job_json(seen))
    else:
        seen = recording.read()
        print_line(job_json(seen) if as_json else job_text(fold(None, seen), width(), look))
    if recording.note is not None:
        narrate(recording.note)


def jobs(
    *,
    as_json: bool = False,
    ascii_only: bool = False,
    ssh: str | None = None,
    slurm: bool = False,
    remote_command: str | None = None,
    run_dir: Path | None = None,
) -> int:
    """List this user's jobs on this, another or all hosts of SLURM jobs; return the exit code."""
    with as_exit_code() as exit_code:
        hosts = () if ssh is None else (ssh,)
        where = "on the hosts of SLURM"
        if slurm:
            found = targets.list_slurm_jobs(hosts, remote_command, run_dir)
        else:
            place = targets.place_of(hosts, remote_command, run_dir)
            where = targets.where(place)
            found = targets.list_jobs(place)
        if as_json:
            print_line(jobs_json(found))
        elif found:
            look = terminal_look(ascii_only=ascii_only)
            print_line(jobs_text(found, width(), look, now=time.time()))
        else:
            narrate(f"no job of yours is {where}. Start one with 'boltmesh fit CONFIG'.")
    return exit_code()


MAX_EVENTS = 5


class JobReport(JobSnapshot, frozen=True, kw_only=True):
    """Document of ``boltmesh top --json``: a JobSnapshot and the viewer's additions.

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
    """Document of ``boltmesh jobs --json``."""

    schema: int
    jobs: tuple["JobSummary", ...]


def job_json(seen: Observation) -> str:
    """Return one JSON object on one line."""
    return state_json(fold(None, seen))


def state_json(state: State) -> str:
    """Return the same of a state, whose findings know those of the look before."""
    known = {name: getattr(state.job, name) for name in JobSnapshot.__struct_fields__}
    if not rates_are_current(state):
        known |= {"samples_per_second": None, "tokens_per_second": None}
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
    """Return the differences to the other run, as one JSON object on one line."""
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
        events_text(state, width, MAX_EVENTS, look),
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
    parts = [rate_line(state, "samples"), rate_line(state, "tokens")]
    if (flops := job_flops(state)) is not None:
        parts.append(labelled(*flops_words(flops)))
        if (hardware := hardware_words(flops)) is not None:
            parts.append(labelled(*hardware))
    if (ratio := figures(state).bubble_ratio.value) is not None:
        part = labelled("bubble", units.share(ratio))
        if (found := bubble(state)) is not None and found.mean.ideal is not None:
            part.add(f"  ideal {units.share(found.mean.ideal)}", "muted")
        parts.append(part)
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
    """The table, and below it each formula that has no room in it."""
    rows = traffic_rows(state.job)
    lines = draw_communication(state, width, len(rows) + 2, look)
    shown = "\n".join(line.plain for line in lines)
    for row in rows:
        words = row.reason if row.is_wrong else row.why
        if words and words not in shown:
            text = f"{row.axis} {operator_name(row.operator)}: {words}"
            lines += sentence(text, width, look, max_lines=None)
    return lines
