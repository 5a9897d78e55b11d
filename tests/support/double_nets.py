"""A vision transformer in float64, for comparisons in which equal means equal to the last digits (trust=[double_nets])."""

import math

import torch


def vit(shape: tuple[int, ...], classes: int, depth: int = 4) -> torch.nn.Module:
    """Blocks of two heads over patches of 4×4, inputs of float32 taken as float64."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=shape[1:], patch_size=4, in_chans=shape[0], num_classes=classes, depth=depth,
        embed_dim=24, num_heads=2,
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
