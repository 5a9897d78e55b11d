"""What is said of an error that ends a run."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from drivetrain.cli import completion, verbs
from drivetrain.core.errors import Diverged, UserError
from drivetrain.data import Own
from drivetrain.engine.training_log import TrainingLog
from drivetrain.launch.job import prepare
from drivetrain.launch.worker import first_lines


def test_weights_that_do_not_fit_are_listed():
    with pytest.raises(RuntimeError) as refused:
        torch.nn.Linear(3, 2).load_state_dict(torch.nn.Linear(4, 2, bias=False).state_dict())
    said = first_lines(refused.value)
    assert said.startswith("Error(s) in loading state_dict for Linear: Missing key(s)")
    assert "size mismatch for weight" in said
    assert "\n" not in said


def test_a_problem_ends_whatever_it_quotes():
    quoted = UserError(["short", f"no file {'x' * 100_000}: set data.root"])
    assert quoted.problems[0] == "short"
    assert len(quoted.problems[1]) < 2_000
    assert quoted.problems[1].startswith("no file x")
    assert quoted.problems[1].endswith("x: set data.root")
    assert re.search("x … 98,[0-9]{3} characters … x", quoted.problems[1])
    assert UserError(quoted.problems).problems == quoted.problems  # also where it is raised again


def test_the_lines_of_an_error():
    assert first_lines(RuntimeError("one\ntwo")) == "one"
    assert first_lines(RuntimeError("")) == ""
    assert first_lines(RuntimeError("all of:\n" + "x\n" * 9)) == "all of: x; x; x; x; x … and 4 more"
    caught = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback …\n  File …\nKeyError: 'no such file'\n"
    assert first_lines(LookupError(caught)) == "Caught KeyError in DataLoader worker process 0: KeyError: 'no such file'"


def test_a_run_that_diverged_says_from_when_on_and_what_to_set():
    parallel = SimpleNamespace(all_reduce_sum=lambda sums: sums, rank_metrics=lambda *_: {}, data_world=SimpleNamespace(size=1))
    progress = SimpleNamespace(updates=0, samples=0, steps=0, skipped=0, epoch=0)
    timer, mfu = SimpleNamespace(since_last=lambda: (1.0, {}), wait=0.0), SimpleNamespace(at=lambda _: None)
    log = TrainingLog([], progress, parallel, timer, torch.device("cpu"), mfu)
    for update, loss in ((1, 2.0), (2, 0.5), (3, 40.0), (4, math.nan)):
        progress.updates = progress.steps = update
        log.loss_sum += loss
        if update < 4:
            log.train(0.1)
    with pytest.raises(Diverged, match=r"from 0\.5 at update 2 to 40 at update 3: lower optimizer\.lr \(the rate was 0\.1\)"):
        log.train(0.1)


@pytest.mark.parametrize(
    ("group", "target", "says"),
    [
        ("optimizer", "torch.optim.SGD", "optimizer=sgd is the option that ships for it"),
        ("optimizer", "torch.optim.LBFGS", "derives from drivetrain.optimizer.Optimizer and makes it"),
        ("loader", "torch.utils.data.DataLoader", "derives from drivetrain.loader.Loader"),
        ("loss", "torch.nn.NLLLoss", "set loss=own loss.target=torch.nn.NLLLoss"),
    ],
)
def test_a_class_that_is_no_option(group, target, says, tmp_path):
    (tmp_path / group).mkdir()
    (tmp_path / group / "bare.yaml").write_text(f"# a class as it is\n_target_: {target}\n")
    with pytest.raises(UserError) as refused:
        prepare([f"{group}=bare", "trust=[torch]"], [str(tmp_path)])
    assert says in " ".join(refused.value.problems)


def test_a_recipe_with_an_empty_group(tmp_path):
    (tmp_path / "mine.yaml").write_text("optimizer:\n")
    with pytest.raises(UserError, match="as '- override /optimizer: adamw', or leave the empty line out"):
        prepare([f"recipe={tmp_path / 'mine.yaml'}"])


class Numbers(torch.utils.data.Dataset):
    """Samples whose targets are numbers."""

    def __init__(self, train: bool = True) -> None:
        self.train = train

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int):
        return [index / 20, 1.0], index / 10


def test_own_data_whose_targets_are_numbers_needs_no_number_of_classes():
    job = prepare(["data=own", f"data.target={__name__}.Numbers", f"trust=[{__name__.split('.')[0]}]", "task=regression"])
    assert job.run.data.load(torch.device("cpu")).classes == 1
    with pytest.raises(UserError, match="targets are numbers such as 0: if they are no classes, set task=regression"):
        Own(f"{__name__}.Numbers").load(torch.device("cpu"))


def test_internal_commands_are_not_suggested_and_completion_has_help(capsys):
    with pytest.raises(UserError, match="did you mean 'completion'"):
        verbs.find("complet")
    assert completion.command(["--help"]) == 0
    assert 'eval "$(drivetrain completion zsh)"' in capsys.readouterr().out
