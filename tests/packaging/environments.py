"""Copies of the checkout and virtual environments in which an install can be tried offline."""

import os
import shutil
import site
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKS = ("boltmesh/configs", "boltmesh/strategies", "boltmesh/tui")
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".gpu", ".venv*", ".*_cache", ".coverage*", "__pycache__", "*.egg-info", "build",
    "dist", "runs", "lightning_logs", "checkpoints",
)  # fmt: skip


def copy_checkout(folder: Path, *, with_links: bool = True) -> Path:
    """Copy the sources to a new folder.

    Without links they become what a checkout under ``core.symlinks=false`` makes of them: small
    text files that hold the target.
    """
    shutil.copytree(ROOT, folder, symlinks=True, ignore=NOT_SOURCE)
    if not with_links:
        for name in LINKS:
            link = folder / name
            target = os.readlink(link)
            link.unlink()
            link.write_text(target, encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Environment:
    """A virtual environment that borrows the installed dependencies but not boltmesh itself."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(
        self, *command: str | Path, cwd: Path, timeout_s: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the environment would, and fail with what it printed."""
        search = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": search, "VIRTUAL_ENV": str(self.folder)}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, (
            f"{command} exits {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        return done

    def install(self, *what: str | Path) -> None:
        """Install without asking any index: the dependencies are there."""
        offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
        self.run(self.python, "-m", "pip", "install", *offline, *what, cwd=self.folder)


def make_environment(folder: Path) -> Environment:
    """Make an environment that sees what is installed for this interpreter.

    A path in a ``.pth`` file is searched for packages, but the ``.pth`` files inside it are not
    read: so an editable boltmesh of the surrounding environment stays invisible.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    environment = Environment(folder)
    variables = {"base": str(folder), "platbase": str(folder)}
    purelib = Path(sysconfig.get_path("purelib", scheme="venv", vars=variables))
    borrowed = dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages()])
    purelib.joinpath("borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    # The scripts of borrowed packages are not borrowed; this one the README uses.
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(f"#!{environment.python}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    return environment


def is_inside(path: str, folder: Path) -> bool:
    """Whether a printed path lies in a folder, links resolved."""
    return Path(path).resolve().is_relative_to(folder.resolve())
