"""Runs the entries of one file of ``modules``: ``tests.zoo`` starts it, one file at a time.

The fork server of the ranks then has this package imported, and no other.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import boltmesh
from tests.support import ranks


def main() -> None:
    """Run the command line: package, folder of results, Lightning's name, filter, strategies."""
    package, folder, lightning, part, again, *columns = sys.argv[1:]
    # Imported first, by the ranks too: the other name of Lightning refers to it.
    importlib.import_module("tests.zoo.vision")
    importlib.import_module(lightning)
    assert boltmesh.__version__
    imported = importlib.import_module(f"tests.zoo.modules.{package}").IMPORTS
    ranks.PRELOAD[:] = ["tests.zoo.vision", lightning, "boltmesh", *ranks.PRELOAD[:13],
                        "tests.zoo.cells", *imported]  # fmt: skip

    from tests.zoo.cells import COLUMNS, by_one_process, by_strategies, entries_of, judged

    file = Path(folder, f"{package}.json")
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    entries = entries_of(package)
    rows = {name: row for name, row in rows.items() if name in entries}
    for name, entry in entries.items():
        row = rows.setdefault(name, {})
        open_ = [column for column in columns
                 if (column not in row or again == "1") and part in name
                 and (column != "context" or entry.in_context)]  # fmt: skip
        groups: dict[tuple[int, int], list[str]] = {}
        for column in open_:
            size = 1 if entry.is_shared_batch else COLUMNS[column].data_size
            groups.setdefault((COLUMNS[column].ranks, size), []).append(column)
        references: dict[int, Any] = {}
        for (_, size), some in groups.items():
            if size not in references:
                references[size] = by_one_process(package, name, size)
            one = references[size]
            if "error" in one:
                print(one.get("traceback", ""))
                row |= {column: {"kind": "failed", "text": one["error"]} for column in some}
                continue
            started = time.monotonic()
            for column, found in by_strategies(package, name, some):
                cell = judged(entry, column, found, one)
                row[column] = {"kind": cell.kind, "text": cell.text}
                if cell.kind in {"crashed", "wrong"}:
                    tell(found)
                print(f"{name} | {column}: {cell.kind} {cell.text}", flush=True)
                file.write_text(json.dumps(rows, indent=1))
            print(f"{name}, {len(some)} cells: {time.monotonic() - started:.1f} s", flush=True)
        file.write_text(json.dumps(rows, indent=1))


def tell(found: list[Any]) -> None:
    """Print the tracebacks of a cell."""
    for rank, each in enumerate(found):
        if "traceback" in each:
            print(f"rank {rank}: {each['traceback']}")


if __name__ == "__main__":
    main()
