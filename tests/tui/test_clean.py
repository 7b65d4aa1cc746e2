import json
import string

import pytest

from boltmesh.tui.sanitize import MAX_LENGTH, clean, clean_json


def test_visible_text_of_any_language_stays_as_it_is() -> None:
    text = "".join(c for c in string.printable if c.isprintable()) + "Größe 学習 épsilon"
    assert clean(text) == text


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[31mred\x1b[0m",
        "\x1b]0;title\x07red",
        "\x1b]52;c;aGk=\x1b\\red",
        "\x9b31mred",
        "\x1b[?1049lred",
        "\x1bPq#0\x1b\\red",
        "\x1bcred",
        "r\x1b[2Jed",
    ],
)
def test_escape_sequences_leave_no_trace(hostile: str) -> None:
    assert clean(hostile) == "red"


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("two\nlines", "two lines"),
        ("tab\there", "tab here"),
        ("bell\x07", "bell?"),
        ("back\x08space", "back?space"),
        ("abc\u202etxt.exe", "abc?txt.exe"),
        ("zero\u200bwidth", "zero?width"),
        ("\x1b", "?"),
        ("cut short \x1b[", "cut short "),
    ],
)
def test_other_control_and_direction_characters_become_visible(hostile: str, harmless: str) -> None:
    assert clean(hostile) == harmless


def test_every_character_below_the_first_thousand_is_printable_afterwards() -> None:
    for code in range(1024):
        assert clean(f"a{chr(code)}b").isprintable()


def test_long_text_is_cut() -> None:
    assert len(clean("x" * 10_000)) == MAX_LENGTH


def test_markup_is_text_like_any_other() -> None:
    assert clean("[bold red]x[/]") == "[bold red]x[/]"


def test_json_keeps_its_meaning_without_anything_a_terminal_obeys() -> None:
    document = {"name": "a\x1b[31m\x9b31m\x85\u202e\u2028b"}
    text = clean_json(json.dumps(document, ensure_ascii=False).encode())
    assert text.isprintable()
    assert json.loads(text) == document
