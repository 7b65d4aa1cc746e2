"""``boltmesh plan``: the table, one strategy, JSON, what is refused, and that it stays light."""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import yaml  # type: ignore[import-untyped]

from boltmesh import cli
from boltmesh.configs.load import recipes
from boltmesh.plan.strategy_options import DDP_KEYS
from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.cost_model.step_time import Machine
from boltmesh.strategy_arguments import SHARED, accepted_arguments
from tests.cli.conftest import ROOT, TINY

NAMES = ["ddp", "zero1", "zero2", "zero3", "zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_nvme"]

LARGE = [
    "zero3", "accelerator=cuda", "precision=bf16-mixed", "data.init_args.batch_size=1",
    "--size", "6.7B", "--devices", "8",
]  # fmt: skip


def plan(capsys, *arguments: str) -> str:
    assert cli.run_command(["plan", *arguments]) == 0
    return capsys.readouterr().out


def data(capsys, *arguments: str) -> dict:
    return json.loads(plan(capsys, *arguments, "--json"))


def test_a_known_model_of_any_size_is_planned_without_a_training_library(workplace):
    code = (
        "import sys\nfrom boltmesh.cli import run_command\n"
        f"code = run_command({['plan', *LARGE]})\n"
        "print([each for each in ('torch', 'lightning', 'textual') if each in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr
    assert done.stdout.startswith("GPT with 6,864,257,024 parameters on 8 ranks")


def test_the_table_has_every_strategy_and_marks_the_configs_own(workplace, capsys):
    lines = plan(capsys, *LARGE).splitlines()
    assert lines[2].split("  ")[0] == "strategy"
    rows = lines[3 : 3 + len(NAMES)]
    assert [line[2:].split()[0] for line in rows] == NAMES
    assert [line[0] for line in rows] == ["*" if name == "zero3" else " " for name in NAMES]
    assert len({len(line) for line in rows}) == 1, "columns are aligned"


def test_the_readme_shows_what_is_printed(workplace, capsys):
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [each for each in shown.split("```") if each.lstrip().startswith("GPT with")]
    assert plan(capsys, *LARGE).startswith(block.strip())


def test_json_holds_the_same_in_bytes(workplace, capsys):
    made = data(capsys, *LARGE)
    by_name = {each["name"]: each for each in made["strategies"]}
    numel = made["model"]["parameters"]
    assert list(by_name) == [f"bolt_{name}" for name in NAMES]
    for name in ("bolt_zero1", "bolt_zero2", "bolt_zero3"):
        kept = by_name[name]["between_steps"]["total"]
        assert kept["device"] == pytest.approx(16 * numel / 8, rel=1e-4)
    nvme = by_name["bolt_zero3_nvme"]
    assert nvme["between_steps"]["optimizer"]["disk"] == pytest.approx(12 * numel / 8, rel=1e-4)
    assert nvme["between_steps"]["parameters"]["disk"] == pytest.approx(2 * numel / 8, rel=0.15)
    peaks = [by_name[f"bolt_{name}"]["peak"]["device"] for name in
             ("ddp", "zero2", "zero3", "zero3_cpu")]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True)
    assert all(each["least_seconds"] is None for each in made["strategies"])


def test_one_strategy_is_shown_in_detail(workplace, capsys):
    out = plan(capsys, *LARGE, "--strategy", "zero3_nvme")
    assert out.startswith("zero3_nvme, GPT with")
    for part in ("between steps", "on the device in a step", "(the peak)", "all-gather", "disk"):
        assert part in out
    assert out == plan(capsys, *LARGE, "--strategy", "bolt_zero3_nvme")


def test_the_configs_options_count_for_its_own_strategy(workplace, capsys):
    half = data(
        capsys, "zero3_cpu", "accelerator=cuda", "strategy.offload_fraction=0.5", "--size", "1.3B"
    )
    rows = {each["name"]: each["between_steps"]["optimizer"] for each in half["strategies"]}
    own, other = rows["bolt_zero3_cpu"], rows["bolt_zero1_cpu"]
    assert own["device"] == pytest.approx(own["host"], rel=0.05)
    assert other["device"] == 0


def test_gradients_that_are_looked_at_are_planned_beside_their_buckets(workplace, capsys):
    def replicas(*more: str) -> int:
        made = data(capsys, "ddp", "accelerator=cuda", "--size", "1.3B", *more)
        return next(e["peak"]["device"] for e in made["strategies"] if e["name"] == "bolt_ddp")

    lean = replicas()
    for more in ("strategy.gradient_as_bucket_view=false", "trainer.gradient_clip_algorithm=value"):
        assert replicas(more) > lean, more
    # A scaler looks at gradients, and the types are as wide as those of bf16.
    assert replicas("trainer.precision=16-mixed") > replicas("trainer.precision=bf16-mixed")


def test_hooks_of_a_model_that_look_at_gradients_are_seen(workplace, capsys):
    peaks = []
    for name, hook in (("quiet", "on_train_start"), ("curious", "on_before_zero_grad")):
        (workplace / f"{name}.py").write_text(
            "import torch\nfrom torch import nn\nfrom lightning.pytorch import LightningModule\n"
            "class Net(LightningModule):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])\n"
            "    def training_step(self, batch, batch_idx):\n"
            "        x, y = batch\n"
            "        return (self.layers(x) - y).square().mean()\n"
            "    def configure_optimizers(self):\n"
            "        return torch.optim.SGD(self.parameters())\n"
            f"    def {hook}(self, *_):\n"
            "        pass\n"
        )
        made = data(
            capsys, str(TINY), f"model.class_path={name}.py:Net", "strategy=bolt_ddp",
            "accelerator=cuda",
        )  # fmt: skip
        peaks.append(made["strategies"][0]["peak"]["device"])
    assert peaks[1] - peaks[0] == 4 * made["model"]["trained_parameters"]


def test_offload_is_left_out_where_weights_are_not_fp32(workplace, capsys):
    made = data(capsys, "zero3", "precision=bf16-true")
    assert [each["name"] for each in made["strategies"]] == [f"bolt_{each}" for each in NAMES[:4]]
    assert made["notes"] == [
        "offload keeps state in fp32, so it cannot be had with precision=bf16-true"
    ]


def test_float8_is_said_to_change_no_bytes(workplace, capsys):
    plain, float8 = (data(capsys, "zero3", *given) for given in ((), ("strategy.float8=rowwise",)))
    assert float8["strategies"] == plain["strategies"]
    (note,) = set(float8["notes"]) - set(plain["notes"])
    assert note.startswith("float8 changes no bytes: ")


def test_large_layers_are_planned_in_tiles(workplace, capsys):
    whole = data(capsys, *LARGE)
    tiled = data(capsys, *LARGE, f"strategy.tile_linear_bytes={64 << 20}")
    before, after = (each["strategies"][3] for each in (whole, tiled))
    assert after["peak"]["device"] < before["peak"]["device"]
    assert after["between_steps"] == before["between_steps"]
    assert after["traffic"][0]["calls"] > before["traffic"][0]["calls"]


def test_sharding_within_a_node_uses_its_ranks(workplace, capsys):
    arguments = ["zero3", "accelerator=cuda", "--size", "1.3B", "--devices", "4", "num_nodes=2"]
    inside = data(capsys, *arguments, "strategy.shard_size=node")
    assert (inside["ranks"], inside["shards"]) == (8, 4)
    operators = [each["operator"] for each in inside["strategies"][3]["traffic"]]
    assert operators == ["all-gather", "reduce-scatter", "all-reduce"]


def test_what_the_command_line_says_wins_over_the_size(workplace, capsys):
    made = data(capsys, "zero3", "--size", "125M", "model.init_args.n_layer=1")
    assert made["model"]["parameters"] < 125e6


def test_a_list_of_devices_is_as_many_ranks(capsys):
    for devices in ("0,2,3", "[0, 2, 3]"):
        assert data(capsys, "zero3", f"trainer.devices={devices}")["ranks"] == 3


def test_a_measured_machine_says_what_fits_and_the_least_time(workplace, capsys):
    (workplace / "machine.yaml").write_text(
        "device_gib: 80\nhost_gib: 10\ndevice_tflops: 400\nnetwork_gb_s: 50\nbus_gb_s: 25\n"
        "host_gb_s: 60\ndisk_read_gb_s: 6\ndisk_write_gb_s: 3\n"
    )
    out = plan(capsys, *LARGE, "--cluster", "machine.yaml")
    table = {line[2:].split()[0]: line for line in out.splitlines()[3:11]}
    assert table["ddp"].endswith("no: device")
    assert table["zero3"].endswith("network  yes".rjust(12)) or table["zero3"].endswith("yes")
    assert table["zero3_cpu"].endswith("no: host")
    assert "s, disk" in table["zero3_nvme"]


@pytest.mark.sample("zero3_cpu", "pipeline_zbv", "tensor_hf", "threed")
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_can_be_planned(workplace, capsys, name):
    out = plan(capsys, name)
    if name.startswith("pipeline"):
        assert "expected bubble" in out
    elif name.startswith("threed"):
        assert "data=2 x tensor=2, ZeRO-1 over the data axis" in out
        assert "between ranks in a step" in out
    elif name.startswith("context"):
        assert "with 128 positions over 2 ranks" in out
        assert "bytes that a rank sends for one batch" in out
    elif name.startswith("expert"):
        assert "CausalLM over 2 ranks: each keeps " in out
        assert "model.model.layers.3.mlp.experts        8         2          4" in out
    elif name.startswith("tensor"):
        assert "GPT over 2 ranks: each keeps " in out or "CausalLM over 2 ranks: each keeps " in out
    else:
        assert f"* {name}" in out
        assert "device and host are one memory" in out


def test_any_other_model_is_built_without_memory_and_run_once(workplace, capsys):
    (workplace / "wide.py").write_text(
        "import torch\nfrom torch import nn\nfrom lightning.pytorch import LightningModule\n"
        "class Wide(LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])\n"
        "        self.huge = nn.Linear(6, 10**10, bias=False)\n"
        "        self.huge.requires_grad_(False)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        x, y = batch\n"
        "        return (self.layers(x) - y).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.layers.parameters(), momentum=0.9)\n"
    )
    made = data(
        capsys, str(TINY), "model.class_path=wide.py:Wide", "strategy=bolt_zero3",
        "accelerator=cuda",
    )  # fmt: skip
    assert made["model"]["parameters"] == 6 * 10**10 + 3 * 42
    assert made["model"]["trained_parameters"] == 3 * 42
    assert made["model"]["activations"]["saved_bytes"] == 4 * (4 * 6 * 3 + 4 * 6)
    assert made["notes"] == []
    kept = made["strategies"][3]["between_steps"]
    assert kept["optimizer"]["device"] == kept["gradients"]["device"] == 4 * 3 * (3 * 6 + 3)


def test_layers_of_configure_model_count(workplace, capsys):
    (workplace / "late.py").write_text(
        "from torch import nn\nfrom lightning.pytorch import LightningModule\n"
        "class Late(LightningModule):\n"
        "    layer = None\n"
        "    def configure_model(self):\n"
        "        if self.layer is None:\n"
        "            self.layer = nn.Linear(6, 7, bias=False)\n"
        "class Asking(LightningModule):\n"
        "    def configure_model(self):\n"
        "        self.trainer.max_epochs\n"
    )
    made = data(capsys, str(TINY), "model.class_path=late.py:Late", "accelerator=auto")
    assert made["model"]["parameters"] == 42
    assert made["notes"][-1].startswith("accelerator=auto is planned as for GPUs")
    made = data(capsys, str(TINY), "model.class_path=late.py:Asking")
    assert made["notes"][0].startswith("what configure_model makes is not counted: RuntimeError")


def test_the_keys_of_a_cluster_are_those_of_its_page():
    page = (ROOT / "docs" / "zero.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    machine = Machine.of(yaml.safe_load(block), source="docs/zero.md")
    assert all(getattr(machine, each.name) for each in fields(Machine))


def test_what_cannot_be_found_out_is_said(workplace, capsys):
    (workplace / "shy.py").write_text(
        "from torch import nn\nfrom lightning.pytorch import LightningModule\n"
        "class Shy(LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(6, 6)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return self.layer(batch[0]).sum() * self.trainer.max_epochs\n"
        "    def configure_optimizers(self):\n"
        "        raise RuntimeError('no trainer')\n"
    )
    out = plan(capsys, str(TINY), "model.class_path=shy.py:Shy")
    assert "activations are not counted: add them to every peak." in out
    assert "training_step cannot run without a Trainer and data: RuntimeError: Shy is not" in out
    assert "the optimizer is made beside a Trainer only: two tensors of state" in out


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_model_that_is_run_comes_out_like_one_that_is_known(workplace, capsys, precision):
    """The same GPT under another name, so that nothing knows it."""
    name = f"gpt_{precision.replace('-', '_')}"
    (workplace / f"{name}.py").write_text((ROOT / "examples" / "gpt.py").read_text())
    (workplace / "text.txt").write_text("the quick brown fox. " * 200)
    arguments = [
        "zero3", f"precision={precision}", "accelerator=cuda", "data.init_args.path=text.txt",
        "data.init_args.batch_size=2", "model.init_args.n_layer=2", "model.init_args.n_embd=32",
    ]  # fmt: skip
    known = data(capsys, *arguments)
    inside = [each for each in arguments if each.startswith("model.init_args")]
    run = data(
        capsys, *arguments, f"model.class_path={name}.py:GPT", *inside,
        "model.init_args.block_size=128",
    )  # fmt: skip
    assert run["strategies"] == known["strategies"]
    how = run["model"]["activations"].pop("how")
    assert how == "counted by running training_step on one batch of the data, without memory"
    del known["model"]["activations"]["how"]
    assert run["model"] == known["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zero3", "--strategy", "zero4"], "There is no strategy 'zero4'. Did you mean 'zero3'?"),
        (["zero3", "--size", "7B"], "There is no size '7B'. Use 125M, "),
        (["zero3", "devices=auto"], "command line: trainer.devices=auto depends on the machine"),
        (["zero3", "precision=transformer-engine"], "trainer.precision=transformer-engine stores"),
        (["zero3", "strategy.stage=4"], "command line: strategy.stage=4 is no ZeRO stage. Use 1 "),
        (["zero3", "strategy.stages=3"], "unknown key 'strategy.stages': ZeROStrategy does not"),
        (["ddp", "strategy.nonsense=3"], "unknown key 'strategy.nonsense': DDPStrategy does not"),
        (["context", "strategy.offload_optimizer=cpu"], "unknown key 'strategy.offload_optimizer'"),
        (["tensor", "strategy.nonsense=3", "--strategy", "zero3"], "'strategy.nonsense': Tensor"),
        (["tensor", "strategy.nonsense=3"], "'strategy.nonsense': TensorParallelStrategy does not"),
        (["zero3", "strategy.shard_size=3", "--devices", "8"], "shard_size=3 does not divide 8 "),
        (["zero3", "--cluster", "none.yaml"], "none.yaml cannot be read: "),
        (["pipeline_1f1b", "--cluster", "none.yaml"], "none.yaml cannot be read: "),
        (["zero3", "--cluster", "date.yaml"], "date.yaml cannot be read: month must be in 1..12."),
        (["pipeline_1f1b", "--cluster", "machine.yaml"], "a plan of bolt_pipeline states no times"),
        (["ddp", "--strategy", "tensor", "--cluster", "machine.yaml"], "a plan of bolt_tensor"),
        (["ddp", "--strategy", "context", "--cluster", "machine.yaml"], "a plan of bolt_context"),
        (["expert_hf", "--cluster", "machine.yaml"], "a plan of bolt_expert states no times"),
        (["threed", "strategy.tile_logits=32"], "tile_logits=32 needs the whole head of the model"),
        (["context", "strategy.activation_offload=true"], "the inputs of recomputed blocks, and n"),
        ([str(TINY), "--size", "125M"], "--size=125M is a size of the GPT that comes with"),
    ],
)
def test_what_cannot_be_planned_is_one_line(workplace, capfd, arguments, message):
    (workplace / "machine.yaml").write_text("device_gib: 80", encoding="utf-8")
    (workplace / "date.yaml").write_text("device_gib: 2026-13-01", encoding="utf-8")
    assert cli.run_command(["plan", *arguments]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert message in error
    assert error.count("\n") == 1


def test_one_process_over_several_devices_is_no_row_and_refused_by_name(workplace, capsys):
    assert cli.run_command(["plan", "ddp", "--strategy", "replicated"]) == 2
    assert "Plan --strategy ddp, whose ranks have as much" in capsys.readouterr().err


def test_the_keys_of_ddp_are_those_that_it_takes():
    assert {*DDP_KEYS, *SHARED} >= accepted_arguments(DDPStrategy).keys() >= {*DDP_KEYS}
