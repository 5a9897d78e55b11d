"""What a device that is lent for half an hour is asked: rows of the other stages, ordered by what their answers are worth.

A row is written to its own stage's file, so that stage goes on with what is left. docs/gpu.md says how long each part takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.gpu.campaign import Row, chosen

ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("smoke", (  # does it start?
        "precision=bf16", "compile=inductor", "compile=step", "compile=cudagraph", "compile=regional", "loader=device",
        "loader=resident", "loader=threads", "loader=workers", "precision=amp", "precision=tf32", "precision=bf16_pure",
        "parallel=ddp", "parallel=fsdp", "amp whole step resident", "amp compiled ddp device", "save and resume", "torchrun",
        "optimizer=adamw", "optimizer=adagrad", "optimizer=muon", "optimizer=lamb", "checkpointing=blocks",
        "checkpointing=offload", "augment=[randaugment]",
    )),
    ("right", ("compile=*",)),  # does what it compiles and accumulates train the same?
    ("clock", ("launch-bound eager", "launch-bound whole step", "launch-bound CUDA graph")),  # can its rates be believed?
    ("speed", ("ceilings", "resnet50", "vit_b", "mlp")),  # is it fast?
    ("clock", ("device-bound eager", "device-bound whole step", "resident")),
    ("speed", ("adamw", "small images", "vit_b more", "resnet50 more", "fed", "ladder", "mlp more", "gpt")),
    ("right", ("interrupted", "loader=*", "precision=*")),
    ("verbs", ("compare", "doctor")),
    ("smoke", ("tests marked cuda",)),
)  # fmt: skip
STAGES = tuple(dict.fromkeys(stage for stage, _ in ORDER))


def ordered(rows: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows of the lease, out of each stage's."""
    return [row for stage, patterns in ORDER for row in chosen(rows[stage], patterns)]
