"""The Prometheus text is read by a parser of its own; the figures are those of the job."""

import math
import re
from pathlib import Path

import pytest

from boltmesh.telemetry.snapshot import MemoryKind, PeerTotal, PhaseTime
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.export.prometheus import families, prometheus_text
from boltmesh.tui.metrics.figures import figures
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.tui.exposition import Read, parse
from tests.tui.samples import NOW, demo, job, rank, step, total


def text_of(*devices: DeviceReading, **changes: object) -> str:
    return prometheus_text(Observation(time=NOW, job=job(**changes), devices=devices))


def read(*devices: DeviceReading, **changes: object) -> dict[str, Read]:
    return parse(text_of(*devices, **changes))


def test_the_parser_refuses_what_is_not_the_format() -> None:
    good = '# HELP a b\n# TYPE a gauge\na{x="1"} 2\n'
    assert parse(good)["a"].value(x="1") == 2
    for bad in (
        good[:-1],
        good + 'a{x="1"} 3\n',
        good + 'b{x="1"} 3\n',
        good + "\n",
        good.replace(" 2\n", " 2 1700000000\n"),
        good.replace(" 2\n", " nan\n"),
        good.replace('"1"', '"a"b"'),
        good.replace('"1"', r'"\t"'),
        good.replace("x=", "x-y="),
        good.replace("gauge", "number"),
    ):
        with pytest.raises(AssertionError):
            parse(bad)


def test_the_whole_demo_is_valid_and_says_what_its_snapshot_says() -> None:
    seen = demo()
    found = parse(prometheus_text(seen))
    assert found["boltmesh_job_steps_total"].value() == seen.job.global_step
    assert found["boltmesh_logged_metric"].value(metric="loss") == seen.job.metrics["loss"]
    assert found["boltmesh_job_state"].value(state="running") == 1
    assert found["boltmesh_job_state"].value(state="crashed") == 0
    assert len(found["boltmesh_rank_up"].samples) == len(seen.job.ranks)
    sent = found["boltmesh_collective_payload_bytes_total"]
    for each in seen.job.ranks[3].collectives:
        labels = {"axis": each.axis, "group": each.group, "operator": each.operator}
        assert sent.value(rank="3", **labels) == each.payload_bytes
    for name, family in found.items():
        assert all(dict(key)["job"] == "gpt-demo" for key in family.samples), name


def test_openmetrics_names_counters_without_their_end_and_units_with_it() -> None:
    seen = demo()
    text = prometheus_text(seen, "openmetrics")
    assert text.endswith("\n# EOF\n")
    assert text.count("# EOF") == 1
    heads = re.findall(r"# TYPE (\S+) (\w+)\n(?:# UNIT (\S+) (\w+)\n)?(\w+)\{", text)
    assert len(heads) == text.count("# TYPE") > 40
    for name, kind, with_unit, unit, sample in heads:
        assert sample == (f"{name}_total" if kind == "counter" else name)
        assert not unit or (with_unit == name and name.endswith(f"_{unit}"))
    assert {unit for *_, unit, _ in heads} >= {"seconds", "bytes", "ratio", "watts"}
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert samples == [
        line for line in prometheus_text(seen).splitlines() if not line.startswith("#")
    ]


def test_names_end_in_their_unit_and_only_counters_in_total() -> None:
    for family in families(demo()):
        assert re.fullmatch(r"boltmesh_[a-z]+(_[a-z]+)*", family.name)
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert not re.search(r"_(ms|ns|kb|mb|gib|percent|minutes)(_|$)", family.name)
        assert family.help.endswith(".")
        assert "\n" not in family.help


def test_text_of_a_job_is_escaped() -> None:
    name = 'a"b\\c\nd{e="f"}'
    found = read(name=name, metrics={name: 1.0}, ranks=(rank(0, host=name),))
    assert found["boltmesh_job_info"].value(name='a"b\\c d{e="f"}') == 1
    assert found["boltmesh_logged_metric"].value(metric='a"b\\c d{e="f"}') == 1
    assert found["boltmesh_rank_info"].value(host='a"b\\c d{e="f"}') == 1


def test_nothing_in_it_steers_a_terminal() -> None:
    text = text_of(name="\x1b]0;title\x07\x9b2J", metrics={"\x1b[31mred\r": 1.0})
    assert text.replace("\n", "").isprintable()


def test_numbers_are_written_as_the_format_has_them() -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-9, "e": 3.0, "f": 1e22}
    text = text_of(metrics=values)
    for name, value in zip("abcdef", ("NaN", "+Inf", "-Inf", "1e-09", "3.0", "1e+22"), strict=True):
        assert f'metric="{name}"}} {value}\n' in text
    assert math.isnan(parse(text)["boltmesh_logged_metric"].value(metric="a"))


def test_large_counters_keep_every_digit() -> None:
    sent = 2**63 + 1
    text = text_of(ranks=(rank(0, collectives=(total(payload_bytes=sent),)),))
    assert f" {sent}\n" in text


def test_what_is_not_known_has_no_sample_and_its_family_no_head() -> None:
    text = text_of(samples_per_second=None, max_steps=None, ranks=())
    assert "samples_per_second" not in text
    assert "max_steps" not in text
    assert "rank_" not in text
    assert parse(text)


def test_steps_and_phases_are_means_of_the_newest_batches() -> None:
    slow = [step(at, seconds=9.0, phases=(PhaseTime("data", 9.0),)) for at in range(50)]
    fast = [step(50 + at, seconds=0.5, phases=(PhaseTime("data", 0.25),)) for at in range(20)]
    found = read(ranks=(rank(0, steps=(*slow, *fast)), rank(1, steps=())))
    assert found["boltmesh_rank_batch_seconds"].samples == {
        (("job", "abc123"), ("rank", "0")): pytest.approx(0.5)
    }
    assert found["boltmesh_rank_phase_seconds"].value(phase="data") == pytest.approx(0.25)


def test_expected_traffic_of_one_operator_is_one_sample() -> None:
    parts = tuple(
        ExpectedTraffic(axis="data", operator="allreduce", payload_bytes=size, calls=1.0, why="x")
        for size in (100.0, 28.0)
    )
    found = read(expected=parts)
    family = found["boltmesh_collective_expected_step_payload_bytes"]
    assert family.value(axis="data", operator="allreduce") == 128


def test_peers_and_kinds_of_memory_are_there() -> None:
    peer = PeerTotal("pipeline", "send", peer=1, calls=4, payload_bytes=4096, bytes_per_step=None)
    kinds = (MemoryKind("optimizer", "host", 10, None), MemoryKind("cache", "device", None, 7))
    found = read(ranks=(rank(0, peers=(peer,), memory_kinds=kinds, skipped_records=3),))
    assert found["boltmesh_peer_payload_bytes_total"].value(rank="0", peer="1") == 4096
    assert found["boltmesh_rank_memory_measured_bytes"].value(kind="optimizer", place="host") == 10
    assert found["boltmesh_rank_memory_predicted_bytes"].value(kind="cache", place="device") == 7
    assert len(found["boltmesh_rank_memory_measured_bytes"].samples) == 1
    assert found["boltmesh_rank_skipped_records_total"].value(rank="0") == 3


def test_devices_are_ratios_bytes_watts_and_degrees() -> None:
    gpu = DeviceReading(
        kind="gpu",
        ranks=(0, 1),
        name="H100",
        uuid="GPU-7",
        utilization_percent=97.0,
        memory_used_bytes=5,
        memory_total_bytes=8,
        power_watts=640.5,
        temperature_celsius=61.0,
        sm_clock_mhz=1980,
        throttle_reasons=("power cap",),
        ecc_corrected_errors=4,
    )
    host = DeviceReading(
        kind="host", ranks=(0, 1, 2), name="here", utilization_percent=50.0, disk_free_bytes=77
    )
    process = DeviceReading(
        kind="process",
        ranks=(2,),
        name="here",
        pid=7,
        utilization_percent=150.0,
        memory_used_bytes=9,
    )
    found = read(gpu, process, host)
    assert found["boltmesh_device_utilization_ratio"].value(device="GPU-7") == 0.97
    assert found["boltmesh_device_memory_used_bytes"].value(device="GPU-7") == 5
    assert found["boltmesh_device_memory_size_bytes"].value(device="GPU-7") == 8
    assert found["boltmesh_device_power_watts"].value(device="GPU-7") == 640.5
    assert found["boltmesh_device_temperature_celsius"].value(device="GPU-7") == 61
    assert found["boltmesh_device_sm_clock_hertz"].value(device="GPU-7") == 1.98e9
    assert found["boltmesh_device_is_throttled"].value(device="GPU-7") == 1
    assert found["boltmesh_device_ecc_corrected_errors_total"].value(device="GPU-7") == 4
    assert found["boltmesh_host_cpu_ratio"].value(host="here") == 0.5
    assert found["boltmesh_host_run_disk_free_bytes"].value(host="here") == 77
    assert found["boltmesh_process_cpu_ratio"].value(rank="2", host="here") == 1.5
    assert found["boltmesh_process_resident_memory_bytes"].value(rank="2") == 9


@pytest.mark.parametrize(("reasons", "held"), [((), 0), (("idle",), 0), (("power limit",), 1)])
def test_an_idle_gpu_is_not_throttled(reasons: tuple[str, ...], held: int) -> None:
    gpu = DeviceReading("gpu", (0,), "H100", uuid="GPU-7", throttle_reasons=reasons)
    assert read(gpu)["boltmesh_device_is_throttled"].value() == held


def test_the_official_parser_reads_it_where_it_is_installed() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    names = {family.name for family in parser.text_string_to_metric_families(text_of())}
    assert "boltmesh_job_steps" in names


def test_names_that_become_alike_when_cleaned_are_one_sample() -> None:
    assert read(metrics={"a\n": 1.0, "a\r": 2.0})["boltmesh_logged_metric"].samples == {
        (("job", "abc123"), ("metric", "a ")): 2.0
    }


def test_the_headline_figures_and_findings_are_there() -> None:
    seen = demo(scenario="straggler", later_s=30)
    found, shown = parse(prometheus_text(seen)), figures(fold(None, seen))
    assert found["boltmesh_job_mfu_ratio"].value() == pytest.approx(shown.mfu.value)
    assert found["boltmesh_job_step_seconds"].value() == pytest.approx(shown.step_s.value)
    assert found["boltmesh_job_model_flops_per_second"].value() > 1e12
    assert found["boltmesh_job_finding"].value(kind="straggler") == 1
    assert found["boltmesh_job_finding"].value(kind="crashed") == 0


DOCUMENT = Path(__file__).parents[2] / "docs" / "recording.md"
UNITS = (
    "_bytes", "_seconds", "_ratio", "_per_second", "_per_step", "_watts", "_celsius", "_hertz",
    "_total",
)  # fmt: skip
"""Endings that say the base unit, or that it is a counter."""
WITHOUT_A_UNIT = {
    "info", "state", "stopped", "ranks", "epoch", "steps", "metric", "finding", "alert", "up",
    "throttled", "threads", "cores",
}  # fmt: skip


def _documented(known: set[str]) -> set[str]:
    """Names in the table of the docs, where ``_epoch`` goes on from the name before it."""
    found = set()
    for line in DOCUMENT.read_text().splitlines():
        if not line.startswith("| `boltmesh_"):
            continue
        first = ""
        for name in re.findall(r"`([a-z_.]+)`", line.split("|")[1]):
            if name.endswith("..."):
                found |= {each for each in known if each.startswith(name.removesuffix("..."))}
                continue
            first = name if name.startswith("boltmesh_") else first
            parts = first.split("_")
            stems = ["_".join(parts[:size]) for size in range(len(parts), 1, -1)]
            full = name if name == first else next(s + name for s in stems if s + name in known)
            found.add(full)
    return found


def test_every_metric_is_in_the_docs_with_a_base_unit_in_its_name() -> None:
    known = {family.name for family in families(demo())}
    assert _documented(known) == known
    for name in known:
        assert name.endswith(UNITS) or name.rpartition("_")[2] in WITHOUT_A_UNIT, name
