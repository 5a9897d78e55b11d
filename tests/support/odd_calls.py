"""Networks that training calls in odd ways, with their data and losses, copied beside the runs that name them."""

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional


class Points(torch.utils.data.Dataset):
    """Samples (8,), whose target is their first number, or the class that its sign is."""

    num_classes = 2

    def __init__(self, train=True, kind="pair", size=48):
        self.x, self.kind = torch.randn(size, 8, generator=torch.Generator().manual_seed(int(train))), kind

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if self.kind == "dict":
            return {"support": x[:4], "query": x[4:], "target": x[:1]}
        if self.kind == "number":
            return x[0].abs().mul(10).long(), int(x[1] > 0)
        return x, (int(x[0] > 0) if self.kind == "class" else x[:1])


class Net(nn.Module):
    """Three layers with a BatchNorm, of so many inputs; `calls` counts its forwards."""

    def __init__(self, inputs=8, outputs=1):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(inputs, 12), nn.BatchNorm1d(12), nn.Linear(12, outputs)
        self.middle = nn.Linear(12, 12)

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.norm(self.first(x)))))


class Noisy(Net):
    """It takes a second argument, which only the loss has."""

    def __init__(self):
        super().__init__()
        self.when = nn.Embedding(10, 8)

    def forward(self, x, *, when):
        return super().forward(x + self.when(when))


def noisy(model, x):
    """A diffusion step."""
    when = torch.randint(10, (len(x),), device=x.device)
    return (model(x + torch.randn_like(x), when=when) - x[:, :1]).square().mean()


class Half(Net):
    """Its samples are dicts, which the loss takes apart."""

    def __init__(self):
        super().__init__(4)


def halves(model, x, y):
    """Two calls with parts of the samples."""
    return (model(x["support"]) - y).square().mean() + (model(x["query"]) + y).square().mean()


class Stepping(Net):
    """As modules of other trainers have it, its loss is one of its methods."""

    def training_step(self, x, y):
        """The loss."""
        return (self(x) - y).square().mean()


def stepping(model, x, y):
    """The module's own step."""
    return model.training_step(x, y)


class Parts(nn.Module):
    """It has no forward."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Net(), Net()


def parts(model, x, y):
    """Both parts, and never the whole."""
    return (model.one(x) - y).square().mean() + (model.two(x) - model.one(x)).square().mean()


class Energy(Net):
    """Its forward differentiates by its input."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


class Slope(Net):
    """As Energy, but that it needs gradients to be computed."""

    def forward(self, x):
        x = x.requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


def slope(model, x, y):
    """The field's error."""
    with torch.enable_grad():
        return (model(x.clone())[:, :1] - y).square().mean()


def elsewhere(model, x, y):
    """The error with weights of its making, which training's depend on."""
    weights = {name: weight * 0.5 for name, weight in model.named_parameters()}
    return (torch.func.functional_call(model, weights, (x,)) - y).square().mean()


def error(output, y):
    """The mean square of the first output's error."""
    return (output[:, :1] - y).square().mean()


class Single(Net):
    """Its samples do not know of each other."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)


class One(Single):
    """Its code has a batch of one."""

    def forward(self, x):
        return super().forward(x.view(1, 8))


class Fixed(Net):
    """Its code has a batch of eight."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(8, 8))

    def forward(self, x):
        return super().forward(x + self.state)


class Ends(nn.Module):
    """An encoder that reads each text at its end token, which texts that are made up lack."""

    def __init__(self, classes=2):
        super().__init__()
        self.embed, self.last = nn.Embedding(64, 8), nn.Linear(8, classes)
        self.middle = nn.Linear(8, 8)

    def forward(self, x):
        if not (x == 63).any(1).all():
            raise ValueError("Each example must contain an end token")
        return self.last(self.middle(self.embed(x)[torch.arange(len(x)), (x == 63).int().argmax(1)]))


class Texts(torch.utils.data.Dataset):
    """Texts that end."""

    num_classes = 2

    def __init__(self, train=True):
        self.x = torch.randint(1, 63, (48, 6), generator=torch.Generator().manual_seed(int(train)))
        self.x[:, 4] = 63

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], i % 2


class Users(nn.Module):
    """Its input is a number."""

    def __init__(self, classes=2):
        super().__init__()
        self.user, self.last = nn.Embedding(64, 8), nn.Linear(8, classes)
        self.middle = nn.Linear(8, 8)

    def forward(self, user):
        return self.last(self.middle(self.user(user)))


class Pairs(nn.Module):
    """Two embeddings and a learned scale, as CLIP returns them."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(4, 6), nn.Linear(4, 6), nn.Parameter(torch.tensor(1.0))
        self.drop = nn.Dropout(noise)

    def forward(self, x):
        one, two = (functional.normalize(self.drop(v), dim=1) for v in (self.one(x[:, :4]), self.two(x[:, 4:])))
        return {"one": one, "two": two, "scale": self.scale.exp()}


class Alike:
    """CLIP's loss, written by a user."""

    compares_samples = True

    def __call__(self, output, y):
        """Each view finds the other."""
        logits = output["scale"] * output["one"] @ output["two"].T
        labels = torch.arange(len(logits), device=logits.device)
        both = (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2
        return {"both": both, "near": 0.1 * y.mean() * logits.diagonal().mean()}


def alike(output, y):
    """The same as a function, which says nothing."""
    return sum(Alike()(output, y).values())


class Weighed:
    """A mean over other things than samples, which it does not tell."""

    def __call__(self, output, y):
        """Only positive targets count."""
        counts = y > 0
        return ((output - y).square() * counts).sum() / counts.sum().clamp(min=1)


class Told(Weighed):
    """The same, and it tells their number."""

    def count(self, y):
        """The positive ones."""
        return (y > 0).sum()


class Counts(Net):
    """Its forward depends on how many there were, and it remembers the last ones."""

    def __init__(self):
        super().__init__()
        self.calls, self.means, self.seen = 0, [], None

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.means.append(x.mean().detach())
            self.seen = x
        return super().forward(x) / (1 + len(self.means) + self.calls)


class Remembers:
    """A loss with a target network, which it copies at its first call and at each second one, and a queue."""

    def __init__(self):
        self.calls, self.queue = 0, []

    def __call__(self, model, x, y):
        """The error, and how far the model is from what it was."""
        if self.calls % 2 == 0:
            self.target = copy.deepcopy(model).eval()
        self.calls += 1
        self.queue.append(x.mean().detach())
        with torch.no_grad():
            before = self.target(x)
        output = model(x)
        return (output - y).square().mean() + len(self.queue) * (output - before).square().mean()


class Drawing:
    """A loss that keeps a generator, a count that it saves, and one that it does not."""

    def __init__(self):
        self.draws, self.steps = torch.Generator().manual_seed(3), 0
        self.numbers = itertools.count()

    def state_dict(self):
        """The count."""
        return {"steps": self.steps}

    def load_state_dict(self, state):
        """Set it."""
        self.steps = state["steps"]

    def __call__(self, model, x, y):
        """Noise of its own, weaker at each step."""
        self.steps += 1
        noise = torch.randn(x.shape, generator=self.draws) + torch.rand(()) / self.steps
        return (model(x + noise) - y).square().mean()
