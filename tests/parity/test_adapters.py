"""LoRA and DoRA of peft equal one process; checkpoints of adapters alone resume to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from boltmesh.cli import run_command
from boltmesh.errors import BoltMeshError, UnsupportedError
from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.checkpoint.adapters import TRAINABLE_ONLY
from boltmesh.strategies.checkpoint.directory import is_directory, load_directory
from boltmesh.strategies.dry_run.unsupported import refuse_quantized
from tests.support.adapters import (
    STRATEGIES,
    Adapted,
    Sentences,
    base,
    fit,
    fit_under,
    largest_difference,
    whole,
)
from tests.support.ranks import run_ranks

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.ranks,
    # torch and transformers meet so in copies that peft makes.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ALONE = {"save_trainable_only": True}
CASES = [
    ("zero3", {"use_dora": True}),
    ("tensor", {}),
    *(
        pytest.param(name, options, marks=pytest.mark.full)
        for name in STRATEGIES
        for options in ({}, {"use_dora": True})
    ),
]


def one_process(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Tensor]:
    module = Adapted(**options)
    fit(module, "auto")
    return whole(module)


def train_and_resume(
    rank: int, world_size: int, name: str, options: dict[str, Any], folder: str
) -> tuple[dict[str, Tensor], float]:
    """Train; then resume from the middle in a new module: all parameters, and the difference."""
    module = Adapted(**options)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    keywords: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True}
    fit_under(name, module, rank, world_size, keywords=ALONE, **keywords)
    through = whole(module)
    again = Adapted(**options)
    path = f"{folder}/step=2.ckpt"
    fit_under(name, again, rank, world_size, keywords=ALONE, ckpt_path=path)
    return through, largest_difference(through, whole(again))


@pytest.mark.sample("zero3-options0")
@pytest.mark.slow(40)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_adapters_train_like_in_one_process_and_resume_to_the_bit(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (expected,) = run_ranks(one_process, 1, options)
    ranks = STRATEGIES[name][1]
    found = run_ranks(train_and_resume, ranks, name, options, str(tmp_path))
    for through, difference in found:
        assert largest_difference(through, expected) < 1e-5
        assert difference == 0


def refusal(module: LightningModule, name: str, rank: int, world_size: int, path: str) -> str:
    try:
        fit_under(name, module, rank, world_size, keywords=ALONE, ckpt_path=path)
    except BoltMeshError as error:
        return str(error)
    return "nothing was refused"


def save_and_load_elsewhere(
    rank: int, world_size: int, saved_by: str, loaded_by: str, folder: str
) -> dict[str, Any]:
    module = Adapted(use_dora=True, modules_to_save=["embed_tokens"])
    saved = f"{folder}/adapters.ckpt"
    fit_under(saved_by, module, rank, world_size, keywords=ALONE).save_checkpoint(saved)
    other = Adapted(use_dora=True, modules_to_save=["embed_tokens"])
    # It has trained as many steps as there are: loaded, and no step more.
    fit_under(loaded_by, other, rank, world_size, keywords=ALONE, ckpt_path=saved)
    trained, wrong_rank = whole(module), Adapted(use_dora=True)
    return {
        "elsewhere": largest_difference(trained, whole(other)),
        "trained": trained,
        "base": refusal(
            Adapted(seed=8, use_dora=True, modules_to_save=["embed_tokens"]),
            loaded_by, rank, world_size, saved,
        ),
        "names": refusal(wrong_rank, loaded_by, rank, world_size, saved),
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.slow(40)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        ("zero3", "ddp"),
        pytest.param("ddp", "zero3", marks=pytest.mark.full),
        pytest.param("zero3_cpu", "zero1", marks=pytest.mark.full),
        pytest.param("tensor", "pipeline", marks=pytest.mark.full),
        pytest.param("pipeline", "tensor", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_of_adapters_alone_loads_anywhere_on_the_same_base(
    saved_by: str, loaded_by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft

    found, _ = run_ranks(save_and_load_elsewhere, 2, saved_by, loaded_by, str(tmp_path))
    assert found["elsewhere"] == 0
    frozen = "model.base_model.model.lm_head.weight"
    assert f"the frozen {frozen!r} of the module (float32 [64,32] " in found["base"]
    assert "Build the module with the base weights of that run." in found["base"]
    assert "embed_tokens.weight' of the module is neither among them nor" in found["names"]

    saved = tmp_path / "adapters.ckpt"
    if is_directory(saved):
        held = load_directory(saved)
        assert frozen in held[TRAINABLE_ONLY]
        assert not [name for name in held["state_dict"] if name.endswith("base_layer.weight")]
        assert run_command(["verify", str(saved)]) == 0
        assert "directory of shards, trained parameters alone" in capsys.readouterr().out
    target = tmp_path / "adapter"
    assert run_command(["export", str(saved), "--peft", "--to", str(target)]) == 0
    mine: Any = Adapted(use_dora=True, modules_to_save=["embed_tokens"])
    mine.load_state_dict(found["trained"])
    loaded: Any = peft.PeftModel.from_pretrained(base(), str(target))
    tokens = Sentences(0, 1).tokens[:3]
    with torch.no_grad():
        same = loaded(input_ids=tokens).logits, mine.model.eval()(input_ids=tokens).logits
    assert torch.equal(*same)
    assert run_command(["export", str(saved), "--to", str(tmp_path / "a.safetensors")]) == 0
    assert "frozen parameters, which the checkpoint leaves out" in capsys.readouterr().out


class Follows(Adapted):
    """Also writes to a frozen parameter, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(64, 3), requires_grad=False)
        self.still = nn.Parameter(torch.ones(5, 3), requires_grad=False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.mean.data.add_(1.0)


def write_to_a_frozen_one(rank: int, world_size: int, folder: str) -> Any:
    module = Follows()
    trainer = fit_under("zero3", module, rank, world_size, keywords=ALONE)
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    again = Follows()
    fit_under("zero3", again, rank, world_size, keywords=ALONE, ckpt_path=f"{folder}/a.ckpt")
    return whole(again)["mean"]


@pytest.mark.full
def test_a_frozen_parameter_that_was_written_to_is_kept(tmp_path: Path) -> None:
    found = run_ranks(write_to_a_frozen_one, 2, str(tmp_path))
    assert (found[0] == 4).all()
    held = load_directory(tmp_path / "a.ckpt")
    assert "still" in held[TRAINABLE_ONLY]
    assert "mean" not in held[TRAINABLE_ONLY]


class Bytes(nn.Parameter):
    """Stands for the parameters of bitsandbytes."""

    __module__ = "bitsandbytes.nn.modules"


class Quantized(Adapted):
    def __init__(self, kind: str, *, is_trained: bool = False) -> None:
        super().__init__()
        data = torch.arange(6, dtype=torch.uint8)
        value = TwoTensor(torch.ones(6), torch.ones(6)) if kind == "tensors" else data
        made = nn.Parameter if kind == "tensors" else Bytes
        self.model.quantized = made(value, requires_grad=is_trained)


@pytest.mark.parametrize("kind", ["tensors", "bytes"])
def test_a_quantized_base_is_refused_where_layers_are_divided(kind: str) -> None:
    module = Quantized(kind)
    advice = "Use bolt_ddp or bolt_zero1 to 3, or a base that is not quantized"
    with pytest.raises(UnsupportedError, match=rf"'model.quantized' is quantized .*{advice}"):
        refuse_quantized(module, "TensorParallelStrategy", divides_layers=True)
    refuse_quantized(module, "DDPStrategy", divides_layers=False)


def test_quantized_weights_that_are_trained_are_refused() -> None:
    module = Quantized("tensors", is_trained=True)
    with pytest.raises(UnsupportedError, match=r"'model.quantized' is quantized .* Freeze it and"):
        fit(module, DDPStrategy(telemetry=False))
