"""Whatever a job's files hold, reading them gives a snapshot or a TelemetryError, and no more.

Ten thousand cases by a seed: bits, bytes, pages, swapped parts, wrong lengths, records that are
sealed and make no sense, hostile JSON.
"""

import json
import math
import os
import random
import re
import struct
import time
import zlib

import msgspec
import pytest

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import END_FILE, JOB_FILE, rank_file
from boltmesh.telemetry.layout import SECTIONS
from boltmesh.telemetry.plan_files import PLAN_FILE, TENSOR_FILE
from boltmesh.telemetry.reader.job_reader import JobReader
from boltmesh.telemetry.reader.rank_reader import RankReader
from boltmesh.telemetry.reader.rank_view import RankView
from boltmesh.telemetry.reader.reader import list_jobs
from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from tests.telemetry.test_reader import make_job, make_rank, write_step

NUM_FILE_CASES = 6_400
NUM_JSON_CASES = 3_600
CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
RECORDS = {
    "status": layout.STATUS,
    "memory": layout.MEMORY,
    "groups": layout.GROUP,
    "peers": layout.PEER,
    "counters": layout.COUNTER,
    "steps": layout.STEP,
    "series": layout.POINT,
    "traffic": layout.TRAFFIC,
    "spans": layout.SPAN,
    "events": layout.EVENT,
    "offload": layout.OFFLOAD,
}
USED = 40
"""Slots of a section that hold something, and some that do not."""

EVIL = "\x1b]0;x\x07\x9b31m\r\n\u202e\u200b\x00"


def strings(value):
    """Give every string of a snapshot."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from strings(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from strings(each)


def check_rank(rank):
    """Check that a rank says nothing that cannot be drawn: times are times, counts are counts."""
    largest = 2**61
    times = [rank.last_seen, *(step.end_time for step in rank.steps)]
    assert all(0 <= each <= 1e12 for each in times), times
    counts = [rank.global_step, rank.epoch, rank.skipped_records]
    for step in rank.steps:
        counts += [step.index, step.global_step, step.epoch, step.seconds, step.samples or 0]
        counts += [phase.seconds for phase in step.phases]
    for each in (*rank.collectives, *rank.peers):
        counts += [each.calls, each.payload_bytes]
    for each in rank.offload:
        counts += [each.calls, each.moved_bytes, each.bytes_per_step or 0]
        counts += [each.seconds_per_step or 0, each.bytes_per_second or 0]
    for each in rank.groups:
        counts.append(each.sequence)
        assert each.time is None or abs(each.time) < 1e12
    counts += [each.measured_bytes or 0 for each in rank.memory_kinds]
    counts += list(rank.coordinates.values())
    assert [each for each in counts if not 0 <= each <= largest] == []
    assert all(each.start <= each.end < 1e12 for each in rank.chunks)
    assert all((each.seconds_per_step or 0) >= 0 for each in rank.collectives)
    for rate in (rank.samples_per_second, rank.tokens_per_second, rank.flops_per_batch):
        assert rate is None or math.isfinite(rate)


def check(snapshot, kind):
    """Check that a snapshot can be shown, and be sent as JSON and be read back."""
    encoded = msgspec.json.encode(snapshot)
    msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=kind)
    for text in strings(json.loads(encoded)):
        assert not CONTROL.search(text), repr(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the bytes of a small real file, with something in every section."""
    folder = tmp_path_factory.mktemp("whole")
    os.environ["BOLTMESH_RUN_DIR"] = str(folder)
    path = make_job(world_size=2)
    file = make_rank(path, world_size=2)
    data, tensor = file.group_number("1", "data", [0, 1]), file.group_number("2", "tensor", [0, 1])
    reduce, send = file.operator_number("allreduce"), file.operator_number("send")
    for number in range(USED - 5):
        ticket = file.enqueue(number + 1, data, reduce, 2, layout.TRAFFIC_IS_TIMED, 100)
        file.complete(ticket, time.monotonic_ns())
        file.enqueue(number + 1, tensor, send, 2, 0, 10, 2)
        write_step(file, number, loss=0.5)
        file.point("loss", number, 0.5)
        file.span(number, 0, number, 0, 0, 0, 10**9, 2 * 10**9)
        file.offload(number, [number * each for each in range(12)])
        file.event("warning", f"{number} {EVIL}")
    file.write_counters()
    file.memory(list(range(24)))
    file.status(1, 0, 0, 1, 20, 20, 1.7e9, 77, 5, 6, 7)
    file.write_facts(
        {
            "coordinates": {"data": 0},
            "device": EVIL,
            "flops_per_batch": 1e9,
            "expected": [{"axis": EVIL, "operator": "x", "payload_bytes": 1.0, "why": "x"}],
        }
    )
    file.close()
    return rank_file(path, 0).read_bytes()


class Patches:
    """Changes of a file that can be taken back, for a copy of two megabytes a case is slow."""

    def __init__(self, path, content):
        self.path = path
        self.content = content
        self._spans = []
        path.write_bytes(content)
        path.chmod(0o600)
        self._file = os.open(path, os.O_RDWR)

    def write(self, at, replacement):
        os.pwrite(self._file, replacement, at)
        self._spans.append((at, len(replacement)))

    def truncate(self, size):
        os.ftruncate(self._file, size)
        self._spans.append((min(size, len(self.content)), abs(size - len(self.content))))

    def undo(self):
        os.ftruncate(self._file, len(self.content))
        for at, size in self._spans:
            os.pwrite(self._file, self.content[at : at + size], at)
        self._spans.clear()

    def close(self):
        os.close(self._file)


def used_slot(draw, name):
    section = SECTIONS[name]
    return section.offset + draw.randrange(min(USED, section.capacity)) * section.record_bytes


def flip_bits(draw, patches):
    name = draw.choice(list(SECTIONS))
    at = used_slot(draw, name) + draw.randrange(min(SECTIONS[name].record_bytes, 300))
    patches.write(at, bytes([patches.content[at] ^ 1 << draw.randrange(8)]))


def flip_header(draw, patches):
    at = draw.randrange(600)
    patches.write(at, bytes([draw.randrange(256)]))


def scramble_record(draw, patches):
    name = draw.choice(list(RECORDS))
    patches.write(used_slot(draw, name), draw.randbytes(SECTIONS[name].record_bytes))


def random_page(draw, patches):
    page = draw.randrange(len(patches.content) // layout.PAGE)
    patches.write(page * layout.PAGE, draw.randbytes(layout.PAGE))


def swap_parts(draw, patches):
    first, second = (used_slot(draw, draw.choice(list(RECORDS))) for _ in range(2))
    size = draw.randrange(8, 400)
    patches.write(first, patches.content[second : second + size])
    patches.write(second, patches.content[first : first + size])


def repeat_record(draw, patches):
    name = draw.choice(list(RECORDS))
    size = SECTIONS[name].record_bytes
    source = used_slot(draw, name)
    patches.write(used_slot(draw, name), patches.content[source : source + size])


def seal_nonsense(draw, patches):
    """A record whose checksum is right and whose fields are anything at all."""
    name = draw.choice(list(RECORDS))
    section = SECTIONS[name]
    for _ in range(draw.randrange(1, 6)):
        at = used_slot(draw, name)
        slot = (at - section.offset) // section.record_bytes
        sequence = draw.choice(
            [slot + 1, slot + 1 + section.capacity, 2**63 + slot, draw.getrandbits(64)]
        )
        body = bytearray(struct.pack("<Q", sequence & 2**64 - 1))
        body += patches.content[at + 8 : at + section.record_bytes - 4]
        for _ in range(draw.randrange(1, 4)):
            word = draw.choice(
                [b"\xff" * 8, b"\x7f" * 8, bytes(8), b"\x00" * 6 + b"\xf0\x7f", draw.randbytes(8)]
            )
            field = draw.randrange(8, max(9, len(body) - 8))
            body[field : field + 8] = word
        body = body[: section.record_bytes - 4]
        patches.write(at, bytes(body) + struct.pack("<I", zlib.crc32(body)))


def hostile_value(draw, depth=0):
    choice = draw.randrange(12 if depth < 3 else 9)
    if choice >= 9:
        if draw.random() < 0.5:
            return [hostile_value(draw, depth + 1) for _ in range(draw.randrange(4))]
        return {
            str(draw.choice(["name", "axis", EVIL, "members", "data", "kind"])): hostile_value(
                draw, depth + 1
            )
            for _ in range(draw.randrange(4))
        }
    return [
        None, True, -1, 0, 2**70, -(2**63), 1e308, EVIL * draw.randrange(1, 60), "\ud800",
    ][choice]  # fmt: skip


def hostile_names(draw, patches):
    facts = {
        "groups": [
            {"name": EVIL, "axis": EVIL, "members": [[0, draw.choice([1, 2, 2**40]), 1]]},
            {"name": "2", "axis": "tensor", "members": []},
        ],
        "operators": ["allreduce", EVIL],
        "metrics": ["loss", EVIL],
        "coordinates": {EVIL: draw.choice([0, -5, 2**62])},
    }
    for name in draw.sample(
        ["groups", "operators", "metrics", "coordinates", "expected", "host", "device",
         "expected_memory", "checkpoint", "flops_per_batch", "communication_note"], 2,
    ):  # fmt: skip
        facts[name] = hostile_value(draw)
    text = draw.choice(
        [
            json.dumps(facts).encode(),
            json.dumps(facts).encode()[: draw.randrange(60)],
            b'{"expected":[{"why":' + b"[" * 30_000,
            draw.randbytes(40),
        ]
    )
    for slot in (1, 2):
        at = layout.slot_offset(SECTIONS["names"], slot)
        patches.write(at, layout.pack_names(100 + slot, text))


def wrong_size(draw, patches):
    patches.truncate(
        draw.choice([0, 7, 2047, 2048, 2049, 4095, 4096, 5000, draw.randrange(layout.FILE_BYTES)])
    )


MUTATIONS = (
    flip_bits, flip_header, scramble_record, random_page, swap_parts, repeat_record, seal_nonsense,
    seal_nonsense, seal_nonsense, hostile_names, wrong_size,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_cases", [NUM_FILE_CASES // 6, pytest.param(NUM_FILE_CASES, marks=pytest.mark.full)]
)
def test_damaged_files_give_a_snapshot_or_a_reason(whole, tmp_path, num_cases, figure):
    draw = random.Random(20260101)
    patches = Patches(tmp_path / "rank-0.bin", whole)
    steady = RankView(0, RankReader(patches.path))
    assert steady.look().state == "dead"
    num_present = num_counted = 0
    for number in range(num_cases):
        for _ in range(draw.choice([1, 1, 2, 5])):
            draw.choice(MUTATIONS)(draw, patches)
        # A reader that sees the damage come, and one that finds it there; of few and many ranks.
        reader = RankReader(patches.path, is_brief=number % 4 == 0, keep_steps=64)
        view = steady if number % 2 else RankView(0, reader)
        seen = view.look()
        history, _ = view.history(data_size=1) if view.is_present else ((), ())
        num_present += view.is_present
        num_counted += seen.skipped_records > 0
        if number % 3 == 0:
            check(seen, RankSnapshot)
            check_rank(seen)
            check(history[-50:], tuple)
        reader.close()
        patches.undo()
        if number % 100 == 99:
            steady.close()
            steady = RankView(0, RankReader(patches.path))
    steady.close()
    patches.close()
    assert num_present > num_cases / 2
    assert num_counted > num_cases / 4
    figure("damaged telemetry files: no traceback, hang or bad number", num_cases, num_cases)


def mutate_text(draw, text):
    kind = draw.randrange(6)
    if kind == 0:
        return text[: draw.randrange(len(text))]
    if kind == 1:
        at = draw.randrange(len(text))
        return text[:at] + draw.randbytes(draw.randrange(1, 9)) + text[at + 1 :]
    if kind == 2:
        return draw.choice([b"[" * 100_000, b'{"a":' * 50_000, b"", b"null", b"\xff\xfe\x00"])
    value = json.loads(text)
    for _ in range(draw.randrange(1, 4)):
        value[draw.choice(list(value))] = hostile_value(draw)
    return json.dumps(value).encode(errors="surrogatepass")


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_cases", [NUM_JSON_CASES // 8, pytest.param(NUM_JSON_CASES, marks=pytest.mark.full)]
)
def test_hostile_jobs_give_a_snapshot_or_a_reason(num_cases, figure):
    draw = random.Random(20260101)
    path = make_job(world_size=2)
    make_rank(path, world_size=2).close()
    texts = {
        JOB_FILE: (path / JOB_FILE).read_bytes(),
        END_FILE: b'{"rank":1,"signal":9,"time":1e12,"message":"x"}',
        PLAN_FILE: b'{"schedule":"1f1b","num_stages":2,"num_microbatches":1,'
        b'"order":[["0F0"],[null]]}',
        TENSOR_FILE: b'{"size":2,"rows":[{"pattern":"a.*","count":3,"shape":[4,2],"style":"row",'
        b'"why":"x","rank_bytes":48,"whole_bytes":96,"collectives":"sum"}],"notes":["y"]}',
    }
    num_read = 0
    for _ in range(num_cases):
        for name, text in texts.items():
            target = path / name
            content = mutate_text(draw, text) if draw.random() < 0.6 else text
            target.write_bytes(content)
            target.chmod(0o600)
        reason = ""
        try:
            with JobReader(path) as job:
                seen = job.snapshot()
                job.peek()
        except TelemetryError as error:
            reason = str(error)
        assert not CONTROL.search(reason)
        if not reason:
            num_read += 1
            check(seen, JobSnapshot)
    assert num_cases / 5 < num_read < num_cases
    assert len(list_jobs()) <= 1
    figure("hostile descriptions of jobs: no traceback, no hang", num_cases, num_cases)


@pytest.mark.parametrize("world_size", [-3, 0, 2**40])
def test_a_job_of_impossibly_many_ranks_is_cut(world_size):
    path = make_job(world_size=world_size, mesh={"data": world_size})
    with JobReader(path) as job:
        seen = job.snapshot()
    assert len(seen.ranks) == seen.world_size == min(max(world_size, 0), 65_536)
    assert 0 <= seen.mesh["data"] <= 65_536


def test_the_fuzz_is_of_ten_thousand_cases():
    assert NUM_FILE_CASES + NUM_JSON_CASES >= 10_000
