"""The list of what composes with what names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_is_named_exists() -> None:
    text = (ROOT / "docs" / "composition.md").read_text(encoding="utf-8")
    there = {path.name for path in ROOT.glob("tests/**/*.py")}
    named = set(re.findall(r"[\w/]*test_\w+\.py", text))
    assert len(named) > 15
    for each in named:
        assert (ROOT / each).is_file() if "/" in each else each in there, each
