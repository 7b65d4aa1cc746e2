"""``boltmesh doctor``: the facts, what follows from them, and a torch that is missing or broken."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from boltmesh import cli
from boltmesh.doctor import command, host
from boltmesh.doctor.command import conclude, report_lines
from boltmesh.doctor.host import Disk, Gpu, Gpus, HostFacts, HostMemory
from boltmesh.tui.render.style import ASCII, Style
from tests.tui.fake_nvml import FakeNvml

GIB = 1 << 30
PROBE: dict[str, Any] = {
    "torch": {"version": "2.13.0+cu130", "cuda": "13.0"},
    "backends": {"gloo": True, "nccl": True, "mpi": False, "nccl_version": "2.29.3"},
    "gloo": {"sum": 1.0},
    "telemetry": {"uncounted": []},
    "cuda": {"devices": 2, "names": ["NVIDIA H100"] * 2, "warnings": []},
    "lightning": {},
    "offload to /nvme": {"is_direct": True},
}
FACTS = HostFacts(
    versions={
        "boltmesh": "0.1.0",
        "python": "3.12.1",
        "torch": "2.13.0+cu130",
        "lightning": "2.6.6",
        "textual": "8.2.8",
        "omegaconf": "2.4.0",
    },
    cores=64,
    host="Linux-6.8",
    gpus=Gpus(
        gpus=tuple(Gpu("NVIDIA H100", f"GPU-{at}", 80 * GIB, at * GIB) for at in range(2)),
        links={"NVLink": 1},
        driver="580.10",
        cuda="13.0",
    ),
    memory=HostMemory(1024 * GIB, 900 * GIB, 512 * GIB, 64 * GIB, 8 << 20),
    open_files=65536,
    disks=(
        Disk("/data/runs", "runs", True, True, "ext4", 300 * GIB, 400 * GIB),
        Disk("/nvme", "offload", True, True, "xfs", 7000 * GIB, 8000 * GIB),
    ),
    optional={
        "transformers": "5.23.0",
        "datasets": None,
        "safetensors": "0.8.0",
        "ssh": "/usr/bin/ssh",
        "sshd": "/usr/sbin/sshd",
    },
    environment={"CUDA_VISIBLE_DEVICES": "0,1"},
    probe=PROBE,
    probe_problem=None,
)


def lines(facts: HostFacts, width: int = 100) -> list[str]:
    return report_lines(facts, conclude(facts), width, Style(ASCII, has_headings=False))


REPORT = """\
versions     boltmesh 0.1.0, python 3.12.1, torch 2.13.0+cu130, lightning 2.6.6, textual
             8.2.8, omegaconf 2.4.0
host         Linux-6.8, 64 cores
GPUs         NVIDIA H100 80.0 GiB (0 B used), NVIDIA H100 80.0 GiB (1.00 GiB used);
             driver 580.10, CUDA up to 13.0
links        pairs of GPUs: NVLink 1
backends     gloo yes, nccl yes, mpi no, NCCL 2.29.3, torch for CUDA 13.0
memory       900 GiB available of 1.00 TiB, cgroup limit 512 GiB
limits       locked memory 8.00 MiB, open files 65536, /dev/shm 64.0 GiB
runs disk    /data/runs (ext4), 300 GiB free of 400 GiB
offload disk /nvme (xfs), 6.84 TiB free of 7.81 TiB
optional     transformers 5.23.0, datasets -, safetensors 0.8.0, ssh /usr/bin/ssh, sshd
             /usr/sbin/sshd
environment  CUDA_VISIBLE_DEVICES=0,1

ok           torch: 2.13.0+cu130 loads.
ok           lightning: 2.6.6 loads.
ok           several processes: works on the CPU over gloo.
ok           telemetry: works, the self-test of the collective hook passes.
ok           several GPUs: work, 2 CUDA devices joined by NVLink.
ok           offload to host memory: works, 900 GiB available.
ok           offload to NVMe: works, direct I/O on /nvme (xfs), 6.84 TiB free.
no           datasets: not installed: no Hugging Face datasets in examples/text.py. Run:
             pip install 'boltmesh[datasets]'.
"""


def test_the_report_of_two_gpus() -> None:
    assert "\n".join(lines(FACTS, 88)) + "\n" == REPORT


@pytest.mark.parametrize("width", [40, 60, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, lines(FACTS, width))) <= width


def probed(**parts: Any) -> HostFacts:
    """The facts with other parts of the probe; None leaves one out."""
    changed = PROBE | {name.replace("_", " "): part for name, part in parts.items()}
    changed = {name: part for name, part in changed.items() if part is not None}
    return replace(FACTS, probe=changed, probe_problem="not tested within 7 s; run it again")


NO_CUDA = {"devices": 0, "names": [], "warnings": []}
NO_GPUS = Gpus(error="NVML Shared Library Not Found")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (replace(FACTS, versions={**FACTS.versions, "torch": None}), "no torch: not installed."),
        (
            replace(FACTS, probe={"torch": {"error": "OSError: libcudart.so.13"}}),
            "no torch: 2.13.0+cu130 does not load: OSError: libcudart.so.13.",
        ),
        (replace(FACTS, probe={"torch": {"error": "x"}}), "no lightning: 2.6.6 does not load"),
        (probed(lightning=None), "note lightning: 2.6.6: not tested within 7 s; run it again."),
        (probed(gloo={"error": "RuntimeError: no interface"}), "no several processes: gloo: Runti"),
        (probed(gloo=None), "note several processes: gloo: not tested within 7 s"),
        (probed(telemetry={"error": "TelemetryError: x"}), "no telemetry: collectives are not c"),
        (
            probed(telemetry={"uncounted": ["new_"]}),
            "note telemetry: works, but does not count new_",
        ),
        (
            probed(backends={"gloo": True, "nccl": False}),
            "no several GPUs: this torch has no NCCL.",
        ),
        (
            probed(cuda={"devices": 1, "names": ["NVIDIA H100"], "warnings": []}),
            "no several GPUs: one CUDA device is here.",
        ),
        (
            probed(cuda=NO_CUDA, torch={"version": "2.13.0+cpu", "cuda": None}),
            "no several GPUs: NVML shows 2 and this torch is built for the CPU.",
        ),
        (
            probed(cuda={"error": "RuntimeError: driver too old"}),
            "no several GPUs: NVML shows 2 and torch finds none: RuntimeError: driver too old.",
        ),
        (probed(cuda=None), "note several GPUs: NVML shows 2; torch: not tested within 7 s"),
        (replace(probed(cuda=NO_CUDA), gpus=NO_GPUS), "no several GPUs: no CUDA device found."),
        (
            probed(**{"offload to /nvme": {"is_direct": False}}),
            "note offload to NVMe: works, but xfs refuses direct I/O on /nvme",
        ),
        (
            probed(**{"offload to /nvme": {"error": "ConfigError: /nvme is no folder"}}),
            "no offload to NVMe: ConfigError: /nvme is no folder.",
        ),
        (replace(FACTS, disks=FACTS.disks[:1]), "note offload to NVMe: not tested; --offload-path"),
        (
            replace(FACTS, disks=(FACTS.disks[0], replace(FACTS.disks[1], file_system="tmpfs"))),
            "note offload to NVMe: works, but /nvme is host memory (tmpfs), not a disk.",
        ),
        (
            replace(FACTS, disks=(replace(FACTS.disks[0], is_writable=False),)),
            "no checkpoints: /data/runs cannot be written. Set run.dir.",
        ),
        (
            replace(FACTS, disks=(replace(FACTS.disks[0], free_bytes=1 << 20),)),
            "note checkpoints: 1.00 MiB free in /data/runs. Set run.dir.",
        ),
        (
            replace(FACTS, memory=replace(FACTS.memory, shared_bytes=64 << 20)),
            "note data loader workers: /dev/shm has 64.0 MiB",
        ),
        (replace(FACTS, open_files=256), "note open files: the limit is 256. Run: ulimit -n 1024."),
        (
            replace(FACTS, optional=dict.fromkeys(FACTS.optional)),
            "no boltmesh top --ssh: no ssh here",
        ),
    ],
)
def test_what_follows_from_a_fact(facts: HostFacts, said: str) -> None:
    shown = [" ".join(line.split()) for line in lines(facts, 1000)]
    assert any(line.startswith(said) for line in shown), shown


def some_gpus() -> Any:
    return FakeNvml(
        nvmlDeviceGetCount=4,
        nvmlSystemGetDriverVersion="580.10",
        nvmlSystemGetCudaDriverVersion=13010,
        nvmlDeviceGetP2PStatus=pynvml.NVML_P2P_STATUS_OK,
        nvmlDeviceGetTopologyCommonAncestor=pynvml.NVML_TOPOLOGY_SINGLE,
    )


def test_gpus_are_those_of_nvml_with_what_joins_them() -> None:
    nvml = some_gpus()
    found = host.read_gpus(nvml)
    assert found.error is None
    assert (found.driver, found.cuda) == ("580.10", "13.1")
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert found.gpus[0] == Gpu("NVIDIA H100", "GPU-0", 80 * GIB, 60 * GIB)
    assert found.links == {"NVLink": 6}
    assert not nvml.is_initialised


def test_a_gpu_that_is_lost_does_not_hide_the_others() -> None:
    nvml = some_gpus()
    nvml.lost.add(1)
    found = host.read_gpus(nvml)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-0", "GPU-2", "GPU-3"]
    assert found.links == {"NVLink": 3}
    assert found.error == "GPU 1: GPU is lost"
    assert any(
        "GPU 1: GPU is lost; driver" in line for line in lines(replace(FACTS, gpus=found), 1000)
    )


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "1024"}, 1024),
        ("0::/job/step\n", {"job/memory.max": "4096", "job/step/memory.max": "max"}, 4096),
        ("0::/seen/outside\n", {"memory.max": "2048"}, 2048),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "512"}, 512),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("3:cpu,cpuacct:/job\n", {}, None),
        ("", {}, None),
    ],
)
def test_the_limit_of_a_cgroup(
    tmp_path: Path,
    own: str,
    files: dict[str, str],
    limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr("boltmesh.host_memory.CGROUPS", tmp_path)
    monkeypatch.setattr("boltmesh.host_memory.OWN_CGROUPS", tmp_path / "own")
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert host.read_memory().cgroup_bytes == limit


def test_a_disk_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    found = host.read_disk(tmp_path / "not" / "yet", "runs")
    assert not found.exists
    assert found.is_writable
    assert 0 < found.free_bytes <= found.total_bytes
    assert host.read_disk(tmp_path, "runs").exists


def test_variables_are_those_that_ranks_read() -> None:
    given = {"HOME": "/root", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1", "SECRET": "x"}
    assert host.read_environment(given) == {"CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "INFO"}
    assert "s3cret" not in str(host.read_environment({"NCCL_NET_TOKEN": "s3cret"}))


def test_lines_of_libraries_are_not_parts() -> None:
    text = 'a warning\n{"part": "torch", "version": "1"}\n[1]\n{"part": "gl'
    assert host.parse_probe(text) == {"torch": {"version": "1"}}


@pytest.mark.full
def test_this_host_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TORCH_S", 120.0)  # a busy machine takes long to load torch
    assert cli.run_command(["doctor", "--json", "--offload-path", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert found["probe_problem"] is None
    assert found["probe"]["torch"]["version"].startswith(found["versions"]["torch"].split("+")[0])
    works = {item["subject"]: item["works"] for item in found["findings"]}
    assert works["torch"] is works["lightning"] is works["several processes"] is True
    assert works["telemetry"] is True
    assert f"offload to {tmp_path}" in found["probe"]
    assert "is_direct" in found["probe"][f"offload to {tmp_path}"]
    assert list(tmp_path.iterdir()) == []
    assert found["memory"]["total_bytes"] > found["memory"]["available_bytes"] > 0


BROKEN = {
    "missing": "raise ModuleNotFoundError(\"No module named 'torch'\")",
    "broken": "raise OSError('libtorch_cpu.so: cannot open shared object file')",
    "crash": "import os; os.kill(os.getpid(), 11)",
    "hang": "import time; time.sleep(600)",
}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "does not load: ModuleNotFoundError: No module named 'torch'."),
        ("broken", "does not load: OSError: libtorch_cpu.so: cannot open shared object file."),
        ("crash", "the process that loads torch was killed by signal 11 (SIGSEGV)."),
        ("hang", "not tested within 2 s; run it again."),
    ],
)
def test_a_torch_that_does_not_load_is_reported(tmp_path: Path, fault: str, said: str) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN[fault])
    code = (
        "from boltmesh.doctor import command\n"
        f"command.TORCH_S = {2.0 if fault == 'hang' else 60.0}\n"
        "from boltmesh.cli import run_command\n"
        "raise SystemExit(run_command(['doctor']))"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.monotonic() - begin < 60
    torch = next(line for line in done.stdout.splitlines() if " torch: " in line)
    assert torch.endswith(said)
    assert "offload to host memory" in done.stdout
    assert done.stderr == ""


def test_the_page_shows_this_report_and_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert f"```text\n{REPORT}```" in page
    for key in ("schema", *asdict(FACTS), "findings"):
        assert f"`{key}`" in page
