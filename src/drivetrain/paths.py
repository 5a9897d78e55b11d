"""Where conf/ and recipes/ are: inside the installed package, else in the checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent.parent / name


def conf_dir() -> Path:
    """The folder with config.yaml and one folder per group."""
    return _shipped("conf")


def recipes_dir() -> Path:
    """The folder with the recipes that ship."""
    return _shipped("recipes")
