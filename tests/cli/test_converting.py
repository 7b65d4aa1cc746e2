"""``boltmesh export`` and ``boltmesh import``: what they write, and what they refuse."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from boltmesh.cli import run_command
from boltmesh.conversion.import_checkpoint import save_alone
from boltmesh.conversion.source import load_value, open_checkpoint, tensors_of
from boltmesh.strategies.checkpoint.manifest import find_fault


class Holder(LightningModule):
    """A module that holds a model whose two ends are tied."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.ModuleDict(
            {
                "wte": nn.Embedding(7, width),
                "norm": nn.BatchNorm1d(width),
                "narrow": nn.Linear(width, 3).bfloat16(),
                "head": nn.Linear(width, 7, bias=False),
            }
        )
        self.model["head"].weight = self.model["wte"].weight

    def embedding(self) -> Tensor:
        return self.model.get_parameter("wte.weight").detach()


def checkpoint_of(module: LightningModule) -> dict[str, Any]:
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.4",
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "hparams_name": "kwargs",
    }


@pytest.fixture
def holder(workplace: Path) -> Holder:
    torch.manual_seed(3)
    module = Holder(width=6)
    save_alone(checkpoint_of(module), Path("source"))
    return module


def whole(path: str) -> dict[str, Tensor]:
    found = tensors_of(open_checkpoint(Path(path)))
    return {name: load_value(each, name) for name, each in found.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        each.dtype == other[name].dtype and torch.equal(each, other[name])
        for name, each in one.items()
    )


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that is refused, which leaves nothing behind."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert run_command(list(arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    assert sorted(Path().rglob("*")) == before
    return shown.err


def test_plain_lightning_loads_the_file(holder: Holder, capsys: Any) -> None:
    assert run_command(["export", "source", "--to", "file.ckpt"]) == 0
    assert "file.ckpt: 9 tensors of the model" in capsys.readouterr().out
    loaded = Holder.load_from_checkpoint("file.ckpt", weights_only=True)
    assert loaded.hparams["width"] == 6
    assert equal(loaded.state_dict(), dict(holder.state_dict()))
    stored = torch.load("file.ckpt", weights_only=True)["state_dict"]
    assert stored["model.head.weight"].data_ptr() == stored["model.wte.weight"].data_ptr()


def test_weights_go_round_through_safetensors_to_the_bit(holder: Holder, capsys: Any) -> None:
    run_command(["export", "source", "--to", "file.ckpt"])
    wanted = dict(holder.state_dict())
    del wanted["model.head.weight"]
    for source in ("source", "file.ckpt"):
        for target in ("model.safetensors", "folder"):
            assert run_command(["export", source, "--to", target, "--force"]) == 0
            assert "names: without 'model.'" in capsys.readouterr().out
            file = target if target != "folder" else "folder/model.safetensors"
            written = {f"model.{name}": each for name, each in load_file(file).items()}
            assert equal(written, {name: wanted[name] for name in written})
            assert written.keys() == wanted.keys()
            with safe_open(file, framework="pt") as opened:
                notes = opened.metadata()
                assert len(notes.pop("boltmesh_crc32")) == 8
                assert notes == {"format": "pt", "head.weight": "wte.weight"}
            line = ["import", target, "--to", "again", "--prefix", "model.", "--force"]
            assert run_command(line) == 0
            assert equal(whole("again"), dict(holder.state_dict()))
    assert run_command(["import", "file.ckpt", "--to", "again", "--force"]) == 0
    assert find_fault(Path("again")) is None
    assert equal(whole("again"), dict(holder.state_dict()))
    assert open_checkpoint(Path("again"))["hyper_parameters"] == {"width": 6}


def test_large_models_are_divided_over_files_with_an_index(holder: Holder) -> None:
    line = ["export", "source", "--to", "folder", "--max-shard-size", "100B"]
    assert run_command(line) == 0
    index = json.loads(Path("folder/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    loaded = {name: load_file(f"folder/{file}")[name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in loaded.values())
    for file in files:
        inside = load_file(f"folder/{file}")
        assert len(inside) == 1 or sum(each.nbytes for each in inside.values()) <= 100
    assert run_command(["import", "folder", "--to", "again", "--prefix", "model."]) == 0
    assert equal(whole("again"), dict(holder.state_dict()))


def test_transformers_loads_the_folder(workplace: Path) -> None:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    module = LightningModule()
    model: Any = transformers.GPT2LMHeadModel(config)
    module.model = model
    save_alone({"state_dict": module.state_dict()}, Path("source"))
    line = ["export", "source", "--to", "folder", "--max-shard-size", "5kB"]
    assert run_command(line) == 0
    config.save_pretrained("folder")
    loaded, notes = transformers.GPT2LMHeadModel.from_pretrained("folder", output_loading_info=True)
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    assert equal(dict(loaded.state_dict()), dict(model.state_dict()))
    # What transformers writes does not tell of the tie.
    model.save_pretrained("theirs")
    tie = ["--tie", "lm_head.weight=transformer.wte.weight"]
    assert run_command(["import", "theirs", "--to", "again", "--prefix", "model.", *tie]) == 0
    assert equal(whole("again"), dict(module.state_dict()))


def test_a_prefix_chooses_among_several_models(workplace: Path, capsys: Any) -> None:
    state = {
        "student.weight": torch.ones(2),
        "teacher.weight": torch.zeros(2),
        "scale": torch.ones(1),
    }
    save_alone({"state_dict": state}, Path("source"))
    said = complaint(capsys, "export", "source", "--to", "model.safetensors")
    assert "scale (1), student. (1), teacher. (1)" in said
    assert "--prefix" in said
    line = ["export", "source", "--to", "model.safetensors", "--prefix"]
    assert run_command([*line, "student."]) == 0
    assert "left out: 2 tensors elsewhere, such as" in capsys.readouterr().out
    assert equal(load_file("model.safetensors"), {"weight": torch.ones(2)})
    assert run_command([*line, "", "--force"]) == 0
    assert equal(load_file("model.safetensors"), state)
    assert "'pupil.'" in complaint(capsys, *line, "pupil.", "--force")


def test_what_cannot_be_exported_is_refused_in_one_line(holder: Holder, capsys: Any) -> None:
    Path("folder").mkdir()
    Path("text.ckpt").write_text("nothing of torch")
    torch.save([1, 2], "list.ckpt")
    torch.save({"state_dict": {"model.weight": torch.ones(2)}, "of": Holder}, "code.ckpt")
    Path("short.ckpt").write_bytes(Path("code.ckpt").read_bytes()[:-40])
    torch.save({"state_dict": {"model.weight": torch.ones(2)}}, "file.ckpt")
    torch.save({"state_dict": {"model.w": torch.ones(2, dtype=torch.complex128)}}, "odd.ckpt")
    for source, target, words in [
        ("nowhere", "a.ckpt", "nowhere does not exist"),
        ("folder", "a.ckpt", "no complete checkpoint: it has no manifest.json"),
        (
            "text.ckpt",
            "a.safetensors",
            "text.ckpt cannot be loaded: it is damaged, or was not written",
        ),
        ("list.ckpt", "a.safetensors", "list.ckpt has no 'state_dict'"),
        ("code.ckpt", "a.safetensors", "could run code"),
        ("short.ckpt", "a.safetensors", "short.ckpt cannot be loaded: it is damaged"),
        ("file.ckpt", "a.ckpt", "is a Lightning file as it is: copy it"),
        ("odd.ckpt", "a.safetensors", "complex128"),
        ("source", "a.bin", "End its name in .ckpt"),
        ("source", "file.ckpt", "file.ckpt exists"),
        ("source", "none/a.ckpt", "none is no folder"),
        ("source", "source", "source is, or holds, source, which is to be read"),
    ]:
        assert words in complaint(capsys, "export", source, "--to", target)
    one = ["export", "source", "--to", "a.safetensors", "--max-shard-size"]
    assert "--to FOLDER" in complaint(capsys, *one, "1GB")
    assert "'much' is no size" in complaint(capsys, *one, "much")
    assert "Leave --prefix out" in complaint(
        capsys, "export", "source", "--to", "a.ckpt", "--prefix", "model."
    )


def test_names_of_hugging_face_need_transformers_and_a_model_that_it_knows(
    holder: Holder, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["export", "source", "--to", "folder", "--hf", "config.json"]
    for content in ('{"model_type": "none"}', "{"):
        Path("config.json").write_text(content)
        assert "config.json describes no model: " in complaint(capsys, *line)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'boltmesh[transformers]'" in complaint(capsys, *line)


def test_what_cannot_be_imported_is_refused_in_one_line(
    holder: Holder, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("empty", "broken", "twice", "absent"):
        Path(name).mkdir()
    Path("broken/model.safetensors").write_bytes(b"no header")
    for name in ("one", "two"):
        save_file({"weight": torch.ones(2)}, f"twice/{name}.safetensors")
    index = {"weight_map": {"weight": "model-00001-of-00001.safetensors"}}
    Path("absent/model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({"state_dict": {"model.weight": torch.ones(2)}}, "file.ckpt")
    save_file({"weight": torch.ones(2)}, "model.safetensors")
    model = ["import", "model.safetensors", "--to", "a"]
    for line, words in [
        (["import", "source", "--to", "a"], "source is a checkpoint of boltmesh as it is"),
        (["import", "empty", "--to", "a"], "empty has no .safetensors file"),
        (["import", "nowhere", "--to", "a"], "nowhere does not exist"),
        (["import", "broken", "--to", "a"], "broken/model.safetensors cannot be read"),
        (["import", "twice", "--to", "a"], "twice has weight in more than one file"),
        (["import", "absent", "--to", "a"], "model-00001-of-00001.safetensors, which is not there"),
        (["import", "file.ckpt", "--to", "a", "--prefix", "b."], "Leave --prefix and --tie out"),
        ([*model, "--tie", "head=body"], "there is no tensor body"),
        ([*model, "--tie", "weight=weight"], "weight has a tensor of its own"),
        ([*model, "--tie", "head"], "is not NAME=STORED"),
        (["import", "model.safetensors", "--to", "empty"], "empty exists"),
    ]:
        assert words in complaint(capsys, *line)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'boltmesh[safetensors]'" in complaint(capsys, *model)


def test_force_replaces_neither_the_source_nor_a_folder_around_it(
    holder: Holder, capsys: Any
) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    Path("source").rename("run/checkpoints/last.ckpt")
    Path("model").mkdir()
    save_file({"weight": torch.ones(2)}, "model/model.safetensors")
    Path("link").symlink_to("model")
    kept = sorted(Path().rglob("*"))
    last = "run/checkpoints/last.ckpt"
    for line, words in [
        (["export", last, "--to", "run/checkpoints"], f"run/checkpoints is, or holds, {last}"),
        (["export", last, "--to", "run"], f"run is, or holds, {last}"),
        (["export", last, "--to", "."], f". is, or holds, {last}"),
        (["import", "model", "--to", "model"], "model is, or holds, model"),
        (["import", "model/model.safetensors", "--to", "link"], "link is, or holds, model/model"),
        (["import", str(Path("model").absolute()), "--to", ".."], ".. is, or holds, "),
    ]:
        assert words in complaint(capsys, *line, "--force")
    assert sorted(Path().rglob("*")) == kept


def test_force_replaces_no_folder_around_the_working_directory(
    holder: Holder, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("here").mkdir()
    monkeypatch.chdir("here")
    for target in (".", str(Path.cwd())):
        said = complaint(capsys, "export", "../source", "--to", target, "--force")
        assert f"{target} holds the working directory" in said


def test_damage_is_named_and_leaves_nothing(holder: Holder, capsys: Any) -> None:
    shards = Path("source/__0_0.distcp")
    data = bytearray(shards.read_bytes())
    at = data.index(holder.embedding().numpy().tobytes())
    data[at] ^= 1
    shards.write_bytes(data)
    for target in ("file.ckpt", "model.safetensors", "folder"):
        said = complaint(capsys, "export", "source", "--to", target)
        assert "was damaged" in said
        assert "wte.weight" in said


def test_a_failing_disk_leaves_what_was_there(
    holder: Holder, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file.ckpt").write_text("older")
    Path("folder").mkdir()
    Path("folder/older").touch()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for target in ("file.ckpt", "folder"):
            assert run_command(["export", "source", "--to", target, "--force"]) == 1
            assert "No space left on device" in capsys.readouterr().err
    assert Path("file.ckpt").read_text() == "older"
    assert [each.name for each in Path("folder").iterdir()] == ["older"]
    assert {each.name for each in Path().iterdir()} == {"source", "file.ckpt", "folder"}
    assert run_command(["export", "source", "--to", "folder", "--force"]) == 0
    assert [each.name for each in Path("folder").iterdir()] == ["model.safetensors"]
