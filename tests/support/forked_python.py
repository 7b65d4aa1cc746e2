"""Runs ``python ARGUMENTS`` as a fork of a process that has torch and Lightning imported.

A command of boltmesh takes five seconds of a core to import them, and each rank that it starts
takes them again. Here the command is a process of its own, with its own environment, folder,
session and standard streams, and so is every rank: what it starts by ``subprocess`` as
``python -m MODULE`` or ``python SCRIPT`` is forked from it, as its child. What a true start adds,
the console script, the order of imports and an interpreter's end, is covered by the tests that
start one.
"""

import contextlib
import gc
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import fork_server

BOLTMESH = ("-m", "boltmesh")


class ForkedPython:
    """A command that runs, with the methods of ``subprocess.Popen`` that tests call.

    Args:
        *arguments: Of the interpreter: ``-m MODULE ...`` or ``SCRIPT ...``.
        cwd: The folder that it runs in; this process's by default.
        env: Its whole environment; this process's by default.
        stdout: Where it writes to; by default what ``communicate`` returns.
        stderr: The same.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
    ) -> None:
        self.args = arguments
        self._own = [
            tempfile.TemporaryFile("w+") if each is None else None  # noqa: SIM115
            for each in (stdout, stderr)
        ]
        self._said: tuple[str, str] | None = None
        files = [own or each for own, each in zip(self._own, (stdout, stderr), strict=True)]
        descriptors = [each.fileno() for each in files]
        self._process = fork_server().Process(
            target=_serve,
            args=(
                _Streams(descriptors),
                list(arguments),
                dict(os.environ if env is None else env),
                str(cwd or Path.cwd()),
                sys.executable,
            ),
            daemon=False,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of ``Popen``: negative after a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        if self._said is None:
            out, error = map(_text_of, self._own)
            self._said = out, error
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, and return what it has written."""
        self.wait(timeout)
        assert self._said is not None
        return self._said

    def send_signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill_all(self) -> None:
        """Kill it and the ranks that it has started, which have sessions of their own."""
        import psutil

        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for each in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        self.wait()


def run_python(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    differentiates: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, and return what it said.

    Args:
        *arguments: As of ``ForkedPython``.
        cwd: The same.
        env: The same.
        timeout_s: Until it is killed.
        differentiates: It uses autograd before it starts ranks. Those of a build of torch with
            CUDA are then no forks of it.

    Raises:
        subprocess.TimeoutExpired: It ran longer and was killed.
    """
    if differentiates and torch.backends.cuda.is_built():
        command = [sys.executable, *arguments]
        return subprocess.run(
            command,
            cwd=cwd,
            env=env,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            check=False,
        )
    process = ForkedPython(*arguments, cwd=cwd, env=env)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill_all()
        raise
    return subprocess.CompletedProcess(arguments, process.wait(), *process.communicate())


def _text_of(file: Any) -> str:
    """Everything in a file, which is closed; nothing of a file that the caller has."""
    if file is None:
        return ""
    with file:
        file.seek(0)
        text: str = file.read()
        return text


class _Streams:
    """Descriptors for a process to be: duplicated while it is started."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = list(descriptors)

    def __reduce__(self) -> Any:
        return _detached, tuple(DupFd(each) for each in self.descriptors)


def _detached(*duplicates: Any) -> list[int]:
    return [each.detach() for each in duplicates]


def _serve(
    streams: list[int], arguments: list[str], environment: dict[str, str], cwd: str, python: str
) -> None:
    """Become ``python ARGUMENTS`` in a child of the fork server."""
    os.setsid()
    os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip((null, *streams), (0, 1, 2), strict=True):
        os.dup2(source, target)
    become_python(arguments, environment, python)


def become_python(arguments: Sequence[str], environment: Mapping[str, str], python: str) -> None:
    """Run a module or a script as ``python`` does, and end the process as it would end."""
    gc.freeze()  # see ranks._rank_main
    code = 1
    try:
        _prepare(dict(environment), python)
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            code = left.code or 0
        else:
            print(left.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except BaseException:  # noqa: BLE001 - whatever it is, it goes to stderr
        sys.excepthook(*sys.exc_info())
    finally:
        for each in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                each.flush()
        # gloo's threads sometimes abort while the interpreter goes down, see pytorch#190489.
        os._exit(code & 0xFF)


def _prepare(environment: Mapping[str, str], python: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    sys.executable = python
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    warnings.resetwarnings()
    for action in environment.get("PYTHONWARNINGS", "default").split(","):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    # As of any training process on Linux: loader workers are forks.
    multiprocessing.set_start_method("fork", force=True)
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get("Popen") is _TruePopen:  # as torchrun imports it
            module.Popen = ForkingPopen  # type: ignore[attr-defined]


_TruePopen = subprocess.Popen
_SIGNATURE = inspect.signature(_TruePopen._execute_child)  # type: ignore[attr-defined]


class ForkingPopen(_TruePopen):
    """Forks where the command is this interpreter with a module or a script."""

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        command = given["args"]
        is_python = not isinstance(command, (str, bytes, os.PathLike)) and (
            command[0] == sys.executable and _without_options(command[1:])
        )
        if not is_python:
            super()._execute_child(*args, **kwargs)  # type: ignore[misc]
            return
        for each in (sys.stdout, sys.stderr):
            each.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(given, _without_options(command[1:]))
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(given[name] for name in ("errread", "errwrite")),
        )


def _without_options(arguments: Sequence[str]) -> list[str]:
    """The module or the script with what follows, or nothing where an option would change it."""
    rest = [*arguments]
    if rest[:1] == ["-u"]:
        del rest[0]
    return rest if rest and (rest[0] == "-m" or not rest[0].startswith("-")) else []


def _become(given: Mapping[str, Any], arguments: Sequence[str]) -> None:
    try:
        if given["start_new_session"]:
            os.setsid()
        if given["cwd"] is not None:
            os.chdir(given["cwd"])
        for source, target in (
            (given["p2cread"], 0),
            (given["c2pwrite"], 1),
            (given["errwrite"], 2),
        ):
            if source != -1:
                os.dup2(source, target)
        kept = sorted(each for each in given["pass_fds"] if each > 2)
        for start, end in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(start + 1, end)
        environment = os.environ if given["env"] is None else given["env"]
        become_python(arguments, environment, sys.executable)
    finally:
        os._exit(1)
