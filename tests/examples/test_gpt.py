"""The example model: what it computes, how it learns, and that it knows nothing of boltmesh."""

import ast
import math
from pathlib import Path
from typing import Any

import gpt
import pytest
import torch
from gpt import GPT
from lightning.pytorch import Trainer, seed_everything
from text import TextData
from torch import Tensor

SMALL: dict[str, Any] = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}


@pytest.fixture
def model() -> GPT:
    seed_everything(0, verbose=False)
    return GPT(**SMALL)


@pytest.fixture
def data(tmp_path: Path) -> TextData:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return TextData(tmp_path, block_size=16, batch_size=8)


def quiet_trainer(folder: Path, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", default_root_dir=folder, **{**quiet, **arguments})


def test_the_example_imports_nothing_of_boltmesh() -> None:
    tree = ast.parse(Path(gpt.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imports
    assert not [node for node in imports if "boltmesh" in ast.unparse(node)]


def test_an_untrained_model_knows_nothing(model: GPT) -> None:
    tokens = torch.randint(256, (64, 17))
    loss = model.loss((tokens[:, :-1], tokens[:, 1:]))
    assert loss.item() == pytest.approx(math.log(256), rel=0.1)


def test_a_position_sees_only_what_is_before_it(model: GPT) -> None:
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0


def test_tied_weights_are_one_parameter(model: GPT) -> None:
    tied = GPT(**SMALL, tie_weights=True)
    assert tied.head.weight is tied.token_embedding.weight
    count = sum(weight.numel() for weight in model.parameters())
    assert sum(weight.numel() for weight in tied.parameters()) == count - 256 * 32


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="n_embd=30 is not a multiple of n_head=4"):
        GPT(n_embd=30, n_head=4)


def test_only_matrices_and_embeddings_decay(model: GPT) -> None:
    model.trainer = Trainer(max_steps=10, logger=False, accelerator="cpu")
    model.trainer.fit_loop.setup_data = lambda: None  # the schedule needs the last step only
    optimizer = model.configure_optimizers()["optimizer"]
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {weight.dim() for weight in decaying["params"]} == {2}
    assert {weight.dim() for weight in others["params"]} == {1}
    found = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert found == {id(weight) for weight in model.parameters()}


@pytest.mark.parametrize("limit", [{"max_steps": 30}, {"max_steps": -1, "max_time": "00:00:01:00"}])
def test_the_learning_rate_warms_up_and_falls_to_a_tenth(
    tmp_path: Path, data: TextData, limit: dict[str, Any]
) -> None:
    rates: list[float] = []

    class Watched(GPT):
        def on_train_batch_end(self, *_: object) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            self.trainer.should_stop = len(rates) == 30

    model = Watched(**SMALL, warmup_steps=5, learning_rate=1.0)
    quiet_trainer(tmp_path, enable_checkpointing=False, **limit).fit(model, data)
    assert rates[:5] == pytest.approx([2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    if "max_time" in limit:
        assert rates[5:] == [1.0] * 25  # nobody knows the last step
    else:
        assert rates[5:] == sorted(rates[5:], reverse=True)
        assert rates[-1] == pytest.approx(0.1)


def test_drawn_text_repeats_by_its_seed_and_differs_from_the_likeliest(model: GPT) -> None:
    prompt = torch.randint(256, (2, 5))

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model.generate(prompt, 30, draw=True)

    likeliest = model.generate(prompt, 30)
    assert torch.equal(likeliest[:, :5], prompt)
    assert likeliest.shape == draw(0).shape == (2, 35)
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert torch.equal(likeliest[:, 5], model(prompt)[:, -1].argmax(-1))


def test_it_learns_validates_tests_and_repeats_its_continuations(
    tmp_path: Path, data: TextData, model: GPT
) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=80)
    before = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    trainer.fit(model, data)
    after = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    assert before > 5
    assert after < 2.5
    assert trainer.test(model, data, verbose=False)[0]["test_loss"] == pytest.approx(after)

    predictions = trainer.predict(model, data)
    restored = GPT.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    again = quiet_trainer(tmp_path).predict(restored, data)
    assert isinstance(predictions, list)
    assert isinstance(again, list)
    for one, other in zip(predictions, again, strict=True):
        assert isinstance(one, Tensor)
        assert one.shape == (8, 16 + 64)
        assert torch.equal(one, other)
