"""What modules of the zoo do that no other test has, in the smallest module that does it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError
from torchmetrics.functional import accuracy, f1_score

from boltmesh.strategies import (
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.support.numbered import Losses
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

STRATEGIES: dict[str, tuple[int, Any]] = {
    "one process": (1, lambda: "auto"),
    "pipeline": (
        2, lambda: PipelineParallelStrategy(schedule="1f1b", microbatches=1, telemetry=False)
    ),
    "two microbatches": (
        2, lambda: PipelineParallelStrategy(schedule="gpipe", microbatches=2, telemetry=False)
    ),
    "tensor": (2, lambda: TensorParallelStrategy(telemetry=False)),
    "zero1": (2, lambda: ZeROStrategy(stage=1, telemetry=False)),
    "zero3": (2, lambda: ZeROStrategy(stage=3, blocks=["first", "second"], telemetry=False)),
    "zero in pipelines": (
        4,
        lambda: Parallel3DStrategy(pipeline=2, data=2, microbatches=1, telemetry=False),
    ),
    "3d": (
        4,
        lambda: Parallel3DStrategy(pipeline=2, tensor=2, microbatches=1, telemetry=False),
    ),
}  # fmt: skip


class Attention(nn.Module):
    """Its last matrix is in a list, as in vit-pytorch, and a block of its own if others differ."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(16, 48, bias=False)
        self.to_out = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        sizes = (rows, length, self.heads, width // self.heads)  # right by chance if heads differ
        q, k, v = (part.view(sizes).transpose(1, 2) for part in self.to_qkv(x).chunk(3, -1))
        y = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v
        return x + self.to_out(y.transpose(1, 2).reshape(x.shape))


class VisionTransformer(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(4), Attention(2)
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.second(self.first(batch))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MessagePassing(VisionTransformer):
    """Sums atoms to molecules in place, as the aggregations of chemprop do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Identity()  # type: ignore[assignment]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        atoms = self.first(batch).flatten(0, 1)
        molecules = torch.arange(len(atoms)) // 2
        index = molecules.unsqueeze(1).repeat(1, 16)
        sums = torch.zeros(len(atoms) // 2, 16)
        sums = sums.scatter_reduce_(0, index, atoms, "sum", include_self=False)
        return self.head(sums).square().mean()


class Forecast(VisionTransformer):
    """Raises if its loss is not a number, as the modules of neuralforecast do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if torch.isnan(loss):
            raise ValueError("Loss is NaN, training stopped.")
        return loss


class Distances(nn.Module):
    """A bias of attention for each distance between positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 1)

    def forward(self, length: int) -> Tensor:
        positions = torch.arange(length)
        bias: Tensor = self.table(positions[:, None] - positions + 4).squeeze(-1)
        return bias


class Biased(nn.Module):
    def __init__(self, distances: Distances | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.found = () if distances is None else (distances,)  # no child of it

    def forward(self, x: Tensor, *given: Distances) -> Tensor:
        (distances,) = given or self.found
        return x + torch.softmax(distances(x.shape[1]), -1) @ self.layer(x)


class Lends(VisionTransformer):
    """Blocks get the module of a bias as an argument, as in x-transformers, and call it."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = Distances()
        self.first, self.second = Biased(), Biased()  # type: ignore[assignment]
        self.third, self.fourth = Biased(self.distances), Biased(self.distances)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.second(self.first(batch, self.distances), self.distances)
        return self.head(self.fourth(self.third(x))).square().mean()


class Convolutions(VisionTransformer):
    """Trained in 64 bits, which a convolution takes with no other type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 4, 3, padding=1)  # type: ignore[assignment]


class LogsRate(VisionTransformer):
    """Reads the learning rate in the step, as many modules do to log it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        self.log("rate", optimizer.param_groups[0]["lr"])
        self.log("last_rate", schedule.get_last_lr()[0])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class ScaledError(MeanSquaredError):
    """A loss that reads what the step has set, as distributions of pytorch-forecasting do."""

    scale: float

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds * self.scale, target)


class SetsMetric(VisionTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.loss = ScaledError()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        made = self.head(self.second(self.first(batch)))
        self.loss.scale = 0.5 + batch_idx
        loss: Tensor = self.loss(made, torch.ones_like(made))
        self.log("train_error", self.loss, on_step=True)
        return loss


class Padded(VisionTransformer):
    """Torch's own encoder with a padding mask, which has a fast path of its own in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        del self.first, self.second

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mask = torch.arange(batch.shape[1]) >= batch[:, :1, 0].abs() * 2 + 1
        found = self.head(self.encoder(batch, src_key_padding_mask=mask)).square().sum(-1)
        return found.masked_fill(mask, 0.0).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.training_step(batch, batch_idx))


class Tags(nn.Module):
    """Embedding, layers and head in one module without repeated blocks, as a BiLSTM with a CRF."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.lstm = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.transitions = nn.Parameter(torch.randn(4, 4))
        self.head = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embedding(words))[0]) @ self.transitions
        return found


class Tagger(VisionTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.net = Tags()
        del self.first, self.second, self.head

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        words = (batch[..., 0] * 4).long().clamp(0, 11)
        return nn.functional.cross_entropy(self.net(words).flatten(0, 1), words.flatten() % 4)


class Grid(nn.Module):
    """Adds positions that it computes once for each length, as those of neuraloperator."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Tensor] | None = None
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.places is None or self.length != x.shape[1]:
            self.places, self.length = [torch.linspace(0, 1, x.shape[1])], x.shape[1]
        return x + self.places[0][:, None]


class Gridded(VisionTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.grid = Grid()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.grid(batch), batch_idx)


class Contrasted(Gridded):
    """A loss of the whole batch behind a grid."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.head(self.second(self.first(self.grid(batch)))).flatten(1)
        return (found @ found.T).logsumexp(1).mean()


class Scored(VisionTransformer):
    """Logs functions of torchmetrics of predicted classes, which look for classes that are none."""

    names = "f1_micro", "accuracy_micro", "f1_macro", "accuracy_macro", "most"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.second(self.first(batch))).flatten(0, 1)
        classes, predicted = torch.arange(len(logits)) % 3, logits.argmax(-1)
        for average in ("micro", "macro"):
            options: Any = {"task": "multiclass", "num_classes": 3, "average": average}
            self.log(f"f1_{average}", f1_score(predicted, classes, **options))
            self.log(f"accuracy_{average}", accuracy(predicted, classes, **options))
        counts = torch.unique(predicted, return_counts=True)[1]
        self.log("most", counts.max().float() if len(counts) else 0.0)
        return nn.functional.cross_entropy(logits, classes)


class Store:
    """Holds the tensors of a batch of another class, as in torch-geometric."""

    def __init__(self, atoms: Tensor) -> None:
        self.atoms = atoms


class Molecules:
    def __init__(self, atoms: Tensor) -> None:
        self.store = Store(atoms)


class Graphs(VisionTransformer):
    """Batches are objects, with other numbers of atoms each."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch.store.atoms, batch_idx)


class Codebook(nn.Module):
    """Sums over all ranks if there are some, as ``VectorQuantize`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        codes = x.detach().sum(1)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(codes)
        return self.layer(x) + codes.unsqueeze(1)


class Quantized(VisionTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.first = Codebook()  # type: ignore[assignment]


class Spike(torch.autograd.Function):
    """Whether a potential is above a threshold, with a smooth gradient, as in snntorch."""

    @staticmethod
    def forward(ctx: Any, potential: Tensor) -> Tensor:
        ctx.save_for_backward(potential)
        return (potential > 0).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (potential,) = ctx.saved_tensors
        return gradient / (1 + potential.square())


def spikes(x: Tensor) -> Tensor:
    """Spikes over time; an operator of a library that calls functions, as in spikingjelly."""
    potential, made = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        potential = 0.5 * (potential + x[:, step])
        made.append(Spike.apply(potential - 0.1))
    return torch.stack(made, 1)


LIBRARY = torch.library.Library("boltmesh_tests", "FRAGMENT")
LIBRARY.define("spikes(Tensor x) -> Tensor")
LIBRARY.impl("spikes", spikes, "CompositeImplicitAutograd")


class Neurons(nn.Module):
    """Neurons without parameters, whose potentials begin at zero in each step."""

    def __init__(self, *, is_operator: bool) -> None:
        super().__init__()
        self.is_operator = is_operator
        self.potential: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        if self.is_operator:
            return torch.ops.boltmesh_tests.spikes(x)
        made = []
        for step in range(x.shape[1]):
            self.potential = 0.5 * self.potential + x[:, step]
            made.append(Spike.apply(self.potential - 0.1))
            self.potential = self.potential - made[-1].detach()
        return torch.stack(made, 1)


class Spiking(VisionTransformer):
    is_operator = False

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(16, 16), Neurons(is_operator=self.is_operator)) for _ in range(4)]
        self.layers = nn.Sequential(*(each for pair in layers for each in pair))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            if isinstance(layer, Neurons):
                layer.potential = 0.0
        return (self.layers(3 * batch).mean(1) - 0.2).square().mean()


class SpikingByOperator(Spiking):
    is_operator = True


class Potential(nn.Module):
    """A neuron whose potential is a buffer that the first batch gives its shape, as in snntorch."""

    potential: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("potential", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Any:
        if self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        self.potential = 0.5 * self.potential.detach() + x
        return Spike.apply(self.potential)


class Resizing(Spiking):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 16), Potential(), nn.Linear(16, 16), Potential(), nn.Linear(16, 16)
        )


class Recurrence(nn.Module):
    """Writes its states into zeros that it has made beforehand, as xLSTM does."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.into(x)
        states = torch.zeros(x.shape[0], x.shape[1] + 1, 32)
        for step in range(x.shape[1]):
            states[:, step + 1] = torch.tanh(inputs[:, step] + states[:, step].clone())
        return x + self.out(states[:, 1:])


class Recurrent(VisionTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Recurrence(), Recurrence()  # type: ignore[assignment]


class Cell(nn.Module):
    """Computes with the parameters in a dictionary, as cells of ncps do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(16, 16))
        self.decay = nn.Parameter(torch.rand(16))
        self.params: dict[str, Any] = {"weight": self.weight, "more": [self.decay]}

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            update = torch.tanh(x[:, step] @ self.params["weight"])
            state = state * self.params["more"][0] + update
        return x + state.unsqueeze(1)


class Cells(VisionTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Cell(), Cell()  # type: ignore[assignment]


class CallsForward(VisionTransformer):
    """Calls the forward of its layers by name, as SqueezeBert of transformers does."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.first.forward(batch)
        return self.head(self.second.forward(hidden)).square().mean()


class Router(Attention):
    """Converts a module in its forward to the dtype that it has, as NLLB-MoE of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        self.to_out = self.to_out.to(x.dtype)
        return super().forward(x)


class Converts(VisionTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Router(4), Router(4)


class Splitting(Attention):
    """Splits rows by how many each expert gets, as JetMoe of transformers does."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.router = nn.Linear(16, 3)
        self.weight = nn.Parameter(torch.randn(3, 16, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x).flatten(0, 1)
        chosen = self.router(rows).argmax(-1)
        order = chosen.argsort(stable=True)
        counts = nn.functional.one_hot(chosen, 3).sum(0).tolist()
        parts = rows[order].split(counts, dim=0)
        given = torch.cat([part @ each for part, each in zip(parts, self.weight, strict=True)])
        return x + torch.zeros_like(rows).index_add(0, order, given).view(x.shape)


class Splits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Splitting(4) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(rank: int, world_size: int, kind: type[LightningModule], strategy: str) -> list[float]:
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    batches: list[Any] = [torch.randn(rows, 4, 16, generator=generator) for rows in (4, 4, 3)]
    precision: Any = "64-true" if kind is Convolutions else "32-true"
    if kind is Graphs:
        batches = [Molecules(each) for each in batches]
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    losses, module = Losses(), kind()
    trainer = Trainer(
        strategy=STRATEGIES[strategy][1](), accelerator="cpu", devices=world_size, max_steps=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=[losses],
        precision=precision,
    )  # fmt: skip
    trainer.fit(module, loader)
    if kind is Scored:
        losses.kept += [float(trainer.callback_metrics[each]) for each in Scored.names]
    if kind is Padded:
        losses.kept += trainer.validate(module, loader, verbose=False)[0].values()
    return losses.kept


@pytest.mark.sample(
    *(
        "MessagePassing-pipeline",
        "Lends-pipeline",
        "LogsRate-tensor",
        "Convolutions-tensor",
        "SetsMetric-pipeline",
        "Padded-pipeline",
        "Graphs-pipeline",
        "Gridded-two microbatches",
        "Scored-pipeline",
        "Tagger-3d",
        "Spiking-two microbatches",
        "SpikingByOperator-two microbatches",
        "Recurrent-tensor",
        "Cells-zero3",
        "Cells-zero in pipelines",
        "CallsForward-zero3",
        "Converts-tensor",
        "Converts-pipeline",
        "Splits-tensor",
        "Splits-pipeline",
    )
)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (VisionTransformer, "tensor"),
        (VisionTransformer, "3d"),
        (MessagePassing, "pipeline"),
        (MessagePassing, "tensor"),
        (Forecast, "pipeline"),
        (Forecast, "tensor"),
        (Lends, "pipeline"),
        (Lends, "3d"),
        (LogsRate, "tensor"),
        (Convolutions, "tensor"),
        (SetsMetric, "pipeline"),
        (Padded, "pipeline"),
        (Graphs, "pipeline"),
        (Graphs, "tensor"),
        (Gridded, "pipeline"),
        (Gridded, "two microbatches"),
        (Contrasted, "two microbatches"),
        (Scored, "pipeline"),
        (Scored, "3d"),
        (Tagger, "pipeline"),
        (Tagger, "3d"),
        (Spiking, "two microbatches"),
        (SpikingByOperator, "two microbatches"),
        (Recurrent, "tensor"),
        (Cells, "zero1"),
        (Cells, "zero3"),
        (Cells, "zero in pipelines"),
        (Cells, "tensor"),
        (CallsForward, "zero1"),
        (CallsForward, "zero3"),
        (Converts, "tensor"),
        (Converts, "pipeline"),
        (Splits, "tensor"),
        (Splits, "pipeline"),
    ],
)
def test_it_trains_as_in_one_process(kind: type[LightningModule], strategy: str) -> None:
    (one,) = run_ranks(train, 1, kind, "one process")
    for losses in run_ranks(train, STRATEGIES[strategy][0], kind, strategy):
        assert losses == pytest.approx(one, rel=1e-5)


def test_a_buffer_that_a_step_gives_another_shape_is_refused() -> None:
    text = r"buffer 'layers\.[13]\.potential', of shape \(0,\), to a value of a layer of shape"
    with pytest.raises(RankFailure, match=text):
        run_ranks(train, 2, Resizing, "two microbatches")


@pytest.mark.sample("pipeline")
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_a_collective_over_ranks_that_share_one_model_is_refused(strategy: str) -> None:
    with pytest.raises(RankFailure, match=r"calls torch\.distributed\.all_reduce over all ranks"):
        run_ranks(train, 2, Quantized, strategy)
