"""How a model is described: shards with their padding, and the GPT that comes along to the byte."""

from typing import Any

import pytest
import torch
from gpt import GPT

from boltmesh.errors import ConfigError
from boltmesh.strategies.cost_model.model import (
    SIZES,
    GPTSize,
    TensorShape,
    describe_gpt,
    size_named,
    widths_of,
)

SMALL: dict[str, Any] = {
    "vocab_size": 97, "block_size": 17, "n_layer": 3, "n_head": 2, "n_embd": 34,
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
def test_shards_are_those_of_torch(rows, num_shards):
    tensor = TensorShape("weight", (rows, 5))
    whole = torch.zeros(rows, 5)
    expected = [len(each) * 5 for each in torch.chunk(whole, num_shards)]
    assert tensor.padded_numel(num_shards) == max(expected)


@pytest.mark.parametrize("is_tied", [False, True])
def test_every_parameter_of_the_gpt_is_known(is_tied):
    size = {**SMALL, "tie_weights": is_tied}
    planned = describe_gpt(GPTSize.of(size), batch=None, widths=widths_of("32-true"))
    with torch.device("meta"):
        module = GPT(**size)
    shapes = {each.name: each.shape for unit in planned.units for each in unit.tensors}
    assert shapes == {name: tuple(each.shape) for name, each in module.named_parameters()}
    assert planned.numel == sum(each.numel() for each in module.parameters())
    for unit in planned.units[:-1]:
        assert dict(module.named_modules())[unit.name] is not None
        assert all(each.name.startswith(f"{unit.name}.") for each in unit.tensors)
    assert [each.stays_gathered for each in planned.units] == [False] * 3 + [True]


def test_the_defaults_are_those_of_the_model():
    module = GPT()
    assert GPTSize() == GPTSize.of(module.hparams)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("tokens", [17, 9])
def test_activations_are_what_autograd_saves(precision, tokens):
    batch = (5, tokens)
    planned = describe_gpt(GPTSize.of(SMALL), batch=batch, widths=widths_of(precision))
    module = GPT(**SMALL)
    if precision in {"64-true", "bf16-true"}:
        module.to(torch.float64 if precision == "64-true" else torch.bfloat16)
    parameters = {each.untyped_storage().data_ptr() for each in module.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor):
        at = tensor.untyped_storage().data_ptr()
        if at not in parameters:
            saved.setdefault(at, tensor)
        return tensor

    text = torch.randint(97, (5, tokens + 1))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        module.loss((text[:, :-1].clone(), text[:, 1:].clone()))
    casts = 0
    if precision == "bf16-mixed":  # without sharding autocast copies each matrix that it multiplies
        casts = 2 * sum(
            each.numel for unit in planned.units for each in unit.tensors if each.is_multiplied
        )
        assert casts == 2 * (3 * 12 * 34 * 34 + 97 * 34)
    assert planned.activations is not None
    measured = sum(each.untyped_storage().nbytes() for each in saved.values())
    assert planned.activations.saved_bytes == measured - casts


@pytest.mark.parametrize("name", SIZES)
def test_a_size_has_the_parameters_that_its_name_says(name):
    number = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    planned = describe_gpt(SIZES[name], batch=None, widths=widths_of("32-true"))
    # Beside the table's numbers the head is a matrix of its own here.
    without_head = planned.numel - SIZES[name].vocab_size * SIZES[name].n_embd
    assert without_head == pytest.approx(number, rel=0.04)
    assert SIZES[name].n_embd % SIZES[name].n_head == 0


def test_a_size_is_found_in_any_case_and_another_is_refused():
    assert size_named("6.7b") is SIZES["6.7B"]
    with pytest.raises(ConfigError, match=r"There is no size '7B'. Use 125M, 350M"):
        size_named("7B")


def test_a_precision_that_hides_its_widths_is_refused():
    with pytest.raises(ConfigError, match=r"Plan with trainer.precision=bf16-mixed"):
        widths_of("transformer-engine")
