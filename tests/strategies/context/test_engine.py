"""Models whose sequence is divided, beside the same models whole, on ranks of gloo."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from boltmesh.strategies.context import exchange
from boltmesh.strategies.context.attention import attend_from_last, causal_attention
from boltmesh.strategies.context.positions import (
    Positions,
    divide,
    divide_by_work,
    document_work,
    joined,
    merged,
    of_one,
)
from boltmesh.strategies.context.seq_shard import ContextState, cut, make_whole
from boltmesh.strategies.context.tokenwise import TokenwiseModule, find_tokenwise
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.torch_compat.tensors import subclasses_unasked
from tests.support.context_runs import apart, compare, compare_model, world
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def run_models(rank: int, size: int, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    return {name: compare(name, **options) for name in names}


def far(found: dict[str, Any], *, by: float) -> dict[str, float]:
    """What is farther from one process than that."""
    return {
        f"{name} {key}": each[key]
        for name, each in found.items()
        for key in ("loss", "gradient", "parameter")
        if not each[key] <= by
    }


@pytest.mark.sample("zigzag")
@pytest.mark.slow(30)
@pytest.mark.parametrize("balance", ["contiguous", "zigzag"])
def test_models_are_those_of_one_process(balance: str) -> None:
    names = ["gpt", "pooled", "mixer", "prefixed", "own", "llama", "mistral", "bert-padded"]
    found = run_ranks(run_models, 3, names, {"balance": balance, "length": 26})
    for each in found:
        assert far(each, by=2e-6) == {}


@pytest.mark.full
@pytest.mark.slow(60)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_more_models_are_those_of_one_process(size: int) -> None:
    names = ["qwen2", "gemma3", "gpt2", "vit", "bert", "llama-eager", "mistral-eager", "gpt2-eager",
             "llama-padded", "llama-left"]  # fmt: skip
    for each in run_ranks(run_models, size, names, {}):
        assert far(each, by=2e-6) == {}


@pytest.mark.full
def test_in_double_precision_differences_are_roundings() -> None:
    names = ["gpt", "mixer", "pooled"]
    for each in run_ranks(run_models, 2, names, {"double": True, "steps": 1}):
        assert far(each, by=1e-14) == {}


@pytest.mark.full
def test_there_may_be_fewer_positions_than_ranks() -> None:
    for each in run_ranks(run_models, 3, ["gpt", "llama"], {"length": 2, "steps": 1}):
        assert far(each, by=2e-6) == {}


def run_without_positions(rank: int, size: int) -> tuple[Tensor, list[bool]]:
    """Draw after a dropout of positions of one rank; differentiate where one rank has none."""
    state = ContextState(world())
    torch.manual_seed(3)
    prefix = cut(torch.ones(2, 32, 4), 1, state)[:, :4]
    functional.dropout(prefix, 0.5)
    drawn = torch.randn(4)
    weight = torch.randn(4, 1, 31, requires_grad=True)
    bias, mask = torch.zeros(4, requires_grad=True), torch.zeros(1, 32, requires_grad=True)
    signal = cut(torch.randn(2, 4, 24), 2, state)
    made = functional.conv1d(signal, weight, bias, padding=15, groups=4)
    _local_sum(made).backward()
    heads = cut(torch.randn(1, 2, 32, 4), 2, state)
    query = heads[:, :, :4]
    rows = functional.scaled_dot_product_attention(query, heads, heads, mask.expand(4, 32))
    _local_sum(rows).backward()
    return drawn, [each.grad is not None for each in (weight, bias, mask)]


def _local_sum(value: Any) -> Tensor:
    return value.local.sum()


def test_a_rank_without_positions_draws_and_differentiates_as_the_others() -> None:
    (one, has_one), (other, has_other) = run_ranks(run_without_positions, 2)
    assert torch.equal(one, other)
    assert has_one == has_other == [True, True, True]


def run_weighted_loss(rank: int, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    logits, target = torch.randn(2, 4, 9), torch.randint(0, 4, (2, 9))
    target[:, ::3] = 255
    divided = cut(logits, 2, ContextState(world()))
    options: dict[str, Any] = {"weight": torch.rand(4), "ignore_index": 255}
    found = [functional.cross_entropy(each, target, **options) for each in (divided, logits)]
    return found[0], found[1]


def test_a_target_to_ignore_may_lie_beyond_the_weights_of_classes() -> None:
    for found, expected in run_ranks(run_weighted_loss, 2):
        torch.testing.assert_close(found, expected)


def run_squeezed(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for shape in ((3, 2, 1), (3, 1, 1), (1, 5, 1)):
        whole = torch.arange(15.0)[: torch.Size(shape).numel()].view(shape)
        divided = cut(whole, 1, ContextState(world()))
        for options in ({}, {"dim": 1}, {"dim": -1}):
            squeezed = divided.squeeze(**options)
            found.append((make_whole(squeezed, "a test"), whole.squeeze(**options)))
    return found


def test_one_position_of_a_rank_is_no_dim_to_squeeze() -> None:
    for of_rank in run_ranks(run_squeezed, 2):
        assert all(torch.equal(found, expected) for found, expected in of_rank)


@pytest.mark.sample("ring")
@pytest.mark.parametrize("way", ["heads", "ring"])
def test_attention_by_heads_and_by_a_ring_is_that_of_one_process(way: str) -> None:
    names = ["llama", "mistral", "bert-padded"]
    for each in run_ranks(run_models, 3, names, {"attention": way, "steps": 1}):
        assert far(each, by=2e-6) == {}
        purposes = {key.split(":")[0] for one in each.values() for key in one["sent"]}
        assert way in purposes
        assert "keys" not in purposes


def run_masked_by_head(rank: int, size: int, way: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    state = ContextState(world(), attention=way)
    query, key, value = torch.randn(3, 2, 4, 6, 8)
    mask = torch.rand(4, 6, 6) < 0.7
    mask[..., 0] = True
    parts: list[Any] = [cut(each, 2, state) for each in (query, key, value)]
    found = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], mask)
    whole = functional.scaled_dot_product_attention(query, key, value, mask)
    return make_whole(found, "a test"), whole


@pytest.mark.sample("ring")
@pytest.mark.parametrize("way", ["keys", "heads", "ring"])
def test_a_mask_of_each_head_needs_no_dim_of_the_batch(way: str) -> None:
    for found, expected in run_ranks(run_masked_by_head, 2, way):
        torch.testing.assert_close(found, expected)


@pytest.mark.full
def test_keys_of_some_heads_at_a_time_are_fetched_again_in_the_backward_pass() -> None:
    names = ["llama", "bert-padded"]
    options = {"attention": "keys", "steps": 1, "max_gather_bytes": 4000}  # of one head: 3,328
    together = {**options, "max_gather_bytes": None}
    pairs = zip(
        *(run_ranks(run_models, 2, names, each) for each in (options, together)), strict=True
    )
    for some, whole in pairs:
        assert far(some, by=2e-6) == {}
        for name in names:
            sent, once = (each[name]["sent"] for each in (some, whole))
            assert sent["keys"] == 2 * once["keys"]
            assert sent["keys (backward)"] == once["keys (backward)"]


@pytest.mark.full
def test_tiles_of_modules_in_which_no_position_meets_another_are_those_of_one_process() -> None:
    for each in run_ranks(run_models, 2, ["gpt", "llama"], {"tile": 3, "steps": 1}):
        assert far(each, by=2e-6) == {}
        assert "blocks.0.mlp" in each["gpt"]["tokenwise"]
        assert "model.model.layers.1.mlp" in each["llama"]["tokenwise"]


class Transposes(nn.Module):
    """Attention by hand, and a mixture of the rows of a batch, by ``mT`` and ``T``."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.rows, self.head = nn.Embedding(9, 8), nn.Linear(2, 2), nn.Linear(8, 9)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tok(batch["input_ids"])
        x = (x @ x.mT).softmax(-1) @ x
        x = self.rows(x.T).T  # (B, T, C), (C, T, B)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch["input_ids"].flatten())


def run_transposes(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"": compare_model(Transposes(), [{"input_ids": torch.randint(9, (2, 7))}])}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors of dimension other than 2")
def test_transposed_tensors_are_those_of_one_process() -> None:
    for each in run_ranks(run_transposes, 2):
        assert far(each, by=2e-6) == {}


class Looks(nn.Module):
    """Does something along the sequence, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.places = how, nn.Parameter(torch.zeros(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean":
            return x - x.mean(1, keepdim=True)
        if self.how == "positions":
            return x + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]
        if self.how == "table":
            return x + self.places[: x.shape[1]]
        if self.how == "shift":
            return x + functional.pad(x[:, :-1], (0, 0, 1, 0))
        if self.how == "softmax":
            return x.softmax(1)
        if self.how == "sum aside":
            self.aside = x.sum()
        if self.how == "rows":
            return x * functional.dropout(torch.ones(len(x), 1, 1), 0.5)
        return functional.dropout(x, 0.5) if self.how == "draws" else x.sin()


WAYS = ("mean", "positions", "table", "shift", "softmax", "sum aside", "draws", "rows", "no")


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(9, 8)
        self.ways = nn.ModuleDict({how: Looks(how) for how in WAYS})
        self.ways["dropout"] = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for each in self.ways.values():
            x = each(x)
        return functional.scaled_dot_product_attention(x, x, x).sum()


def test_modules_that_look_along_the_sequence_do_not_run_on_plain_tensors() -> None:
    model = Looking()
    found = analyse(model, lambda model: model(torch.ones(2, 12, dtype=torch.long)), blocks={})
    modules = find_tokenwise(found)
    plain = TokenwiseModule(dim=1, draws=False)  # draws for rows are those of one process
    assert modules == {"ways.rows": plain, "ways.no": plain,
                       "ways.dropout": TokenwiseModule(dim=1, draws=True)}  # fmt: skip


def test_attention_from_the_last_positions_is_that_of_a_mask() -> None:
    query, key, value = (torch.randn(2, 3, size, 8, requires_grad=True) for size in (5, 9, 9))
    with subclasses_unasked():
        ours = attend_from_last(query, key, value, {"dropout_p": 0.0, "scale": None})
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    theirs = functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(
        *(torch.autograd.grad(each.square().sum(), [query, key, value]) for each in (ours, theirs)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-13), (torch.bfloat16, 2e-2)]
)
def test_joined_attention_is_that_of_a_mask(dtype: torch.dtype, near: float) -> None:
    query = torch.randn(2, 4, 5, 8, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, 2, 9, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    options: dict[str, Any] = {"dropout_p": 0.0, "scale": 0.3, "enable_gqa": True}
    with subclasses_unasked():
        ours = causal_attention(query, key, value, 4, options)
    assert type(ours.grad_fn).__name__ == "JoinedAttentionBackward"
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    theirs = functional.scaled_dot_product_attention(query, key, value, mask, **options)
    torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
    for one, other in zip(
        *(torch.autograd.grad(each.square().sum(), [query, key, value]) for each in (ours, theirs)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=near, atol=10 * near)


def test_a_window_fetches_the_keys_that_it_shows() -> None:
    """Window 6, two ranks: five positions of two layers go to the second rank."""
    first, second = run_ranks(run_models, 2, ["mistral"], {"steps": 1, "length": 26})
    row = 2 * 2 * 4 * 8 * 4  # keys and values, batch, heads (repeated for a mask), channels, fp32
    assert first["mistral"]["sent"]["keys"] == 2 * 5 * row
    assert second["mistral"]["sent"]["keys"] == 0


# Positions.


@pytest.mark.parametrize("length", [0, 1, 5, 16, 29])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("balance", ["contiguous", "zigzag"])
def test_ranks_have_every_position_once(length: int, ranks: int, balance: Any) -> None:
    found = divide(length, ranks, balance)
    taken = sorted(at for part in found.parts for a, b in part for at in range(a, b))
    assert taken == list(range(length))
    counts = [found.count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= (1 if balance == "contiguous" else 2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_packed_documents_are_even_work(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    rows = []
    for _ in range(2):
        places = [torch.arange(int(torch.randint(3, 700, (), generator=generator)))
                  for _ in range(40)]  # fmt: skip
        rows.append(torch.cat(places)[:4001])
    work = document_work([torch.zeros(2, 5), torch.stack(rows)])[4001]
    starts = [int((row[: at + 1] == 0).nonzero()[-1]) for row in rows for at in (1000, 4000)]
    assert int(work[1000]) == 1001 - starts[0] + 1001 - starts[2]
    found = divide_by_work(work, ranks)
    taken = sorted(at for part in found.parts for a, b in part for at in range(a, b))
    assert taken == list(range(4001))
    loads = [sum(int(work[a:b].sum()) for a, b in part) for part in found.parts]
    assert max(loads) * ranks / sum(loads) <= 1.05
    counts = [found.count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 32


def test_numbers_of_documents_show_them_too_and_one_document_is_divided_from_both_ends() -> None:
    numbers = torch.tensor([[1, 1, 2, 2, 2], [1, 2, 2, 3, 3]])
    assert document_work([numbers])[5].tolist() == [2, 3, 3, 3, 5]
    assert document_work([torch.tensor([[5, 3, 9]]), torch.zeros(2, 4).long()]) == {}
    assert divide_by_work(torch.arange(1, 17), 2) == divide(16, 2, "zigzag")


def test_a_slice_and_a_join_keep_who_has_what() -> None:
    found = divide(10, 2, "zigzag").narrowed(1, 10)
    assert found == Positions(9, (((0, 1), (6, 9)), ((1, 6),)))
    assert joined([of_one(2, 2, 0), found]).parts == (((0, 3), (8, 11)), ((3, 8),))


# Exchange.


def dot(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum())


def check_exchange(rank: int, size: int, length: int, balance: Any) -> dict[str, Any]:
    """Values, adjoints by <f(x), y> = <x, f'(y)> over all ranks, and bytes."""
    group = world()
    positions = divide(length, size, balance)
    torch.manual_seed(0)
    whole = torch.randn(2, 4, length, 3, dtype=torch.float64)

    def own(tensor: Tensor) -> Tensor:
        pieces = [tensor[:, :, a:b] for a, b in positions.parts[rank]]
        return torch.cat(pieces or [tensor[:, :, :0]], 2)

    local = own(whole).requires_grad_()
    wants = [merged([(max(0, length // 2 - 2 * r), length)]) for r in range(size)]
    fetched = exchange.fetch(local, 2, positions, wants, group, "fetch")
    start = max(0, length // 2 - 2 * rank)
    found = {"fetch": apart(fetched.detach(), whole[:, :, start:])}
    heads = [list(range(4 * r // size, 4 * (r + 1) // size)) for r in range(size)]
    swapped = exchange.swap_to_heads(local, positions, heads, group, "heads")
    found["heads"] = apart(swapped.detach(), whole[:, heads[rank]])
    back = exchange.swap_to_positions(swapped, positions, heads, group, "back")
    found["back"] = apart(back.detach(), local.detach())
    row = 2 * 4 * 3 * 8
    mine = {at for a, b in positions.parts[rank] for at in range(a, b)}
    wanted = [{at for a, b in each for at in range(a, b)} for each in wants]
    others = [r for r in range(size) if r != rank]
    found["fetch bytes"] = group.sent["fetch"] - row * sum(len(mine & wanted[r]) for r in others)
    swapped_heads = sum(len(heads[r]) for r in others)
    found["heads bytes"] = group.sent["heads"] - 2 * 3 * 8 * len(mine) * swapped_heads
    for name, result in (("fetch", fetched), ("heads", swapped), ("back", back)):
        seed = torch.randn(result.shape, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(result, local, seed, retain_graph=True)
        sides = torch.tensor([dot(result.detach(), seed), dot(local.detach(), gradient)])
        sides = exchange.total(sides, group)
        found[f"{name} adjoint"] = float((sides[0] - sides[1]).abs())
    theirs = [{at for a, b in each for at in range(a, b)} for each in positions.parts]
    found["backward bytes"] = group.sent["fetch (backward)"] - row * sum(
        len(wanted[rank] & theirs[r]) for r in others
    )
    return found


@pytest.mark.sample("2")
@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_and_their_adjoints_are_exact_to_the_byte(size: int) -> None:
    for length, balance in ((29, "contiguous"), (16, "zigzag"), (2, "contiguous")):
        for found in run_ranks(check_exchange, size, length, balance):
            assert all(abs(value) < 1e-5 for value in found.values()), found
