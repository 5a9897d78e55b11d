"""What a run says of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.run import environment


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nstepping\t: 1\n", "AMD EPYC (family 25, model 1)"),
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n", "AMD EPYC (family 25, model 17)"),
        ("model name\t: Cortex\n", "Cortex"),
    ],
)
def test_processors_of_one_name_are_told_apart(facts: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of one are not compared with those of the other: they differ by what they have in hardware."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: facts)
    assert environment.processor() == name
