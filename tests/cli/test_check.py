"""``boltmesh check`` as a user runs it, where ranks share batches and where they do not."""

import pytest

from tests.support.forked_python import BOLTMESH, run_python

SMALL = [
    "model.init_args.n_layer=2", "model.init_args.n_embd=32", "data.init_args.batch_size=4",
    "limit_val_batches=1", "limit_predict_batches=1",
]  # fmt: skip


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "ranks"),
    [
        pytest.param("zero2", (), 2, id="two data ranks"),
        pytest.param("tensor", (), 2, id="one data rank, in the loader's order"),
        pytest.param("threed", ("strategy.data=1", "devices=4"), 4, id="one of four"),
    ],
)
def test_layouts_are_compared_with_the_batches_that_their_data_ranks_see(
    workplace, recipe, overrides, ranks
):
    line = (*BOLTMESH, "check", recipe, "--steps", "2", *SMALL, *overrides)
    done = run_python(*line, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" on {ranks} ranks against one process:" in done.stdout
    assert "compared: 2 losses, 2 gradient norms" in done.stdout
    assert "equal, within what the order of sums explains" in done.stdout
