"""Trains with a divided sequence and compares with one process: fits, evaluations, checkpoints."""

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from boltmesh.errors import ConfigError, LayoutError, UnsupportedError
from boltmesh.strategies import ContextParallelStrategy, DDPStrategy, gathered_parameters
from boltmesh.strategies.context.rules import CUT_RULES
from boltmesh.strategies.context.seq_shard import ContextState, SeqShard, cut
from tests.support.context_models import Trained, batch_of, built
from tests.support.context_runs import world
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow(20)]


def context(**options: Any) -> ContextParallelStrategy:
    return ContextParallelStrategy(**{"telemetry": False, "timeout_s": 600.0, **options})


class AdamW(Trained):
    """Keeps what each step logged and the norm of its gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], _: int = 0) -> Tensor:
        loss = super().training_step(batch)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Gradients of biases of keys are zero but for roundings, which a small eps would enlarge.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Texts(torch.utils.data.Dataset[Any]):
    """Texts with a prompt of ``-100`` labels each, of other lengths."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        batch = batch_of("llama", 21, torch.Generator().manual_seed(row))
        return {key: each[row % 2] for key, each in batch.items()}


def loader(share: int, shares: int, rows: int = 2) -> DataLoader[Any]:
    """Batches of texts of one data rank."""
    return DataLoader(Subset(Texts(), range(share, 16, shares)), batch_size=rows)


def trained(
    name: str, strategy: Any, devices: int, texts: DataLoader[Any], **options: Any
) -> tuple[AdamW, Trainer]:
    torch.manual_seed(1)
    module = AdamW(built(name))
    trainer = quiet_trainer(devices, strategy, **options)
    trainer.fit(module, texts, texts)
    return module, trainer


def values_of(module: LightningModule) -> list[Tensor]:
    with gathered_parameters(module):
        return [each.detach().clone() for each in module.parameters()]


def fit_beside(
    rank: int, size: int, name: str, strategy: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Train on all ranks, then in one process; return how far apart they are."""
    context_size = strategy.get("size", size)
    data = size // context_size
    own, whole = (loader(rank // context_size, data), loader(0, 1, 2 * data))
    cut, trainer = trained(name, context(**strategy), size, own, **options)
    values = values_of(cut)
    one, reference = trained(name, "auto", 1, whole, **options)
    pairs = zip(values, one.parameters(), strict=True)
    found = {"parameters": max(float((a - b).abs().max()) for a, b in pairs)}
    if data == 1:
        metrics = [float(each.callback_metrics["val_loss"]) for each in (trainer, reference)]
        found["val_loss"] = abs(metrics[0] - metrics[1])
        losses = zip(cut.losses, one.losses, strict=True)
        found["losses"] = max(abs(a - b) for a, b in losses)
    return found


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_fit_is_that_of_one_process(stage: int) -> None:
    """With clipping, accumulation and AdamW, over every ZeRO stage."""
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    for found in run_ranks(fit_beside, 2, "llama", {"zero_stage": stage}, options):
        assert max(found.values()) < 2e-5, found


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_and_context_axes_train_together(stage: int) -> None:
    for found in run_ranks(fit_beside, 4, "gpt", {"size": 2, "zero_stage": stage}, {}):
        assert max(found.values()) < 2e-5, found


class Series(LightningModule):
    """Predicts the next values of a series, which are of the run's precision."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.into, self.out = nn.Linear(6, 16), nn.Linear(16, 6)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.out(self.encoder(self.into(batch)))
        return functional.mse_loss(found + torch.arange(6) / 7.0, batch.roll(1, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_in_double(rank: int, size: int) -> float:
    runs = []
    for devices, strategy in ((size, context()), (1, "auto")):
        torch.manual_seed(1)
        module, series = Series(), torch.randn(8, 8, 6)
        trainer = quiet_trainer(devices, strategy, precision="64-true")
        trainer.fit(module, DataLoader(series, batch_size=2))  # type: ignore[arg-type]
        runs.append([each.detach() for each in module.parameters()])
    assert {each.dtype for each in runs[0]} == {torch.float64}
    return max(float((one - other).abs().max()) for one, other in zip(*runs, strict=True))


def test_a_step_in_double_precision_equals_one_process() -> None:
    assert max(run_ranks(fit_in_double, 2)) < 1e-12


def fit_with_dims(rank: int, size: int, dims: dict[str, int]) -> tuple[set[int], float]:
    """Train two batches; return the dims that were cut, and how far parameters are apart."""
    strategy = context(dims=dims)
    cut, _ = trained("gpt", strategy, size, loader(0, 1), limit_train_batches=2)
    one, _ = trained("gpt", "auto", 1, loader(0, 1), limit_train_batches=2)
    pairs = zip(values_of(cut), one.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return {each.dim for each in strategy.context_axis.entries}, apart


@pytest.mark.full
def test_an_axis_that_is_named_is_divided() -> None:
    """Also one along which nothing looks: the rows of a batch."""
    for dims, apart in run_ranks(fit_with_dims, 2, {"input_ids": 0}):
        assert dims == {0}
        assert apart < 2e-5


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_blocks_may_be_run_again_and_mlps_in_tiles(kind: str) -> None:
    strategy = {"activation_checkpointing": kind, "tile_tokens": 4, "zero_stage": 3}
    for found in run_ranks(fit_beside, 2, "llama", strategy, {"limit_train_batches": 2}):
        assert max(found.values()) < 2e-5, found


class LengthNorm(nn.LayerNorm):
    """Depends on how long the sequence is, which no analysis of tensors sees."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x.shape[1] / 16)


def fit_with_lengths(rank: int, size: int) -> float:
    """Train two batches; return how far parameters are apart from those of one process."""
    values: list[list[Tensor]] = []
    for strategy, devices in ((context(), size), ("auto", 1)):
        torch.manual_seed(1)
        model: Any = built("gpt")
        model.norm = LengthNorm(32)
        module = AdamW(model)
        quiet_trainer(devices, strategy, limit_train_batches=2).fit(module, loader(0, 1))
        values.append(values_of(module))
    return max(float((a - b).detach().abs().max()) for a, b in zip(*values, strict=True))


@pytest.mark.full
def test_a_module_that_reads_its_length_sees_that_of_the_whole() -> None:
    assert max(run_ranks(fit_with_lengths, 2)) < 2e-5


class Manual(AdamW):
    """Steps its optimizer itself, after every second batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], index: int = 0) -> Tensor:
        loss = super().training_step(batch)
        self.manual_backward(loss / 2)
        if index % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss


def fit_by_hand(rank: int, size: int, stage: int) -> float:
    """Train with manual optimisation; return how far parameters are apart."""
    modules: list[Manual] = []
    values: list[list[Tensor]] = []
    for strategy, devices in ((context(zero_stage=stage), size), ("auto", 1)):
        torch.manual_seed(1)
        modules.append(Manual(built("llama")))
        trainer = quiet_trainer(devices, strategy, limit_train_batches=4)
        trainer.fit(modules[-1], loader(0, 1))
        values.append(values_of(modules[-1]))
    pairs = zip(*values, strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_may_be_optimised_by_hand(stage: int) -> None:
    assert max(run_ranks(fit_by_hand, 2, stage)) < 2e-5


class Overflows(Callback):
    """Makes gradients of the second rank's positions infinite in the second batch."""

    def __init__(self) -> None:
        self.is_due = False
        self.seen: list[list[Tensor]] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        pl_module.model.model.lm_head.register_forward_pre_hook(self._spoil)

    def _spoil(self, _: nn.Module, inputs: Any) -> None:
        if self.is_due:
            inputs[0].local.register_hook(lambda gradient: gradient * float("inf"))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, at: int) -> None:
        strategy: Any = trainer.strategy
        self.is_due = at == 1 and strategy.coordinates["context"] == 1

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.seen.append(values_of(pl_module))


def overflow(rank: int, size: int, stage: int) -> tuple[list[bool], float, bool]:
    """Train under fp16; return which steps changed something, the scale, and if all is finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin, spoils = MixedPrecision("16-mixed", device="cpu", scaler=scaler), Overflows()
    torch.manual_seed(1)
    options: dict[str, Any] = {"plugins": [plugin], "callbacks": [spoils], "limit_train_batches": 4}
    trainer = quiet_trainer(size, context(zero_stage=stage), gradient_clip_val=1.0, **options)
    trainer.fit(AdamW(built("llama")), loader(0, 1))
    pairs = itertools.pairwise(spoils.seen)
    moved = [any(not torch.equal(*each) for each in zip(*pair, strict=True)) for pair in pairs]
    finite = all(bool(each.isfinite().all()) for each in spoils.seen[-1])
    return moved, scaler.get_scale(), finite


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_an_fp16_overflow_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    for found in run_ranks(overflow, 2, stage):
        assert found == ([False, True, True], 64.0, True)


# Refused before the first step.


def refused(rank: int, size: int, kind: str) -> str:
    """Return the error of a fit."""
    strategy = context()
    module: LightningModule = AdamW(built("llama"))
    texts: Any = loader(0, 1)
    if kind == "wrong rule":  # attention that counts its queries from the first one given
        CUT_RULES["scaled_dot_product_attention"] = lambda *_: NotImplemented
    elif kind == "reentrant":
        model: Any = module.model.model
        model.gradient_checkpointing_enable({"use_reentrant": True})
    elif kind == "compiled":
        inner: Any = module.model.model
        module.model.model = torch.compile(inner)
    elif kind == "no sequence":
        module, texts = Trained(Classifier()), DataLoader(Points(), batch_size=2)
    elif kind == "flex":
        module.model.model.set_attn_implementation("flex_attention")  # type: ignore[operator]
    elif kind == "gather":
        module, strategy = AdamW(built("gpt")), context(max_gather_bytes=1000)
    elif kind == "no such tensor":
        strategy = context(dims={"tokens": 1})
    elif kind == "no such dim":
        strategy = context(dims={"input_ids": 2})
    elif kind == "other batches":
        texts = DataLoader(Subset(Texts(), range(rank, 16)), batch_size=2)
    with pytest.raises((ConfigError, UnsupportedError)) as caught:
        quiet_trainer(size, strategy).fit(module, texts)
    return str(caught.value)


class Points(torch.utils.data.Dataset[Any]):
    """Points in a plane."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": torch.ones(2) * row, "y": torch.tensor(row % 2)}


class Classifier(nn.Module):
    """No axis of the data but the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(self.layer(batch["x"]), batch["y"])


@pytest.mark.sample(
    "wrong rule-computes something else than whole: it gives",
    "compiled-is compiled, which a divided sequence cannot pass through",
    "other batches-All ranks of a context group have to get the same batch",
)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("wrong rule", "computes something else than whole: it gives"),
        ("reentrant", "Reentrant activation checkpointing hides"),
        ("compiled", "is compiled, which a divided sequence cannot pass through"),
        ("no sequence", "has no sequence that could be divided over 2 ranks"),
        ("flex", "FlexAttention does not support backward on CPU"),
        ("gather", "max_gather_bytes=1,000"),
        ("no such tensor", "names dim 1 of 'tokens', and the batch has {'input_ids': (2, 21)"),
        ("no such dim", "names dim 2 of 'input_ids'"),
        ("other batches", "All ranks of a context group have to get the same batch"),
    ],
)
def test_what_would_be_wrong_is_refused_before_the_first_step(kind: str, text: str) -> None:
    for error in run_ranks(refused, 2, kind):
        assert text in error
        assert len(error) < 800


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 0}, "size=0 holds no rank"),
        ({"attention": "rings"}, "attention='rings' does not exist"),
        ({"balance": "even"}, "balance='even' does not exist"),
        ({"zero_stage": 4}, "zero_stage=4 is no ZeRO stage"),
        ({"max_gather_bytes": 0}, "max_gather_bytes=0 allows no gather"),
        ({"tile_tokens": 0}, "tile_tokens=0 is the number of positions"),
        ({"dims": {"input_ids": "1"}}, "names no dim of a batch"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ContextParallelStrategy(**options)


def test_a_size_that_the_ranks_do_not_have_is_refused_with_one_that_fits() -> None:
    with pytest.raises(LayoutError, match="Set size=3, or start a multiple of 4 ranks"):
        ContextParallelStrategy(size=4).choose_layout(6)


# Dropout.


def dropped(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Dropout of a cut tensor, of a whole one behind it, and of the cut one again."""
    state = ContextState(world())
    torch.manual_seed(3)
    cut_ones = cut(torch.ones(2, 32, 4), 1, state)
    first = functional.dropout(cut_ones, 0.5)
    whole = functional.dropout(torch.ones(64), 0.5)
    torch.manual_seed(3)
    again = functional.dropout(cut_ones, 0.5)
    assert isinstance(first, SeqShard)
    assert isinstance(again, SeqShard)
    return first.local, whole, again.local


@pytest.mark.full
def test_dropout_differs_where_cut_and_repeats() -> None:
    (one, whole, again), (other, other_whole, _) = run_ranks(dropped, 2)
    assert not torch.equal(one, other)
    assert torch.equal(whole, other_whole)
    assert torch.equal(one, again)


# Checkpoints.


def saved(rank: int, size: int, path: str, stage: int) -> None:
    """Train an epoch and save."""
    strategy = context(zero_stage=stage)
    _, trainer = trained("llama", strategy, size, loader(0, 1))
    trainer.save_checkpoint(path)


def resumed(rank: int, size: int, path: str) -> float:
    """Train a second one in one process; compare with one that was never stopped."""
    one, _ = trained("llama", "auto", 1, loader(0, 1), max_epochs=2)
    module = AdamW(built("llama"))
    strategy = DDPStrategy(telemetry=False)
    trainer = quiet_trainer(1, strategy, max_epochs=2)
    trainer.fit(module, loader(0, 1), ckpt_path=path)
    pairs = zip(module.parameters(), one.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_goes_on_from_a_checkpoint(tmp_path: Any, stage: int) -> None:
    path = str(tmp_path / "epoch.ckpt")
    run_ranks(saved, 2, path, stage)
    assert max(run_ranks(resumed, 1, path)) < 2e-5
