"""Adapters: small trained corrections of a model with frozen weights."""

from drivetrain.adapter.base import Adapter

__all__ = ["Adapter"]
