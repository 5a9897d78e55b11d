"""A user's own losses, copied beside the runs that name them (`loss=own loss.target=my_losses.step trust=[my_losses]`)."""

import torch
from torch import nn
from torch.nn import functional


class Parts(nn.Module):
    """A body and a head, which a loss may call by themselves."""

    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 12), nn.Tanh())
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.body(x))


def plain(output, y):
    """Cross entropy, by position."""
    return functional.cross_entropy(output, y)


def step(model, x, y):
    """The same, as a training step."""
    return functional.cross_entropy(model(x), y)


def twice(model, batch, progress):
    """Two forwards, and one of the parts by itself."""
    hidden = model.body(batch.x)
    both = functional.cross_entropy(model(batch.x), batch.y) + functional.mse_loss(model(-batch.x), -model.head(hidden))
    return {"loss": both + (0.1 if progress.training else 0.2) * hidden.square().mean(), "size": hidden.square().mean()}


def parts(model, x, y):
    """The parts alone, in place of the forward."""
    return functional.cross_entropy(model.head(model.body(x)), y)


def penalty(model, x, y):
    """A loss that differentiates a gradient, in evaluations too."""
    with torch.enable_grad():
        x = x.requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(functional.cross_entropy(output, y, reduction="sum"), x, create_graph=True)
    return functional.cross_entropy(output, y) + 10 * gradient.square().sum((1, 2, 3)).mean()


def detached(output, y):
    return functional.cross_entropy(output.detach(), y)


def told(output, y, progress):
    """It is told how far the run is."""
    return functional.cross_entropy(output, y) * (1 + progress.update)
