"""The folder .hydra/ of a run: its config as Hydra writes it, so that tools for Hydra's runs find it."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from drivetrain.config.compose import Composed
from drivetrain.config.hydra_settings import HydraSettings
from drivetrain.core import files
from drivetrain.core.overrides import redact
from drivetrain.recipe import write

OURS = "# written by drivetrain\n"  # the first line of our hydra.yaml


def leave(run_dir: Path, config: str, composed: Composed, settings: HydraSettings, resumed: bool = False) -> None:
    """Write `config`, the unresolved config as YAML, overrides.yaml and hydra.yaml; for a resumed run config.yaml alone.

    What Hydra itself wrote, for a script with @hydra.main that this run is part of, is left as it is.
    """
    if settings.folder is None:
        return
    folder = run_dir / settings.folder
    if folder.is_symlink():  # it would be followed to a folder elsewhere
        return
    if (folder / "hydra.yaml").exists() and not _is_ours(folder / "hydra.yaml"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / "config.yaml", config)
    if not resumed:
        files.write_text(folder / "overrides.yaml", OmegaConf.to_yaml([redact(word) for word in composed.overrides]))
        files.write_text(folder / "hydra.yaml", OURS + write.block({"hydra": settings.node(composed, run_dir)}))


def _is_ours(file: Path) -> bool:
    try:
        return files.read_text(file).startswith(OURS)
    except (OSError, ValueError):
        return False
