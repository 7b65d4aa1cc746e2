"""The counted payload against the bytes that the kernel moved, in a network namespace of its own.

Two ranks all-reduce over the loopback device of a fresh namespace, where nothing else is on the
wire. What n ranks send each other in an all-reduce of S bytes is 2 (n - 1) S in all (Patarasuk
and Yuan 2009, section 3, https://doi.org/10.1016/j.jpdc.2008.09.002); the device's counter holds
that and the frames around it:

- a header of 66 bytes for each segment: 14 Ethernet, 20 IPv4, 32 TCP with timestamps. The loopback
  device has an MTU of 65,536, and segmentation is left to it, so a segment carries up to 64 KiB:
  0.1 %, or a few times that where gloo's pieces or the window end one early;
- an acknowledgement of 66 bytes for every segment or two;
- gloo's own header before each piece that it sends, under 100 bytes.

Between 0 and 2 % is therefore right, and anything below 0 would mean that less was sent than was
counted. A rank that gets no time for long does not acknowledge, and its peer sends a segment again;
how many were, the kernel tells.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not shutil.which("ip") or os.geteuid() != 0, reason="needs iproute2 and root"
    ),
]

NUM_CALLS = 12
SIZES = [1_000_000, 3_000_000, 8_000_000]
MOST_OF_A_SEGMENT = 65_536 + 14


def loopback_bytes():
    """Return what the loopback device of this namespace has received."""
    line = next(
        line for line in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in line
    )
    return int(line.partition(":")[2].split()[0])


def resent_bytes():
    """Return at most how many bytes were sent again in this namespace."""
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return MOST_OF_A_SEGMENT * int(values[names.index("RetransSegs")])


def run_rank(rank, folder):
    """Be one of two ranks; rank 0 prints what it counted and what the kernel saw."""
    import torch
    import torch.distributed as dist

    from tests.telemetry.counting import counted, open_counting

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    recorder = open_counting(rank, 2)
    results = []
    for size in SIZES:
        buffer = torch.ones(size // 4)
        dist.all_reduce(buffer)  # connections grow their windows
        dist.barrier()
        with counted(recorder, rank) as moved:
            before, resent_before = loopback_bytes(), resent_bytes()
            dist.barrier()
            for _ in range(NUM_CALLS):
                dist.all_reduce(buffer)
            dist.barrier()
            seen = loopback_bytes() - before
            resent = resent_bytes() - resent_before
        results.append((moved["world", "allreduce"], seen, resent))
    recorder.close()
    if rank == 0:
        sys.stdout.write(json.dumps(results))
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


@pytest.fixture
def namespace():
    """A network namespace with nothing but a loopback device."""
    name = f"boltmesh-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"needs the right to make network namespaces: {made.stderr.strip()}")
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.full
def test_the_counted_payload_is_what_the_kernel_moved_but_for_headers(namespace, tmp_path):
    inside = ["ip", "netns", "exec", namespace, sys.executable, "-c"]
    code = "import sys; from tests.telemetry.test_wire_bytes import run_rank; run_rank({}, {!r})"
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*inside, code.format(rank, str(tmp_path))],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=600)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    results = json.loads(said.splitlines()[-1])
    for size, ((calls, payload_bytes), seen, resent) in zip(SIZES, results, strict=True):
        assert (calls, payload_bytes) == (NUM_CALLS, NUM_CALLS * size)
        num_ranks = 2
        wire_bytes = 2 * (num_ranks - 1) * payload_bytes
        assert 0 < seen - wire_bytes < 0.02 * wire_bytes + resent, results
