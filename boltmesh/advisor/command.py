"""``boltmesh plan auto CONFIG`` and ``boltmesh advise``: the best layouts of a config's own model.

``advice_lines`` says the choice of a layout in words, and the first change to make.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from boltmesh.advisor.layouts import ConfigSearch, PlannedLayout
from boltmesh.advisor.machine import Hardware, of_cluster, of_this_machine
from boltmesh.advisor.report import (
    as_data,
    command_line,
    head_lines,
    memory_text,
    nothing_lines,
    report_lines,
    room_text,
    words,
)
from boltmesh.advisor.search import ConfigSearcher
from boltmesh.configs.load import load, source_named
from boltmesh.errors import ConfigError
from boltmesh.planner.machine import accelerator_named, build_cluster, parse_network
from boltmesh.preflight import check_config
from boltmesh.strategy_arguments import check_strategy_name, make_strategy

MATTERS = 0.10
"""Layouts that differ by less are taken as equal."""


def advice_lines(found: ConfigSearch) -> Iterator[str]:
    """Yield the advice as lines of text."""
    yield from head_lines(found)
    yield ""
    chosen = found.best(20)
    fits = ", ".join(f"{words(each)} ({memory_text(each)})" for each in chosen)
    yield f"Fits into the {room_text(found.hardware)} of a rank: {fits or 'nothing'}."
    kinds = {each.layout.axes.division for each in chosen}
    large: dict[object, PlannedLayout] = {}
    for each in found.candidates:
        if each.layout.axes.division not in kinds:
            large.setdefault(each.layout.axes.division, each)
    if large:
        too_large = ", ".join(f"{words(each)} ({memory_text(each)})" for each in large.values())
        yield f"Does not fit: {too_large}."
    yield from (f"Cannot run: {what}: {why}" for what, why in found.refused)
    yield f"The usual rule: {rule(found)}"
    if chosen:
        agrees = follows_rule(found, chosen[0])
        said = "agree" if agrees else f"say otherwise: {words(chosen[0])}"
        yield f"The numbers {said}."
    yield ""
    yield from _first_change(found, chosen)


def rule(found: ConfigSearch) -> str:
    """Return the layout that the usual decision flow proposes, in words."""
    hardware = found.hardware
    replicas_fit = _fits_replicated(found)
    if hardware.num_ranks == 1:
        return (
            "one device and the model fits: train."
            if replicas_fit
            else "one device and the model does not fit: ZeRO with offload to the host or a disk."
        )
    if replicas_fit:
        return "the model fits into one device: DDP or ZeRO."
    block = max((each.numel for each in found.model.units if each.name), default=0)
    if 4 * 4 * block > found.hardware.rank_gib * 2**30:
        return "one block does not fit into a device: tensor groups, or ZeRO-3 with tiled linears."
    if hardware.num_nodes == 1:
        return "one node and the model does not fit into a device: ZeRO, pipeline or tensor groups."
    return "several nodes: ZeRO over a fast network; else tensor groups in a node, and a pipeline."


def follows_rule(found: ConfigSearch, best: PlannedLayout) -> bool:
    """Whether the best layout is one that the usual rule names."""
    if _fits_replicated(found):
        return not best.layout.axes.is_divided
    return best.layout.name != "bolt_ddp"


def _fits_replicated(found: ConfigSearch) -> bool:
    return any(
        each.fits and each.layout.name == "bolt_ddp" and not each.layout.arguments
        for each in found.candidates
    )


def _first_change(found: ConfigSearch, chosen: list[PlannedLayout]) -> Iterator[str]:
    if not chosen:
        yield from nothing_lines(found)
        changes = [f"{words(each)} needs {memory_text(each)}" for each in found.smallest(2)]
        yield f"Change first what needs least memory: {'; '.join(changes)}."
        if found.enough_ranks is not None:
            yield f"With {found.enough_ranks} ranks of this kind ZeRO-3 fits."
        yield "bolt_zero3_nvme keeps parameters and optimizer state on a disk; see docs/zero.md."
        return
    best = chosen[0]
    own = found.own
    if own is None:
        yield f"The config's own strategy was not predicted. The best is: {words(best)}."
    elif not own.fits:
        yield f"Change first: the config's own layout, {words(own)}, does not fit."
    elif own.seconds <= best.seconds * (1 + MATTERS):
        yield (
            f"Change nothing: the config's own layout, {words(own)}, is as fast as the best within "
            f"the error of the prediction."
        )
        return
    else:
        faster = own.seconds / best.seconds
        yield (
            f"Change first: {words(best)} is predicted {faster:.2f} x as fast as the config's "
            f"own layout, {words(own)}. Measure both with boltmesh tune."
        )
    yield f"  {command_line(found, best)}"


def plan_config(
    config: str,
    overrides: Sequence[str],
    *,
    gpu: str | None,
    devices: int | None,
    nodes: int | None,
    network: str | None,
    count: int,
    as_json: bool,
) -> int:
    """Print the best layouts; return the exit code, 1 if none fits.

    Raises:
        ConfigError: For a config that cannot be planned, and options that contradict each other.
    """
    found = search_config(config, overrides, gpu=gpu, devices=devices, nodes=nodes, network=network)
    if as_json:
        print(json.dumps(as_data(found, count)))
    else:
        print("\n".join(report_lines(found, count)))
    return 0 if found.fitting else 1


def advise(
    config: str,
    overrides: Sequence[str],
    *,
    gpu: str | None,
    devices: int | None,
    nodes: int | None,
    network: str | None,
) -> int:
    """Print the advice; return the exit code, 1 if no layout fits.

    Raises:
        ConfigError: For a config that cannot be planned, and options that contradict each other.
    """
    found = search_config(config, overrides, gpu=gpu, devices=devices, nodes=nodes, network=network)
    print("\n".join(advice_lines(found)))
    return 0 if found.fitting else 1


def search_config(
    config: str,
    overrides: Sequence[str],
    *,
    gpu: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    network: str | None = None,
    again: bool = False,
    memory_gib: float | None = None,
) -> ConfigSearch:
    """Return the layouts of a config.

    Args:
        config: Its name or path.
        overrides: ``key=value`` of the command line.
        gpu: Devices that are elsewhere; None: those that are here.
        devices: Their number.
        nodes: In which they are.
        network: Between them.
        again: Measure rates that are remembered.
        memory_gib: Memory that a rank may use; None: its share of the machine.

    Raises:
        ConfigError: For a config that cannot be planned, and options that contradict each other.
    """
    hardware = _hardware(
        config, overrides, gpu=gpu, devices=devices, nodes=nodes, network=network, again=again
    )
    if memory_gib is not None:
        hardware = hardware.limited(memory_gib)
    source = source_named(config, overrides)
    return ConfigSearcher(config, list(overrides), source=source, hardware=hardware).search()


def _hardware(
    config: str,
    overrides: Sequence[str],
    *,
    gpu: str | None,
    devices: int | None,
    nodes: int | None,
    network: str | None,
    again: bool,
) -> Hardware:
    loaded, source = load(config, overrides), source_named(config, overrides)
    check_strategy_name(loaded.strategy.get("name"), source=source)
    make_strategy(loaded.strategy, source=source)  # refuses what a run would refuse
    if gpu is None:
        for option, value in (("--nodes", nodes), ("--network", network)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value} is of devices that are elsewhere, and without --gpu the "
                    f"plan is for those that are here. Add --gpu NAME, or leave {option} out."
                )
        if devices is not None:
            loaded.trainer.devices = devices
        placement = check_config(loaded, source=source, is_fit=False, for_show=True)
        if placement.launcher is not None or placement.num_nodes > 1:
            raise ConfigError(
                f"{source}: plans for the devices that are here are of one machine without a "
                f"launcher. For several nodes add --gpu NAME --devices N --nodes M."
            )
        disk = loaded.strategy.get("offload_path") or "."
        return of_this_machine(
            placement.accelerator,
            placement.num_local_ranks,
            loaded.trainer.precision,
            disk if Path(disk).is_dir() else ".",
            again=again,
        )
    if devices is None:
        raise ConfigError("--gpu NAME needs --devices N, how many there are in all nodes together.")
    accelerator = accelerator_named(gpu)
    rate = None if network is None else parse_network(network)
    cluster = build_cluster(accelerator, num_devices=devices, num_nodes=nodes, network_rate=rate)
    if cluster.num_devices % cluster.devices_per_node:
        raise ConfigError(
            f"--devices {devices} fill no whole nodes of {cluster.devices_per_node}. Add --nodes."
        )
    return of_cluster(cluster, loaded.trainer.precision, loaded.run.matmul_precision)
