"""Checks of a config before a rank is started; they import no torch."""

from omegaconf import DictConfig

from boltmesh.configs.advice import located
from boltmesh.configs.classes import check_class_path
from boltmesh.errors import ConfigError
from boltmesh.launch.placement import Placement, place_ranks
from boltmesh.run_folder import (
    check_run_dir,
    checkpoint_to_evaluate,
    checkpoint_to_resume,
    next_run_folder,
    refuse_unwritable,
)
from boltmesh.run_lock import refuse_held
from boltmesh.strategy_arguments import check_strategy_name


def check_config(config: DictConfig, *, source: str, is_fit: bool, for_show: bool) -> Placement:
    """Run the checks that need no class of the config, and decide where the ranks run.

    Raises:
        ConfigError: For a name, a file or a combination that cannot work.
        LayoutError: For ranks that do not fit.
    """
    check_strategy_name(config.strategy.get("name"), source=source)
    _check_classes(config, source)
    _check_combinations(config, source)
    check_run_dir(config)
    checkpoint = None
    if is_fit:
        checkpoint = checkpoint_to_resume(config)
    elif not for_show:
        checkpoint_to_evaluate(config)
    placement = place_ranks(config)
    if config.trainer.precision.startswith("16-") and placement.accelerator == "cpu":
        # Lightning would take bf16 in place of 16-mixed, with a warning among many.
        bf16 = config.trainer.precision.replace("16-", "bf16-")
        raise ConfigError(
            f"{located(source, 'trainer.precision')}={config.trainer.precision} needs a CUDA "
            f"device, and the ranks run on the CPU. Set trainer.precision={bf16}."
        )
    if is_fit and placement.launcher is None:
        folder = next_run_folder(config, checkpoint)
        refuse_unwritable(config, folder)
        if not for_show:  # in a rank of a launcher, the first one may hold it already
            refuse_held(folder)
    return placement


def _check_classes(config: DictConfig, source: str) -> None:
    trainer, optimizer = config.trainer, config.optimizer
    sections = {"model": config.model, "data": config.data, "optimizer": optimizer}
    sections["optimizer.scheduler"] = optimizer.scheduler
    for name in ("callbacks", "logger"):
        for at, each in enumerate(trainer[name] or []):
            sections[f"trainer.{name}.{at}"] = each
    for key, section in sections.items():
        if section.class_path is not None:
            check_class_path(section.class_path, f"{key}.class_path", source=source)


def _check_combinations(config: DictConfig, source: str) -> None:
    keep, optimizer = config.run.checkpoint, config.optimizer
    if keep.every_n_steps is not None and keep.every_n_epochs is not None:
        raise ConfigError(
            f"{located(source, 'run.checkpoint.every_n_steps')}={keep.every_n_steps} and "
            f"every_n_epochs={keep.every_n_epochs} exclude each other. "
            f"Set run.checkpoint.every_n_epochs=null."
        )
    if keep.monitor is None and keep.save_top_k > 1:
        raise ConfigError(
            f"{located(source, 'run.checkpoint.save_top_k')}={keep.save_top_k} needs a value to "
            f"rank by. Set run.checkpoint.monitor=val_loss, or "
            f"run.checkpoint.save_top_k=-1 to keep all."
        )
    if optimizer.class_path is None and (optimizer.init_args or optimizer.scheduler.class_path):
        raise ConfigError(
            f"{source}: optimizer.class_path is missing, so the module's own optimizer would be "
            f"used and the section ignored. Set optimizer.class_path=torch.optim.AdamW."
        )
    scheduler = optimizer.scheduler
    if scheduler.class_path is None and scheduler.init_args:
        raise ConfigError(
            f"{source}: optimizer.scheduler.class_path is missing. Set for example "
            f"optimizer.scheduler.class_path=torch.optim.lr_scheduler.StepLR."
        )
    if str(scheduler.class_path).endswith("ReduceLROnPlateau") and scheduler.monitor is None:
        raise ConfigError(
            f"{source}: optimizer.scheduler.monitor is missing: ReduceLROnPlateau needs it. "
            f"Set optimizer.scheduler.monitor=val_loss."
        )
    if config.trainer.gradient_clip_algorithm and config.trainer.gradient_clip_val is None:
        raise ConfigError(
            f"{located(source, 'trainer.gradient_clip_algorithm')}="
            f"{config.trainer.gradient_clip_algorithm} clips nothing without a limit. "
            f"Set trainer.gradient_clip_val=1.0."
        )
