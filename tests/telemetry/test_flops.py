"""FLOPs of a batch and of the device, and what a job says of its config."""

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from boltmesh.telemetry.job import JobInfo, job_path, make_private_folder, run_dir, write_job
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.snapshot import AlertThresholds
from boltmesh.telemetry.writer.throughput import flops_per_batch, peak_flops, peak_of
from tests.support.ranks import run_ranks
from tests.telemetry.test_callback import Model, loader, look, strategy, trainer


class Counted(Model):
    """Learns in its first batch what a batch takes."""

    flops_per_batch = None

    def training_step(self, batch, batch_idx):
        self.flops_per_batch = 1234
        return super().training_step(batch, batch_idx)


def counted_worker(rank, world_size):
    chosen = strategy()
    chosen.recipe = "gpt\x1b[31m"
    chosen.settings = {"data.init_args.batch_size": 16}
    chosen.alerts = AlertThresholds(stall_s=7.0)
    fit = trainer(max_epochs=1, limit_val_batches=0, log_every_n_steps=1, strategy=chosen)
    fit.fit(Counted(), loader())
    return look()


@pytest.mark.ranks
def test_a_run_tells_its_flops_its_recipe_and_its_thresholds():
    for rank, seen in enumerate(run_ranks(counted_worker, 2)):
        assert seen.ranks[rank].flops_per_batch == 1234.0
        assert seen.ranks[rank].peak_flops_per_second is None  # a CPU has no data sheet
        assert seen.recipe == "gpt"
        assert seen.hyperparameters["data.init_args.batch_size"] == "16"
        assert seen.alerts == AlertThresholds(stall_s=7.0)


def test_a_script_has_no_recipe_and_the_thresholds_of_the_reader():
    make_private_folder(run_dir())
    make_private_folder(job_path("abcd"))
    info = JobInfo.create(strategy="DDPStrategy", mesh={"data": 1}, world_size=1, id="abcd")
    write_job(info, job_path("abcd"))
    with open_job() as job:
        assert (job.snapshot().recipe, job.snapshot().alerts) == (None, AlertThresholds())


class Property(lightning.LightningModule):
    """Says what it takes by a property of choice."""

    def __init__(self, say):
        super().__init__()
        self.say = say

    @property
    def flops_per_batch(self):
        return self.say()


def fail():
    raise ValueError("not yet")


@pytest.mark.parametrize(
    ("say", "number"),
    [
        (lambda: 5, 5.0),
        (lambda: torch.tensor(2e12), 2e12),
        (lambda: None, None),
        (lambda: 0, None),
        (lambda: -3, None),
        (lambda: float("nan"), None),
        (lambda: "many", None),
        (lambda: [1], None),
        (fail, None),
    ],
    ids=["int", "tensor", "none", "zero", "negative", "nan", "text", "list", "error"],
)
def test_what_a_module_says_of_its_flops_is_a_number_or_not_known(say, number):
    assert flops_per_batch(Property(say)) == pytest.approx(number)


def test_a_module_that_says_nothing_is_not_known():
    assert flops_per_batch(lightning.LightningModule()) is None


class Placed(lightning.Trainer):
    """As much of a Trainer as is asked."""

    def __init__(self):
        self.placed = SingleDeviceStrategy(torch.device("cuda", 0))
        self.plugin = MixedPrecision("bf16-mixed", "cuda")

    @property
    def strategy(self):
        return self.placed

    @property
    def precision_plugin(self):
        return self.plugin


def test_the_peak_is_that_of_the_device_at_the_precision_of_the_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert peak_flops(Placed()) == 989.4e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Unheard-of 9000")
    assert peak_flops(Placed()) is None

    def broken(*_):
        raise RuntimeError

    monkeypatch.setattr(torch.cuda, "get_device_name", broken)
    assert peak_flops(Placed()) is None


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("Tesla T4", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peaks_are_dense_ones_of_data_sheets(name, bf16):
    assert peak_of(name, torch.bfloat16) == bf16


def test_float32_products_run_as_tf32_where_torch_is_told_so(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    assert peak_of("Tesla V100-PCIE-16GB", torch.float32) == 14e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
