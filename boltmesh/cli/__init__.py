"""The ``boltmesh`` command. Loads torch, Lightning or the dashboard only where a command needs it.

Exit codes: 0 for success, 1 for a failed run, 2 for what the user can correct, 130 after Ctrl-C and
143 after SIGTERM. Errors are one line on stderr; ``--traceback`` shows where they come from.
"""

import os
import sys
from collections.abc import Sequence

import click

from boltmesh import __version__
from boltmesh.cli.convert import export, import_command, prune, verify
from boltmesh.cli.plan import advise, doctor, plan, schedule, tune
from boltmesh.cli.run import bench, check, command_of
from boltmesh.cli.top import export_metrics, jobs, record, report, stream, top
from boltmesh.errors import BoltMeshError
from boltmesh.process import without_control


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run_command(given))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = boltmesh.main(args=arguments, prog_name="boltmesh", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except click.Abort:
        return 130
    except BoltMeshError as error:
        return _complain(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of stdout has seen enough. Python would complain once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        return _complain(f"{error.filename} cannot be used: {error.strerror}.", 2)
    return result if isinstance(result, int) else 0


def _complain(message: str, exit_code: int) -> int:
    print(f"boltmesh: {without_control(message)}", file=sys.stderr)
    return exit_code


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    commands=[
        command_of("fit", "Train."),
        command_of("validate", "Run the validation data through a checkpoint."),
        command_of("test", "Run the test data through a checkpoint."),
        command_of("predict", "Write the predictions of a checkpoint, one file per rank."),
        check,
        bench,
        plan,
        advise,
        tune,
        schedule,
        doctor,
        top,
        record,
        report,
        export,
        import_command,
        verify,
        prune,
        export_metrics,
        jobs,
        stream,
    ],
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def boltmesh() -> None:
    """Train Lightning modules on many devices, and watch them from a terminal."""
