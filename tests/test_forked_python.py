"""A command in a fork is a process like any other: streams, folder, environment, children, end."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.forked_python import BOLTMESH, ForkedPython, run_python

pytestmark = pytest.mark.ranks

PARENT = """
import os, subprocess, sys
assert "lightning" in sys.modules and __name__ == "__main__"
print(sys.argv[1:], os.getcwd(), os.environ["MINE"], flush=True)
child = subprocess.Popen(
    [sys.executable, "-u", "child.py", str(os.getpid())], stdout=subprocess.PIPE, text=True,
    env={**os.environ, "MINE": "child"}, start_new_session=True,
)
print("child", child.communicate()[0].strip(), child.returncode)
print(subprocess.run(["echo", "another program"], capture_output=True, text=True).stdout.strip())
sys.exit("a reason")
"""
CHILD = """
import os, signal, sys
assert "lightning" in sys.modules
assert os.getppid() == int(sys.argv[1]) and os.getsid(0) == os.getpid()
print(os.environ["MINE"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_starts_another_that_is_its_child(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    done = run_python("parent.py", "a", cwd=tmp_path, env={**os.environ, "MINE": "parent"})
    assert done.stderr == "a reason\n"
    assert done.stdout.splitlines() == [
        f"['a'] {tmp_path} parent",
        f"child child {-signal.SIGKILL}",
        "another program",
    ]
    assert done.returncode == 1


def test_an_error_is_told_on_stderr_and_a_signal_is_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('planted')")
    failed = run_python(str(tmp_path / "fails.py"))
    assert failed.returncode == 1
    assert failed.stderr.endswith("ValueError: planted\n")
    (tmp_path / "waits.py").write_text("import time; print(1, flush=True); time.sleep(100)")
    waiting = ForkedPython(str(tmp_path / "waits.py"))
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    waiting.terminate()
    assert waiting.wait(20) == -signal.SIGTERM


def test_the_command_of_boltmesh_runs_in_it(tmp_path: Path) -> None:
    done = run_python(*BOLTMESH, "fit", "ddp", "--print-config", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bolt_ddp" in done.stdout
    assert run_python(*BOLTMESH, "fit", "no-such-recipe", cwd=tmp_path).returncode == 2
