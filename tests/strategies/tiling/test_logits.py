"""Logits in tiles: losses and gradients of the whole, in less memory; whatever else is done."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies.tiling.logits import LogitTiling, TiledLogits

WIDTH, CLASSES, BATCH, LENGTH = 8, 50, 3, 7


class Model(nn.Module):
    def __init__(self, *, has_bias: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=has_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(tokens)))


def hugging_face(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float()
    labels = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, CLASSES), labels, ignore_index=-100)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view": lambda x, y: F.cross_entropy(x.view(-1, CLASSES), y.view(-1)),
    "view of the number of classes": lambda x, y: F.cross_entropy(
        x.view(-1, x.size(-1)), y.view(-1)
    ),
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "shifted": lambda x, y: F.cross_entropy(
        x[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)
    ),
    "shifted with an ellipsis": lambda x, y: nn.CrossEntropyLoss()(
        x[..., :-1, :].contiguous().view(-1, x.shape[-1]), y[..., 1:].contiguous().view(-1)
    ),
    "transposed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permuted, summed": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, reduction="sum"),
    "not reduced": lambda x, y: (
        F.cross_entropy(x.transpose(1, 2), y, reduction="none").square().sum()
    ),
    "ignored, smoothed": lambda x, y: F.cross_entropy(
        x.view(-1, CLASSES), y.masked_fill(y < 20, 3).view(-1), ignore_index=3, label_smoothing=0.1
    ),
    "Hugging Face": hugging_face,
}  # fmt: skip

WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class weights": lambda x, y: F.cross_entropy(
        x.view(-1, CLASSES), y.view(-1), weight=torch.linspace(0.1, 1.0, CLASSES).to(x.dtype)
    ),
    "probabilities": lambda x, y: F.cross_entropy(
        x.view(-1, CLASSES), F.one_hot(y.view(-1), CLASSES).float()
    ),
    "log_softmax": lambda x, y: F.nll_loss(x.log_softmax(-1).view(-1, CLASSES), y.view(-1)),
    "classes cut off": lambda x, y: F.cross_entropy(x[..., :40].transpose(1, 2), y.clamp(max=39)),
    "a penalty beside": lambda x, y: (
        F.cross_entropy(x.view(-1, CLASSES), y.view(-1))
        + 1e-2 * torch.logsumexp(x, -1).square().mean()
    ),
    "a list": lambda x, y: F.cross_entropy(
        torch.cat([x, x * 0.5]).view(-1, CLASSES), torch.cat([y, y]).view(-1)
    ),
}


def with_padding(x: Tensor, y: Tensor) -> Tensor:
    x[..., 40:] = -1e9
    return F.cross_entropy(x.view(-1, CLASSES), y.clamp(max=39).view(-1))


def with_mask(x: Tensor, y: Tensor) -> Tensor:
    x.masked_fill_(torch.arange(CLASSES) >= 40, -1e9)
    return F.cross_entropy(x.transpose(1, 2), y.clamp(max=39))


def with_temperature(x: Tensor, y: Tensor) -> Tensor:
    flat, shifted = x.view(-1, CLASSES), x[:, :-1].contiguous()
    x.div_(0.5)
    later = F.cross_entropy(shifted.view(-1, CLASSES), y[:, 1:].reshape(-1))
    return F.cross_entropy(flat, y.view(-1)) + later


def written_by_a_view(x: Tensor, y: Tensor) -> Tensor:
    classes = x.transpose(1, 2)
    x[:, 1:].flatten(1, 1).clamp_(-0.1, 0.1)
    return F.cross_entropy(classes, y)


def written_without_gradients(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        rows = x.view(-1, CLASSES)[:4]
        rows[:, 30:] = 1.0
        x.data[:, -1] += 1
    return F.cross_entropy(x.view(-1, CLASSES), y.view(-1))


def with_inplace_activation(x: Tensor, y: Tensor) -> Tensor:
    F.leaky_relu(x, 0.5, inplace=True)
    return F.cross_entropy(x.view(-1, CLASSES), y.view(-1))


def with_another_shape(x: Tensor, y: Tensor) -> Tensor:
    x.transpose_(1, 2)
    assert x.shape == (BATCH, CLASSES, LENGTH)
    return F.cross_entropy(x, y)


def hooked(x: Tensor, y: Tensor) -> Tensor:
    flat = x.view(-1, CLASSES)
    x.register_hook(lambda gradient: gradient * 3)
    return F.cross_entropy(flat, y.view(-1)) + F.cross_entropy(x.float().transpose(1, 2), y)


def hooked_view(x: Tensor, y: Tensor) -> Tensor:
    flat = x.view(-1, CLASSES)
    flat.register_hook(lambda gradient: gradient * 3)
    return F.cross_entropy(flat, y.view(-1)) + F.cross_entropy(x.transpose(1, 2), y)


def retained(x: Tensor, y: Tensor) -> Tensor:
    x.retain_grad()
    (gradient,) = torch.autograd.grad(
        F.cross_entropy(x.flatten(0, 1), y.flatten()), x, retain_graph=True
    )
    loss = F.cross_entropy(x.flatten(0, 1), y.flatten())
    loss.backward(retain_graph=True)
    return loss + x.grad.square().sum() + gradient.square().sum()


CHANGED = [with_padding, with_mask, with_temperature, written_by_a_view, written_without_gradients,
           with_inplace_activation, with_another_shape, hooked, hooked_view, retained]  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CLASSES, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(model: Model, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    tokens, targets = data()
    model.zero_grad()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters())]


@pytest.mark.parametrize("positions", [1, 4, 1000])
@pytest.mark.parametrize("name", [*LOSSES, *WHOLE])
def test_losses_and_gradients_are_those_of_whole_logits(name: str, positions: int) -> None:
    loss_of = {**LOSSES, **WHOLE}[name]
    torch.manual_seed(0)
    model = Model(has_bias=positions != 4).double()
    expected = trained(model, loss_of)
    tiling = LogitTiling(positions)
    tiling.put_on(model)
    found = trained(model, loss_of)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    tiling.take_off()
    assert type(model(data()[0])) is Tensor


@pytest.mark.parametrize("loss_of", CHANGED)
def test_logits_that_are_written_or_have_a_hook_are_those_of_a_plain_head(
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = Model().double()
    expected = trained(model, loss_of)
    LogitTiling(4).put_on(model)
    for one, other in zip(trained(model, loss_of), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", ["register_hook", "retain_grad"])
def test_a_hook_behind_a_loss_in_tiles_is_refused(method: str) -> None:
    model = Model()
    LogitTiling(4).put_on(model)
    tokens, targets = data()
    logits = model(tokens)
    LOSSES["view"](logits, targets)
    with pytest.raises(UnsupportedError, match=f"{method} was called on logits behind a loss"):
        getattr(logits, method)(*([lambda gradient: gradient] if "hook" in method else []))


def test_reading_logits_leaves_the_loss_in_tiles() -> None:
    model = Model()
    LogitTiling(4).put_on(model)
    tokens, _ = data()
    logits = model(tokens)
    with torch.inference_mode():
        flat = logits.view(-1, CLASSES)
        flat.argmax(-1)
    with torch.no_grad():
        logits.softmax(-1)
    assert logits.whole is None
    assert flat.whole is None
    logits.argmax(-1)
    assert isinstance(logits.view(-1, CLASSES), TiledLogits)


@pytest.mark.parametrize("name", LOSSES)
def test_no_more_logits_exist_than_those_of_a_tile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    linear = F.linear

    def watched(inputs: Tensor, *args: Tensor) -> Tensor:
        outputs = linear(inputs, *args)
        rows.append(outputs.numel() // CLASSES)
        return outputs

    monkeypatch.setattr(F, "linear", watched)
    model = Model()
    LogitTiling(4).put_on(model)
    tokens, targets = data()
    LOSSES[name](model(tokens), targets).backward()
    assert max(rows) == 4
    assert sum(rows) in {2 * BATCH * LENGTH, 2 * BATCH * (LENGTH - 1)}


def test_under_autocast_logits_have_its_type_and_the_loss_is_the_same() -> None:
    model = Model()

    def run() -> tuple[torch.dtype, list[Tensor]]:
        seen = []

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            seen.append(x.dtype)
            return LOSSES["view"](x, y)

        with torch.autocast("cpu", torch.bfloat16):
            found = trained(model, loss_of)
        return seen[0], found

    dtype, expected = run()
    LogitTiling(4).put_on(model)
    tiled_dtype, found = run()
    assert dtype == tiled_dtype == torch.bfloat16
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


def test_logits_look_like_logits() -> None:
    model = Model()
    LogitTiling(4).put_on(model)
    logits = model(data()[0])
    assert isinstance(logits, TiledLogits)
    assert logits.shape == (BATCH, LENGTH, CLASSES)
    assert (logits.size(-1), logits.ndim, logits.dtype) == (CLASSES, 3, torch.float32)
    assert logits.requires_grad
    assert logits.transpose(1, 2).shape == (BATCH, CLASSES, LENGTH)
    predicted = logits.argmax(-1)
    model.eval()
    assert torch.equal(predicted, model(data()[0]).argmax(-1))


def test_logits_are_whole_in_evaluation_and_without_gradients() -> None:
    model = Model()
    LogitTiling(4).put_on(model)
    with torch.no_grad():
        assert type(model(data()[0])) is Tensor
    assert type(model.eval()(data()[0])) is Tensor


def test_logits_that_are_used_after_the_backward_pass_are_refused() -> None:
    model = Model()
    LogitTiling(4).put_on(model)
    tokens, targets = data()
    logits, others = model(tokens), model(tokens)
    kept = others.detach()
    (LOSSES["view"](logits, targets) + LOSSES["view"](others, targets)).backward()
    with pytest.raises(UnsupportedError, match=r"\.detach\(\)"):
        logits.argmax(-1)
    assert type(kept) is Tensor


def test_a_model_without_a_head_and_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="has none"):
        LogitTiling(4).put_on(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    with pytest.raises(ConfigError, match="tile_logits=0"):
        LogitTiling(0)
    with pytest.raises(ConfigError, match="pipeline or a tensor axis"):
        LogitTiling(4).put_on(Model(), is_divided=True)
