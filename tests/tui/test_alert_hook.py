"""The viewer's own command: what reaches it, and that it never gets in the way."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from boltmesh.tui.alerts.hook import MAX_RUNS, WINDOW_S, AlertHook, HookRun
from boltmesh.tui.alerts.watch import Alert

ALERT = Alert(
    time=12.5, job="abc123", name="sample", kind="stall", message="no step for 2m 00s", rank=4
)


def run_hook(command: str, alert: Alert, timeout_s: float = 30.0) -> str | None:
    return HookRun(command, alert).finish(timeout_s)


def wait_for(is_so: Callable[[], object], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_command_gets_the_alert_as_variables_and_as_json(tmp_path: Path) -> None:
    command = f"env | grep ^BOLTMESH_ALERT | sort > {tmp_path}/env; cat > {tmp_path}/json"
    assert run_hook(command, ALERT) is None
    assert (tmp_path / "env").read_text().splitlines() == [
        "BOLTMESH_ALERT_JOB=abc123",
        "BOLTMESH_ALERT_KIND=stall",
        "BOLTMESH_ALERT_MESSAGE=no step for 2m 00s",
        "BOLTMESH_ALERT_NAME=sample",
        "BOLTMESH_ALERT_RANK=4",
        "BOLTMESH_ALERT_STATE=raised",
    ]
    assert json.loads((tmp_path / "json").read_text()) == {
        "schema": 1,
        "time": 12.5,
        "job": "abc123",
        "name": "sample",
        "kind": "stall",
        "message": "no step for 2m 00s",
        "rank": 4,
        "is_resolved": False,
    }


def test_an_alert_of_the_whole_job_names_no_rank_and_an_end_says_so(tmp_path: Path) -> None:
    alert = msgspec.structs.replace(ALERT, rank=None, is_resolved=True)
    command = f'echo "[$BOLTMESH_ALERT_RANK] $BOLTMESH_ALERT_STATE" > {tmp_path}/said'
    assert run_hook(command, alert) is None
    assert (tmp_path / "said").read_text() == "[] resolved\n"


@pytest.mark.parametrize(
    "text",
    [
        "; touch PWNED",
        "$(touch PWNED)",
        "`touch PWNED`",
        "'; touch PWNED; '",
        "a\nb\x00c",
        "\x1b]0;",
    ],
)
def test_no_text_of_a_job_is_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alert = msgspec.structs.replace(ALERT, message=text, name=text, job=text)
    command = (
        'echo $BOLTMESH_ALERT_MESSAGE "$BOLTMESH_ALERT_NAME" $BOLTMESH_ALERT_JOB > said; cat >json'
    )
    assert run_hook(command, alert) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["json", "said"]
    assert "\x1b" not in (tmp_path / "said").read_text()


def test_a_command_that_fails_is_one_line() -> None:
    assert run_hook("echo first >&2; echo no such channel >&2; exit 3", ALERT) == (
        "the command ended with code 3: no such channel"
    )
    assert run_hook("kill -9 $$", ALERT) == "the command ended with SIGKILL"
    problem = run_hook("no-such-program-anywhere", ALERT)
    assert problem is not None
    assert problem.startswith("the command ended with code 127: ")
    assert run_hook("a\x00b", ALERT) == "the command cannot be run: embedded null byte"


def test_a_command_that_reads_nothing_is_no_failure() -> None:
    assert run_hook("exec <&-; exit 0", ALERT) is None


def test_a_command_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    run = HookRun(
        f"sleep 60 & echo $! > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; wait", ALERT
    )
    wait_for((tmp_path / "pid").exists)
    begun = time.monotonic()
    assert run.finish(0.3) == "the command did not end within 0.3 s and was ended"
    assert time.monotonic() - begun < 120
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_sending_never_waits_and_runs_one_after_the_other(tmp_path: Path) -> None:
    log, sent = tmp_path / "log", tmp_path / "sent"
    hook = AlertHook(
        f"echo begin >> {log}; until [ -e {sent} ]; do sleep 0.01; done; "
        f"echo $BOLTMESH_ALERT_RANK >> {log}"
    )
    hook.send([msgspec.structs.replace(ALERT, rank=rank) for rank in range(3)])
    sent.touch()  # which a send that waits for the command would never come to
    hook.close(wait_s=60)
    assert log.read_text().split() == ["begin", "0", "begin", "1", "begin", "2"]
    assert hook.failures() == ()


def test_a_failure_is_told_once_as_an_alert_of_its_own() -> None:
    hook = AlertHook("exit 1")
    hook.send([ALERT])
    hook.close(wait_s=60)
    (failure,) = hook.failures()
    assert (failure.kind, failure.message) == ("hook", "--on-alert: the command ended with code 1")
    assert (failure.job, failure.rank) == ("abc123", None)
    assert hook.failures() == ()


def test_a_flood_is_dropped_and_counted(tmp_path: Path) -> None:
    log, now = tmp_path / "log", [100.0]
    hook = AlertHook(f"echo x >> {log}", clock=lambda: now[0])
    hook.send([ALERT] * (MAX_RUNS + 5))
    (failure,) = hook.failures()
    assert failure.message == (
        f"--on-alert: the command was not run for 5 alerts: at most {MAX_RUNS} in {WINDOW_S:.0f} s"
    )
    now[0] += WINDOW_S
    hook.send([ALERT])
    assert hook.failures() == ()
    hook.close(wait_s=60)
    assert log.read_text().count("x") == MAX_RUNS + 1


def test_closing_waits_a_while_and_then_ends_the_command(tmp_path: Path) -> None:
    hook = AlertHook(
        f"echo $$ > {tmp_path}/pid.part; mv {tmp_path}/pid.part {tmp_path}/pid; sleep 60"
    )
    hook.send([ALERT])
    wait_for((tmp_path / "pid").exists)
    begun = time.monotonic()
    hook.close(wait_s=0.1)
    assert time.monotonic() - begun < 120
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(pid))
    hook.send([ALERT])
    assert "was not run for an alert" in hook.failures()[-1].message


def test_a_hook_that_is_never_used_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    hook = AlertHook("exit 1")
    hook.close()


def test_a_command_that_a_nameless_signal_ends_is_told_by_its_number() -> None:
    failure = run_hook("kill -40 $$", ALERT)
    assert failure is not None
    assert "signal 40" in failure
