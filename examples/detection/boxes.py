"""Detection: where rectangles are in a picture, and of which kind. torchvision's network computes its own loss.

A sample's target is a dict of boxes and their kinds; a picture with fewer than three has places left empty. The loss names
`model`: it gives the network the targets too, which a forward of the inputs alone would not get.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOS
from torchvision.ops import box_iou

SIZE, MOST, EMPTY = 64, 3, -1
Found = list[dict[str, torch.Tensor]]


class Pictures(torch.utils.data.Dataset):
    """Pictures of one to three bright rectangles, which are wide or tall; each follows from its number."""

    classes = ("wide", "tall")

    def __init__(self, train: bool = True) -> None:
        self.numbers = range(96) if train else range(96, 128)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(self.numbers[index])
        image, boxes, kinds = torch.zeros(3, SIZE, SIZE), torch.zeros(MOST, 4), torch.full((MOST,), EMPTY)
        for place in range(int(torch.randint(1, MOST + 1, (), generator=draw))):
            kind, short, long = (int(torch.randint(*span, (), generator=draw)) for span in ((0, 2), (8, 14), (18, 26)))
            width, height = (long, short) if kind == 0 else (short, long)
            left, top = (int(torch.randint(SIZE - side, (), generator=draw)) for side in (width, height))
            image[:, top : top + height, left : left + width] += torch.rand(3, 1, 1, generator=draw) / 2 + 0.5
            boxes[place], kinds[place] = torch.tensor([left, top, left + width, top + height]), kind
        return {"image": image, "target": {"boxes": boxes, "labels": kinds}}


class Backbone(nn.Sequential):
    """Features of every eighth pixel."""

    out_channels = 64

    def __init__(self) -> None:
        sizes = [(3, 16), (16, 32), (32, self.out_channels)]
        super().__init__(*(m for a, b in sizes for m in (nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.ReLU())))


class Detector(nn.Module):
    """torchvision's FCOS (Tian et al. 2019): the boxes in pictures or, with targets, its losses."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        anchors = AnchorGenerator(sizes=((16,),), aspect_ratios=((1.0,),))
        self.net = FCOS(Backbone(), classes, SIZE, SIZE, [0.5] * 3, [0.5] * 3, anchors, detections_per_img=10)
        nn.init.ones_(self.net.head.regression_head.bbox_reg.bias)  # boxes of no size would have no gradient

    def forward(self, image: torch.Tensor, targets: Found | None = None) -> Any:
        self.net.training = targets is not None  # it has nothing else that differs between training and evaluation
        return self.net(list(image), targets)


def loss(model: Any, x: torch.Tensor, y: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The sum of the network's losses, which are means over boxes."""
    there = y["labels"] != EMPTY
    targets = [{name: y[name][n][there[n]] for name in y} for n in range(len(x))]
    return dict(model(x, targets))


def found(output: Found, target: dict[str, torch.Tensor]) -> float:
    """The share of pictures whose rectangles are all found, of the right kind and with an overlap of a half at least."""
    right = 0
    for n, guess in enumerate(output):
        there = target["labels"][n] != EMPTY
        sure = guess["scores"] > 0.3
        overlaps = box_iou(target["boxes"][n][there], guess["boxes"][sure]) > 0.5
        alike = target["labels"][n][there][:, None] == guess["labels"][sure]
        right += int((overlaps & alike).any(1).all())
    return right / len(output)
