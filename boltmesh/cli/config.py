"""Parts that commands share: the arguments of a config, and types of options."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from typing_extensions import override

Command = TypeVar("Command", bound=Callable[..., object])

CONFIG_HELP = (
    "CONFIG is the name of a recipe or the path of a YAML file. Keys are changed with key=value, "
    "for example trainer.max_steps=100; keys of trainer and run need no section: max_steps=100."
)

TRACEBACK = click.option(
    "--traceback", "wants_traceback", is_flag=True, help="Show where errors come from."
)


def takes_config(command: Command) -> Command:
    """Give a command the arguments ``config`` and ``overrides``."""
    with_overrides = click.argument("overrides", nargs=-1, metavar="[key=value ...]")(command)
    return click.argument("config")(with_overrides)


def see_working_directory() -> None:
    """As `python -m` has it: a config can name code that lies in the working directory."""
    if str(Path.cwd()) not in {str(Path(each).absolute()) for each in sys.path}:
        sys.path.insert(0, str(Path.cwd()))


class NumberRange(click.FloatRange):
    """A number within limits; neither infinite nor NaN, which Python reads as well."""

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
