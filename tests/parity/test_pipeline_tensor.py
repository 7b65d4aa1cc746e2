"""Two stages, each of two ranks that share its layers, compute what one process computes."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch.amp import GradScaler

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import trace_layout
from boltmesh.telemetry.reader.reader import open_job
from tests.parity.test_tensor import Case
from tests.support.cases import BF16, CLIP, ROUGH, SGD, one_process
from tests.support.causal_training import CausalTraining
from tests.support.gpts import TinyGPT, text_data
from tests.support.pipeline_tensor import PipelineTensor
from tests.support.ranks import run_ranks
from tests.support.recording_path import RecordingPath

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}

CASES = [
    Case("tied over stages, a vocabulary that does not divide, clipping", ranks=4,
         model={"ties": True, "vocabulary": 27}, trainer=CLIP),
    Case("a sequence that is divided between stages, too", ranks=4, accumulate=2,
         model={"depth": 4}, trainer=CLIP,
         strategy={**INTERLEAVED, "sequence_parallel": True, "activation_checkpointing": "full"}),
    Case("Hugging Face's Llama, zbv", ranks=4, module=CausalTraining, trainer=CLIP,
         strategy={"schedule": "zbv", "microbatches": 4, "split": "auto"}),
    Case("bf16-mixed", ranks=4, model=SGD, trainer={**BF16, **CLIP}, tolerance=ROUGH, steps=3),
]  # fmt: skip


def layout(rank: int, world_size: int, case: Case) -> tuple[Trace, float]:
    strategy = PipelineTensor(telemetry=False, **case.strategy)
    trace = trace_layout(case.problem(), strategy, devices=world_size)
    plan = strategy.tensor_axis.plan
    assert plan is not None
    assert (plan.sequence is not None) == bool(case.strategy.get("sequence_parallel"))
    divided = sum(each.elements for each in plan.sharded.values())
    return trace, divided / sum(each.numel() for each in trace.parameters.values())


@pytest.mark.sample("tied over stages, a vocabulary that does not divide, clipping")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_equals_one_process(case: Case) -> None:
    reference = run_ranks(one_process, 1, case)[0]
    assert reference.losses[-1] != reference.losses[0]
    for trace, share in run_ranks(layout, case.ranks, case):
        assert share > 0.9
        assert [*map(str, find_differences(reference, trace, case.tolerance))] == []


def train(rank: int, world_size: int, options: dict[str, Any]) -> str:
    seed_everything(1, verbose=False)
    strategy = PipelineTensor(**options)
    recording = RecordingPath()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, callbacks=[recording],
        plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))],
        max_steps=12, accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(TinyGPT(depth=4, ties=True, dropout=0.1), text_data(192, 8))
    return recording.path


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["zero_bubble"])
def test_each_axis_moves_what_is_expected_of_it(schedule: str) -> None:
    told = run_ranks(train, 4, {"schedule": schedule})
    with open_job(Path(told[0])) as job:
        seen = job.snapshot()
    expected = {
        (each.axis, each.operator): (each.payload_bytes, each.calls)
        for each in seen.expected
        if each.axis in {"tensor", "pipeline"}
    }
    assert {axis for axis, _ in expected} == {"tensor", "pipeline"}
    assert expected["tensor", "allreduce"][0] > 0
    moved: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for rank in seen.ranks:
        own: dict[tuple[str, str], tuple[float, float]] = {}
        for each in rank.collectives:  # of several groups along an axis
            key = each.axis, each.operator
            if key[0] in {"tensor", "pipeline"} and each.bytes_per_step:
                size, calls = own.get(key, (0.0, 0.0))
                own[key] = size + each.bytes_per_step, calls + (each.calls_per_step or 0.0)
        for key, amount in own.items():
            moved.setdefault(key, []).append(amount)
    assert moved.keys() == expected.keys()
    for key, amounts in moved.items():
        # In the mean over the stages that move it at all, as it is stated.
        mean = tuple(sum(values) / len(amounts) for values in zip(*amounts, strict=True))
        assert mean == pytest.approx(expected[key]), key
