"""Adapters: small trained corrections of a model whose own weights are frozen."""

from drivetrain.adapter.base import Adapter

__all__ = ["Adapter"]
