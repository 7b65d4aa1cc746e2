"""``boltmesh record``: a job's telemetry in a file."""

import contextlib
import shlex
from pathlib import Path

from boltmesh.tui.commands import targets
from boltmesh.tui.commands.console import as_exit_code, narrate


def record(
    job: str | None,
    file: Path,
    *,
    interval_s: float = 1.0,
    for_s: float | None = None,
    force: bool = False,
    run_dir: Path | None = None,
) -> int:
    """Keep a job's telemetry in a file for ``top --replay``; return the exit code.

    Ends with the job, after ``for_s`` seconds or with Ctrl-C, which is no failure.
    """
    with as_exit_code() as exit_code:
        from boltmesh.tui.recording.record import RecordingWriter
        from boltmesh.tui.recording.record import record as keep

        with (
            contextlib.closing(targets.open_source(job, demo=False, place=run_dir)) as source,
            RecordingWriter(file, has_force=force) as recording,
        ):
            with contextlib.suppress(KeyboardInterrupt):
                keep(
                    source,
                    recording,
                    interval_s=interval_s,
                    for_s=for_s,
                    on_begin=lambda: narrate(
                        f"recording into {file}; Ctrl-C ends it, the job goes on."
                    ),
                )
            if recording.num_frames:
                narrate(
                    f"{file}: {recording.summary()} "
                    f"See it with: boltmesh top --replay {shlex.quote(str(file))}"
                )
    return exit_code()
