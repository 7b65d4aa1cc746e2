"""Facts that only torch knows, read by a process that may hang or crash without harm.

    python -m boltmesh.doctor.torch_probe [FOLDER ...]

Prints a JSON object per line, ``{"part": ..., **facts}``, each as soon as it is known; a part that
fails has an ``error``. In each FOLDER a swap file is made, written and read as offload does it.
"""

import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

TRIAL_BYTES = 1 << 20
GROUP_TIMEOUT = timedelta(seconds=5)


def main(folders: list[str]) -> None:
    """Print every part."""
    if not _print_part("torch", _versions):
        return
    _print_part("backends", _backends)
    for folder in folders:
        _print_part(f"offload to {folder}", partial(_offload, Path(folder)))
    _print_part("gloo", _gloo)
    _print_part("telemetry", _telemetry)
    _print_part("cuda", _cuda)
    _print_part("lightning", _lightning)


def _print_part(part: str, read: Callable[[], dict[str, Any]]) -> bool:
    try:
        facts = read()
    except Exception as error:  # noqa: BLE001 - a broken part is what the report is about
        text = " ".join(str(error).split())
        facts = {"error": f"{type(error).__name__}: {text}" if text else type(error).__name__}
    sys.stdout.write(json.dumps({"part": part, **facts}) + "\n")
    sys.stdout.flush()
    return "error" not in facts


def _versions() -> dict[str, Any]:
    import torch

    return {"version": str(torch.__version__), "cuda": torch.version.cuda}


def _backends() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {"gloo": False, "nccl": False, "mpi": False}
    if dist.is_available():
        found = {
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "mpi": dist.is_mpi_available(),
        }
    if found["nccl"]:
        found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _gloo() -> dict[str, Any]:
    """Sum a number in a group of this one process, which needs a network interface."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        timeout=GROUP_TIMEOUT,
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {"sum": total.item()}


def _telemetry() -> dict[str, Any]:
    """Install the hook that counts collectives, which tests itself."""
    from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES
    from boltmesh.telemetry.writer.torch_compat.operators import uncounted_operators

    observer: Any = object()  # no collective runs meanwhile
    COLLECTIVES.attach(observer)
    COLLECTIVES.detach(observer)
    return {"uncounted": list(uncounted_operators())}


def _cuda() -> dict[str, Any]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count()
        if torch.version.cuda is not None and count == 0:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        elif count:
            torch.ones(1, device="cuda").sum().item()
    return {
        "devices": count,
        "names": [torch.cuda.get_device_name(number) for number in range(count)],
        "warnings": [" ".join(str(entry.message).split()) for entry in caught],
    }


def _offload(folder: Path) -> dict[str, Any]:
    import torch

    from boltmesh.strategies.offload.disk.swap_file import FileCalls, SwapFile
    from boltmesh.strategies.offload.host_memory import allocate_host, as_bytes

    memory = allocate_host(TRIAL_BYTES, device=torch.device("cpu"))
    memory.random_(0, 256)
    expected = memory.clone()
    file = SwapFile(folder, TRIAL_BYTES, rank=0, calls=FileCalls())
    try:
        file.write(as_bytes(memory), 0)
        file.sync()
        memory.zero_()
        file.read(as_bytes(memory), 0)
    finally:
        file.close()
    if not torch.equal(memory, expected):
        raise OSError(f"{folder} returned other bytes than were written")
    return {"is_direct": file.is_direct}


def _lightning() -> dict[str, Any]:
    import lightning.pytorch  # noqa: F401 - whether it loads

    return {}


if __name__ == "__main__":
    main(sys.argv[1:])
