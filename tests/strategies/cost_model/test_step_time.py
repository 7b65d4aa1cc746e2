"""The least time of a step, from measured numbers and from nothing else."""

import pytest

from boltmesh.errors import ConfigError
from boltmesh.strategies.cost_model.model import (
    JobShape,
    ModelShape,
    ShardingLayout,
    TensorShape,
    UnitShape,
    widths_of,
)
from boltmesh.strategies.cost_model.step_time import Machine, estimate_step_time

NUMEL = 10**9
MODEL = ModelShape(
    "one", (UnitShape("a", (TensorShape("w", (1000, 10**6)),)),), forward_flops=2 * 10**15
)
JOB = JobShape(1, widths_of("bf16-mixed"))
ALL = Machine(
    device_tflops=100, network_gb_s=10, bus_gb_s=20, host_gb_s=36, disk_read_gb_s=6,
    disk_write_gb_s=3,
)  # fmt: skip


def test_each_part_follows_from_its_speed():
    sharing = ShardingLayout("cpu", 3, {"host": 1.0})
    time = estimate_step_time(MODEL, sharing, JOB, ALL)
    assert time.computing_s == pytest.approx(60.0)
    assert time.host_s == pytest.approx(36 * NUMEL / 36e9)
    assert time.bus_s == pytest.approx(4 * NUMEL / 20e9)
    assert time.disk_s == time.network_s == 0
    assert (time.least_s, time.slowest) == (time.computing_s, "computing")


def test_a_disk_reads_and_writes_state_and_parameters():
    time = estimate_step_time(MODEL, ShardingLayout("nvme", 3, {"disk": 1.0}, "disk"), JOB, ALL)
    read, written = 12 * NUMEL + 2 * 2 * NUMEL, 12 * NUMEL + 2 * NUMEL
    assert time.disk_s == pytest.approx(max(read / 6e9, written / 3e9), rel=1e-4)
    assert time.bus_s == pytest.approx(4 * NUMEL / 20e9, rel=1e-4)


def test_ranks_that_compute_on_the_host_have_no_bus():
    job = JobShape(1, widths_of("32-true"), is_on_host=True)
    assert estimate_step_time(MODEL, ShardingLayout("cpu", 3, {"host": 1.0}), job, ALL).bus_s == 0


def test_sending_takes_its_share_of_the_network():
    time = estimate_step_time(
        MODEL, ShardingLayout("zero3", 3), JobShape(4, widths_of("bf16-mixed")), ALL
    )
    assert time.network_s == pytest.approx(0.75 * (2 * 2 + 4) * NUMEL / 10e9)


def test_what_was_not_measured_is_not_predicted():
    time = estimate_step_time(
        MODEL, ShardingLayout("cpu", 3, {"host": 1.0}), JOB, Machine(host_gb_s=36)
    )
    assert time.host_s is not None
    assert time.computing_s is None
    assert time.least_s is None
    assert time.slowest is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disk_gb_s": 3}, "a.yaml: unknown key 'disk_gb_s'. Use device_gib, host_gib, "),
        ({"host_gb_s": 0}, "a.yaml: host_gb_s=0 is no measured number. Write one above 0"),
        ({"host_gb_s": True}, "a.yaml: host_gb_s=True is no measured number."),
    ],
)
def test_numbers_that_cannot_be_are_refused(given, message):
    with pytest.raises(ConfigError) as caught:
        Machine.of(given, source="a.yaml")
    assert str(caught.value).startswith(message)
