"""A step that calls its layers again and again, each layer on the rank that holds it."""

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from boltmesh.strategies.pipeline.layerwise_eval import LayerwiseEvaluation
from boltmesh.strategies.pipeline.stage.units import find_stage_units, is_absent, make_absent
from tests.support.pipeline_models import WORDS, Block, Words
from tests.support.ranks import RankFailure, run_ranks


class Writer(Words):
    """Continues a text by drawn tokens, until one of a kind comes."""

    def predict_step(self, tokens: Tensor, batch_idx: int) -> dict[str, Any]:
        steps = 0
        while steps < 5:
            x = self.embed(tokens[:, -6:])
            for block in self.blocks:
                x = block(x)
            odds = self.head(self.norm(x))[:, -1].softmax(-1)
            following = torch.multinomial(odds, 1)
            tokens = torch.cat((tokens, following), dim=1)
            steps += 1
            if following.max().item() == 0:  # Python looks at what layers computed
                break
        return {"tokens": tokens, "odds": odds, "steps": steps}


class Hoarding(Block):
    """Leaves something behind for code outside of it."""

    cache: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(x)
        return super().forward(x)


class Hoarder(Words):
    def __init__(self) -> None:
        super().__init__(make=Hoarding)

    def predict_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x + len(Hoarding.cache))
        return x


def model(kind: type[Words]) -> Words:
    torch.manual_seed(1)
    return kind().eval()


def evaluation(root: nn.Module, ranks: int) -> LayerwiseEvaluation:
    units = find_stage_units(root)
    holders = {name: at * ranks // len(units) for at, name in enumerate(units)}
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    for name, unit in units.items():
        if holders[name] != rank:
            make_absent(unit.parameters())
    between = {root.get_parameter("positions"): 0}
    if rank != 0:
        make_absent(between)
    return LayerwiseEvaluation(units, holders, between, group, torch.device("cpu"))


def write(rank: int, ranks: int) -> tuple[dict[str, Any], bool]:
    root = model(Writer)
    made = evaluation(root, ranks).run(lambda: root.predict_step(texts(), 0), seed=5)
    return made, is_absent(root.get_parameter("positions"))


def hoard(rank: int, ranks: int) -> None:
    root = model(Hoarder)
    evaluation(root, ranks).run(lambda: root.predict_step(texts(), 0), seed=5)


def texts() -> Tensor:
    return torch.randint(WORDS, (3, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.sample("2")
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_what_one_process_computes(ranks: int) -> None:
    alone = model(Writer)
    torch.manual_seed(5)
    with torch.no_grad():
        wanted = alone.predict_step(texts(), 0)
    found = run_ranks(write, ranks)
    for rank, (made, gave_back) in enumerate(found):
        assert made["steps"] == wanted["steps"] > 1
        assert torch.equal(made["tokens"], wanted["tokens"])
        torch.testing.assert_close(made["odds"], wanted["odds"])
        assert gave_back == (rank != 0), "lent parameters are given back"


@pytest.mark.full
@pytest.mark.ranks
def test_what_a_layer_leaves_behind_on_its_own_rank_is_refused() -> None:
    with pytest.raises(RankFailure, match=r"different values.*use_cache=False"):
        run_ranks(hoard, 2)
