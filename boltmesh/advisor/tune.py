"""``boltmesh tune``: runs the best layouts for some steps each, and remembers the machine's rates.

Each layout is a job of its own, started as ``boltmesh fit`` starts it and measured by its
telemetry; the memory that a rank may take is its limit. They run in rounds that go back and forth,
so that what else the machine does meets all of them. Their steps correct the predictions of all
other layouts. While one of these is then the fastest, it is run beside the fastest that was
measured. A layout that fails or runs out of memory is an answer too.
"""

import json
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from boltmesh.advisor.command import search_config
from boltmesh.advisor.evaluate import described, judged, order
from boltmesh.advisor.layouts import ConfigSearch, PlannedLayout
from boltmesh.advisor.machine import MeasuredStep, key_of, rates_file, remember, remember_steps
from boltmesh.advisor.report import (
    command_line,
    head_lines,
    memory_text,
    overrides_of,
    room_text,
    words,
)
from boltmesh.bench.job import OUT_OF_MEMORY, run_variant
from boltmesh.bench.variant import PLANNED, Variant
from boltmesh.errors import ConfigError


@dataclass
class Measured:
    """One layout, predicted and run."""

    planned: PlannedLayout
    step_s: list[float] = field(default_factory=list)
    """Times of the steps of all rounds."""
    reason: str | None = None
    """Why it ended early, if it did; it is not run again."""

    @property
    def seconds(self) -> float | None:
        """Median time of a step; None if no step was measured."""
        return statistics.median(self.step_s) if self.step_s else None


def tune(
    config: str,
    overrides: Sequence[str],
    *,
    steps: int,
    warmup: int,
    rounds: int,
    count: int,
    memory_gib: float | None,
    as_json: bool,
) -> int:
    """Measure the best layouts, and print the fastest; return 1 if none has run.

    What has been measured is also printed after an interrupt, and where it cannot be remembered.

    Args:
        config: Its name or path.
        overrides: ``key=value`` of the command line.
        steps: Optimizer steps of each layout that count, in each round.
        warmup: Optimizer steps before them.
        rounds: Runs of each layout.
        count: Layouts that are measured first, and at most how many more.
        memory_gib: Memory that a rank may use. None: its share of a host's, all of a GPU's.
        as_json: Print JSON.

    Raises:
        ConfigError: For a config that cannot be planned.
    """
    found = search_config(config, overrides, again=True, memory_gib=memory_gib)
    measured = [Measured(each) for each in found.best(count)]
    was_stopped, num_whole = False, 0
    try:
        _run_rounds(found, measured, (), rounds, steps=steps, warmup=warmup)
        num_whole = len(measured)
        for _ in range(count):
            better = _faster_one(found, measured)
            if better is None:
                break
            fastest = min(measured, key=_seconds)
            measured.append(Measured(better))
            _run_rounds(found, measured[-1:], [fastest], rounds, steps=steps, warmup=warmup)
            num_whole = len(measured)
    except KeyboardInterrupt:
        was_stopped = True
    for each in measured:
        if each.reason == OUT_OF_MEMORY:
            need, room = memory_text(each.planned), room_text(found.hardware)
            each.reason = f"{OUT_OF_MEMORY}: it was to need {need} of the {room} of a rank"
    ran = [each for each in measured[:num_whole] if each.seconds is not None]
    path, why = None, "no layout has run"
    if was_stopped and not num_whole:
        why = "not all rounds have run"
    elif ran:
        try:
            path = _remember(found, ran)
        except OSError as error:
            why = f"{error.filename} cannot be written: {error.strerror}"
        except ConfigError as error:
            why = str(error).rstrip(".")
    if as_json:
        print(json.dumps(_as_data(found, measured, path, why)))
    else:
        print("\n".join(_lines(found, measured, path, why)))
    if was_stopped:
        return 128 + signal.SIGINT
    return 0 if ran else 1


def _run_rounds(
    found: ConfigSearch,
    measured: Sequence[Measured],
    beside: Sequence[Measured],
    rounds: int,
    *,
    steps: int,
    warmup: int,
) -> None:
    """Run layouts in turn, forth and back, with others beside them while one of them runs."""
    together = [*measured, *beside]
    for number in range(rounds):
        if all(each.reason is not None for each in measured):
            return
        for each in together if number % 2 == 0 else together[::-1]:
            if each.reason is None:
                print(
                    f"boltmesh tune: {words(each.planned)}, round {number + 1} of {rounds}",
                    file=sys.stderr,
                    flush=True,
                )
                _run(found, each, steps=steps, warmup=warmup)


def _faster_one(found: ConfigSearch, measured: Sequence[Measured]) -> PlannedLayout | None:
    """Return the layout that is the fastest by what was measured; None if it was measured too."""
    ran = [each for each in measured if each.seconds is not None]
    if not ran:
        return None
    steps = {key_of(found.config): _steps_of(ran)}
    hardware = replace(found.hardware, measured=steps)
    corrected: list[tuple[PlannedLayout, PlannedLayout]] = []
    for planned in found.candidates:
        known = next((each for each in measured if each.planned is planned), None)
        if known is None:
            again = judged(planned.layout, planned.memory, hardware, planned.step)
        elif known.seconds is None:
            continue
        else:
            again = planned.measured(known.seconds)
        corrected.append((again, planned))
    best, planned = min(corrected, key=lambda each: order(each[0]))
    return planned if best.fits and not best.is_measured else None


def _steps_of(ran: Sequence[Measured]) -> dict[str, MeasuredStep]:
    """Return measured steps by layout, as they were predicted and measured."""
    return {
        words(each.planned): MeasuredStep(
            each.seconds or 0.0,
            each.planned.seconds,
            described(each.planned.layout, each.planned.step, each.planned.time),
        )
        for each in ran
    }


def _seconds(measured: Measured) -> float:
    return measured.seconds or float("inf")


def planned_variants(config: str, overrides: Sequence[str]) -> list[Variant]:
    """Return the three best layouts for the devices that are here, for ``boltmesh bench``.

    Raises:
        ConfigError: For a config that cannot be planned, or where nothing fits.
    """
    found = search_config(config, overrides)
    chosen = found.best(3)
    if not chosen:
        raise ConfigError(
            f"--strategies {PLANNED}: no layout of {config} fits these devices. boltmesh advise "
            f"{config} says what needs least."
        )
    return [
        replace(_variant(found, each), label=f"{words(each)} (planned {1e3 * each.seconds:.1f} ms)")
        for each in chosen
    ]


def _variant(found: ConfigSearch, planned: PlannedLayout) -> Variant:
    return Variant(
        label=words(planned),
        strategy=planned.layout.name,
        settings=tuple(overrides_of(found, planned)),
        environment=found.hardware.device_limit,
        is_whole=True,
    )


def _run(found: ConfigSearch, measured: Measured, *, steps: int, warmup: int) -> None:
    """Run a layout once more, and add its steps or why it ended."""
    variant = _variant(found, measured.planned)
    host = found.hardware.machine.host_gib
    ended = run_variant(
        variant,
        found.name,
        variant.overrides(found.config, found.overrides),
        steps=steps,
        warmup=warmup,
        host_bytes=round(host * 2**30) if found.hardware.is_cpu and host else None,
    )
    if ended.run is not None:
        measured.step_s += ended.run.step_s
    measured.reason = ended.reason


def _remember(found: ConfigSearch, ran: Sequence[Measured]) -> Path:
    """Write the rates of this machine, and its steps as they were predicted and measured."""
    hardware, trainer = found.hardware, found.config.trainer
    kind = "cpu" if hardware.is_cpu else "cuda"
    path = rates_file(kind, hardware.ranks_per_node, trainer.precision)
    remember(hardware.machine, path)
    remember_steps(key_of(found.config), _steps_of(ran), path)
    return path


def _lines(
    found: ConfigSearch, measured: Sequence[Measured], path: Path | None, why: str
) -> Iterator[str]:
    yield from head_lines(found)
    yield ""
    yield "   predicted   measured"
    ranked = sorted(measured, key=_seconds)
    for place, each in enumerate(ranked, start=1):
        took = "       none" if each.seconds is None else f"{each.seconds:9.3f} s"
        ended = "" if each.reason is None else f": {each.reason}"
        yield f"{place}. {each.planned.seconds:8.3f} s {took}  {words(each.planned)}{ended}"
    yield ""
    if ranked and ranked[0].seconds is not None:
        yield f"The fastest: {command_line(found, ranked[0].planned)}"
    if path is None:
        yield f"Nothing is remembered: {why}."
    else:
        yield f"Rates and these steps are remembered, and correct later plans: {path}"


def _as_data(
    found: ConfigSearch, measured: Sequence[Measured], path: Path | None, why: str
) -> dict[str, Any]:
    return {
        "schema": 1,
        "remembered": None if path is None else str(path),
        "not_remembered": why if path is None else None,
        "layouts": [
            {
                "command": command_line(found, each.planned),
                "predicted_s": each.planned.seconds,
                "measured_s": each.seconds,
                "reason": each.reason,
            }
            for each in measured
        ],
    }
