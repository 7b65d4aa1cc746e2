"""The command that reports what a host has."""

from pathlib import Path

import click


@click.command()
@click.option(
    "--offload-path",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Also test a disk for strategy.offload_path: one small file is written and read there.",
)
@click.option("--ascii", "ascii_only", is_flag=True, help="Print with ASCII.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(offload_path: Path | None, ascii_only: bool, as_json: bool) -> int:
    """Print versions, devices, links, disks and limits of this host, and what will work on it.

    Takes less than ten seconds. Add its output to an issue report.
    """
    from boltmesh.doctor.command import doctor as report

    return report(offload_path=offload_path, as_json=as_json, ascii_only=ascii_only)
