"""What an evaluation sums is as wide as the device has it."""

import torch


def test_sums_are_of_that_width(make, monkeypatch):
    trainer = make()
    found = []
    for dtype in (torch.float64, torch.float32):
        for module in ("drivetrain.loss.classification", "drivetrain.loss.language"):
            monkeypatch.setattr(f"{module}.sum_dtype", lambda device, dtype=dtype: dtype)
        found.append(trainer.evaluator.loss.sums(torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)).dtype)
    assert found == [torch.float64, torch.float32]
