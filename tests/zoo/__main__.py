"""Trains published modules under every strategy: ``python -m tests.zoo [--packages chemprop ...]``.

Prints a line for each entry, and the sums. Results are kept in ``runs/zoo``, by commit, so that a
run that was ended goes on; ``--write`` puts the table into docs/support.md. ``make zoo`` makes the
environment that this needs, from tests/zoo/requirements.txt.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.zoo.table import counted, printed, write

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMPORTS = ("lightning.pytorch", "pytorch_lightning")
"""Packages take turns; the first entry of each is run by the other import too."""
OTHER_COLUMN = "tensor"
PACKAGES = sorted(each.stem for each in (HERE / "modules").glob("*.py"))


def main() -> int:
    """Run the command line."""
    from tests.zoo.columns import NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", nargs="*", choices=PACKAGES, default=PACKAGES, metavar="NAME")
    parser.add_argument("--strategies", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--entries", default="", help="a part of the names of entries")
    parser.add_argument("--key", default=commit(), help="results of which key; the commit")
    parser.add_argument("--again", action="store_true", help="what is kept is run once more")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    folder = ROOT / "runs" / "zoo" / options.key
    other_folder = folder / "by the other import"
    other_folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for package in options.packages:
        number = PACKAGES.index(package) % 2
        again = str(int(options.again))
        found = run(package, folder, IMPORTS[number], options.entries, again, *options.strategies)
        rows |= found
        if found:
            entry = next(iter(found))
            others |= run(package, other_folder, IMPORTS[1 - number], entry, again, OTHER_COLUMN)
    print(printed(rows))
    print("by the other import of Lightning:", dict(counted(others)))
    if options.write:
        write(rows)
    return int(bool((counted(rows) + counted(others)).keys() & {"wrong", "crashed", "failed"}))


def run(package: str, folder: Path, lightning: str, *arguments: str) -> dict[str, Any]:
    """Run entries of a package in a process of its own, and return what is kept of it."""
    command = [sys.executable, "-m", "tests.zoo.package", package, str(folder), lightning]
    subprocess.run([*command, *arguments], cwd=ROOT, check=False)
    file = folder / f"{package}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def commit() -> str:
    """Return the commit, with a digest of what is not committed."""
    head = _git("rev-parse", "--short", "HEAD").strip()
    changes = _git("diff", "HEAD", "--", "strategies", "boltmesh", "tests/zoo")
    return f"{head}-{hashlib.sha1(changes.encode()).hexdigest()[:6]}" if changes else head


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout  # fmt: skip


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(code)
