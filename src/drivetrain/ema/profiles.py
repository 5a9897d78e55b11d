"""Power-function averages that are stored in a run, and one of another width that is made of them (Karras et al. 2024)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch

from drivetrain.core.errors import UserError
from drivetrain.saving import checkpoint_io

FOLDER = "averages"  # of a run's directory: <updates>.safetensors
LARGEST_ERROR = 0.1  # of the profile that is wanted: beyond it the average would be of another width

logger = logging.getLogger(__name__)


class Stored(NamedTuple):
    """One of the averages of a run: over its first `updates`, with weights in proportion to their number to this power."""

    updates: float
    power: float


def power(width: float) -> float:
    """The power γ of the profile with this relative width: width² = (γ + 1) / ((γ + 2)² (γ + 3))."""
    return float(np.roots([1, 7, 16 - width**-2, 12 - width**-2]).real.max())


def overlap(a: Stored, b: Stored) -> float:
    """The integral of the product of two profiles."""
    first, last = (a, b) if a.updates < b.updates else (b, a)
    both = (a.power + 1) * (b.power + 1) / ((a.power + b.power + 1) * last.updates)
    return float(both * (first.updates / last.updates) ** last.power)


def shares(stored: list[Stored], wanted: Stored) -> tuple[np.ndarray[Any, Any], float]:
    """Of each stored average, the share that it has in the one that is closest to the `wanted` profile, by least squares.

    The shares sum to 1 (the paper leaves that open), so that a weight that never moved is as it was. Beside them, the norm of
    what is left of the wanted profile, relative to its own.
    """
    products = np.array([[overlap(a, b) for b in stored] for a in stored])
    aims = np.array([overlap(a, wanted) for a in stored])
    one = np.ones((len(stored), 1))
    system = np.block([[products, one], [one.T, np.zeros((1, 1))]])
    found = np.linalg.lstsq(system, np.append(aims, 1.0), rcond=None)[0][:-1]
    own = overlap(wanted, wanted)
    left = own - 2 * found @ aims + found @ products @ found
    return found, float(np.sqrt(max(0.0, left) / own))


def store(folder: Path, state: Mapping[str, Any]) -> None:
    """Store both averages of the state of an ema=post_hoc."""
    widths = {f"width/{number}": torch.tensor(width, dtype=torch.float64) for number, width in enumerate(state["widths"])}
    both = {f"{n}/{name}": state[key][name] for n, key in enumerate(("tensors", "wider")) for name in state["wider"]}
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint_io.write_weights({**widths, **both}, folder / f"{state['updates']}.safetensors")


def synthesised(run_dir: Path, state: Mapping[str, Any], width: float) -> dict[str, torch.Tensor]:
    """The average of a width, made of a checkpoint's `state` of ema=post_hoc and of what was stored before. Raises UserError."""
    if "wider" not in state:
        raise UserError(f"average={width:g}: {run_dir} has no averages to make this width from: the run needs ema=post_hoc")
    updates = state["updates"]
    files = [f for f in (run_dir / FOLDER).glob("*.safetensors") if f.stem.isdecimal() and f.is_file() and not f.is_symlink()]
    earlier = sorted((int(file.stem), file) for file in files if int(file.stem) < updates)
    try:
        return _sum(earlier, state, width)
    except (safetensors.SafetensorError, KeyError, RuntimeError) as error:
        raise UserError(f"average={width:g}: the averages in {run_dir / FOLDER} do not fit the run ({error})") from None


def _sum(earlier: list[tuple[int, Path]], state: Mapping[str, Any], width: float) -> dict[str, torch.Tensor]:
    stored = [Stored(state["updates"], power(w)) for w in state["widths"]]
    opened = [(updates, safetensors.safe_open(file, "pt")) for updates, file in earlier]
    stored += [Stored(updates, power(float(file.get_tensor(f"width/{n}")))) for updates, file in opened for n in (0, 1)]
    found, error = shares(stored, Stored(state["updates"], power(width)))
    if error > LARGEST_ERROR:
        low, high = state["widths"]
        raise UserError(
            f"average={width:g}: the {len(stored) // 2} pairs of averages of this run give this width to {error:.0%} only: "
            f"choose one nearer to {low:g} or {high:g}, or train with a larger ema.snapshots"
        )
    logger.info(f"average={width:g} of {len(stored)} stored averages, with an error of {error:.2%} of its profile")
    made = dict(state["tensors"])  # buffers that are copied are the latest
    for name in state["wider"]:
        parts = [state["tensors"][name], state["wider"][name]]
        total = torch.zeros_like(parts[0], dtype=torch.float64)
        for share, part in zip(found[:2], parts, strict=True):
            total.add_(part, alpha=float(share))
        for place, (_, file) in enumerate(opened, 1):
            for n in (0, 1):
                total.add_(file.get_tensor(f"{n}/{name}").to(total.device), alpha=float(found[2 * place + n]))
        made[name] = total.to(parts[0].dtype)
    return made
