"""Finding defects in textures: the user's own data, network and loss. The loss's third term is slow, and is mended below."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits

from drivetrain.core.options.option import Count
from drivetrain.loss import Loss

REACH = 1.01  # margins lie in -1 … 1; the levels go a little further on both sides


class Textures(torch.utils.data.Dataset):
    """`count` woven textures from number `first` on, every other one with a defect, made as they are read.

    A sample is an image (1, size, size) and the map (size, size) of where its defect is.
    """

    def __init__(self, first: int, count: int, size: int = 32, detail: int = 4) -> None:
        self.first, self.count, self.detail = first, count, detail
        self.places = torch.arange(size * detail) / detail  # drawn finer than it is shown

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = self.first + index
        random = torch.Generator().manual_seed(number)
        phase, across, along, place, wide = torch.rand(5, generator=random).tolist()
        rows, columns = self.places[:, None], self.places[None, :]
        bent = rows + 0.3 * torch.sin(columns * 0.2 + 2 * math.pi * place)
        warp = torch.sin(bent * (0.6 + 0.3 * across) + 2 * math.pi * phase)
        weft = torch.sin(columns * (0.6 + 0.3 * along))
        spot = torch.zeros(len(rows), len(rows), dtype=torch.bool)
        if number % 2:
            middle, radius = rows.max() * (0.2 + 0.6 * place), 2 + 3 * wide
            spot = (rows - middle) ** 2 + (columns - (rows.max() - middle)) ** 2 < radius**2
        image = torch.where(spot, 0.6 * warp * weft + 0.5, 0.5 * (warp + weft))  # torn threads no longer add up
        image = image + 0.8 * torch.randn(image.shape, generator=random)
        shown = avg_pool2d(torch.stack([image, spot.float()])[None], self.detail)[0]
        return shown[:1], (shown[1] > 0.5).float()


class Finder(torch.nn.Sequential):
    """Images (n, channels, h, w) to one logit a pixel (n, h, w)."""

    def __init__(self, shape: tuple[int, ...], width: int = 8) -> None:
        def block(channels: int) -> list[torch.nn.Module]:
            return [torch.nn.Conv2d(channels, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]

        last = torch.nn.Conv2d(width, 1, 1)
        super().__init__(*block(shape[0]), *block(width), *block(width), last, torch.nn.Flatten(0, 1))


class Slow(Loss):
    """Right pixel by pixel, right for the image as a whole, and defects set apart from sound pixels, pair by pair."""

    metrics = ("loss", "accuracy")
    best = ("accuracy", max)

    def __init__(self, levels: Count = 64) -> None:
        self.levels = levels

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits (n, h, w) against maps (n, h, w)."""
        pixels = binary_cross_entropy_with_logits(output, target)
        images = binary_cross_entropy_with_logits(output.amax((1, 2)), target.amax((1, 2)))
        return pixels + images + self.apart(output.sigmoid().flatten(1), target.flatten(1))

    def apart(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Each pixel beside another one by chance; where only the first has a defect its score must be the higher."""
        others = self.shuffled(scores.numel(), scores.device)
        margins = scores - scores.flatten()[others].view_as(scores)
        counts = target * (1 - target.flatten()[others].view_as(target))
        return (self.graded(margins) * counts).sum() / counts.sum().clamp(min=1)

    def cost(self, margin: torch.Tensor | float) -> torch.Tensor | float:
        """The cost of a margin at a level's bound: nothing at the top, 1 at the bottom."""
        return ((REACH - margin) / (2 * REACH)) ** 2

    def shuffled(self, count: int, device: torch.device) -> torch.Tensor:
        """The numbers below `count` in an order of chance."""
        order = torch.randperm(count)  # on the CPU, whatever the device is
        return order.to(device)

    def bound(self, level: torch.Tensor | int) -> torch.Tensor | float:
        """The place at which a level begins."""
        return level * (2 * REACH / self.levels) - REACH

    def graded(self, margins: torch.Tensor) -> torch.Tensor:
        """Costs of margins (n, pixels): between its level's two bounds each lies on the straight line."""
        rows = []
        for row in margins:
            costs = torch.zeros_like(row)
            for level in range(self.levels):
                low, high = self.bound(level), self.bound(level + 1)
                slope = (self.cost(high) - self.cost(low)) / (high - low)
                inside = (row >= low) & (row < high)
                costs = costs + inside * (self.cost(low) + slope * (row - low))
            rows.append(costs)
        return torch.stack(rows)

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Of a batch: the loss, the images that were called right, and how many there are: float64 (3,)."""
        count = torch.tensor(float(len(output)), device=output.device, dtype=torch.float64)
        right = ((output.amax((1, 2)) > 0) == (target.amax((1, 2)) > 0)).sum().double()
        return torch.stack([self(output.float(), target).double() * count, right, count])


class Mended(Slow):
    """The same loss: the shuffle where the scores are, and all levels at once."""

    def shuffled(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.randperm(count, device=device)

    def graded(self, margins: torch.Tensor) -> torch.Tensor:
        level = ((margins.detach() + REACH) / (2 * REACH) * self.levels).floor()  # of all at once; no gradient goes through it
        low, high = self.bound(level), self.bound(level + 1)
        return self.cost(low) + (self.cost(high) - self.cost(low)) / (high - low) * (margins - low)
