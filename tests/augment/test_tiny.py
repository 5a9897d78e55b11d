"""Every augmentation of images of one pixel, of a few and of one line: a result, or a refusal before the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from drivetrain.augment import FlipCrop, RandomErasing, RandomResizedCrop
from drivetrain.config.catalog import option_files, target
from drivetrain.core.microbatch import Request
from drivetrain.core.tensors import Tensors
from drivetrain.core.user_code import import_name
from drivetrain.loader.base import Pipeline

OPTIONS = {name: import_name(target(file))() for name, file in option_files()["augment"].items()}
OPTIONS |= {
    "flip_crop.pad=1": FlipCrop(pad=1),
    "random_erasing.prob=1": RandomErasing(prob=1.0),
    "random_resized_crop, wide": RandomResizedCrop(ratio=(3.0, 4.0)),
    "random_resized_crop, high": RandomResizedCrop(ratio=(0.1, 0.2), interpolation="bicubic"),
    "random_resized_crop, small": RandomResizedCrop(scale=(0.001, 0.01)),
}
SIZES = [(1, 1), (1, 3), (3, 1), (2, 2), (4, 4), (1, 40), (40, 1)]
SAMPLES = 24
RUN = SimpleNamespace(data=SimpleNamespace(max_value=None, shape=lambda: None), named=lambda group: f"{group}=own")


@pytest.mark.parametrize("floats", [False, True], ids=["bytes", "floats"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tiny_images_are_augmented_or_refused(name, floats):
    option, refused = OPTIONS[name], 0
    for height, width in SIZES:
        if said := list(option.validate_shape(RUN, (3, height, width))):
            assert all(f"augment.{name.partition('.')[0]}.pad=" in problem for problem in said)
            refused += 1
            continue
        x = torch.randint(256, (SAMPLES, 3, height, width), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        x = x / 255 if floats else x
        pipeline = Pipeline(Tensors(x, torch.arange(SAMPLES) % 4), (option,), None, 0, 4)
        for epoch in range(3):
            changed, targets = pipeline(Request(epoch, torch.arange(SAMPLES), 1.0))
            assert changed.shape == x.shape
            assert bool(changed.isfinite().all() & targets.isfinite().all()), (height, width)
    assert refused == {"flip_crop": len(SIZES), "flip_crop.pad=1": 5}.get(name, 0), "it can be used where it is not refused"


def test_a_shape_that_only_loading_tells_is_judged_then(make, problems, tmp_path, monkeypatch):
    from drivetrain.core.errors import UserError

    (tmp_path / "tiny_own.py").write_text(
        "import torch\n"
        "class Pictures(torch.utils.data.Dataset):\n"
        "    classes = ('a', 'b')\n"
        "    def __init__(self, split): pass\n"
        "    def __len__(self): return 24\n"
        "    def __getitem__(self, index): return torch.rand(1, 4, 4), index % 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ["data=own", "data.target=tiny_own.Pictures", "trust=[tiny_own]"]
    with pytest.raises(UserError, match=r"augment\.flip_crop\.pad=4 .* not \[1, 4, 4\]: set it to at most 3"):
        make(*own, "augment=[flip_crop]")
    with pytest.raises(UserError, match=r"augment=\[color_jitter\] works on RGB images .* data=own gives 1 channels"):
        make(*own, "augment=[color_jitter]")
    make(*own, "augment=[flip_crop]", "augment.flip_crop.pad=3")
