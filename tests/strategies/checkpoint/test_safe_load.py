"""No code of a checkpoint is run, wherever it comes from and whoever loads it."""

import ast
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from boltmesh.cli import run_command
from boltmesh.errors import CheckpointError, ConfigError, UnsafeCheckpointError
from boltmesh.strategies import DDPStrategy, StartingWeights, ZeROStrategy
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO, load_file
from boltmesh.strategies.checkpoint.safe_load import safe_load
from tests.support import object_store
from tests.support.file_server import serving
from tests.support.ftp_server import serving_ftp
from tests.support.ranks import run_ranks
from tests.support.tiny import TinyData, TinyModel

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "support" / "tiny.yaml"
Figure = Callable[[str, int, int], None]
VERBS = ("fit", "validate", "test", "predict")
STRATEGIES: dict[str, Any] = {"ddp": DDPStrategy, "zero3": lambda: ZeROStrategy(stage=3)}


class Harmful:
    """Makes a file when it is unpickled, in three of many ways."""

    def __init__(self, mark: Path, way: str = "system") -> None:
        self.mark, self.way = mark, way

    def __reduce__(self) -> Any:
        if self.way == "system":
            return os.system, (f"touch {self.mark}",)
        if self.way == "run":
            return subprocess.run, (["touch", str(self.mark)],)
        return eval, (f"open({str(self.mark)!r}, 'w')",)


class Harmless:
    """A class of the user's, say in hyper-parameters."""


def trainer(strategy: Any, **arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **arguments,
    )


def content(**more: Any) -> dict[str, Any]:
    model = TinyModel()
    run = trainer(DDPStrategy())
    run.strategy.connect(model)
    checkpoint = run._checkpoint_connector.dump_checkpoint(weights_only=True)
    return {**checkpoint, **more}


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """What harmful files make, and must not have made."""
    path = tmp_path / "code-was-run"
    yield path
    assert not path.exists()


@pytest.fixture(params=["path", "file", "http", "ftp", "memory", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where the file ``served/a.ckpt`` of the test lies, once ``publish`` has been called."""
    (tmp_path / "served").mkdir()
    object_store.install(tmp_path / "objects")
    with serving(tmp_path / "served") as address, serving_ftp(tmp_path / "served") as ftp:
        yield {
            "file": f"file://{tmp_path}/served/a.ckpt",
            "ftp": f"{ftp}/a.ckpt",
            "objects": "objects://bucket/a.ckpt",  # as s3 and gs are
            "path": str(tmp_path / "served" / "a.ckpt"),
            "http": f"{address}/a.ckpt",
            "memory": "memory://served/a.ckpt",
        }[request.param]
    memory = fsspec.filesystem("memory")
    if memory.exists("/served"):
        memory.rm("/served", recursive=True)


def publish(value: Any, folder: Path) -> None:
    file = folder / "served" / "a.ckpt"
    torch.save(value, file)
    fsspec.filesystem("memory").pipe_file("/served/a.ckpt", file.read_bytes())
    if (folder / "objects").is_dir():
        fsspec.filesystem("objects").pipe_file("bucket/a.ckpt", file.read_bytes())


@pytest.mark.each_choice
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_trainer_runs_no_code(
    kind: str, verb: str, place: str, mark: Path, tmp_path: Path, figure: Figure
) -> None:
    publish(content(bomb=Harmful(mark)), tmp_path)
    run = trainer(STRATEGIES[kind]())
    with pytest.raises(UnsafeCheckpointError) as caught:
        getattr(run, verb)(TinyModel(), datamodule=TinyData(), ckpt_path=place)
    said = str(caught.value)
    shown = place.removeprefix("file://")
    assert said.startswith(f"{shown} was not loaded, because loading it could run code: it names ")
    assert "posix.system" in said
    assert "weights_only" not in said
    # Lightning does not pass the argument on to strategies that restore after their setup.
    error = ConfigError if kind == "ddp" else UnsafeCheckpointError
    with pytest.raises(error, match=r"boltmesh never runs|was not loaded"):
        getattr(trainer(STRATEGIES[kind]()), verb)(
            TinyModel(), datamodule=TinyData(), ckpt_path=place, weights_only=False
        )
    assert not mark.exists()
    figure("harmful checkpoints at paths and addresses: no code is run", 1, 1)


@pytest.mark.each_choice
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_good_file_still_resumes(kind: str, place: str, tmp_path: Path) -> None:
    first = trainer(STRATEGIES[kind](), limit_train_batches=3)
    model = TinyModel()
    first.fit(model, datamodule=TinyData())
    run = trainer(DDPStrategy(), limit_train_batches=3)
    run.fit(TinyModel(), datamodule=TinyData())
    publish(run._checkpoint_connector.dump_checkpoint(), tmp_path)
    resumed = TinyModel()
    again = trainer(STRATEGIES[kind](), limit_train_batches=3)
    again.fit(resumed, datamodule=TinyData(), ckpt_path=place)
    assert again.global_step == 3
    stored = load_file(tmp_path / "served" / "a.ckpt")["state_dict"]
    found: dict[str, Tensor] = resumed.state_dict()
    assert found.keys() == stored.keys()
    for name, each in stored.items():
        assert torch.equal(getattr(found[name], "full_tensor", lambda v=found[name]: v)(), each)


@pytest.mark.each_choice
@pytest.mark.parametrize("verb", VERBS)
def test_commands_run_no_code(
    verb: str,
    place: str,
    mark: Path,
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
    figure: Figure,
) -> None:
    monkeypatch.chdir(tmp_path)
    publish(content(bomb=Harmful(mark)), tmp_path)
    key = "resume" if verb == "fit" else "ckpt_path"
    assert run_command([verb, str(TINY), "trainer.devices=1", f"{key}={place}"]) == 2
    lines = [each for each in capfd.readouterr().err.splitlines() if "boltmesh: " in each]
    assert len(lines) == 1, lines
    shown = place.removeprefix("file://")
    assert lines[0].startswith(f"boltmesh: {shown} was not loaded, because")
    assert not mark.exists()
    figure("harmful checkpoints at paths and addresses: no code is run", 1, 1)


def test_conversions_run_no_code(
    place: str, mark: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    publish(content(bomb=Harmful(mark)), tmp_path)
    for line in (["import", place, "--to", "b"], ["export", place, "--to", "b.safetensors"]):
        assert run_command(line) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1
        is_local = place.startswith(("/", "file:"))
        assert ("posix.system" if is_local else "local disk alone") in said


def _load_on_ranks(rank: int, world_size: int, place: str) -> tuple[str, str, int]:
    run = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    try:
        run.validate(TinyModel(), datamodule=TinyData(), ckpt_path=place, verbose=False)
    except CheckpointError as error:
        return type(error).__name__, str(error), error.exit_code
    raise AssertionError


@pytest.mark.ranks
def test_ranks_refuse_together(mark: Path, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    publish(content(bomb=Harmful(mark)), tmp_path)
    with serving(tmp_path / "served") as address:
        found = run_ranks(_load_on_ranks, 2, f"{address}/a.ckpt")
    assert found[0] == found[1]
    kind, said, exit_code = found[0]
    assert (kind, exit_code) == ("UnsafeCheckpointError", 2)
    assert said.endswith("(rank 0)")


@pytest.mark.parametrize("way", ["system", "run", "eval"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_every_way_and_format_is_refused(
    way: str, is_zip: bool, mark: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"bomb": Harmful(mark, way)}, path, _use_new_zipfile_serialization=is_zip)
    for load in (load_file, AtomicCheckpointIO().load_checkpoint, StartingWeights(str(path))._load):
        arguments = {"checks_files": True} if load.__name__ == "_load" else {"place": path}
        arguments = {"path": path} if load.__name__ == "load_checkpoint" else arguments
        with pytest.raises(UnsafeCheckpointError, match="could run code: it names"):
            load(**arguments)


def test_a_class_of_the_user_is_named_and_can_be_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"hyper_parameters": {"of": Harmless()}}, path)
    with pytest.raises(UnsafeCheckpointError) as caught:
        load_file(path)
    said = str(caught.value)
    assert f"it names {Harmless.__module__}.Harmless. Save plain values" in said
    assert "torch.serialization.add_safe_globals([...])" in said
    with torch.serialization.safe_globals([Harmless]):
        assert isinstance(load_file(path)["hyper_parameters"]["of"], Harmless)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.s:FutureWarning")  # from torch 2.14 on
def test_what_is_no_checkpoint_is_said_without_advice_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    script = path.read_bytes()
    for data in (b"", b"nothing of torch", b"PK\x03\x04 and no more", script, script[:-40]):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"a\.ckpt cannot be loaded: it is") as caught:
            load_file(path, is_mapped=True)
        said = str(caught.value)
        assert "weights_only" not in said
        assert said.isprintable()


def test_names_cannot_fool_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"\x80\x02c\x1b[2Jevil\nbo\x07om\n.")
    with pytest.raises(CheckpointError) as caught:
        safe_load(path, path)
    assert str(caught.value).isprintable()


ALLOWED = {
    # Objects between ranks of one job, which trust each other.
    "strategies/pipeline/layerwise_eval.py": {"pickle.loads"},
    "strategies/pipeline/stage/unit_outputs.py": {"pickle.Unpickler"},
    # An unpickler that builds what torch's metadata consists of, and nothing else.
    "strategies/checkpoint/shard_reader.py": {"pickle.Unpickler"},
    "strategies/checkpoint/safe_load.py": {"torch.load"},
}
UNPICKLING = {
    "torch.load",
    "torch.jit.load",
    "torch.hub.load_state_dict_from_url",
    "torch.serialization.load",
    "lightning.fabric.utilities.cloud_io._load",
    "lightning.pytorch.utilities.cloud_io.load",
    *(f"{module}.{name}" for module in ("pickle", "dill", "cloudpickle", "joblib", "marshal")
      for name in ("load", "loads", "Unpickler")),
}  # fmt: skip


def unpickling(source: str) -> Iterator[str]:
    """What a module names, by full names, of what can unpickle."""
    names: dict[str, str] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                names[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for each in node.names:
                names[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            first, *rest = ast.unparse(node).split(".")
            name = ".".join((names.get(first, first), *rest))
            if name in UNPICKLING:
                yield name


def test_the_package_unpickles_in_one_place() -> None:
    found: dict[str, set[str]] = {}
    for folder in ("boltmesh", "strategies", "configs", "tui"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if "load" in source and (names := set(unpickling(source))):
                found[path.relative_to(ROOT).as_posix()] = names
    assert found == ALLOWED


def test_the_search_sees_each_spelling() -> None:
    for source in (
        "import torch\ntorch.load('a')",
        "import torch as t\nf = t.load",
        "from torch import load\nload('a')",
        "from lightning.fabric.utilities.cloud_io import _load as pl_load\npl_load('a')",
        "import pickle\npickle.loads(b'')",
        "from pickle import Unpickler\nclass A(Unpickler): ...",
    ):
        assert list(unpickling(source)), source
