"""What a step writes while it is only looked at is gone afterwards, wherever it wrote it."""

from collections import defaultdict
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn

from boltmesh.strategies.dry_run.no_side_effects import MOST_MEMBERS, modules_unchanged
from tests.support.pipelines import quiet_trainer


class Keeping(nn.Module):
    of_all: ClassVar[list[int]] = [1]
    by_loader_of_all: ClassVar[list[list[int]]] = [[], [2]]

    def __init__(self) -> None:
        super().__init__()
        self.flat: list[int] = [1, 2]
        self.by_loader: list[list[int]] = [[], [3]]
        self.by_name: Any = {"a": [], "b": {4}, "c": ([], {})}
        self.counts: Any = defaultdict(list)

    def note(self) -> None:
        for each in (self.of_all, *self.by_loader_of_all, self.flat, *self.by_loader):
            each.append(0)
        self.by_name["a"].append(0)
        self.by_name["b"].add(0)
        self.counts["new"].append(0)
        self.late = [0]

    def kept(self) -> dict[str, Any]:
        names = ("of_all", "by_loader_of_all", "flat", "by_loader", "by_name", "counts")
        return {name: getattr(self, name) for name in names}


def test_containers_have_their_members_again_also_within_each_other_and_on_classes() -> None:
    module = Keeping()
    before = repr(module.kept())
    objects = [*map(id, module.kept().values()), *map(id, module.by_loader)]
    with modules_unchanged([module]):
        module.note()
        assert repr(module.kept()) != before
        module.by_loader = [[7]]
    assert repr(module.kept()) == before
    assert [*map(id, module.kept().values()), *map(id, module.by_loader)] == objects
    assert not hasattr(module, "late")


def test_containers_are_put_back_in_whatever_order_they_are_met() -> None:
    module: Any = nn.Module()
    lists: list[list[int]] = [[], []]
    module.all, module.later = {"lists": lists}, lists
    with modules_unchanged([module]):
        lists[0].append(1)
    assert lists == [[], []]


def test_a_container_that_was_not_written_is_not_written() -> None:
    module: Any = nn.Module()
    shared = {"a": 1}
    module.shared = shared
    with modules_unchanged([module]):
        readers = iter(shared)
    assert list(readers) == ["a"]  # of a dict that changed meanwhile Python would say so


def test_a_container_of_many_is_put_back_and_not_looked_into() -> None:
    module: Any = nn.Module()
    module.rows = [[] for _ in range(MOST_MEMBERS + 1)]
    with modules_unchanged([module]):
        module.rows[0].append(1)
        module.rows.append([2])
    assert len(module.rows) == MOST_MEMBERS + 1
    assert module.rows[0] == [1]


def test_running_statistics_are_put_back_though_their_kernel_counts_no_write() -> None:
    module = nn.BatchNorm1d(2)
    written = module.running_mean._version
    with modules_unchanged([module]):
        module(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        assert module.running_mean.tolist() != [0.0, 0.0]
    assert module.running_mean.tolist() == [0.0, 0.0]
    assert module.running_var.tolist() == [1.0, 1.0]
    assert module.num_batches_tracked == 0
    assert module.running_mean._version == written, "a graph may have saved them"


def test_what_a_step_sets_on_its_trainer_optimizers_and_schedulers_is_put_back() -> None:
    module = LightningModule()
    layer = nn.Linear(2, 2)
    trainer = quiet_trainer(1)
    module.trainer = trainer
    rates = torch.tensor(0.5)
    groups: list[dict[str, Any]] = [{"params": [layer.weight]}, {"params": [layer.bias]}]
    optimizer = torch.optim.Adam(groups, lr=0.5)
    optimizer.param_groups[1]["lr"] = rates
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trainer.strategy.optimizers = [optimizer]
    trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler)]
    before = repr((optimizer.param_groups, scheduler.state_dict()))
    with modules_unchanged(nn.ModuleList([module]).modules()):
        trainer.should_stop = True
        trainer.fit_loop.max_epochs = 0
        trainer.fit_loop.epoch_loop.batch_progress.current.ready = 7
        optimizer.param_groups[0].update(lr=0.1, mine=1)
        rates.mul_(2)
        optimizer.step()
        scheduler.step()
        assert repr((optimizer.param_groups, scheduler.state_dict())) != before
    assert not trainer.should_stop
    assert trainer.fit_loop.max_epochs == 1
    assert trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0
    assert repr((optimizer.param_groups, scheduler.state_dict())) == before
    assert optimizer.param_groups[1]["lr"] is rates
