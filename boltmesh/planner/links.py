"""Seconds of collectives and messages between the devices of a cluster."""

from dataclasses import dataclass
from math import log2, sqrt

from boltmesh.planner.layout import AxisGroup
from boltmesh.planner.machine import Cluster
from boltmesh.planner.rates import Rates

LINK_LATENCY = 6.4e-6
NETWORK_LATENCY = 34e-6
"""Seconds of a step of a collective within a node, and between nodes: all-reduces of 1 MiB over 8
and over 32 ranks, planner_micro.csv M26 and M27."""


@dataclass(frozen=True)
class ClusterLinks:
    """Links by data sheets, and the shares of them that software reaches."""

    cluster: Cluster
    rates: Rates

    @property
    def network_rate(self) -> float:
        """Bytes per second between nodes, of one device, as collectives reach it."""
        rates, cluster = self.rates, self.cluster
        return cluster.network_rate * (rates.onload_network if cluster.is_onload else rates.network)

    def ring(self, group: AxisGroup, num_bytes: float) -> float:
        """Return the seconds of an all-gather, or of a reduce-scatter, of ``num_bytes`` in all."""
        if group.size == 1:
            return 0.0
        latency = self.latency(group) * log2(group.size)
        inside = (
            (group.in_node - 1) / group.in_node * num_bytes / (self.cluster.accelerator.link_rate)
        )
        across = 0.0
        if group.num_nodes > 1:
            # Each rank of a node moves its part of the node's bytes.
            share = num_bytes / group.in_node * (group.num_nodes - 1) / group.num_nodes
            across = share / (self.network_rate)
        moving = max(inside, across)
        # A pipelined ring fills and drains: a message of a medium size reaches half of the rate
        # of a large one (planner_micro.csv M22 to M27).
        return latency + moving + sqrt(latency * moving)

    @staticmethod
    def latency(group: AxisGroup) -> float:
        """Return the seconds of one step of a collective, however small."""
        return LINK_LATENCY if group.num_nodes == 1 else NETWORK_LATENCY

    def all_reduce(self, group: AxisGroup, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of ``num_bytes``."""
        return 2.0 * self.ring(group, num_bytes)

    def message(self, group: AxisGroup, num_bytes: float) -> float:
        """Return the seconds of a message from a rank to the next."""
        if group.size == 1:
            return 0.0
        rate = self.cluster.accelerator.link_rate if group.num_nodes == 1 else self.network_rate
        return self.latency(group) + num_bytes / rate

    def exchange(self, group: AxisGroup, num_bytes: float) -> float:
        """Return the seconds of an all-to-all: ``num_bytes`` from each rank to each other one."""
        if group.size == 1:
            return 0.0
        inside = num_bytes * (group.in_node - 1) / self.cluster.accelerator.link_rate
        across = num_bytes * (group.size - group.in_node) / self.network_rate
        return self.latency(group) * log2(group.size) + max(inside, across)
