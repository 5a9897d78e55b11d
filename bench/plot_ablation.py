"""Draw the way from recipe=naive to recipe=fast that `drivetrain ablate` measured: docs/images/ablation.png.

python -m bench.plot_ablation          # needs matplotlib: pip install 'drivetrain[plots]'
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.harness import RESULTS

TABLE = "From naive to fast, step by step"
BLUE, GREY = "#3e63dd", "#8b8d98"


def main() -> None:
    """Read bench/results/ablate-cpu.json and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "ablate-cpu.json")
    parser.add_argument("--out", type=Path, default=RESULTS.parents[1] / "docs/images/ablation.png")
    given = parser.parse_args()
    draw(json.loads(given.results.read_text())[TABLE], given.out)


def draw(table: dict, file: Path) -> None:
    """One row for each technique: the ratio of samples a second to naive, with its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows, overrides = table["rows"], " ".join(table["overrides"])
    figure, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
    for place, row in enumerate(rows):
        ratio, low, high = row["ratio"]
        colour = BLUE if place else GREY
        axes.hlines(place, low, high, color=colour, linewidth=2)
        axes.plot(ratio, place, "o", color=colour, markersize=7)
        axes.annotate(f"{ratio:.2f} ×", (0.985, place), xycoords=("axes fraction", "data"), ha="right", va="center", color=colour)
    axes.axvline(1, color=GREY, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows], family="monospace", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0.9, max(row["ratio"][2] for row in rows) + 0.25)
    axes.set_xlabel("samples a second, relative to naive; the bars are 95 % intervals")
    title = f"From naive to fast, one technique added per row\n{overrides}, {rows[0]['device']}"
    figure.suptitle(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e5ea")
    axes.set_axisbelow(True)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
