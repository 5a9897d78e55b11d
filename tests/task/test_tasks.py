"""A task sets data, model, loss and metrics in one word; the command line and recipes go before it."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from drivetrain.config.catalog import content, option_files, options
from drivetrain.config.compose import compose
from drivetrain.core.step.microbatch import Request
from drivetrain.launch.job import prepare
from drivetrain.loader import Pipeline
from drivetrain.run.recipe_file import to_recipe
from tests.support.command import ROOT
from tests.support.refusals import problems_of
from tests.support.to_end import run_to_end

TASKS = options()["task"]
SMALL = {  # what makes a task's example small
    "classification": ["model.width=4"],
    "multilabel": ["model.width=4", "data.samples=40", "data.test_samples=10"],
    "regression": [],
    "segmentation": ["model.width=4", "data.samples=40", "data.test_samples=10"],
    "language_modelling": ["data.max_files=20", "data.length=16", "data.test_samples=8", "model.width=16"],
    "text_classification": ["data.max_files=400", "data.length=16", "data.test_samples=8", "model.width=16"],
    "contrastive": ["model.width=4"],
    "instruction": ["data.length=128", "model.width=16"],
}


# --- what is set ---


def test_the_default_task_sets_nothing():
    assert compose([]).choices["task"] == "classification"
    assert compose(["task=classification"]).plain == compose([]).plain
    for task in ("classification", "own"):
        assert not content(option_files()["task"][task]).get("preset")


def test_a_task_sets_options_and_values():
    composed = compose(["task=regression"])
    assert composed.problems == []
    assert {g: composed.choices[g] for g in ("data", "model", "loss")} == {"data": "diabetes", "model": "mlp", "loss": "mse"}
    assert composed.choices["metrics"] == ["mae", "rmse", "r2"]
    assert composed.plain["model"]["hidden"] == [64]
    assert composed.plain["select"] == "r2"
    assert "preset" not in composed.plain["task"]


def test_the_command_line_goes_before_the_recipe_and_that_before_the_task(tmp_path: Path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults:\n  - override /loss: huber\n  - override /clip: norm\nepochs: 7\nbatch:\n  global_batch: 9\n")
    words = ["task=regression", f"recipe={recipe}"]
    composed = compose(words)
    assert composed.choices["loss"] == "huber"
    assert composed.choices["data"] == "diabetes"
    assert (composed.plain["epochs"], composed.plain["batch"]["global_batch"]) == (7, 9)
    composed = compose([*words, "loss=l1", "epochs=3"])
    assert (composed.choices["loss"], composed.plain["epochs"]) == ("l1", 3)
    recipe.write_text("defaults:\n  - override /task: regression\n")
    assert compose([f"recipe={recipe}"]).choices["data"] == "diabetes"


def test_values_of_a_group_hold_for_the_option_that_the_task_chose():
    assert compose(["task=language_modelling"]).plain["data"]["max_files"] == 300
    composed = compose(["task=language_modelling", "data=jsonl"])
    assert composed.problems == []
    assert composed.choices["data"] == "jsonl"
    assert "max_files" not in composed.plain["data"]
    assert composed.plain["model"]["width"] == 128
    assert compose(["task=regression", "data=own"]).choices["data"] == "own"


def test_a_runs_recipe_repeats_values_that_the_user_set_back_to_the_defaults(tmp_path: Path):
    """The default of epochs is 15, and the task's own value would come back if the recipe left 15 out."""
    composed = compose(["task=segmentation", "epochs=15"])
    (tmp_path / "recipe.yaml").write_text(to_recipe(composed, {"logger"}))
    again = compose([f"recipe={tmp_path / 'recipe.yaml'}"])
    assert again.plain["epochs"] == 15
    assert {**again.plain, "recipe": None} == {**composed.plain, "recipe": None}


@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_a_valid_run(task: str):
    run = prepare([f"task={task}"]).run
    assert not run.task.targets or run.data.targets in run.task.targets


def test_data_reads_what_the_task_wants():
    assert prepare(["task=multilabel"]).run.data.targets == "labels"
    assert prepare(["task=segmentation"]).run.data.targets == "mask"
    assert prepare(["task=contrastive"]).run.data.views == 2
    run = prepare(["data=stdlib", "model=gpt", "loss=next_token"]).run  # without a task's word it is as ever
    assert (run.data.targets, run.data.views) == ("tokens", 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["task=regression", "data=digits"], "task=regression wants numbers for each sample"),
        (["task=regression", "data=digits"], "set data=diabetes"),
        (["task=language_modelling", "data=digits"], "task=language_modelling wants the next token"),
        (["task=text_classification", "data=digits"], "wants sequences of tokens, which data=digits does not give"),
        (["task=text_classification", "data=tabular"], "does not give: name its column of texts, as by data.columns=[NAME:text]"),
        (["task=segmentation", "model=mlp"], "model=mlp gives one output for an image"),
        (["model=unet"], "model=unet is for masks, and data=digits has none: set task=segmentation"),
        (["task=contrastive", "augment=[]"], "with augment=[] both are the same"),
        (["task=segmentation", "augment=[random_resized_crop]"], "would stay: set augment=[flip_crop]"),
        (["task=segmentation", "augment=[mixup]"], "augment=[mixup] mixes the classes of samples"),
        (["task=regression", "loss=cross_entropy"], "loss=cross_entropy wants"),
        (["task=regression", "metrics=[f1]"], "metrics=[f1]"),
        (["task=regresion"], "did you mean 'regression'?"),
        (["task=regression", "task.preset.data=wine"], "task=regression has no 'preset'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_set(words: list[str], says: str):
    refused = problems_of(prepare, words)
    assert any(says in problem for problem in refused), refused


def test_a_model_that_cannot_answer_is_told_at_the_start():
    told = "model=gpt learns answers and cannot write any"
    assert any(told in line for line in prepare(["task=instruction"]).notices)
    assert not any(told in line for line in prepare(["task=language_modelling"]).notices)
    transformers = ["task=instruction", "model=transformers", "model.name=GPT2LMHeadModel"]
    assert not any("cannot write any" in line for line in prepare(transformers).notices)


# --- training ---


@pytest.mark.parametrize("task", [t for t in SMALL if t != "classification"])
def test_each_task_trains_from_one_word(task: str):
    result = run_to_end([f"task={task}", *SMALL[task], "updates=2", "epochs=1", "batch.global_batch=16"], updates=2)
    assert set(prepare([f"task={task}"]).run.names("metrics")) <= set(result.judged("final"))


def test_the_two_views_of_a_sample_differ_and_depend_on_its_number_alone():
    run = prepare(["task=contrastive"]).run
    splits = run.data.load(torch.device("cpu"))
    pipeline = Pipeline(splits.train, tuple(run.augment), splits.normalize, 3, views=2)
    both, _ = pipeline(Request(1, torch.tensor([5, 9]), 1.0))
    alone, _ = pipeline(Request(1, torch.tensor([9]), 1.0))
    assert both.shape == (2, 2, 1, 8, 8)
    assert not torch.equal(both[:, 0], both[:, 1])
    torch.testing.assert_close(both[1], alone[0])


def test_a_mask_moves_with_its_image():
    from drivetrain.augment.geometry import FlipCrop
    from drivetrain.core.step.tensors import Tensors

    mask = torch.randint(0, 9, (6, 8, 8))
    source = Tensors(mask.unsqueeze(1).to(torch.uint8), mask)
    x, y = Pipeline(source, (FlipCrop(flip=0.5, pad=2),), None, 0, masks=True)(Request(2, torch.arange(6), 1.0))
    assert not torch.equal(y, mask)
    assert torch.equal(x[:, 0].long(), y)


def test_the_page_trains_what_is_all_of_your_own(own_module):
    """The code and the command of docs/tasks.md as they stand, with fewer epochs."""
    page = (ROOT / "docs" / "tasks.md").read_text()
    own_module("mine", re.search(r"```python\n(.*?)```", page, re.S)[1])
    import mine

    trunk = {name: value for name, value in mine.Net(10).state_dict().items() if name.startswith("trunk")}
    torch.save(trunk, "weights.pt")
    command = re.search(r"    python -m src\.train ('trust=\[mine\]'.*?)\n\n", page, re.S)[1]
    result = run_to_end([*shlex.split(command.replace("\\\n", " ")), "epochs=5"])
    assert set(result.judged("final")) == {"loss", "accuracy", "cost"}
    assert result.judged("final")["accuracy"] > 0.75
    assert result.selection == {"metric": "cost", "better": "min"}
