"""Findings on waiting: for data, offloaded memory, other ranks, and in pipeline bubbles."""

from boltmesh.telemetry.snapshot import JobSnapshot, MemoryKind, RankSnapshot, operator_name
from boltmesh.tui import units
from boltmesh.tui.devices.reading import NO_LIMIT, POWER_LIMIT
from boltmesh.tui.metrics.experts import excess_work, layer_loads, num_sharing
from boltmesh.tui.metrics.findings.finding import KEPT, Finding, Kind
from boltmesh.tui.metrics.pipelines import Bubble, BubbleRow, bubble
from boltmesh.tui.metrics.step_time import middle
from boltmesh.tui.metrics.stragglers import Balance, Lateness, stragglers
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.state import State

INPUT_SHARE = 0.15
"""Share of a step. A loader that keeps up costs under a percent, so a sixth is no accident; less is
not worth more workers, which cost memory."""

OFFLOAD_SHARE = 0.3
"""Share of a step, for the optimizer and the copies together. An optimizer on the device takes
about a twentieth; offload is chosen for memory, and up to a third is its known price."""

COMMUNICATION_SHARE = 0.2
"""Share of a step, exposed. What hides behind the backward pass is free; up to a fifth is common if
the last bucket is large, and the cures cost accuracy or memory."""

COMPRESSION = {"DDPStrategy": ', or send less: gradient_compression="bf16"'}
"""Strategies with an argument for it."""

HOTTER_CELSIUS = 10.0
"""Above the other GPUs. Their places in a case differ by less."""

EXPERTS_SHARE = 0.1
"""Share of a step waited for the ranks whose experts have most rows."""

UNEVEN_SHARE = 0.15
"""Share of a step waited for ranks that come last in turn. Noise of equal ranks stays below it."""


def limit_of(limit: float, kind: Kind, state: State) -> float:
    """Return the limit of a share, lower while the finding holds so that it does not flap."""
    return KEPT * limit if kind in state.standing else limit


def find_straggler(state: State) -> Finding | None:
    """Name the ranks that the others wait for, and the phase in which they lose the time."""
    if state.job.state != "running":
        return None
    late = stragglers(state.job)
    if not late:
        return None
    worst = late[0]
    ranks = tuple(sorted(found.rank for found in late))
    phase = worst.phase or "several phases"
    who = f"straggler {units.ranks([worst.rank])}"
    if worst.stage is not None:
        who += f", stage {worst.stage}"
    if len(late) > 1:
        who = f"stragglers {units.ranks(ranks).removeprefix('ranks ')}, the latest {worst.rank}"
    device, cure = _judge_device(state, worst.rank)
    return Finding(
        kind="straggler",
        severity="warn",
        headline=f"{who}: {units.seconds(worst.excess_s)} a step late in {phase}",
        evidence=(*_tell_late(state.job, worst, ranks), *device),
        advice=cure or _relieve(phase, is_one=len(late) == 1, stage=worst.stage),
        ranks=ranks,
        cost=max(0.0, min(1.0, worst.excess_s / worst.step_s)),
    )


def _tell_late(job: JobSnapshot, worst: Lateness, ranks: tuple[int, ...]) -> tuple[str, ...]:
    evidence = [f"{worst.share:+.0%} compute time"]
    if worst.phase is not None:
        own, peers = units.seconds(worst.phase_s), units.seconds(worst.phase_peers_s)
        evidence.insert(0, f"{worst.phase} {own}, its peers {peers}")
    if worst.peers_wait_s > worst.wait_s:
        evidence.append(
            f"waits {units.seconds(worst.wait_s)}, its peers {units.seconds(worst.peers_wait_s)}"
        )
    hosts = {rank.host for rank in job.ranks if rank.rank in ranks}
    others = {rank.host for rank in job.ranks if rank.rank not in ranks}
    if len(hosts) == 1 and others - hosts:
        evidence.append(f"on host {next(iter(hosts))}")
    return tuple(evidence)


def _judge_device(state: State, rank: int) -> tuple[list[str], str | None]:
    """Return properties that only the GPU of a late rank has, and the advice.

    A reason for low clocks that most other GPUs have as well does not make one of them late; the
    power limit is the normal state of a busy GPU.
    """
    gpus = [reading for reading in state.devices if reading.kind == "gpu"]
    own = next((reading for reading in gpus if rank in reading.ranks), None)
    if own is None:
        return [], None
    others = [reading for reading in gpus if reading is not own]
    facts = []
    cure = None
    reasons = [
        reason
        for reason in own.throttle_reasons or ()
        if 2 * sum(reason in (other.throttle_reasons or ()) for other in others) <= len(others)
        and (others or reason != POWER_LIMIT)
        and reason not in NO_LIMIT
    ]
    if reasons:
        facts.append(f"its GPU is throttled, unlike most others: {', '.join(reasons)}")
        cure = "look why that GPU is throttled: `nvidia-smi -q -d PERFORMANCE,CLOCK` on its host"
    if POWER_LIMIT in reasons:
        cure = "compare the power limit of that GPU with the others: `nvidia-smi -q -d POWER`"
    known = [each.temperature_celsius for each in others if each.temperature_celsius is not None]
    is_hotter = False
    if own.temperature_celsius is not None and known:
        usual = middle(known)
        is_hotter = own.temperature_celsius >= usual + HOTTER_CELSIUS
        if is_hotter:
            hotter = f"its GPU has {own.temperature_celsius:.0f} C, the others {usual:.0f} C"
            facts.insert(0, hotter)
    if is_hotter or any("thermal" in reason for reason in reasons):
        cure = "cool that GPU, or take it out of the job"
    return facts, cure


def _relieve(phase: str, *, is_one: bool, stage: int | None) -> str:
    if stage is not None and phase in {"forward", "backward"}:
        return f"move a block from stage {stage} to another, or look at the clocks of its rank"
    its = "its" if is_one else "their"
    if phase == "data":
        return f"look at {its} loader workers, shard and storage"
    if phase == "transfer":
        return f"look at {its} PCIe link, and whether the loader pins memory"
    if phase == "optimizer":
        return f"look at {its} share of the parameters, and at the disk where they are offloaded"
    return f"look at {its} clocks, heat and other processes, then at the size of {its} batches"


def find_input(state: State, typical: Balance) -> Finding | None:
    """Say that the ranks wait for batches, or for their way to the device."""
    parts = ["data"] if has_offload(state.job) else ["data", "transfer"]
    share = typical.share(*parts)
    if share < limit_of(INPUT_SHARE, "input", state):
        return None
    data_s, transfer_s = (typical.phases.get(name, 0.0) for name in ("data", "transfer"))
    is_loader = data_s >= transfer_s
    evidence = [f"data {units.seconds(data_s)} of {units.seconds(typical.step_s)}"]
    if transfer_s > 0:
        evidence.append(f"host to device {units.seconds(transfer_s)}")
    if (ready := state.trends.get("loader_queue")) is not None:
        evidence.append(f"{units.count(ready.values[-1])} batches ready in the loader of rank 0")
    return Finding(
        kind="input",
        severity="warn",
        headline=f"input-bound: {share:.0%} of a step goes into waiting for the batch",
        evidence=tuple(evidence),
        advice="give the loader more workers or prefetching, or do its work beforehand"
        if is_loader
        else "pin the loader's memory, and move only what the step needs",
        cost=share,
    )


def find_offload(state: State, typical: Balance) -> Finding | None:
    """Say that the step waits for memory on the host or the disk."""
    share = typical.share("optimizer", "transfer")
    kinds = offloaded(state.job)
    if not kinds or share < limit_of(OFFLOAD_SHARE, "offload", state):
        return None
    places = sorted({kind.place for kind in kinds})
    evidence = [
        f"{name} {units.seconds(typical.phases[name])}"
        for name in ("optimizer", "transfer")
        if name in typical.phases
    ]
    evidence.append(f"of {units.seconds(typical.step_s)}")
    largest = max(kinds, key=_kept_bytes)
    evidence.append(f"{largest.kind} {units.memory(_kept_bytes(largest))} on {largest.place}")
    return Finding(
        kind="offload",
        severity="warn",
        headline=f"offload-bound: {share:.0%} of a step goes to the {' and the '.join(places)}",
        evidence=tuple(evidence),
        advice="keep on the device what fits, starting with the optimizer, or accumulate more "
        "batches a step",
        cost=share,
    )


def find_communication(state: State, typical: Balance) -> Finding | None:
    """Say that transfers which nothing hides take a large part of the step."""
    exposed_s = typical.transfer_s
    if state.job.mesh.get("pipeline", 1) > 1 and bubble(state) is None:
        return None  # waits for other stages cannot be separated from transfers
    share = exposed_s / typical.step_s
    least = limit_of(COMMUNICATION_SHARE, "communication", state)
    if state.job.communication_note is not None or share < least:
        return None
    evidence = [f"{units.seconds(exposed_s)} of {units.seconds(typical.step_s)}"]
    rows = [row for row in traffic_rows(state.job) if row.payload_bytes]
    axis = None
    if rows:
        heaviest = max(rows, key=lambda row: row.payload_bytes or 0.0)
        axis = heaviest.axis
        fact = f"{axis} {operator_name(heaviest.operator)} {units.traffic(heaviest.payload_bytes)}"
        speed = heaviest.wire_bytes_per_second
        evidence.append(fact + (f" at {units.traffic(speed)}/s" if speed is not None else ""))
    return Finding(
        kind="communication",
        severity="warn",
        headline=f"communication-bound: {share:.0%} of a step is exposed communication",
        evidence=tuple(evidence),
        advice="keep the tensor axis within one host, or make it smaller"
        if axis == "tensor"
        else "give each rank more work a step: larger, or more accumulated batches"
        + COMPRESSION.get(state.job.strategy, ""),
        cost=share,
    )


def find_experts(state: State, typical: Balance) -> Finding | None:
    """Say that ranks wait for those whose experts have most rows."""
    loads, size = layer_loads(state.job), num_sharing(state.job)
    excess = excess_work(loads, size)
    if excess is None:
        return None
    # Even rows save no more than the ranks wait, and no more than the rows that are too many.
    share = min(typical.uneven_s / typical.step_s, 1 - 1 / excess)
    if share < limit_of(EXPERTS_SHARE, "experts", state):
        return None
    worst = max(loads, key=lambda load: max(load.by_rank(size)))
    return Finding(
        kind="experts",
        severity="warn",
        headline=f"uneven experts: ranks wait {share:.0%} of a step for those with most rows",
        evidence=(
            f"the fullest rank of a layer has {excess:.2f}x the mean rows",
            f"{worst.module}: {worst.imbalance or 0:.2f}x on one expert, {worst.num_idle} idle",
        ),
        advice="raise the weight of the auxiliary loss that balances experts, or let fewer ranks "
        "share them: a smaller expert= puts more experts on each",
        cost=share,
    )


def find_uneven(state: State, typical: Balance) -> Finding | None:
    """Say that ranks wait for the last one, which changes from step to step."""
    job = state.job
    share = typical.uneven_s / typical.step_s
    # Waits between pipeline stages are the bubble; a late rank has a finding of its own.
    least = limit_of(UNEVEN_SHARE, "uneven", state)
    if share < least or job.mesh.get("pipeline", 1) > 1 or stragglers(job):
        return None
    if find_experts(state, typical) is not None:
        return None
    return Finding(
        kind="uneven",
        severity="warn",
        headline=f"uneven steps: ranks wait {share:.0%} of a step for the last one",
        evidence=(
            f"{units.seconds(typical.uneven_s)} of {units.seconds(typical.step_s)}",
            "no rank is late all the time",
        ),
        advice="make batches of equal cost (group samples by length), and look for other load on "
        "the hosts",
        cost=share,
    )


def has_offload(job: JobSnapshot) -> bool:
    """Say whether a part of the training state lives off the device."""
    return bool(offloaded(job))


def offloaded(job: JobSnapshot) -> list[MemoryKind]:
    """Return the state of one rank on the host or the disk, from the first rank that reports it."""
    for rank in job.ranks:
        kinds = [kind for kind in rank.memory_kinds if _is_off_device(kind, rank)]
        if kinds:
            return kinds
    return []


def _is_off_device(kind: MemoryKind, rank: RankSnapshot) -> bool:
    if kind.kind not in {"parameters", "gradients", "optimizer", "activations"}:
        return False
    # The host is where a rank on a CPU computes.
    is_away = kind.place == "disk" or (kind.place == "host" and not rank.device.startswith("cpu"))
    return is_away and _kept_bytes(kind) > 0


def _kept_bytes(kind: MemoryKind) -> int:
    return kind.measured_bytes or kind.predicted_bytes or 0


BUBBLE_SHARE = 0.25
"""Idle time of a step. Four microbatches for each stage cost less than a fifth in GPipe and 1F1B;
what the host adds is a few percent."""

PART_SHARE = 0.1
"""Idle time that only uneven stages, or only communication and the host, may cost."""


def find_bubble(state: State, typical: Balance) -> Finding | None:
    """Say how long the ranks stand idle, and which part of it is easiest to reduce."""
    found = bubble(state)
    if found is None or typical.step_s <= 0:
        return None
    share = found.ratio
    parts = {
        name: part
        for name in ("structural", "imbalance", "excess")
        if (part := getattr(found.mean, name)) is not None
    }
    worst = max(parts, key=lambda name: parts[name], default=None)
    avoidable = max(parts.get("imbalance", 0.0), parts.get("excess", 0.0))
    least_part = limit_of(PART_SHARE, "bubble", state)
    if share < limit_of(BUBBLE_SHARE, "bubble", state) and avoidable < least_part:
        return None
    if avoidable >= least_part:  # the schedule's own share is known before a run, this is not
        worst = "imbalance" if parts.get("imbalance", 0.0) == avoidable else "excess"
    slow = _slowest(found) if worst == "imbalance" else None
    evidence = [f"{name} {part:.0%}" for name, part in parts.items()]
    if slow is not None:
        row, by = slow
        evidence.append(f"{_stages(row)} on rank {row.rank} works {by:.0%} longer than the others")
    if found.plan is not None:
        evidence.append(f"{found.plan.schedule}, {found.plan.num_microbatches} microbatches")
    return Finding(
        kind="bubble",
        severity="warn",
        headline=f"pipeline bubble: ranks are idle for {share:.0%} of the pipeline's time",
        evidence=tuple(evidence),
        advice=_mend(worst, found, slow),
        ranks=() if slow is None else (slow[0].rank,),
        cost=share,
    )


def _slowest(found: Bubble) -> tuple[BubbleRow, float] | None:
    """Return the rank that works longest, and by how much more than the median of the others."""
    if len(found.rows) < 2:
        return None
    row = min(found.rows, key=lambda row: row.parts.measured)
    typical = middle(1 - each.parts.measured for each in found.rows if each is not row)
    if typical <= 0:
        return None
    return row, (1 - row.parts.measured) / typical - 1


def _stages(row: BubbleRow) -> str:
    if len(row.stages) == 1:
        return f"stage {row.stages[0]}"
    return f"stages {', '.join(map(str, row.stages))}"


def _mend(worst: str | None, found: Bubble, slow: tuple[BubbleRow, float] | None) -> str:
    if worst == "imbalance" and slow is not None:
        fast = max(found.rows, key=lambda row: row.parts.measured)
        return f"move a block from {_stages(slow[0])} to {_stages(fast)}"
    if worst == "excess":
        return "look at what runs between the chunks: sends and receives, the host, logging"
    batches = "" if found.plan is None else f" than {found.plan.num_microbatches}"
    return f"use more microbatches{batches}, or an interleaved or zero-bubble schedule"
