"""Make docs/images/run.png, the picture of a run's page in the README: `python -m bench.picture`. Needs Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

import drivetrain

WIDTH, HEIGHT = 1100, 940  # of the part of the page that is shown
SHOWN = 0.62  # times that, in the README
PICTURE = Path(__file__).parents[1] / "docs/images/run.png"


def main() -> None:
    """Train the digits for some seconds, and take a picture of the top of the run's page."""
    browser = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # the page says where the run is: outputs/…
        result = drivetrain.train(["epochs=12"])
        shot = Path(place) / "page.png"
        window = [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}"]
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--hide-scrollbars", *window, result.page.resolve().as_uri()], check=True
        )
        picture = Image.open(shot).convert("RGB").resize((round(WIDTH * SHOWN), round(HEIGHT * SHOWN)), Image.Resampling.LANCZOS)
        picture.quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
