"""Jobs as files, without training: what a rank would write, written by the test."""

import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from boltmesh.telemetry import layout
from boltmesh.telemetry.job import JobInfo, make_private_folder, rank_file, write_job
from boltmesh.telemetry.snapshot import PHASES
from boltmesh.telemetry.writer.rank_file import RankFile


class WrittenJob:
    """A job whose ranks live in this process.

    Args:
        run_dir: Where it keeps its telemetry.
        job_id: Its id.
        world_size: Ranks of the whole job.
        ranks: Those that have a file here; None: all.
        host: What they say of their host; None: the truth.
        info: Fields of ``job.json`` to replace.
    """

    def __init__(
        self,
        run_dir: Path,
        job_id: str = "abcd",
        *,
        world_size: int = 2,
        ranks: tuple[int, ...] | None = None,
        host: str | None = None,
        **info: Any,
    ) -> None:
        make_private_folder(run_dir)
        self.path = run_dir / job_id
        make_private_folder(self.path)
        found = JobInfo.create(
            strategy="DDPStrategy", mesh={"data": world_size}, world_size=world_size, id=job_id
        )
        write_job(msgspec.structs.replace(found, **info), self.path)
        self.files = {
            rank: RankFile(rank_file(self.path, rank), rank=rank, world_size=world_size)
            for rank in (range(world_size) if ranks is None else ranks)
        }
        where = host or socket.gethostname()
        for rank, file in self.files.items():
            file.write_facts({"host": where, "device": "cpu", "coordinates": {"data": rank}})
        self.num_steps = 0
        self.step()

    def step(self, *, ms: int = 10) -> None:
        """Every rank does one step."""
        self.num_steps += 1
        phases = [0] * len(PHASES)
        phases[PHASES.index("forward")] = ms * 1_000_000
        for rank, file in self.files.items():
            loss = 1 / self.num_steps
            done = self.num_steps
            file.step(
                done - 1, done, 0, layout.STEP_HAS_LOSS, time.time(), ms * 1_000_000, *phases,
                loss, 8, -1,
            )  # fmt: skip
            file.point("loss", done, loss)
            file.phase(PHASES.index("forward"))
            self._write_status(rank, "running")

    def end(self, state: str, *, message: str = "finished") -> None:
        """Every rank says that it is ``finished`` or has ``failed``."""
        for rank, file in self.files.items():
            self._write_status(rank, state)
            file.event("error" if state == "failed" else "end", message)

    def _write_status(self, rank: int, state: str) -> None:
        number = layout.STATES.index(state)
        self.files[rank].status(
            number, 0, 0, 0, self.num_steps, self.num_steps, time.time(), 1000 + rank, -1, -1, -1
        )

    def close(self) -> None:
        """Let go of the files, as if the ranks had been killed."""
        for file in self.files.values():
            file.close()
