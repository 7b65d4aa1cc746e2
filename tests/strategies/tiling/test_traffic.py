"""What layers in tiles are expected to move is what telemetry counts, to the byte and the call."""

from typing import Any

import pytest

from tests.strategies.data_parallel.test_shard_traffic import Silent, counted

pytestmark = pytest.mark.ranks


class Wide(Silent):
    """Embedding, head and the Linears of the blocks are all larger than 4096 bytes."""

    def __init__(self) -> None:
        super().__init__(width=101, hidden=103, depth=2)


class Tied(Silent):
    def __init__(self) -> None:
        super().__init__(width=101, hidden=103, depth=1, ties=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "strategy", "trainer", "kind"),
    [
        (2, {}, {}, Wide),
        (2, {}, {"accumulate_grad_batches": 3}, Tied),
        (2, {}, {"precision": "bf16-mixed", "gradient_clip_val": 1.0}, Wide),
        (4, {"shard_size": 2}, {}, Wide),
        (2, {"activation_checkpointing": "full"}, {}, Wide),
        (2, {"activation_checkpointing": "selective"}, {}, Wide),
    ],
    ids=[
        "plain",
        "tied, accumulation",
        "bf16-mixed, clipping",
        "copies of shards",
        "recomputed",
        "some",
    ],
)
def test_the_bytes_of_a_step_are_the_bytes_expected(
    world_size: int, strategy: Any, trainer: Any, kind: Any
) -> None:
    strategies = [strategy, {**strategy, "tile_linear_bytes": 4096}]
    (plain, _), (expected, measured) = counted(world_size, strategies, trainer, kind)
    assert expected["_allgather_base"][1] > 2 * plain["_allgather_base"][1]
    for rank in measured:
        assert rank == expected
