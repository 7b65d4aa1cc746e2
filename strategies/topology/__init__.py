"""Placement of ranks on hosts and GPUs, and groups of ranks that a slow link delays.

``devices`` collects the host and GPU of every rank of a job (collective over all ranks), explains
CUDA's errors and binds ranks to the cores near their GPU. ``links`` describes locations:
``RankLocation``, ``Topology``, and the ``Link`` between two GPUs, read from NVML.
``find_slow_groups`` finds groups of ranks that cross hosts or slow links although a better order
exists, and returns the warning. The engine calls it once per job, after the groups are made.
"""
