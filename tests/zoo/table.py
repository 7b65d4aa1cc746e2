"""Prints the table of the zoo, and writes it into docs/support.md."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.zoo.columns import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Cells by entry and column."""


def counted(rows: Rows) -> Counter[str]:
    """Count the cells by kind."""
    return Counter(cell["kind"] for row in rows.values() for cell in row.values())


def printed(rows: Rows) -> str:
    """Return the table for a terminal, with the reasons below."""
    wide = max((len(name) for name in rows), default=0)
    lines = [" " * wide + "".join(f" {name[:11]:>11}" for name in NAMES)]
    for name, row in rows.items():
        cells = (row.get(column, {"kind": ""})["kind"] for column in NAMES)
        lines.append(f"{name:<{wide}}" + "".join(f" {each:>11}" for each in cells))
    for name, row in rows.items():
        for column, cell in row.items():
            if cell["text"]:
                lines.append(f"{name} | {column}: {cell['kind']}: {cell['text'][:300]}")
    return "\n".join([*lines, str(dict(counted(rows)))])


def for_the_page(rows: Rows) -> str:
    """Return the table in Markdown, and the reasons of refusals below it."""
    lines = [
        "| module | " + " | ".join(NAMES) + " |",
        "| --- |" + " --- |" * len(NAMES),
    ]
    reasons: dict[str, int] = {}
    for name, row in sorted(rows.items()):
        shown = []
        for column in NAMES:
            cell = row.get(column)
            if cell is None:
                shown.append("")
            elif cell["kind"] == "equal":
                shown.append("=")
            elif cell["kind"] == "refused":
                number = reasons.setdefault(first_sentence(cell["text"]), len(reasons) + 1)
                shown.append(f"[{number}]")
            else:
                shown.append(f"**{cell['kind']}**")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += ["", *(f"{number}. {text}" for text, number in reasons.items())]
    sums = counted(rows)
    counts = ", ".join(f"{sums[kind]} {kind}" for kind in ("equal", "refused", "wrong", "crashed"))
    return "\n".join([f"{len(rows)} modules, {sum(sums.values())} cells: {counts}.", "", *lines])


def first_sentence(text: str) -> str:
    """Return the first sentence of an error, without its class, ranks and folders."""
    _, _, reason = text.partition(": ")
    reason = re.sub(r"/\S*/(site-packages/|(?=tests/zoo/))", "", reason)
    reason = re.sub(r"Stage \d+ on rank \d+", "A stage", reason)
    reason = re.sub(r" of stage \d+", " of a later one", reason)
    end = reason.find(". ")
    return (reason if end < 0 else reason[: end + 1]).replace("|", "\\|")


def write(rows: Rows) -> None:
    """Replace the table of the page."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{for_the_page(rows)}\n{END}{after}")
