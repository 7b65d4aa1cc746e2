"""No word that a user reads changes without a line in a review."""

from tests.guards.errors import ERRORS, errors


def test_messages_are_those_that_are_written_down():
    assert errors().splitlines() == ERRORS.read_text(encoding="utf-8").splitlines(), (
        "If that is intended, run `make snapshot` and commit tests/guards/errors.txt."
    )
