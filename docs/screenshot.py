"""Draws docs/dashboard.svg: the dashboard itself, on its demo source, at a fixed moment.

    python docs/screenshot.py [FILE.svg] [--screen NAME] [--size 120x40] [--job JOB]

The clock and the seed are fixed, so the picture changes only when the dashboard does. ``--png``
writes a PNG for looking at beside it, by Chromium: other converters ignore the lengths of texts.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from boltmesh.telemetry.reader.reader import open_job
from boltmesh.tui.app import DashboardApp
from boltmesh.tui.demo import DemoSource
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.sources.live import LiveSource, Source

SIZE = (120, 40)
MOMENT = 1_763_726_400.0
"""2025-11-21 12:00:00 UTC."""


async def draw(
    size: tuple[int, int] = SIZE, screen: str = "overview", *, source: Source | None = None
) -> str:
    """Return a screen of the dashboard as SVG, of the demo where no source is given."""
    source = source or DemoSource(clock=lambda: MOMENT)
    app = DashboardApp(source, palette="night", interval_s=None)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.press(PAGES[screen].tab.key)
        await pilot.pause()
        return app.svg(title="boltmesh top")


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def main() -> int:
    """Write the file that is named, or the one that the README shows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(__file__).with_name("dashboard.svg")
    parser.add_argument("file", type=Path, nargs="?", default=default)
    parser.add_argument("--screen", choices=list(PAGES), default="overview", help="which one")
    parser.add_argument("--size", type=_size, default=SIZE, help="columns x lines")
    parser.add_argument("--job", help="a job of yours instead of the demo, by name or id")
    parser.add_argument("--png", action="store_true", help="also write a PNG, by Chromium")
    options = parser.parse_args()

    os.environ["TZ"] = "UTC"
    time.tzset()
    os.environ.pop("NO_COLOR", None)
    source = None if options.job is None else LiveSource(open_job(options.job))
    svg = asyncio.run(draw(options.size, options.screen, source=source))
    options.file.write_text(svg, encoding="utf-8")
    sys.stdout.write(f"{options.file}\n")
    if options.png:
        browser = shutil.which("chromium")
        if browser is None:
            sys.stderr.write("screenshot: no chromium, so no PNG\n")
            return 1
        target = options.file.with_suffix(".png")
        width, height = map(float, svg.partition('viewBox="0 0 ')[2].partition('"')[0].split())
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--window-size={width:.0f},{height:.0f}", f"--screenshot={target}",
                   options.file.resolve().as_uri()]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # noqa: S603 (both paths are the caller's own)
        sys.stdout.write(f"{target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
