"""Odd words on the command line are refused in one line: no crash, whatever is given for a value or a name."""

import pytest

from drivetrain.cli import main

NINES = "9" * 400
WORDS = [
    "epochs=1e999", "epochs=nan", "epochs='${a'", "epochs=${a", "optimizer.lr=1" + "0" * 400, "updates=0x" + "f" * 500,
    f"scheduler.warmup={NINES}", f"scheduler.warmup={NINES}ep", "scheduler.warmup=inf", "model={}", "model=[1,2]", "data=[]",
    "optimizer={lr:1}", "augment={a:1}", "trust={a:1}", "callbacks={a:1}", "callbacks={a:{_target_:1}}", "model.freeze={a:1}",
    "model.hidden={a:1}", "data.shape={}", "data.shape=[[[]]]", "recipe=" + "x" * 3000, "resume=" + "x" * 3000, "x" * 3000,
    "model=" + "x" * 3000, "x" * 3000 + "=1", "=", "~", "@", "model@x=1", "epochs='\\", "model.unfreeze={a:1e999}",
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS, ids=range(len(WORDS)))
def test_an_odd_word_is_refused(word, capsys):
    assert main.main(["train", word]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    assert "DRIVETRAIN_TRACEBACK" not in said
