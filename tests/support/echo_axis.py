"""A toy axis, added as any new axis is: an entry in ``AXES``, a class, an argument of a strategy.

Its ranks repeat the work of each other: they get the same batches, average nothing, hold the whole
model and move no bytes. To be run as a program, ``python -m tests.support.echo_axis PART FILE``:
the entry has to be there before the rest of boltmesh is imported. It writes as JSON what is made of
the axis by the commands and the demo, or by a run on two ranks and the dashboard.
"""

from boltmesh import axes

axes.AXES = (*axes.AXES[:-1], "echo", axes.AXES[-1])
axes.ALL_AXES = (*axes.AXES, "expert")

import asyncio  # noqa: E402
import contextlib  # noqa: E402
import inspect  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from lightning.pytorch import LightningModule, Trainer, seed_everything  # noqa: E402

from boltmesh import cli  # noqa: E402
from boltmesh.strategies import Parallel3DStrategy, registry  # noqa: E402
from boltmesh.strategies.engine.axis import Axis  # noqa: E402
from boltmesh.telemetry.reader.reader import open_job  # noqa: E402
from boltmesh.tui.export.prometheus import prometheus_text  # noqa: E402
from boltmesh.tui.export.tables import csv_text  # noqa: E402
from boltmesh.tui.sources.live import Observation  # noqa: E402
from tests.support.pipelines import quiet_trainer  # noqa: E402
from tests.support.stack import Stack, token_data  # noqa: E402
from tests.tui.samples import demo  # noqa: E402
from tests.tui.screens import open_app, screen_text  # noqa: E402


class EchoAxis(Axis):
    """Ranks that repeat each other."""

    name = "echo"

    def __init__(self, size: int) -> None:
        self.wanted_size = size


class EchoStrategy(Parallel3DStrategy):
    """All axes, and the toy axis."""

    def __init__(self, *, echo: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.add_axis(EchoAxis(echo))


_OWN = inspect.signature(EchoStrategy.__init__).parameters["echo"]
_OTHERS = inspect.signature(Parallel3DStrategy.__init__).parameters.values()
EchoStrategy.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [each for each in _OTHERS if each.kind is not each.VAR_KEYWORD] + [_OWN]
)
registry.STRATEGIES["bolt_3d"] = registry.Entry(__name__, "EchoStrategy", "With a toy axis.")

TINY = ("model.init_args.n_embd=32", "data.init_args.batch_size=8")


def planned(*arguments: str) -> str:
    """Return what a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.run_command(["plan", "threed", *TINY, *arguments]) == 0
    return printed.getvalue()


async def page_text(seen: Observation) -> str:
    """Return the page of the mesh."""
    async with open_app(seen, size=(160, 45)) as pilot:
        await pilot.press("8")
        return screen_text(pilot.app)


def shown(seen: Observation) -> dict[str, Any]:
    """Return what the dashboard and the exports make of a job."""
    return {
        "mesh": seen.job.mesh,
        "page": asyncio.run(page_text(seen)),
        "ranks": "".join(csv_text("ranks", [seen])),
        "prometheus": prometheus_text(seen),
    }


def fit(strategy: Any, devices: int) -> tuple[LightningModule, Trainer]:
    """Train three steps."""
    seed_everything(1, verbose=False)
    module = Stack()
    trainer = quiet_trainer(devices, strategy, max_steps=3)
    trainer.fit(module, token_data(24, 4))
    return module, trainer


def trained() -> dict[str, Any]:
    """Train on two ranks of the axis, and in one process; return how they compare."""
    strategy = EchoStrategy(echo=2, data=1, zero_stage=0, start_method="fork", timeout_s=600)
    module, _ = fit(strategy, 2)
    with open_job() as job:
        snapshot = job.snapshot()
    reference, _ = fit("auto", 1)
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    return {
        "is_equal": all(torch.equal(one, other) for one, other in pairs),
        "coordinates": [rank.coordinates for rank in snapshot.ranks],
        "expected": [each.axis for each in snapshot.expected],
        **shown(Observation(time=snapshot.updated, job=snapshot)),
    }


def without_training() -> dict[str, Any]:
    """Return plans, and what is made of the demo."""
    file = f"data.init_args.path={__file__}"
    return {
        "plan": planned("strategy.echo=2", "strategy.data=1", "trainer.devices=8", file),
        "plan of one": planned(file),
        **shown(demo(mesh={"pipeline": 2, "data": 2, "echo": 2, "tensor": 2})),
    }


if __name__ == "__main__":
    _, part, output = sys.argv
    found = {"demo": without_training, "run": trained}[part]()
    Path(output).write_text(json.dumps(found))
