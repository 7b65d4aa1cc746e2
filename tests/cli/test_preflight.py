"""What is refused before a rank is started, and where the ranks would run."""

import os
from pathlib import Path

import pytest

from boltmesh.cli import run_command
from boltmesh.configs.load import load
from boltmesh.errors import ConfigError, LayoutError
from boltmesh.launch import placement
from boltmesh.launch.placement import find_launcher, place_ranks
from boltmesh.preflight import check_config
from tests.cli.conftest import TINY
from tests.support.forked_python import BOLTMESH, run_python

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip


count_cuda_devices = placement.count_cuda_devices  # as it is without the fixture below


def check(*overrides: str, is_fit: bool = True):
    return check_config(load(TINY, overrides), source="a.yaml", is_fit=is_fit, for_show=False)


@pytest.fixture(autouse=True)
def nobody_has_launched(workplace, monkeypatch):
    for name in (*TORCHRUN, "SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(placement, "count_cuda_devices", lambda: 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["strategy=bolt_dpp"],
            (
                "a.yaml: there is no strategy 'strategy.name=bolt_dpp'. Did you mean "
                "strategy.name=bolt_ddp?"
            ),
        ),
        (
            ["strategy=zzz"],
            (
                "a.yaml: there is no strategy 'strategy.name=zzz'. Use bolt_ddp, "
                "bolt_auto, bolt_ddp_find_unused_parameters_true, bolt_replicated, bolt_zero1, "
                "bolt_zero2, bolt_zero3, bolt_zero1_cpu, bolt_zero2_cpu, bolt_zero3_cpu, "
                "bolt_zero3_nvme, bolt_pipeline, bolt_tensor, bolt_context, bolt_3d and "
                "bolt_expert."
            ),
        ),
        (
            ["precision=16-mixed"],
            (
                "a.yaml: trainer.precision=16-mixed needs a CUDA device, and the ranks "
                "run on the CPU. "
                "Set trainer.precision=bf16-mixed."
            ),
        ),
        (
            ["precision=16-true"],
            (
                "a.yaml: trainer.precision=16-true needs a CUDA device, and the ranks "
                "run on the CPU. "
                "Set trainer.precision=bf16-true."
            ),
        ),
        (
            ["accelerator=gpu"],
            (
                "trainer.accelerator=gpu needs a CUDA device, and torch finds none here. "
                "Set trainer.accelerator=cpu."
            ),
        ),
        (
            ["devices=[0,1,2]"],
            (
                "trainer.devices=[0, 1, 2] names CUDA devices, but the ranks run on the CPU. "
                "Set trainer.devices=3."
            ),
        ),
        (
            ["num_nodes=2"],
            (
                "trainer.num_nodes=2 needs a launcher that starts the ranks of every "
                "node. Start it "
                "with torchrun --nnodes=2 --nproc-per-node=2 -m boltmesh, or srun, or set "
                "trainer.num_nodes=1."
            ),
        ),
        (
            ["checkpoint.every_n_steps=5", "checkpoint.every_n_epochs=1"],
            (
                "a.yaml: run.checkpoint.every_n_steps=5 and every_n_epochs=1 exclude each other. "
                "Set run.checkpoint.every_n_epochs=null."
            ),
        ),
        (
            ["checkpoint.save_top_k=3"],
            (
                "a.yaml: run.checkpoint.save_top_k=3 needs a value to rank by. Set "
                "run.checkpoint.monitor=val_loss, or run.checkpoint.save_top_k=-1 to keep all."
            ),
        ),
        (
            ["optimizer.init_args.lr=1"],
            (
                "a.yaml: optimizer.class_path is missing, so the module's own "
                "optimizer would be used "
                "and the section ignored. Set optimizer.class_path=torch.optim.AdamW."
            ),
        ),
        (
            ["optimizer.class_path=torch.optim.SGD", "optimizer.scheduler.init_args.step_size=1"],
            (
                "a.yaml: optimizer.scheduler.class_path is missing. Set for example "
                "optimizer.scheduler.class_path=torch.optim.lr_scheduler.StepLR."
            ),
        ),
        (
            [
                "optimizer.class_path=torch.optim.SGD",
                "optimizer.scheduler.class_path=torch.optim.lr_scheduler.ReduceLROnPlateau",
            ],
            (
                "a.yaml: optimizer.scheduler.monitor is missing: ReduceLROnPlateau needs it. "
                "Set optimizer.scheduler.monitor=val_loss."
            ),
        ),
        (
            ["gradient_clip_algorithm=norm"],
            (
                "a.yaml: trainer.gradient_clip_algorithm=norm clips nothing without a limit. "
                "Set trainer.gradient_clip_val=1.0."
            ),
        ),
        (
            ["resume=runs/none.ckpt"],
            (
                "run.resume=runs/none.ckpt: there is no such checkpoint. Write for example "
                "run.resume=auto."
            ),
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(overrides, message):
    with pytest.raises((ConfigError, LayoutError)) as caught:
        check(*overrides)
    assert str(caught.value) == message


@pytest.mark.parametrize("for_show", [True, False])
def test_a_folder_that_cannot_be_written_is_refused_before_a_rank_starts(workplace, for_show):
    (workplace / "taken").write_text("a file")
    config = load(TINY, ["run.dir=taken/runs"])
    with pytest.raises(ConfigError) as caught:
        check_config(config, source="a.yaml", is_fit=True, for_show=for_show)
    assert str(caught.value) == (
        f"run.dir=taken/runs: {workplace}/taken cannot be written: Not a directory. "
        f"Set run.dir to a folder of yours, for example run.dir=/tmp/runs."
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_a_folder_without_the_right_to_write_is_refused_before_a_rank_starts(workplace):
    (workplace / "runs").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"runs cannot be written: Permission denied\. Set run"):
        check()


def test_evaluating_without_a_checkpoint_is_refused_before_random_weights_are_judged():
    with pytest.raises(ConfigError, match="finds no checkpoint below runs/tiny"):
        check(is_fit=False)
    check("ckpt_path=null", is_fit=False)


@pytest.mark.parametrize(
    ("devices", "cuda", "placed"),
    [
        ("auto", 0, ("cpu", 1)),
        ("3", 0, ("cpu", 3)),
        ("auto", 4, ("cuda", 4)),
        ("-1", 4, ("cuda", 4)),
        ("2", 4, ("cuda", 2)),
        ("[1,3]", 4, ("cuda", [1, 3])),
        ("'\"1,\"'", 4, ("cuda", [1])),
    ],
)
def test_ranks_follow_the_devices(monkeypatch, devices, cuda, placed):
    monkeypatch.setattr(placement, "count_cuda_devices", lambda: cuda)
    found = check("accelerator=auto", f"devices={devices.strip(chr(39))}")
    assert (found.accelerator, found.devices) == placed


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("3", ("trainer.devices=3 needs 3 CUDA devices, but there are 2. "
              "Set trainer.devices=2, or trainer.accelerator=cpu.")),
        ("[0,2]", ("trainer.devices=[0, 2] names CUDA devices that do not exist, or one "
                  "twice; there are 0 to 1. Set trainer.devices=2.")),
    ],
)  # fmt: skip
def test_devices_that_are_not_there_are_refused(monkeypatch, devices, message):
    monkeypatch.setattr(placement, "count_cuda_devices", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        check("accelerator=cuda", f"devices={devices}")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("environment", "name", "rank", "world_size"),
    [
        (TORCHRUN, "torchrun", 3, 4),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "the launcher", 1, 2),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, "srun", 5, 8),
    ],
)
def test_a_launcher_is_known_by_its_variables(environment, name, rank, world_size):
    found = find_launcher(environment)
    assert (found.name, found.rank, found.world_size) == (name, rank, world_size)


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"}],
)
def test_without_a_launcher_there_is_none(environment):
    assert find_launcher(environment) is None


def test_mpirun_without_mpi4py_is_refused():
    with pytest.raises(ConfigError, match="pip install mpi4py"):
        find_launcher({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})


@pytest.mark.parametrize(
    ("overrides", "started", "message"),
    [
        (["devices=3"], {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
         ("trainer.devices=3 x trainer.num_nodes=1 needs 3 ranks, but torchrun has started "
         "4 ranks. Set trainer.devices=4, or start 3.")),
        (["devices=2"], {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
         ("trainer.devices=2 x trainer.num_nodes=1 needs 2 ranks, but torchrun has started "
         "4 ranks. Set trainer.devices=2 trainer.num_nodes=2, or start 2.")),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_the_launcher_are_refused_with_what_fits(
    monkeypatch, overrides, started, message
):
    for name, value in {**TORCHRUN, **started}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LayoutError) as caught:
        check(*overrides)
    assert str(caught.value) == message
    advised = message.partition("Set ")[2].partition(",")[0].split()
    assert check(*advised).world_size == 4


def test_on_a_cpu_auto_takes_what_the_launcher_has_started(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert place_ranks(load(TINY, ["devices=auto", "num_nodes=2"])).devices == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("timeout_s=abc", "strategy.timeout_s=abc is not a number. Write for example strategy."),
        ("timeout_s=.nan", "strategy.timeout_s=nan is not a time for collectives"),
        ("timeout_s=-1", "strategy.timeout_s=-1 is not a time for collectives"),
        ("timeout_s=1e30", "strategy.timeout_s=1e+30 is not a time for collectives"),
        ("process_group_backend=3", "strategy.process_group_backend=3 is not a text or null."),
    ],
)
def test_arguments_of_the_engine_are_refused_with_a_value_that_works(override, said, capfd):
    line = ["fit", str(TINY), "devices=1", f"strategy.{override}", "--dry-run"]
    assert run_command(line) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "begins"),
    [
        (["strategy.timeout_s=-1"], "command line: strategy.timeout_s=-1 is not a time"),
        (["strategy=bolt_zero2", "strategy.stage=7"], "command line: strategy.stage=7 is no ZeRO"),
        (["strategy=bolt_dpp"], "command line: there is no strategy"),
        (["strategy.nonsense=1"], "command line: unknown key 'strategy.nonsense'"),
        (["precision=16-mixed"], "command line: trainer.precision=16-mixed needs a CUDA"),
        (["model.init_args.wide=3"], "command line: unknown key 'model.init_args.wide'"),
        (["model.class_path=torch.nn.Linaer"], "command line: model.class_path=torch.nn.Linaer"),
        (["model.init_args.width=-1"], "{file} and command line: model cannot be built"),
        (["max_time=nonsense"], "command line: trainer.max_time=nonsense"),
        (["limit_val_batches=1.5"], "{file} and command line: trainer: "),
        (["trainer.callbacks=[lightning.pytorch.callbacks.Tmier]"], "command line: trainer.callb"),
    ],
)
def test_an_error_names_the_command_line_where_that_has_set_the_value(overrides, begins, capfd):
    assert run_command(["fit", str(TINY), "devices=1", *overrides, "--dry-run"]) == 2
    assert capfd.readouterr().err.startswith("boltmesh: " + begins.format(file=TINY))


def test_an_error_names_the_file_for_what_that_has(tmp_path, capfd):
    file = tmp_path / "own.yaml"
    strategy = "strategy: {name: bolt_zero2, stage: 7}\n"
    file.write_text(TINY.read_text().replace("tiny.py", str(TINY.with_name("tiny.py"))) + strategy)
    assert run_command(["fit", str(file), "devices=1", "max_steps=3", "--dry-run"]) == 2
    assert capfd.readouterr().err.startswith(f"boltmesh: {file}: strategy.stage=7 is no ZeRO")


OTHER_MODELS = f"""
import sys
sys.path.insert(0, {str(TINY.parent)!r})
from tiny import TinyModel

class Late(TinyModel):
    def __init__(self):
        super().__init__()
        self.layers = None

    def configure_model(self):
        if self.layers is None:
            self.layers = TinyModel().layers

class Frozen(TinyModel):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
"""


def written_models(folder: Path) -> str:
    """Write them to a file whose name no other test has imported."""
    file = folder / f"{folder.name}.py"
    file.write_text(OTHER_MODELS)
    return str(file)


SGD = ("optimizer.class_path=torch.optim.SGD", "optimizer.init_args.lr=0.1")


def test_layers_of_configure_model_may_have_the_optimizer_of_the_config(workplace, capfd):
    model = f"model.class_path={written_models(workplace)}:Late"
    line = ["fit", str(TINY), "devices=1", model, *SGD, "--dry-run"]
    assert run_command(line) == 0, capfd.readouterr().err
    assert run_command([*line, "optimizer.init_args.lr=-1"]) == 2
    assert "optimizer cannot be built: SGD raised ValueError" in capfd.readouterr().err


def test_advice_for_a_model_of_which_nothing_is_trained_says_so(workplace, capfd):
    model = f"model.class_path={written_models(workplace)}:Frozen"
    line = ["advise", str(TINY), model, "--gpu", "h100-80gb", "--devices", "2"]
    assert run_command(line) == 2
    assert "Frozen has no parameter that requires a gradient" in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("more", [SGD, ()], ids=["of the config", "of the module"])
def test_a_run_of_a_model_of_which_nothing_is_trained_says_so(workplace, more):
    model = f"model.class_path={written_models(workplace)}:Frozen"
    done = run_python(*BOLTMESH, "fit", str(TINY), "devices=1", model, *more)
    assert done.returncode == 2
    assert "Frozen has no parameter that requires a gradient" in done.stderr


def test_torch_is_asked_for_gpus_wherever_a_driver_is_loaded(monkeypatch, tmp_path):
    """Also in a container without NVML, whose GPUs were passed over for the CPU."""
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(placement, "_DRIVERS", (str(driver),))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert count_cuda_devices() == 0
    driver.touch()
    assert count_cuda_devices() == 2
