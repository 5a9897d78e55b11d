"""Costs to plant, each on a line with a mark, for the doctor to find: data, a model and a loss as a user would write them."""

import time
from pathlib import Path
from typing import NamedTuple

import torch

from drivetrain.loss.classification import CrossEntropy


class Data(torch.utils.data.Dataset):
    """256 samples of 64 numbers, each read after `pause` seconds."""

    classes = ("a", "b")

    def __init__(self, split: str, pause: float = 0.0) -> None:
        self.pause, self.noise = pause, torch.rand(256, 64)

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.pause:
            time.sleep(self.pause)  # slow-data
        return self.noise[index], index % 2


class Net(torch.nn.Module):
    """Three linear layers; `read` plants an .item(), `loop` a loop over elements."""

    def __init__(self, shape: tuple[int, ...], classes: int, read: bool = False, loop: bool = False, width: int = 512) -> None:
        super().__init__()
        self.read, self.loop = read, loop
        self.body = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
            torch.nn.Linear(width, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 64) → (n, classes)."""
        if self.read:
            self.seen = x.mean().item()  # read-back
        if self.loop:
            x = x.clone()
            for row in range(x.shape[0]):
                x[row, 0] = x[row, 1] * 2  # element-loop
        return self.body(x)


class Shuffled(CrossEntropy):
    """Cross entropy, beside which a permutation is drawn that nobody needs."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(1_000_000)  # made-in-step
        return super().__call__(output, target) + 0 * order[0]


class Case(NamedTuple):
    """The planted cost, the verdict that is right, the mark of the guilty line, and whether an override helps."""

    overrides: tuple[str, ...]
    verdict: str
    mark: str | None = None
    fixed_by_overrides: bool = False


OVERRIDES = (
    "data=own", f"data.target={__name__}.Data", "model=own", f"model.target={__name__}.Net", "trust=[tests]",
    "saving=none", "evaluate_every=1000", "epochs=1000", "batch.global_batch=128", "log_every=100", "runtime.device=cpu",
)  # fmt: skip
CASES = {
    "slow data": Case(("data.kwargs.pause=0.001",), "waits for data", "slow-data", True),
    "a read": Case(("model.kwargs.read=true", "model.kwargs.width=2048"), "reads a value back", "read-back"),
    "a loop": Case(("model.kwargs.loop=true", "model.kwargs.width=128", "loader=resident"), "loop over elements", "element-loop"),
    "a tensor": Case(("loss=shuffled",), "tensors are made", "made-in-step"),
    "workers": Case(("loader=workers", "loader.num_workers=24"), "24 loader workers share", None, True),
    "saving": Case(("saving=last", "saving.every_updates=1", "model.kwargs.width=1024"), "saving takes", None, True),
    "nothing": Case(("model.kwargs.width=2048",), "no bottleneck"),
}


def config_dir(folder: Path) -> list[str]:
    """Make a config directory with the planted loss in `folder`; return the arguments that name it."""
    (folder / "mine/loss").mkdir(parents=True, exist_ok=True)
    (folder / "mine/loss/shuffled.yaml").write_text(f"_target_: {__name__}.Shuffled\n")
    return ["-cd", str(folder / "mine")]


def overrides_of(case: Case) -> list[str]:
    """All overrides of a case; its own ones replace the common ones."""
    return list({override.partition("=")[0]: override for override in (*OVERRIDES, *case.overrides)}.values())


def place(mark: str) -> str:
    """file:line of a mark, as the doctor names it."""
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))} "
