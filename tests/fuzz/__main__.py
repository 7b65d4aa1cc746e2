"""Trains random configurations under one strategy: ``python -m tests.fuzz --strategy tensor``.

Prints each case that is not equal to a plain loop, with its seed, and a table at the end.
"""

import argparse
import sys
from collections import Counter

from tests.fuzz.cases import drawn
from tests.fuzz.running import LAYOUTS, outcomes

CHUNK = 10


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=[*LAYOUTS, "all"], default="all")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    layouts = list(LAYOUTS) if options.strategy == "all" else [options.strategy]
    has_failed = False
    for layout in layouts:
        counts: Counter[str] = Counter()
        for start in range(options.first, options.first + options.count, CHUNK):
            end = min(start + CHUNK, options.first + options.count)
            for each in outcomes([drawn(seed) for seed in range(start, end)], layout):
                counts[each.kind] += 1
                if each.kind != "equal":
                    print(f"{layout} {each.kind}: {each.case}\n    {each.text}", flush=True)
            print(f"{layout}, seeds to {end - 1}: {dict(counts)}", flush=True)
        has_failed |= bool(counts.keys() - {"equal", "equal in fp64", "refused"})
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
