"""What every test starts from and leaves behind: its own run directory, and no other change.

Under pytest-xdist, too: tests share no folder, port or process, and one that measures time has the
machine to itself.
"""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.support.pairwise import mark_the_rest
from tests.support.turnstile import taking_turns

FIGURE = "figure"

# Before torch is imported, here or in a rank: several ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is imported and collected stays until the end: see pytest_collection_finish.
gc.disable()

# A shell gives what it starts in the background an ignored Ctrl-C, which processes inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, int, int], None]:
    """Print a figure at the end, from other workers too: ``figure("flips found", 200, 200)``.

    Figures of one name are summed.
    """
    return lambda name, found, of: record_property(FIGURE, (name, found, of))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have reached."""
    found: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for kind, value in report.user_properties:
            if kind == FIGURE and report.when == "call":
                found[value[0]] += value[1]
                wanted[value[0]] += value[2]
    if found:
        terminalreporter.section("figures")
    for name, count in wanted.items():
        terminalreporter.write_line(f"{found[name]:,}/{count:,} {name}")


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path) -> Iterator[None]:
    """Give the test folders of its own, and take back what it sets for its process."""
    before = dict(os.environ)
    os.environ["BOLTMESH_RUN_DIR"] = str(tmp_path / "boltmesh-run")
    os.environ["BOLTMESH_SETTINGS_DIR"] = str(tmp_path / "boltmesh-settings")
    # Of torchrun's --log-dir, which is a folder in /tmp that stays there if nothing is said.
    os.environ["PET_LOG_DIR"] = str(tmp_path / "torchrun-logs")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _own_torch() -> Iterator[None]:
    """Reset what torch keeps for the whole process; torch is imported by the tests that need it."""
    yield
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the timeout: who waits is not slow
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked ``alone`` while no other worker of pytest-xdist runs one.

    The fork server of ranks imports for two minutes where a machine is busy: before the first test.
    """
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.await_fork_server()
    if not hasattr(item.config, "workerinput"):
        return (yield)
    # Of each worker a folder in one that they share, and that pytest clears away.
    shared = Path(item.config.getoption("basetemp")).parent
    with taking_turns(shared, alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks that tests of a file have shared after the last of them."""
    ranks = sys.modules.get("tests.support.ranks")
    if ranks and (nextitem is None or nextitem.path != item.path):
        ranks.end_standing()


@pytest.hookimpl(tryfirst=True)  # before -m "not full" is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow tests last, and skip by name what needs a device that is not there.

    With several workers they come first: one worker begins with all of them, and while its ranks
    share the cores the others run short tests, which mostly wait. The longest begin, so that what
    the workers share at the end is short, and none of them computes while the others are done.
    """
    mark_the_rest(items, is_whole=not any("::" in each for each in config.args))
    if hasattr(config, "workerinput"):
        items.sort(key=_slow_seconds, reverse=True)
    else:
        items.sort(key=lambda item: _slow_seconds(item) > 0)
    needs_a_device = [item for item in items if item.get_closest_marker("gpu")]
    if needs_a_device and not _has_cuda():
        for item in needs_a_device:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave a million objects of modules and tests out of every later search for garbage."""
    gc.freeze()
    gc.enable()


def _slow_seconds(item: pytest.Item) -> float:
    """About how long a test marked ``slow`` takes, and 0 for any other."""
    marker = item.get_closest_marker("slow")
    if marker is None:
        return 0.0
    return float(marker.args[0]) if marker.args else 10.0


def _has_cuda() -> bool:
    import torch

    # The campaign's dry run takes the CPU in its place.
    return torch.cuda.is_available() or os.environ.get("BOLTMESH_CAMPAIGN") == "cpu"
