"""What users rely on changes only together with a text that is read in review."""

import pytest

from tests.guards.interface import INTERFACE, interface


@pytest.mark.ranks
def test_the_interface_is_the_one_that_is_written_down():
    assert interface() == INTERFACE.read_text(encoding="utf-8"), (
        "If that is intended, run `make snapshot` and commit tests/guards/interface.txt."
    )
