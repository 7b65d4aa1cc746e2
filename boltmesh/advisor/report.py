"""Prints the best layouts of a config, with their memory and time, and why others are slower."""

import shlex
from collections.abc import Iterator
from typing import Any

from boltmesh.advisor.layouts import BATCH_KEY, ConfigSearch, PlannedLayout
from boltmesh.advisor.machine import Hardware
from boltmesh.plan.text import size_text
from boltmesh.planner.command import behind_text, terms_text

COLD = "not known before boltmesh tune has measured steps; a factor of two on a busy CPU"
CALIBRATED = "not known; boltmesh tune has measured steps, and prints both times"


def command_line(found: ConfigSearch, candidate: PlannedLayout) -> str:
    """Return the command and the ``Trainer`` that start a layout."""
    return shlex.join(["boltmesh", "fit", found.name, *overrides_of(found, candidate)])


def overrides_of(found: ConfigSearch, candidate: PlannedLayout) -> list[str]:
    """Return all ``key=value`` that make a layout."""
    at = found.hardware
    return candidate.layout.overrides(
        found.name, found.overrides, at.ranks_per_node, at.num_nodes, is_cpu=at.is_cpu
    )


def head_lines(found: ConfigSearch) -> Iterator[str]:
    """Yield what is planned, and for what."""
    count = found.model.numel
    size = f"{count / 1e9:,.1f} billion" if count >= 1e9 else f"{count / 1e6:,.1f} million"
    yield f"{found.model.name}, {size} parameters, on {found.hardware.name}"
    rows = f"{found.batches} batches" if found.rows is None else f"{found.rows:,} rows"
    yield (
        f"a step: {rows} over all replicas, as the config has them; "
        f"{len(found.candidates)} layouts predicted, {len(found.fitting)} fit"
    )
    yield f"{found.hardware.rates_from}."


def report_lines(found: ConfigSearch, count: int) -> Iterator[str]:
    """Yield the report of the best ``count`` layouts as lines of text."""
    yield from head_lines(found)
    yield ""
    chosen = found.best(count)
    if not chosen:
        yield from nothing_lines(found)
    for place, each in enumerate(chosen, start=1):
        tight = ", TIGHT" if each.is_tight else ""
        how = ", measured" if each.is_measured else ""
        needs = f"{memory_text(each)} a rank{tight}"
        yield f"{place}. {each.seconds:8.3f} s{how}  {needs}: {words(each)}"
    for place, each in enumerate(chosen, start=1):
        yield ""
        yield f"{place}. {command_line(found, each)}"
        hardware = found.hardware
        trainer = each.layout.trainer_text(
            hardware.ranks_per_node, hardware.num_nodes, is_cpu=hardware.is_cpu
        )
        yield f"   python  {trainer}"
        parts = [f"{name}: {text}" for name, text in each.layout.axes.dimensions.items()]
        yield f"   divides {'; '.join(parts)}"
        yield f"   time    {terms_text(each.time, digits=3)}"
        yield f"   memory  {_memory(each)}"
        reason = _first_reason(found, each) if place == 1 else _behind(chosen[0], each)
        yield f"   {'why   ' if place == 1 else 'behind'}  {reason}"
    yield ""
    for what, best in found.changes.items():
        same = chosen and best.layout.axes.division == chosen[0].layout.axes.division
        yield f"With {what}: {'the same' if same else words(best)}, {best.seconds:.3f} s."
    yield from (f"not possible: {what}: {why}" for what, why in found.refused)
    if found.left_out:
        yield f"not planned: {found.left_out} divisions of layers into more parts."
    yield from (f"{each}." for each in found.notes)
    is_calibrated = bool(found.hardware.measured)
    yield f"Expected error of a time: {CALIBRATED if is_calibrated else COLD}."


def words(candidate: PlannedLayout) -> str:
    """Return a layout in words."""
    return candidate.layout.described()


def memory_text(candidate: PlannedLayout) -> str:
    """Return the peak of the fullest rank."""
    return size_text(candidate.peak_bytes).strip()


def room_text(hardware: Hardware) -> str:
    """Return the memory that a rank has."""
    return size_text(hardware.rank_bytes).strip()


def nothing_lines(found: ConfigSearch) -> Iterator[str]:
    """Yield why nothing fits, and the layouts that need least."""
    if not found.candidates:
        ranks = found.hardware.num_ranks
        if found.rows is None or found.rows >= ranks:
            yield "No layout can run."
        else:
            yield (
                f"No layout can run: a step has {found.rows} rows over all replicas, for {ranks} "
                f"ranks. Give it more: {BATCH_KEY}={-(-ranks // found.batches)}."
            )
        return
    (least,) = found.smallest(1)
    yield (
        f"No layout fits: {words(least)} needs least, {memory_text(least)} a rank, and a rank has "
        f"{room_text(found.hardware)}."
    )


def _memory(candidate: PlannedLayout) -> str:
    kept = candidate.memory.kept
    parts = [
        f"{kind} {size_text(each.device + each.host).strip()}"
        for kind, each in kept.items()
        if each.device + each.host
    ]
    total = candidate.memory.between_steps
    peak = candidate.memory.peak
    more = peak.device + peak.host - total.device - total.host
    parts.append(f"at the peak ({candidate.memory.peak_moment}) {size_text(more).strip()} more")
    return ", ".join(parts)


def _first_reason(found: ConfigSearch, first: PlannedLayout) -> str:
    layout = first.layout
    if layout.name == "bolt_ddp":
        return "everything fits on every rank, and replicas exchange gradients alone"
    simpler = [
        each
        for each in found.candidates
        if each.layout.axes.num_mechanisms < layout.axes.num_mechanisms
    ]
    too_large = [each for each in simpler if not each.fits]
    if too_large and len(too_large) == len(simpler):
        return f"{words(too_large[0])} does not fit: {memory_text(too_large[0])} a rank"
    slower = [each for each in simpler if each.fits]
    if not slower:
        return "nothing is simpler"
    return f"{words(slower[0])} is {_behind(first, slower[0])}"


def _behind(first: PlannedLayout, other: PlannedLayout) -> str:
    """Return why a layout is slower than another one."""
    text = behind_text(first.time, other.time, digits=3)
    return f"{text}, with more mechanisms" if text.startswith("equal") else text


def as_data(found: ConfigSearch, count: int) -> dict[str, Any]:
    """Return the report as data for JSON; seconds and bytes."""
    hardware = found.hardware
    return {
        "schema": 1,
        "model": found.model.name,
        "parameters": found.model.numel,
        "ranks": hardware.num_ranks,
        "rates": {key: each for key, each in vars(hardware.machine).items() if each is not None},
        "rates_from": hardware.rates_from,
        "rows": found.rows,
        "layouts": len(found.candidates),
        "fit": len(found.fitting),
        "refused": [list(each) for each in found.refused],
        "notes": list(found.notes),
        "changes": {
            what: {"layout": words(each), "step_s": each.seconds}
            for what, each in found.changes.items()
        },
        "best": [
            {
                "command": command_line(found, each),
                "overrides": overrides_of(found, each),
                "sizes": dict(each.layout.sizes),
                "dimensions": each.layout.axes.dimensions,
                "step_s": each.seconds,
                "is_measured": each.is_measured,
                "time_s": dict(each.time),
                "memory_bytes": each.peak_bytes,
                "is_tight": each.is_tight,
            }
            for each in found.best(count)
        ],
    }
