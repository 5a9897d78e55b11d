"""The recipes that ship: each is good, and those that train in a second are held to what they claim."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench import zoo

from drivetrain.cli.main import main
from drivetrain.config.compose import compose
from drivetrain.core.errors import DONE
from drivetrain.core.machine.paths import recipes_dir
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options.selection import Reach, evaluated
from drivetrain.core.world import World
from drivetrain.launch.job import checked, prepare
from drivetrain.launch.worker import run_rank
from drivetrain.measure.benchmark.variants import Facts
from drivetrain.measure.claims.verify import ALL, HOLDS, REFUTED, ClaimRuns, Differences, verify
from drivetrain.recipe import lookup
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.claims import Claim, DeviceSection, Memory, Quality
from drivetrain.run.reader import read
from tests.support.put import put

NAMES = sorted(file.stem for file in recipes_dir().glob("*.yaml"))
QUICK = ("digits_fast", "digits_small")  # less than a second of training each


def test_every_recipe_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "check", *NAMES]) == DONE
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert lines == [f"{name}: valid" for name in NAMES]


def test_a_check_tells_what_is_left_to_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipe", "check", "cifar10_fast"])
    assert "cifar10_fast: valid\n  left to the command line: data=cifar10 needs data.root" in capsys.readouterr().out


def test_a_missing_path_hides_no_other_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = put(tmp_path / "r.yaml", "defaults:\n  - override /data: cifar10\noptimizer:\n  lr: -1\n")
    assert main(["recipe", "check", str(recipe)]) != DONE
    assert "optimizer.lr=-1" in capsys.readouterr().err


def test_each_recipe_says_what_it_is_for_in_a_line() -> None:
    for name in NAMES:
        assert 20 < len(lookup.read(name).description) < 130, name


def test_a_recipe_that_is_not_verified_here_claims_nothing() -> None:
    assert zoo.names()
    for name in set(NAMES) - set(zoo.names()):
        assert lookup.read(name).claim is None, name


def test_a_plan_is_of_a_recipe_that_ships() -> None:
    assert set(zoo.PLANS) <= set(zoo.names())


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_recipe_does_what_it_claims(name: str, tmp_path: Path) -> None:
    recipe = lookup.read(name)
    claim = recipe.claim
    assert claim is not None
    assert claim.quality is not None
    assert claim.target is not None
    job = prepare([f"recipe={name}", f"runtime.seed={max(claim.seeds or ()) + 1}", "saving=none", *zoo.COMMON])
    with StopFlag() as stop:
        result = run_rank(job, World(), tmp_path, stop, quiet=True)
    run = replace(read(tmp_path), result=result, status=result.status)
    facts = Facts.of(run, 0, 0, Reach.parse(claim.target.reach))
    differ = Differences.of(claim, facts.kind, facts.device, facts.data)
    seen = ClaimRuns([facts], replace(differ, device="another one"), evaluated(job.run))  # which is not timed
    answers = {kind.key: kind.answer(claim, seen) for kind in ALL if kind.key in ("quality", "target")}
    assert not differ.data
    assert answers["quality"].outcome == HOLDS, answers
    assert answers["target"].outcome != REFUTED, answers


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(QUICK)))
def test_a_recipe_does_what_it_claims(name: str) -> None:
    recipe = lookup.read(name)
    if name not in zoo.names() or recipe.claim is None or zoo.PLANS.get(name, zoo.Plan()).pretrain:
        pytest.skip("it claims nothing, or starts from weights that python -m bench.zoo trains first")
    found = verify(recipe, [*zoo.COMMON], (), zoo.VerifySettings(seeds=1))
    assert all(answer.outcome != REFUTED for answer in found.answers), found.answers


# --- bench.zoo ---


def test_parameters_are_counted_without_the_statistics_of_norms(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "checkpoints" / "12"
    folder.mkdir(parents=True)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
    save_file(net.state_dict(), folder / "model.safetensors")
    assert zoo.parameters(tmp_path) == sum(p.numel() for p in net.parameters())
    assert zoo.parameters(tmp_path / "none") is None


ROW = {
    "cell": "", "metric": "accuracy", "better": "max", "seeds": 3, "seconds": 1.23, "samples_per_second": 12345.6,
    "parameters": 4810, "peak_mib": 371.4, "validation": {"mean": 0.98, "low": 0.97, "high": 0.99},
    "test": {"mean": 0.97, "low": None, "high": None},
    "target": {"reach": "accuracy>=0.97", "reached": 2, "updates": 90.0, "seconds": 0.5},
}  # fmt: skip


def test_the_table_has_a_row_for_each_recipe_and_the_best_cell_of_a_grid() -> None:
    worse = {**ROW, "cell": "clip=none", "validation": {"mean": 0.9, "low": None, "high": None}}
    content = {"recipes": {"b": {"cells": [worse, {**ROW, "cell": "clip=norm", "target": None}]}, "a": {"cells": [ROW]}}}
    text = zoo.page(f"before\n{zoo.BEGIN}old\n{zoo.END}after\n", content)
    lines = text.splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in text
    assert lines[4] == (
        "| `a` | accuracy | 0.980 ± 0.010 | 0.970 | accuracy>=0.97: 90 updates, 0.5 s (2 of 3 seeds) | 1.2 s | 12,346 | 4,810 "
        "| 371 | 3 |"
    )
    assert lines[5].startswith("| `b`, the best of 2 cells: `clip=norm` | accuracy | 0.980 ± 0.010 | 0.970 | – |")
    assert zoo.page(text, content) == text


def test_the_page_says_on_which_machine_a_claim_was_verified() -> None:
    answers = [
        {"kind": "quality", "claimed": "0.98", "measured": "0.981", "outcome": zoo.HOLDS, "because": ""},
        {"kind": "target", "claimed": "90", "measured": "300", "outcome": zoo.REFUTED, "because": "slower"},
        {"kind": "memory", "claimed": "400 MiB", "measured": "–", "outcome": zoo.UNTOLD, "because": "x, claimed on y"},
        {"kind": "energy", "claimed": "9 J", "measured": "–", "outcome": zoo.UNTOLD, "because": "nothing tells it"},
    ]
    verified = {"machine": {"cpu": "a CPU", "load": 0.52}, "answers": answers}
    content = {"recipes": {"a": {"verified": [verified]}, "b": {"verified": None}, "c": {"cells": [ROW]}}}
    lines = zoo.page(f"{zoo.BEGIN}{zoo.END}{zoo.BEGIN_VERIFIED}old\n{zoo.END}", content).splitlines()
    row = "| `a` | a CPU | 0.5 | quality | target (300 for 90) | memory (– for 400 MiB); energy (nothing tells it) |"
    assert lines[-2] == row
    assert sum("`b`" in line for line in lines) == 0
    assert lines[3].startswith("| `c` |")


def test_a_claim_takes_the_place_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(tmp_path / "r.yaml", "description: a recipe\nclaim:\n  old: 1\n  older: 2\nepochs: 3\n")
    monkeypatch.setattr(zoo.lookup, "load", lambda _: (file, b""))
    quality = Quality("accuracy", "validation", 0.9, 1)
    zoo.write_claim("r", Claim(device=DeviceSection("cpu", "a CPU"), versions={"torch": "2.15.0"}, quality=quality))
    text = file.read_text()
    assert text.startswith("description: a recipe\nepochs: 3\nclaim:\n")
    assert "old" not in text
    assert recipes.read(file).claim.quality == quality


@pytest.mark.parametrize(("run", "memory"), [
    ({}, Memory(400, 1)),
    ({"device": "another CPU"}, None),
    ({"peak_mib": None}, None),
])  # fmt: skip
def test_a_claim_of_memory_is_of_a_process_of_its_own_on_the_claims_device(run: dict, memory: Memory | None) -> None:
    quality = Quality("accuracy", "validation", 0.9, 1)
    claim = Claim(device=DeviceSection("cpu", "a CPU"), versions={"torch": "2.15.0"}, quality=quality, memory=Memory(1, 9))
    found = zoo.with_memory(claim, Facts(0, **{"device": "a CPU", "peak_mib": 400.0, **run}))
    assert found == replace(claim, memory=memory)


def test_only_what_is_missing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def train(*words: str) -> None:
        commands.append(words)
        given = dict(word.split("=", 1) for word in words if "=" in word)
        for seed in given["runtime.seed"].split(","):
            job = checked(compose([f"recipe={given['recipe']}", f"runtime.seed={seed}", *zoo.COMMON]))
            folder = Path(given["output_dir"]) / seed
            put(folder / "result.json", json.dumps({"status": "completed", "config_hash": job.config_hash}))

    monkeypatch.setattr(zoo, "_train", train)
    plan = zoo.Plan(seeds=2)
    assert [len(runs) for runs in zoo.trained("digits_fast", plan, tmp_path).values()] == [2]
    zoo.trained("digits_fast", plan, tmp_path)
    zoo.trained("digits_fast", replace(plan, seeds=3), tmp_path)
    assert [next(word for word in words if word.startswith("runtime.seed")) for words in commands] == [
        "runtime.seed=0,1",
        "runtime.seed=2",
    ]
