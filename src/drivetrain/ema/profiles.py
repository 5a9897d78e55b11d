"""Stored power-function averages of a run, and their combination to another width (Karras et al. 2024)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.machine import files
from drivetrain.core.typed import StateDict, fits
from drivetrain.ema.base import BELOW, NARROWEST
from drivetrain.saving import checkpoint_io, manifest, space

FOLDER = "averages"  # of a run's directory: <updates>.safetensors
MOST_HEADER = 2**20  # bytes of a file of averages without its tensors
LARGEST_ERROR = 0.1  # largest relative error of the wanted profile: beyond it the average would have another width

logger = logging.getLogger(__name__)


class StoredAverage(NamedTuple):
    """An average of a run's first `updates`, with weights in proportion to the update number to this power."""

    updates: float
    power: float


def power(width: float) -> float:
    """The power γ of the profile with this relative width: width² = (γ + 1) / ((γ + 2)² (γ + 3))."""
    return float(np.roots([1, 7, 16 - width**-2, 12 - width**-2]).real.max())


def overlap(a: StoredAverage, b: StoredAverage) -> float:
    """The integral of the product of two profiles."""
    first, last = (a, b) if a.updates < b.updates else (b, a)
    both = (a.power + 1) * (b.power + 1) / ((a.power + b.power + 1) * last.updates)
    return float(both * (first.updates / last.updates) ** last.power)


def shares(stored: list[StoredAverage], wanted: StoredAverage) -> tuple[list[float], float]:
    """The share of each stored average in the combination closest to the `wanted` profile, by least squares.

    The shares sum to 1 (the paper leaves that open), so that a weight that never moved is unchanged. Also returns the
    relative norm of the remaining difference from the wanted profile.
    """
    products = np.array([[overlap(a, b) for b in stored] for a in stored])
    aims = np.array([overlap(a, wanted) for a in stored])
    one = np.ones((len(stored), 1))
    system = np.block([[products, one], [one.T, np.zeros((1, 1))]])
    found = np.linalg.lstsq(system, np.append(aims, 1.0), rcond=None)[0][:-1]
    own = overlap(wanted, wanted)
    left = own - 2 * found @ aims + found @ products @ found
    return [float(share) for share in found], float(np.sqrt(max(0.0, left) / own))


def refuse_link(run_dir: Path) -> None:
    """Raise UserError if a run's averages would be written elsewhere: the run may come from a stranger."""
    if (run_dir / FOLDER).is_symlink():
        raise UserError(f"{run_dir / FOLDER} is a link, and a run's averages are written into its own directory: remove it")


def store(run_dir: Path, state: StateDict) -> str:
    """Store both averages of the state of an ema=post_hoc. Returns the SHA-256 of their file. Raises CannotSave."""
    widths = {f"width/{number}": torch.tensor(width, dtype=torch.float64) for number, width in enumerate(state["widths"])}
    both = {f"{n}/{name}": state[key][name] for n, key in enumerate(("tensors", "wider")) for name in state["wider"]}
    try:
        file = files.folder_in(run_dir, FOLDER) / f"{state['updates']}.safetensors"
    except OSError as error:
        raise space.cannot_write(FOLDER, run_dir, str(error.strerror)) from error
    checkpoint_io.write_weights({**widths, **both}, file)
    return manifest.sha256(file)


def synthesised(run_dir: Path, state: StateDict, width: float) -> dict[str, torch.Tensor]:
    """The average of a width, from a checkpoint's `state` of ema=post_hoc and earlier stored averages. Raises UserError."""
    if not state.get("wider"):
        raise UserError(f"average={width:g}: {run_dir} has no averages to make this width from: the run needs ema=post_hoc")
    try:
        _check(state)
        numbers = sorted(number for number in map(int, state["stored"]) if number < state["updates"])
        earlier = [(number, run_dir / FOLDER / f"{number}.safetensors") for number in numbers]
        for number, file in earlier:
            _verify(file, state["stored"][str(number)], most=2 * _size(state) + MOST_HEADER)
        return _sum(earlier, state, width)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"average={width:g}: {error.filename} cannot be read ({error.strerror})") from None
    except (safetensors.SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise UserError(f"average={width:g}: the averages in {run_dir / FOLDER} do not fit the run ({error})") from None


def _check(state: StateDict) -> None:
    """Raise ValueError unless a state is ema=post_hoc's: a run's directory may come from a stranger."""
    updates, widths, stored, tensors, wider = (state[key] for key in ("updates", "widths", "stored", "tensors", "wider"))
    if not (fits(updates, int) and updates > 0):
        raise ValueError(f"updates={updates!r:.80}")
    if not (fits(widths, list[float]) and len(widths) == 2):
        raise ValueError(f"widths={widths!r:.80}")
    if not (fits(stored, dict[str, str]) and all(map(manifest.NUMBER.fullmatch, stored)) and "0" not in stored):
        raise ValueError(f"stored={stored!r:.80}")
    if not (isinstance(wider, dict) and isinstance(tensors, dict) and wider.keys() <= tensors.keys()):
        raise ValueError("the two averages have other names")


def _size(state: StateDict) -> int:
    """The bytes of a state's two averages, equal to those of a stored file."""
    found = [*state["tensors"].values(), *state["wider"].values()]
    return sum(tensor.nbytes for tensor in found if isinstance(tensor, torch.Tensor))


def _verify(file: Path, sha256: str, most: int) -> None:
    """Raise ValueError if a file is not the stored one or too large, and OSError if it is no file."""
    if (size := file.stat().st_size) > most:  # before reading its bytes: a stranger's may have any size
        raise ValueError(f"{file.name} has {size:,} bytes")
    if manifest.sha256(file) != sha256:
        raise ValueError(f"the SHA-256 of {file.name} differs")


def _power_of(width: float) -> float:
    """The power of a width from a file. Raises ValueError."""
    if not NARROWEST <= width < BELOW:
        raise ValueError(f"a width of {width:g}")
    return power(width)


def _sum(earlier: list[tuple[int, Path]], state: StateDict, width: float) -> dict[str, torch.Tensor]:
    stored = [StoredAverage(state["updates"], _power_of(w)) for w in state["widths"]]
    opened = [(updates, safetensors.safe_open(file, "pt")) for updates, file in earlier]
    widths = [(updates, float(file.get_tensor(f"width/{n}"))) for updates, file in opened for n in (0, 1)]  # type: ignore[no-untyped-call]
    stored += [StoredAverage(updates, _power_of(w)) for updates, w in widths]
    found, error = shares(stored, StoredAverage(state["updates"], power(width)))
    if error > LARGEST_ERROR:
        low, high = state["widths"]
        raise UserError(
            f"average={width:g}: the {len(stored) // 2} pairs of averages of this run give this width to {error:.0%} only: "
            f"choose one nearer to {low:g} or {high:g}, or train with a larger ema.snapshots"
        )
    logger.info(f"average={width:g} of {len(stored)} stored averages, with an error of {error:.2%} of its profile")
    made = dict(state["tensors"])  # copied buffers are the latest
    for name in state["wider"]:
        parts = [state["tensors"][name], state["wider"][name]]
        total = torch.zeros_like(parts[0], dtype=torch.float64)
        for share, part in zip(found[:2], parts, strict=True):
            total.add_(part, alpha=share)
        for place, (_, file) in enumerate(opened, 1):
            for n in (0, 1):
                total.add_(file.get_tensor(f"{n}/{name}").to(total.device), alpha=found[2 * place + n])  # type: ignore[no-untyped-call]
        made[name] = total.to(parts[0].dtype)
    return made
