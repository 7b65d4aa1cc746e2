"""``boltmesh check``: train a config's layout and one process side by side, and compare.

The command starts the ranks of the layout, then the one process, which gets the number of those
that see data of their own; each writes what it computed into a folder, and the comparison of
``parity.py`` names the first difference.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boltmesh.configs.load import load, source_named, without_section
from boltmesh.errors import ConfigError
from boltmesh.launch.rank import Rank
from boltmesh.launch.supervisor import Supervisor
from boltmesh.preflight import check_config
from boltmesh.telemetry.job import SWITCH_VARIABLE, new_job_id

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.check.parity import Problem
    from boltmesh.launch.placement import Placement
    from boltmesh.run import Built

PART_VARIABLE = "BOLTMESH_CHECK_PART"
"""``reference`` or ``layout``: what the ranks of a supervisor of this command are to compute."""
FOLDER_VARIABLE = "BOLTMESH_CHECK_FOLDER"
DATA_SIZE = "data_size"
"""The file into which the layout writes how many of its ranks see data of their own."""

SHOWN = 5
"""How many differences are listed; the first is the one to look for."""

_COMPARED = (
    "benchmark",
    "detect_anomaly",
    "deterministic",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "precision",
)
"""Keys of the trainer section that change what is computed, and hold for both runs."""


def check(config: str, overrides: Sequence[str], *, steps: int, rank: Rank) -> int:
    """Compare, print, and return 1 when the layout and one process differ.

    Raises:
        ConfigError: When the config cannot run, or nothing can be compared.
    """
    if PART_VARIABLE in os.environ:
        return _trace_in_rank(config, overrides, steps, rank)
    loaded, source = load(config, overrides), source_named(config, overrides)
    placement = check_config(loaded, source=source, is_fit=False, for_show=True)
    if placement.launcher is not None:
        raise ConfigError(
            f"boltmesh check starts the ranks of both runs itself, and {placement.launcher.name} "
            f"has started this one. Run it without {placement.launcher.name}."
        )
    if placement.world_size == 1:
        raise ConfigError(
            f"{source}: trainer.devices=1 leaves nothing to compare with one process. "
            f"Set trainer.devices=2."
        )
    if not loaded.trainer.use_distributed_sampler:
        raise ConfigError(
            f"{source}: trainer.use_distributed_sampler=false leaves it to the data which rank "
            f"sees what, and a comparison has to know. Set trainer.use_distributed_sampler=true."
        )
    with tempfile.TemporaryDirectory(prefix="boltmesh-check-") as folder:
        os.environ.update({FOLDER_VARIABLE: folder, SWITCH_VARIABLE: "0"})
        line = ["check", config, *overrides, "--steps", str(steps)]
        # One process on the first device, with the shares of all data ranks.
        alone = ["trainer.devices=1", "strategy=bolt_ddp"]
        others = without_section(overrides, "strategy")
        reference = ["check", config, *others, *alone, *line[-2:]]
        for part, command, ranks in (
            ("layout", line, placement.num_local_ranks),
            ("reference", reference, 1),
        ):
            os.environ[PART_VARIABLE] = part
            flag = ["--traceback"] if rank.wants_traceback else []
            code = Supervisor(
                [*command, *flag],
                num_ranks=ranks,
                job_id=new_job_id(),
                wants_traceback=rank.wants_traceback,
            ).run()
            if code != 0:
                return code
        return _compare(Path(folder), loaded, placement)


def _trace_in_rank(config: str, overrides: Sequence[str], steps: int, rank: Rank) -> int:
    import torch

    from boltmesh.check.parity import trace_layout, trace_one_process
    from boltmesh.run import RunBuilder

    loaded, source = load(config, overrides), source_named(config, overrides)
    placement = check_config(loaded, source=source, is_fit=False, for_show=True)
    rank.serve_rendezvous()

    builder = RunBuilder(loaded, "fit", placement, rank, source=source)
    part, folder = os.environ[PART_VARIABLE], Path(os.environ[FOLDER_VARIABLE])
    problem = _problem(loaded, placement, lambda: builder.build(for_show=True), steps)
    if part == "reference":
        data_size = int((folder / DATA_SIZE).read_text())
        # Where there is one data rank, the Trainer leaves the order to the loader.
        trace = trace_one_process(problem, data_size=data_size, is_dealt=data_size > 1)
    else:
        strategy = builder.build_strategy()
        trace = trace_layout(problem, strategy, devices=placement.devices)
        if rank.rank == 0:
            (folder / DATA_SIZE).write_text(str(strategy.layout.data))
    if rank.rank == 0:
        torch.save(vars(trace), folder / part)
    return 0


def _problem(
    config: "DictConfig", placement: "Placement", build: Callable[[], "Built"], steps: int
) -> "Problem":
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from boltmesh.check.parity import Problem

    built = build()
    source: Any = built.data if built.data is not None else built.model
    if built.data is not None:
        built.data.prepare_data()
        built.data.setup("fit")

    def loader(name: str) -> Any:
        return getattr(source, name) if is_overridden(name, source) else None

    can_predict = is_overridden("predict_step", built.model)
    if built.data is not None and can_predict and loader("predict_dataloader") is not None:
        built.data.setup("predict")
    return Problem(
        module=lambda: build().model,
        train=source.train_dataloader,
        validation=loader("val_dataloader"),
        prediction=loader("predict_dataloader") if can_predict else None,
        steps=steps,
        accumulate=config.trainer.accumulate_grad_batches,
        trainer={
            "accelerator": placement.accelerator,
            **{key: config.trainer[key] for key in _COMPARED},
        },
        seed=config.run.seed if config.run.seed is not None else 1,
    )


def _compare(folder: Path, config: "DictConfig", placement: "Placement") -> int:
    from boltmesh.check.differences import Trace, find_differences
    from boltmesh.strategies.checkpoint.safe_load import safe_load

    reference, layout = (
        Trace(**safe_load(folder / part, part)) for part in ("reference", "layout")
    )
    differences = find_differences(reference, layout)
    print(f"{config.strategy.name} on {placement.world_size} ranks against one process:")
    print(f"  {'step':>4}  {'loss':>12}  {'one process':>12}  {'gradient norm':>13}")
    for step, (one, other) in enumerate(zip(reference.losses, layout.losses, strict=False)):
        norm = max(layout.gradient_norms[step]) if step < len(layout.gradient_norms) else 0.0
        print(f"  {step:>4}  {other:>12.7f}  {one:>12.7f}  {norm:>13.7f}")
    compared = {
        "losses": len(reference.losses),
        "gradient norms": len(reference.gradient_norms),
        "logged metrics": len({name for each in reference.metrics for name in each}),
        "parameters": len(reference.parameters),
        "optimizer states": len(reference.optimizer_state),
        "validation metrics": len(reference.validation),
        "floating-point predictions": len(reference.predictions),
    }
    what = ", ".join(f"{count} {name}" for name, count in compared.items() if count)
    left_out = [name for name, count in compared.items() if not count]
    print(f"compared: {what}" + (f"; there are no {' and no '.join(left_out)}" if left_out else ""))
    if not differences:
        print("equal, within what the order of sums explains")
        return 0
    print(f"{len(differences)} differences; the first:")
    for each in differences[:SHOWN]:
        print(f"  {each}")
    return 1
