"""An editable install works from every kind of process, with the links and without them."""

from pathlib import Path

import pytest

from tests.packaging.environments import Environment, copy_checkout, is_inside, make_environment

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

SPAWNS = """
import multiprocessing
import boltmesh.configs.load, boltmesh.strategies, boltmesh.tui

def where(_):
    return [boltmesh.configs.load.__file__, boltmesh.strategies.__file__, boltmesh.tui.__file__]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.map(where, [0])[0], sep="\\n")
"""


@pytest.fixture(scope="module", params=["links", "no-links"])
def editable(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Environment, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    checkout = copy_checkout(folder / "checkout", with_links=request.param == "links")
    environment = make_environment(folder / "venv")
    environment.install("-e", checkout)
    return environment, checkout


@pytest.mark.sample("links")
def test_a_spawned_process_imports_the_checkout(
    editable: tuple[Environment, Path], tmp_path: Path
) -> None:
    environment, checkout = editable
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS, encoding="utf-8")
    files = environment.run(environment.python, script, cwd=tmp_path).stdout.split()
    assert len(files) == 3
    assert all(is_inside(file, checkout) for file in files)


@pytest.mark.full
@pytest.mark.parametrize("editable", ["links"], indirect=True)
def test_torchrun_starts_the_example(editable: tuple[Environment, Path]) -> None:
    environment, checkout = editable
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    example = ("examples/01_ddp.py", "--max-steps", "2")
    done = environment.run(environment.python, *torchrun, *example, cwd=checkout)
    assert "max_steps=2" in done.stdout + done.stderr
    assert list(checkout.glob("lightning_logs/version_*/checkpoints/*.ckpt"))


@pytest.mark.sample("links")
def test_the_console_script_reads_the_recipes_of_the_checkout(
    editable: tuple[Environment, Path], tmp_path: Path
) -> None:
    environment, checkout = editable
    recipe = checkout / "configs" / "only_here.yaml"
    recipe.write_text((checkout / "configs" / "ddp.yaml").read_text(encoding="utf-8"))
    merged = environment.run("boltmesh", "fit", "only_here", "--print-config", cwd=tmp_path)
    assert "bolt_ddp" in merged.stdout
