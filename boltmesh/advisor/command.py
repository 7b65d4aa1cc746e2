"""``boltmesh plan auto CONFIG``: the best layouts of a config's own model."""

import json
import shlex
from collections.abc import Sequence

from boltmesh.advisor.advice import advice_lines
from boltmesh.advisor.machine import Hardware, of_cluster, of_this_machine
from boltmesh.advisor.report import as_data, report_lines
from boltmesh.advisor.search import ConfigSearch, ConfigSearcher
from boltmesh.configs.load import find, load
from boltmesh.errors import ConfigError
from boltmesh.planner.machine import accelerator_named, build_cluster, parse_network
from boltmesh.preflight import check_config
from boltmesh.strategy_arguments import check_strategy_name


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
    line = shlex.join([config, *overrides])
    if as_json:
        print(json.dumps(as_data(found, line, count)))
    else:
        print("\n".join(report_lines(found, line, count)))
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
    print("\n".join(advice_lines(found, shlex.join([config, *overrides]))))
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
) -> ConfigSearch:
    """Return the layouts of a config; ``again`` measures rates that are remembered.

    Raises:
        ConfigError: For a config that cannot be planned, and options that contradict each other.
    """
    hardware = _hardware(
        config, overrides, gpu=gpu, devices=devices, nodes=nodes, network=network, again=again
    )
    source = str(find(config))
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
    loaded, source = load(config, overrides), str(find(config))
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
        return of_this_machine(
            placement.accelerator,
            placement.num_local_ranks,
            loaded.trainer.precision,
            again=again,
        )
    if devices is None:
        raise ConfigError("--gpu NAME needs --devices N, how many there are in all nodes together.")
    check_strategy_name(loaded.strategy.get("name"), source=source)
    accelerator = accelerator_named(gpu)
    rate = None if network is None else parse_network(network)
    cluster = build_cluster(accelerator, num_devices=devices, num_nodes=nodes, network_rate=rate)
    if cluster.num_devices % cluster.devices_per_node:
        raise ConfigError(
            f"--devices {devices} fill no whole nodes of {cluster.devices_per_node}. Add --nodes."
        )
    return of_cluster(cluster, loaded.trainer.precision, loaded.run.matmul_precision)
