"""Draw the pictures of the documentation and of the README.

    python docs/make_pictures.py  # writes docs/pictures/*.png

The pictures show a GPT of three layers, compiled for a CPU: its memory without and with policies,
the page of its report (photographed by a headless Chromium), and the frontier of the planner.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
SIZE: dict[str, Any] = {
    "size": "tiny",
    "layers": 3,
    "width": 128,
    "heads": 4,
    "seq": 128,
    "vocab": 512,
}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")


def photograph(page: Path, picture: Path, width: int, height: int) -> None:
    """Take a picture of a page with a headless Chromium."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)))
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *(str(browser), "--headless", "--no-sandbox", "--disable-gpu"),
                *(
                    "--hide-scrollbars",
                    "--virtual-time-budget=8000",
                    "--force-device-scale-factor=1",
                ),
                *(f"--user-data-dir={profile}", f"--window-size={width},{height}"),
                *(f"--screenshot={picture}", f"file://{page}"),
            ],
            check=True,
            capture_output=True,
        )


def main(argv: list[str] | None = None) -> int:
    """Draw all pictures."""
    argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0]).parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(ROOT), str(ROOT / "models")]
    import gpt

    import remat_kit

    PICTURES.mkdir(exist_ok=True)
    loss, args = gpt.build(**SIZE)
    reports = [remat_kit.inspect(loss, *args, target="cpu")]
    reports += [
        remat_kit.inspect(loss, *args, policy=p, at=gpt.BLOCKS, target="cpu")
        for p in ("dots", "nothing")
    ]
    both = remat_kit.Comparison(tuple(reports), model="a GPT of three layers")
    both.to_png(PICTURES / "memory.png")
    remat_kit.frontier(loss, *args).to_png(PICTURES / "frontier.png")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        both.to_html(page)
        photograph(page, PICTURES / "report.png", 1200, 1420)
    return 0


if __name__ == "__main__":
    sys.exit(main())
