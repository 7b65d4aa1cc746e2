"""Runs a script that may take so much memory and no more.

``RLIMIT_DATA`` counts private writable memory, touched or not: torch's tensors, huge pages and
thread stacks alike. Unlike a control group it needs no privileges, and a process that asks for
more is told so instead of being killed.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PREAMBLE = """
import re, resource
from pathlib import Path


def data_bytes():
    found = re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


def allow(num_bytes):
    limit = data_bytes() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

"""


def run_limited(
    script: str, *arguments: object, timeout_s: float = 600.0, stack_kib: int = 8192
) -> "subprocess.CompletedProcess[str]":
    """Run a script that calls ``allow(num_bytes)`` once everything is imported and warm.

    Args:
        script: Python's code.
        *arguments: Of the script.
        timeout_s: After which it is killed.
        stack_kib: Of every thread: a process group has two.
    """
    root = str(Path(__file__).parents[2])
    code = PREAMBLE + textwrap.dedent(script)
    limited = ["sh", "-c", f'ulimit -s {stack_kib}; exec "$@"', "sh"]
    return subprocess.run(
        [*limited, sys.executable, "-c", code, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=root,
        # What is freed is to be gone: glibc otherwise keeps it for the next that asks.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
            "MALLOC_MMAP_THRESHOLD_": "131072",
        },
    )
