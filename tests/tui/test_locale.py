"""The C locale gets ASCII, though Python writes UTF-8 in it."""

import pytest

from boltmesh.tui.commands.console import terminal_look

VARIABLES = ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8", "PYTHONIOENCODING")


class _Utf8:
    encoding = "utf-8"


@pytest.mark.parametrize(
    ("set_to", "is_ascii"),
    [
        ({"LANG": "C", "LC_ALL": "C"}, True),
        ({"LC_ALL": "POSIX", "LANG": "de_DE.UTF-8"}, True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),  # as Python has set it
        ({"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, False),
        ({"LANG": "C.UTF-8"}, False),
        ({"LANG": "C", "PYTHONUTF8": "1"}, False),
        ({}, False),
    ],
)
def test_the_locale_decides(
    set_to: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, is_ascii: bool
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", _Utf8())
    assert terminal_look(ascii_only=False).glyphs.is_ascii == is_ascii
