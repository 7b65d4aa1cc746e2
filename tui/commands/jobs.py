"""``boltmesh jobs``: the jobs of this user on a host."""

import time
from pathlib import Path

from boltmesh.tui.commands import targets
from boltmesh.tui.commands.console import as_exit_code, narrate, print_line, terminal_look, width
from boltmesh.tui.report import jobs_json, jobs_text


def jobs(
    *,
    as_json: bool = False,
    ascii_only: bool = False,
    ssh: str | None = None,
    remote_command: str | None = None,
    run_dir: Path | None = None,
) -> int:
    """List this user's jobs on this or another host, newest first; return the exit code."""
    with as_exit_code() as exit_code:
        hosts = () if ssh is None else (ssh,)
        found = targets.list_jobs(targets.place_of(hosts, remote_command, run_dir))
        if as_json:
            print_line(jobs_json(found))
        elif found:
            look = terminal_look(ascii_only=ascii_only)
            print_line(jobs_text(found, width(), look, now=time.time()))
        else:
            host = "this host" if ssh is None else ssh
            narrate(f"no job of yours is on {host}. Start one with 'boltmesh fit CONFIG'.")
    return exit_code()
