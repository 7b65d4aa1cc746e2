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

from tests.zoo.table import printed, write

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
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
    folder.mkdir(parents=True, exist_ok=True)
    for package in options.packages:
        first = "pytorch_lightning" if PACKAGES.index(package) % 2 else "lightning.pytorch"
        subprocess.run(
            [sys.executable, "-m", "tests.zoo.package", package, str(folder), first,
             options.entries, str(int(options.again)), *options.strategies],
            cwd=ROOT, check=False,
        )  # fmt: skip
    rows: dict[str, Any] = {}
    for package in options.packages:
        file = folder / f"{package}.json"
        if file.exists():
            rows |= json.loads(file.read_text())
    print(printed(rows))
    if options.write:
        write(rows)
    kinds = [cell["kind"] for row in rows.values() for cell in row.values()]
    return int(any(kind in {"wrong", "crashed", "failed"} for kind in kinds))


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
