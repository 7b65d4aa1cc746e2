"""The word lint finds what it is for, and leaves ordinary English."""

import pytest

from tests.guards.words import Hit, find_hits, lower


@pytest.mark.parametrize(
    ("source", "phrase", "line"),
    [
        ('"""Return the shards.\n\nFor whoever steps them.\n"""', "whoever", 3),
        ("x = 1\n# The ranks are told\n# the result.", "told", 2),
        ("# A rank that ends without\n# a word is waited for.", "without a word", 2),
        ('raise ValueError(f"{name} stands in two stages")', "stands", 1),
        ('"""Of the whole, in fp32."""', "Of", 1),
        ('"""Sizes of a chunk. Of the last one, what is left."""', "Of", 1),
        ("# What a chunk keeps.", "What", 1),
    ],
)
def test_a_private_turn_of_phrase_is_found_at_its_line(source: str, phrase: str, line: int) -> None:
    assert find_hits("a.py", source) == [Hit("a.py", line, phrase)]


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the shape of the full tensor. Of course it may be empty."""',
        '"""Parse the microbatches.\n\nSize of each: all that are left."""',
        'name = "told"',
        "# What if a rank never arrives? It is waited for.",
        "tells = asks = 1",
    ],
)
def test_ordinary_english_and_names_are_left(source: str) -> None:
    assert find_hits("a.py", source) == []


def test_prose_of_a_page_is_checked_and_its_code_is_not() -> None:
    page = (
        "# Ranks\n\nA rank `asks`.\n\n```bash\ntells\n```\n\n| a | Of the model |\nNobody waits.\n"
    )
    assert [(hit.line, hit.phrase) for hit in find_hits("a.md", page)] == [
        (9, "Of"),
        (10, "Nobody"),
    ]


def test_comments_of_a_recipe_are_checked() -> None:
    assert find_hits("a.yaml", "size: 2 # ranks, for whoever asks\n") == [
        Hit("a.yaml", 1, "asks"),
        Hit("a.yaml", 1, "whoever"),
    ]


def test_the_budget_only_shrinks() -> None:
    assert lower({"a": 3, "b": 1}, {"a": 5, "b": 0}) == {"a": 3}
    assert lower({"a": 3}, {"a": 2, "new": 4}) == {"a": 2}


def test_a_renamed_or_merged_file_takes_its_budget_along() -> None:
    assert lower({"old": 3}, {"new": 5, "other": 1}) == {"new": 3}
    assert lower({"kept": 1, "old": 3}, {"kept": 3, "new": 5}) == {"kept": 3, "new": 1}
