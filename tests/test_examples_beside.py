"""The examples with a loop beside them: a run's losses, weights and figures are those of the loop, also killed and resumed."""

import copy
import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import drivetrain
from drivetrain.core.step import rng
from drivetrain.engine.trainer import Trainer
from drivetrain.launch.job import prepare
from tests.support import command
from tests.support.command import ROOT, only_run
from tests.support.same_end import differences
from tests.support.to_end import continued, run_to_end


class Example(NamedTuple):
    """The length of an example's training, and what its loop yields."""

    losses: tuple[str, ...] = ("loss",)  # keys of a record, in the order of the loop's
    figures: tuple[str, ...] = ()  # keys of an evaluation
    ends: bool = False  # whether the loop yields something after each epoch too
    updates: int | None = None  # else two epochs
    learns: bool = False  # even within that time


EXAMPLES = {
    "multitask": Example(("loss", "loss_digit", "loss_ink"), ("right", "off"), ends=True),
    "detection": Example(figures=("found",), ends=True),
    "balanced": Example(learns=True),
    "curriculum": Example(learns=True),
    "truncated_backpropagation": Example(learns=True),
    "stream": Example(updates=100, learns=True),
    "diffusion": Example(ends=True),
    "dino": Example(),
    "clip": Example(learns=True),
    "maml": Example(),
    "dpo": Example(),
    "hints": Example(("loss", "loss_task", "loss_hint")),
}


@pytest.fixture
def words(import_from: Callable[[Path], None]) -> Callable[[str], list[str]]:
    """`words(name)`: the command of an example in examples/README.md, for two epochs. Its modules can be imported."""

    def given(name: str) -> list[str]:
        import_from(ROOT / "examples" / name)
        if name == "truncated_backpropagation":  # the text is a shorter module's
            import recurrent

            recurrent.argparse = shlex
        text = (ROOT / "examples/README.md").read_text().partition(f"## {name}\n")[2]
        found = re.search(r"drivetrain train (.*?)\n\n", text, re.S)
        assert found is not None
        kept = [word for word in shlex.split(found[1].replace("\\\n", " ")) if not word.startswith("epochs=")]
        return [*kept, "epochs=2", "log_every=1", "runtime.threads=1", "runtime.device=cpu"]

    return given


@pytest.fixture
def example(words: Callable[[str], list[str]], trainer_of: Callable[..., Trainer]) -> Callable[[str], Trainer]:
    """`example(name)`: the trainer of an example's run, which reads in the loop's order."""

    def built(name: str) -> Trainer:
        given = [word for word in words(name) if not word.startswith(("saving.", "callbacks="))]
        in_order = [] if "data.order=" in " ".join(given) or name == "stream" else ["data.order=sequential"]
        return trainer_of(prepare([*given, *in_order, "saving=none"]))

    return built


def by_loop(model: torch.nn.Module, example: Example) -> list[list[Any]]:
    """The values that the example's loop yields, each as a list. It draws from the same stream as a run."""
    import plain

    torch.manual_seed(rng.mix(0, 4, 0))  # from its first update on
    length = {"epochs": 2} if example.updates is None else {"updates": example.updates}
    return [list(found.values()) if isinstance(found, dict) else [found] for found in plain.train(model, **length)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_trains_as_the_loop_beside_it(name: str, example: Callable[[str], Trainer]) -> None:
    """Both begin with the same weights."""
    trainer, known = example(name), EXAMPLES[name]
    model = copy.deepcopy(trainer.model)
    trainer.fit()
    found = by_loop(model, known)
    each = len(found) // 2 if known.ends else len(found) + 1
    losses = [row for n, row in enumerate(found, 1) if n % each]
    sink = trainer.log.writers[0]
    records = [[record[key] for key in known.losses] for record in sink if record["event"] == "train"]
    assert len(records) == len(losses) > 10
    for ours, theirs in zip(records, losses, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6, rel=1e-6)
    if known.learns:
        assert sum(loss for (loss,) in losses[-10:]) < 0.9 * sum(loss for (loss,) in losses[:10])
    for key, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(key), atol=1e-6, rtol=1e-5)
    if known.figures:
        figures = [[record[key] for key in known.figures] for record in sink if record["event"] == "evaluate"]
        assert figures == [pytest.approx(theirs, abs=1e-6) for theirs in found[each - 1 :: each]]
    elif known.ends:  # the images that the averaged weights draw
        from denoise import sample

        with trainer.evaluator.holding() as averaged:
            torch.manual_seed(0)
            torch.testing.assert_close(sample(averaged, 32), found[-1][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "middle"),
    [("balanced", 14), ("curriculum", 14), ("truncated_backpropagation", 12), ("diffusion", 17), ("dino", 17), ("clip", 17)],
)
def test_it_resumes_exactly_in_the_middle_of_an_epoch(name, middle, words, stop_at):
    given = words(name)
    whole = run_to_end(given)
    stop_at(middle)
    stopped = run_to_end(given, updates=middle, ends="interrupted")
    stop_at(None)
    rest = drivetrain.train([f"resume={stopped.run_dir}"])
    assert differences(rest.run_dir, whole.run_dir) == []
    drawn = [{path.name: path.read_bytes() for path in run.run_dir.glob("*drawn*")} for run in (whole, rest)]
    assert drawn[0] == drawn[1]
    assert bool(drawn[0]) == (name == "diffusion")


KILLER = """
import os, signal
from drivetrain import Callback

class Kill(Callback):
    def update(self, event):
        if event.update == 73 and not os.path.exists(MARK):
            open(MARK, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stream_that_is_killed_goes_on(words, example, tmp_path, monkeypatch):
    """The losses after the last checkpoint, of update 60, are those of the loop that nobody stopped."""
    (tmp_path / "killer.py").write_text(KILLER.replace("MARK", repr(str(tmp_path / "killed"))))
    places = os.pathsep.join([str(ROOT / "examples/stream"), str(tmp_path)])
    given = [*words("stream"), "trust=[readings,killer]", "callbacks=[killer.Kill]"]
    assert command.train(*given, cwd=tmp_path, env={"PYTHONPATH": places}).code == -signal.SIGKILL
    run = only_run(tmp_path / "outputs")
    monkeypatch.syspath_prepend(tmp_path)
    continued(run, updates=100)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["update"]: [line["loss"]] for line in lines if line["event"] == "train"}
    assert [losses[update] for update in range(1, 101)] == [
        pytest.approx(loss, abs=1e-6) for loss in by_loop(example("stream").model, EXAMPLES["stream"])
    ]


@pytest.mark.slow
def test_preferences_train_as_trls(example: Callable[[str], Trainer], tmp_path: Path) -> None:
    """The losses of 20 updates are those of TRL's DPOTrainer, which makes tokens of the same texts."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    trainer = example("dpo")
    import dpo

    policy, samples = copy.deepcopy(trainer.model.policy), dpo.Sums()
    trainer.fit()
    symbols = {symbol: i for i, symbol in enumerate(dpo.SYMBOLS)}
    by_symbol = tokenizers.Tokenizer(tokenizers.models.WordLevel(symbols, unk_token=" "))
    by_symbol.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=by_symbol, pad_token=" ", eos_token=".", unk_token=" ")
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)} for a, b, wrong in samples.samples[:320]]
    config = trl.DPOConfig(
        str(tmp_path), beta=dpo.BETA, max_steps=20, per_device_train_batch_size=16, learning_rate=1e-3, weight_decay=0.0,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", max_length=None, optim="adamw_torch",
    )  # fmt: skip

    losses: list[float] = []

    class InOrder(trl.DPOTrainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            found = super().compute_loss(*given, **named)
            losses.append(float((found[0] if isinstance(found, tuple) else found).detach()))  # its log has four decimals
            return found

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    theirs = InOrder(
        policy, copy.deepcopy(policy), args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    theirs.train()
    ours = trainer.log.writers[0].losses[:20]
    assert ours == pytest.approx(losses, abs=1e-5)
    assert len({*losses}) == 20
