"""A vision transformer in float64, for comparisons in which equal means equal to the last digits (trust=[double_nets])."""

from __future__ import annotations

import math
import os
import time

import torch


def vit(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """Four blocks of two heads over patches of 4×4, inputs of float32 taken as float64."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=shape[1:], patch_size=4, in_chans=shape[0], num_classes=classes, depth=4, embed_dim=24,
        num_heads=2,
    ).double()  # fmt: skip
    model.register_forward_pre_hook(lambda module, args: tuple(x.double() for x in args))
    return model


def overwriting(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """A sequence whose second half begins with an operation in place, in float64."""
    wide, relu = (lambda: torch.nn.Linear(32, 32)), (lambda: torch.nn.ReLU(inplace=True))
    begin, end = torch.nn.Linear(math.prod(shape), 32), torch.nn.Linear(32, classes)
    model = torch.nn.Sequential(torch.nn.Flatten(), begin, relu(), wide(), relu(), wide(), relu(), end).double()
    model.register_forward_pre_hook(lambda module, args: tuple(x.double() for x in args))
    return model


class SlowPictures(torch.utils.data.Dataset):
    """48 pictures of noise, each of which takes 10 ms on rank SLOW_RANK."""

    def __init__(self, train: bool) -> None:
        self._pictures = torch.randn(48 if train else 8, 3, 8, 8)

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if os.environ.get("RANK") == os.environ.get("SLOW_RANK"):
            time.sleep(0.01)
        return self._pictures[i], i % 4


def slow_on_a_rank(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """The same, each block of which takes 150 ms more on rank SLOW_RANK."""
    model = vit(shape, classes)
    if os.environ.get("RANK") == os.environ.get("SLOW_RANK"):
        for block in model.blocks:
            block.mlp.act.register_forward_pre_hook(lambda *_: time.sleep(0.15))
    return model
