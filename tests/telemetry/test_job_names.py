"""A job is named by its name as well as by its id."""

import time

import pytest

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.reader.reader import open_job
from tests.telemetry.test_reader import FINISHED, make_job, make_rank


def test_a_job_is_opened_by_its_name_the_running_one_first():
    finished = make_rank(make_job("aaaa", name="threed"), state=FINISHED)
    running = make_rank(make_job("bbbb", name="threed"))
    newest = make_rank(make_job("cccc", name="threed", started=time.time() + 9), state=FINISHED)
    other = make_rank(make_job("dddd", name="other run"))
    with open_job("threed") as job:
        assert job.info.id == "bbbb"
    with open_job("oth") as job:
        assert job.info.id == "dddd"
    with open_job("aaa") as job:
        assert job.info.id == "aaaa"
    with pytest.raises(TelemetryError, match=r"'thre' begins the id or the name of 3 jobs"):
        open_job("thre")
    with pytest.raises(TelemetryError, match=r"no job 'therd' .*Did you mean 'threed'\?"):
        open_job("therd")
    for file in (finished, running, newest, other):
        file.close()
