"""A model built under ``deferred_init`` gets the weights that it would have got, to the bit."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpt import GPT
from torch import Tensor, nn

from boltmesh.errors import ConfigError
from boltmesh.strategies.deferred_initialization.deferred import deferred_init, is_deferred
from boltmesh.strategies.deferred_initialization.materialize import materialize
from boltmesh.strategies.deferred_initialization.recording import recording_of


class Initialisers(nn.Module):
    """What authors do to parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tall, self.wide = nn.Linear(40, 30), nn.Linear(30, 40)
        self.cut, self.conv = nn.Linear(33, 7, bias=False), nn.Conv2d(3, 5, 3)
        self.far = nn.Linear(21, 5)
        nn.init.orthogonal_(self.tall.weight)
        nn.init.orthogonal_(self.wide.weight, gain=2.0)
        nn.init.trunc_normal_(self.cut.weight, std=0.02)
        nn.init.trunc_normal_(self.far.weight, a=-0.01, b=0.01)  # by rejection
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        nn.init.sparse_(self.far.weight, 0.3)
        self.drawn = nn.Parameter(torch.randn(10, 10) / 3 + 1)
        self.turned = nn.Parameter(torch.rand(5, 6).t().contiguous())
        self.joined = nn.Parameter(torch.cat([torch.randn(3, 4), torch.rand(2, 4)]))
        self.grown = nn.Parameter(torch.linspace(0, 1, 50))
        self.mixed = nn.Parameter(torch.randperm(50).float())
        self.some = nn.Parameter(torch.bernoulli(torch.rand(20, 20)))
        self.chosen = nn.Parameter(torch.multinomial(torch.rand(10, 20), 3).float())
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(30, 30), 0.3))
        self.low = nn.Linear(20, 20).bfloat16()
        self.copied = copy.deepcopy(self.low)
        self.beside = torch.randn(9, 9)
        self.kept = [torch.randn(3, 9)]


class DependsOnValues(nn.Module):
    """What is drawn depends on what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(10, 10))
        self.second = nn.Parameter(torch.eye(9))
        if self.first.std() > 0.1:
            nn.init.constant_(self.second, self.first.std().item())
        with torch.no_grad():
            self.first[torch.rand(10, 10) < 0.5] = 0
            self.first.masked_fill_(self.first.abs() < 1e-3, 5.0)
        listed, shown = self.first.tolist(), self.first.detach().numpy()
        self.third = nn.Parameter(torch.tensor(listed) + torch.from_numpy(shown))


class Assigned(nn.Module):
    """Values that come from elsewhere, and change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        source = torch.full((12, 12), 3.0) + torch.arange(12).double().float()
        self.a.weight.data = source.clone()
        with torch.no_grad():
            self.b.weight.copy_(source)
            source.mul_(2)
            self.a.weight[3:5].copy_(source[3:5])
        self.b.weight.data.mul_(self.a.weight.data)
        self.device_of_weight = self.a.weight.device
        self.on_the_same = nn.Parameter(torch.ones(12, 12, device=self.a.weight.device))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        waves = torch.zeros(50, 8)
        waves[:, 0::2] = torch.sin(torch.arange(50).unsqueeze(1) * torch.ones(4))
        self.register_buffer("waves", waves)
        self.register_buffer("mask", torch.ones(30, 30).tril(), persistent=False)
        self.norm = nn.BatchNorm1d(30)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.empty(7, 7))
        nn.init.normal_(self.a, generator=generator)
        self.b = nn.Parameter(torch.randn(7, 8, generator=generator))
        self.after = torch.rand(3, generator=generator)


def _parametrized() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(12, 13)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(13, 12)),
        nn.utils.parametrizations.orthogonal(nn.Linear(12, 12)),
    )


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(40, 50))


def _tied() -> nn.Module:
    embedding, head = nn.Embedding(20, 8, padding_idx=3), nn.Linear(8, 20)
    head.weight = embedding.weight
    return nn.Sequential(embedding, head)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: GPT(n_layer=2),
    "GPT, tied": lambda: GPT(n_layer=2, tie_weights=True),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128), 3, enable_nested_tensor=False
    ),
    "MultiheadAttention": lambda: nn.MultiheadAttention(64, 4, kdim=32, add_bias_kv=True),
    "LSTM": lambda: nn.LSTM(5, 6, 2),
    "initialisers": Initialisers,
    "depends on values": DependsOnValues,
    "assigned": Assigned,
    "buffers": Buffers,
    "own generator": OwnGenerator,
    "parametrized": _parametrized,
    "weight_norm": _old_weight_norm,
    "tied": _tied,
}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """All tensors of a module, those beside its parameters and buffers too."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for path, each in module.named_modules():
        for key, value in vars(each).items():
            if isinstance(value, Tensor):
                found[f"{path}.{key}"] = value
            elif isinstance(value, list):
                found.update(
                    {f"{path}.{key}{i}": t for i, t in enumerate(value) if isinstance(t, Tensor)}
                )
    return found


def build(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(5)
    if not options:
        return make(), torch.get_rng_state()
    with deferred_init(**options):
        module = make()
    return module, torch.get_rng_state()


@pytest.mark.parametrize("min_bytes", [1, 256, 4096])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_weights(name: str, min_bytes: int) -> None:
    plain, plain_state = build(MODELS[name])
    deferred, state = build(MODELS[name], min_bytes=min_bytes)
    assert torch.equal(state, plain_state)
    assert not any(map(is_deferred, deferred.buffers()))
    for parameter, real in zip(deferred.parameters(), plain.parameters(), strict=True):
        assert parameter.shape == real.shape
        assert parameter.requires_grad == real.requires_grad
        assert parameter.dtype == real.dtype
    torch.manual_seed(6)
    state = torch.get_rng_state()
    materialize(deferred)
    assert torch.equal(torch.get_rng_state(), state)
    expected, made = tensors(plain), tensors(deferred)
    assert made.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(made[key], value), key
        assert made[key].stride() == value.stride(), key


@pytest.mark.parametrize("name", ["GPT", "initialisers", "tied", "assigned"])
def test_the_smallest_threshold_defers_every_parameter_that_is_made_empty(name: str) -> None:
    deferred, _ = build(MODELS[name], min_bytes=1)
    assert sum(map(is_deferred, deferred.parameters())) >= 0.9 * len(list(deferred.parameters()))


def test_small_parameters_are_real_at_once() -> None:
    deferred, _ = build(lambda: nn.Linear(200, 100), min_bytes=1000)
    assert is_deferred(deferred.weight)
    assert deferred.bias.device.type == "cpu"
    assert deferred.bias.abs().max() > 0


def test_ties_hold_after_materialising() -> None:
    deferred, _ = build(_tied, min_bytes=1)
    materialize(deferred)
    assert deferred[0].weight is deferred[1].weight


def test_attributes_of_parameters_are_kept() -> None:
    with deferred_init(min_bytes=1):
        layer: Any = nn.Linear(3, 4)
        layer.weight.has_decay = False
        layer.weight.requires_grad_(False)
    materialize(layer)
    assert layer.weight.has_decay is False
    assert not layer.weight.requires_grad


def test_a_change_after_the_context_is_refused_by_name() -> None:
    layer = nn.Module()
    with deferred_init(min_bytes=1):
        layer.inner = nn.Linear(3, 4)
    nn.init.zeros_(layer.inner.weight)
    with pytest.raises(ConfigError, match=r"inner\.weight was changed after the end"):
        materialize(layer)


def test_a_source_that_changes_after_the_context_is_refused() -> None:
    source = torch.ones(30, 30)
    layer = nn.Linear(30, 30)
    with deferred_init(min_bytes=64):
        layer = nn.Linear(30, 30)
        with torch.no_grad():
            layer.weight.copy_(source)
    source.zero_()
    with pytest.raises(ConfigError, match="changed afterwards"):
        materialize(layer)


def test_a_source_that_changes_within_the_context_is_taken_as_it_was() -> None:
    source = torch.arange(900.0).view(30, 30)
    expected = source.clone()
    with deferred_init(min_bytes=64):
        layer = nn.Linear(30, 30)
        with torch.no_grad():
            layer.weight.copy_(source)
            source.mul_(2)
            layer.weight[:3].add_(source[:3])
            source.zero_()
    expected[:3] *= 3
    materialize(layer)
    assert torch.equal(layer.weight, expected)


def test_a_tensor_that_is_copied_onto_itself_keeps_its_values() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(30, 30)
    torch.manual_seed(1)
    with deferred_init(min_bytes=64):
        layer = nn.Linear(30, 30)
        with torch.no_grad():
            layer.weight.copy_(layer.weight.view(30, 30))
    materialize(layer)
    assert torch.equal(layer.weight, plain.weight)


def test_the_dtype_of_the_construction_counts() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    plain = torch.rand(3, 4)
    torch.manual_seed(1)
    with deferred_init(min_bytes=1):
        module = nn.ParameterList([torch.rand(3, 4)])
    torch.set_default_dtype(torch.float32)
    materialize(module)
    assert module[0].dtype == torch.float64
    assert torch.equal(module[0], plain)


def test_a_cast_after_the_context_is_a_cast() -> None:
    torch.manual_seed(1)
    plain: Any = nn.Sequential(nn.Linear(3, 4)).bfloat16()
    torch.manual_seed(1)
    with deferred_init(min_bytes=1):
        layer: Any = nn.Sequential(nn.Linear(3, 4))
    layer.bfloat16()
    assert is_deferred(layer[0].weight)
    materialize(layer)
    assert torch.equal(layer[0].weight, plain[0].weight)


def test_contexts_nest() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(3, 4)
    torch.manual_seed(1)
    with deferred_init(min_bytes=1), deferred_init():
        layer = nn.Linear(3, 4)
    assert is_deferred(layer.weight)
    materialize(layer)
    assert torch.equal(layer.weight, plain.weight)


def test_an_error_of_the_construction_is_its_own_and_ends_the_context() -> None:
    with pytest.raises(RuntimeError, match="must match the size"), deferred_init(min_bytes=1):
        torch.ones(3, 4).add_(torch.ones(5, 6))
    assert not is_deferred(torch.ones(500, 500))


def test_a_recording_lives_no_longer_than_its_tensors() -> None:
    with deferred_init(min_bytes=1):
        layer = nn.Linear(3, 4)
    recording = recording_of(layer.weight)
    assert recording is not None
    before = len([each for each in gc.get_objects() if each is recording])
    assert before == 1
    materialize(layer)
    gc.collect()
    # What holds it is this function alone.
    assert len(gc.get_referrers(recording)) <= 1
