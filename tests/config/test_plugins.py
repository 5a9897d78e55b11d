"""Options from outside, one for each group: from a folder by --config-dir, and from an installed package by its entry point."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from drivetrain.cli import completion
from drivetrain.cli.main import main
from drivetrain.config import catalog, plugins
from drivetrain.core.errors import UserError
from drivetrain.core.machine.paths import add_working_directory
from drivetrain.core.machine.process import PACKAGE
from drivetrain.launch.job import prepare
from drivetrain.sweeps.store import prepare as prepare_sweep
from drivetrain.testing import contract_problems
from tests.support import pairwise, slow
from tests.support.put import put
from tests.support.refusals import problems_of

GROUPS = list(catalog.default_options())
SOME = slow.but({"optimizer", "augment", "loader", "loss", "task"}.__contains__, GROUPS)
# The shipped option that each made-up one derives from: one that takes settings and runs with the defaults of everything else.
BASE = {
    "augment": "flip_crop", "surgery": "channels_last", "checkpointing": "every_k", "compile": "none", "clip": "norm",
    "ema": "ema", "debug": "fast", "logger": "files", "metrics": "accuracy",
}  # fmt: skip
RULE = """
    def validate(self, run):
        yield from super().validate(run)
        if run.named("clip") == "clip=norm":
            yield f"{run.named('optimizer')} bounds gradients by itself: set clip=none"
"""
ENTRY_POINTS = """
[drivetrain.options]
made_up = made_up

[drivetrain.verbs]
hello = made_up.verbs:command
missing = made_up.nowhere:command
train = made_up.verbs:command
"""


def word(group: str, option: str = "mine") -> str:
    return f"{group}=[{option}]" if group in catalog.LISTS else f"{group}={option}"


def write_package(site: Path) -> Path:
    """The package `made_up` in `site`, with an option `mine` for every group; its conf/."""
    package = site / "made_up"
    (package / "conf").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "verbs.py").write_text("def command(argv):\n    print('hello', *argv)\n    return 3\n")
    classes = []
    for group, default in catalog.default_options().items():
        text = catalog.option_files()[group][BASE.get(group, default)].read_text()
        module, _, name = yaml.safe_load(text)["_target_"].rpartition(".")
        rule = RULE if group == "optimizer" else "    effect = 'exact'\n"
        classes.append(f"import {module}\n\nclass {group.title()}({module}.{name}):\n{rule}\n")
        settings = [line for line in text.splitlines() if not line.startswith(("#", "_target_"))]
        place = [f"# @package {group}.mine"] if group in catalog.LISTS else []
        lines = [*place, f"# {group} of a made-up package", f"_target_: made_up.options.{group.title()}", *settings]
        put(package / "conf" / group / "mine.yaml", "\n".join(lines) + "\n")
    (package / "options.py").write_text("\n".join(classes))
    return package / "conf"


def install(site: Path, entry_points: str = ENTRY_POINTS) -> None:
    """The files that `pip install` leaves of a package beside its modules."""
    info = site / "made_up-1.0.dist-info"
    put(info / "METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@dataclass
class Outside:
    """The folder of the options, and what a command line needs besides their names."""

    config_dirs: list[str]
    trust: list[str]

    @property
    def arguments(self) -> list[str]:
        return [part for folder in self.config_dirs for part in ("--config-dir", folder)]

    def problems(self, *overrides: str) -> list[str]:
        return problems_of(prepare, [*overrides, *self.trust], self.config_dirs)


@pytest.fixture(autouse=True)
def _not_imported_yet() -> Iterator[None]:
    """Each test writes a package `made_up` of its own."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "made_up"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The package as a folder of files, and as an installed one. No test changes them."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("config_dir", "entry_point")}
    for place in places.values():
        write_package(place)
    install(places["entry_point"])
    return places


@pytest.fixture(params=["config_dir", "entry_point"])
def outside(request: pytest.FixtureRequest, sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Outside:
    site = sites[request.param]
    monkeypatch.syspath_prepend(site)
    return Outside([], []) if request.param == "entry_point" else Outside([str(site / "made_up" / "conf")], ["trust=[made_up]"])


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed; its site."""
    site = tmp_path / "site"
    write_package(site)
    install(site)
    monkeypatch.syspath_prepend(site)
    return site


# Every group's made-up option is where the shipped ones are.


def test_it_is_in_the_lists(outside: Outside, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *outside.arguments]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len([row for row in rows if "mine" in row[:2] and row[-3:] == ["a", "made-up", "package"]]) == len(GROUPS)
    assert main(["list", "clip=mine", *outside.arguments]) == 0
    said = capsys.readouterr().out
    assert said.startswith("clip=mine: clip of a made-up package\n")
    assert "    clip.max_norm: 1.0 " in said
    claimed = (
        "effect: exact" if not outside.trust else "effect: its code is not imported here: see drivetrain show clip=mine 'trust=["
    )
    assert f"    {claimed}" in said


def test_it_is_completed(outside: Outside) -> None:
    line = " ".join(["drivetrain train", *outside.arguments])
    assert completion.candidates([f"{line} optimizer=mi"]) == ["optimizer=mine"]
    assert "surgery=mine" in completion.candidates([f"{line} surgery="])
    settings = completion.candidates([f"{line} augment.flip_crop."])
    assert settings
    assert completion.candidates([f"{line} augment.mine."]) == [setting.replace("flip_crop", "mine") for setting in settings]


@pytest.mark.parametrize("group", SOME)
def test_it_is_shown(group: str, outside: Outside, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", word(group), *outside.trust, *outside.arguments]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert word(group) in shown if group in ("optimizer", "scheduler") else "updates" in shown


@pytest.mark.parametrize("group", GROUPS)
def test_it_keeps_the_contract(group: str, outside: Outside) -> None:
    assert contract_problems(group, "mine", outside.config_dirs) == []


@pytest.mark.parametrize("group", SOME)
def test_it_is_a_variant_of_a_comparison(group: str, outside: Outside) -> None:
    first = BASE.get(group, catalog.default_options()[group])
    variants = f"{word(group, first)},{word(group).partition('=')[2]}"
    jobs = prepare_sweep([variants, *outside.trust], outside.config_dirs)
    assert [job.problems for job in jobs] == [[], []]
    made = jobs[1].job.run.parts[group]
    assert type(made[0] if group in catalog.LISTS else made).__module__ == "made_up.options"
    assert jobs[0].job.config_hash != jobs[1].job.config_hash or group == "logger"


def test_it_is_among_the_pairs(outside: Outside, tmp_path: Path) -> None:
    factors = pairwise.factors(outside.config_dirs)
    assert {factors.pop("stages")[0], factors.pop("target")[0]} == {"stages=null", "target=null"}  # keys of the whole config
    assert set(factors) == set(GROUPS)  # even those of which drivetrain has one option
    assert all(word(group) in words for group, words in factors.items())
    pair = ("optimizer=mine", "clip=norm")
    reason = pairwise.refused([*pair, *outside.trust], tmp_path, outside.config_dirs)
    assert reason == "optimizer=mine bounds gradients by itself: set clip=none"
    assert pairwise.names_both(frozenset(pair), reason)
    assert pairwise.refused(["optimizer=mine", "clip=mine", *outside.trust], tmp_path, outside.config_dirs) is None


def test_its_settings_are_overrides_like_any_other(outside: Outside) -> None:
    job = prepare(["optimizer=mine", "optimizer.lr=0.5", *outside.trust], outside.config_dirs)
    assert job.run.optimizer.lr == 0.5
    wrong = outside.problems("optimizer=mine", "optimizer.lrr=1", "clip=mine", "clip.max_norm=-1", "ema=mien")
    for text in ("optimizer=mine has no 'lrr'", "clip.max_norm=-1: must be > 0", "did you mean 'mine'?"):
        assert any(text in problem for problem in wrong), wrong
    assert "ema=mine has it" in " ".join(outside.problems("ema=none", "ema.decay=0.9"))


def test_it_trains(outside: Outside, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["data=synthetic", "data.shape=[3,8,8]", "model=mlp", "updates=2", "-q"]
    assert main(["train", *outside.arguments, *outside.trust, *tiny, "optimizer=mine", "scheduler=mine", "batch=mine"]) == 0
    assert "completed" in capsys.readouterr().out
    (run_dir,) = (file.parent for file in Path("outputs").rglob("result.json"))
    assert main(["train", "-q", f"resume={run_dir}", "updates=3"]) == 0, "the run knows where its options came from"


def test_a_recipe_may_choose_it(outside: Outside, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An installed package's without further ado; that of a folder needs the operator's trust."""
    recipe = put(tmp_path / "shared.yaml", "defaults:\n  - override /optimizer: mine\noptimizer:\n  lr: 0.25\n")
    assert prepare([f"recipe={recipe}", *outside.trust], outside.config_dirs).run.optimizer.lr == 0.25
    assert main(["recipe", "check", str(recipe), *outside.arguments]) == (2 if outside.trust else 0)
    said = capsys.readouterr()
    assert "trust=[made_up]" in said.err if outside.trust else said.out == f"{recipe}: valid\n"


# Without the package, and with a wrong one.


def test_a_recipe_with_an_option_that_is_not_installed(tmp_path: Path) -> None:
    recipe = put(tmp_path / "shared.yaml", "epochs: 1\ndefaults:\n  - override /optimizer: mine\n")
    (problem,) = problems_of(prepare, [f"recipe={recipe}"])
    assert problem.startswith(f"{recipe}:3: optimizer=mine is no option of optimizer")
    assert "an option of a plugin needs its package installed" in problem


def test_the_contract_finds_what_is_wrong(installed: Path) -> None:
    put(installed / "made_up" / "conf" / "clip" / "mine.yaml", "_target_: made_up.options.Clip\nmax_norm: 2.0\n")
    found = contract_problems("clip", "mine")
    assert len(found) == 3
    for text in ("first comment", "norm_type is missing, which is an argument of Clip", "max_norm is 2.0, but the default"):
        assert any(text in problem for problem in found), found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# x\n_target_: made_up.options.Nothing\n", "made_up.options.Nothing cannot be imported"),
        ("# x\n_target_: nowhere.Clip\n", "nowhere.Clip cannot be imported"),
        ("# x\n_target_: os.getcwd\n", "os.getcwd does not derive from Option"),
        ("# x\nmax_norm: 2.0\n", "_target_ as the dotted name of its class"),
    ],
)
def test_the_contract_of_an_odd_option(text: str, says: str, installed: Path) -> None:
    (installed / "made_up" / "conf" / "clip" / "mine.yaml").write_text(text)
    assert any(says in problem for problem in contract_problems("clip", "mine"))


def test_the_contract_asks_what_an_option_does_to_training(installed: Path) -> None:
    said = "    effect = 'exact'\n"
    options = installed / "made_up" / "options.py"
    before, saving, after = options.read_text().partition("class Saving(")
    options.write_text(before + saving + after.replace(said, "    key_effects = {'maximum': 'close'}\n", 1))
    says, names = contract_problems("saving", "mine")
    assert "Saving does not say what it does to training" in says
    assert "maximum of Saving.key_effects is no argument of it" in names


@pytest.mark.parametrize("group", ["loss", "metrics"])
def test_a_class_is_asked_what_targets_it_takes(group: str, installed: Path) -> None:
    """A metric also by its contract. A loss may be one for data that does not say its targets."""
    with (installed / "made_up" / "options.py").open("a") as options:
        options.write(f"\n{group.title()}.takes = ()\n")
    asked = [problem for problem in contract_problems(group, "mine") if "does not say what targets" in problem]
    assert len(asked) == (group == "metrics")
    with pytest.raises(UserError, match=rf"{group}=.* \({group.title()}\) does not say what targets"):
        prepare([word(group)])


def test_the_contract_of_no_option() -> None:
    assert contract_problems("clip", "nrom") == ["there is no clip=nrom: did you mean 'norm'?"]
    assert "there is no group 'clp': did you mean 'clip'" in contract_problems("clp", "norm")[0]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("optimizer/sgd.yaml", "_target_: made_up.options.Optimizer\n", "optimizer=sgd ships with drivetrain"),
        ("optimiser/mine.yaml", "_target_: made_up.options.Optimizer\n", "no group 'optimiser': did you mean 'optimizer'?"),
        ("optimizer/other.yaml", "lr: 0.1\n", "_target_ as the dotted name of its class"),
        ("optimizer/other.yaml", "lr: [\n", "not valid YAML"),
        ("optimizer/other.yaml", "lr: 1\n" + "#" * catalog.MOST, "it is larger than 1 MB"),
        ("optimizer/_shared.yaml", "lr: " + "[" * 1000, "it is nested too deep"),
        ("surgery/other.yaml", "_target_: made_up.options.Surgery\n", "add the line '# @package surgery.other'"),
    ],
)
def test_a_wrong_file_is_named(name: str, text: str, says: str, installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = installed / "made_up" / "conf" / name
    put(file, text)
    for argv in (["list"], ["train", "epochs=1"]):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert str(file) in said
        assert says in said


@pytest.mark.parametrize(("module", "says"), [("not_there", "no package not_there"), ("email", "email has no folder conf/")])
def test_an_entry_point_without_options(
    module: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "site", f"[drivetrain.options]\nx = {module}\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(UserError, match=says):
        prepare([])
    assert module not in plugins.trusted_packages()
    assert main(["list", "clip"]) == 0, "the other options are shown all the same"
    said = capsys.readouterr()
    assert says in said.err
    assert "norm" in said.out


LIES = {  # of a class, of what it is imported from, or of an entry point; and what is said
    "raises": ("raise RuntimeError('boom')", "raise RuntimeError('boom'): RuntimeError: boom"),
    "exits": ("raise SystemExit(7)", "cannot be imported: ", "SystemExit: 7"),
    "an effect of its own": ("Clip.effect = 'perfect'", "says effect='perfect': it is one of exact, close, changes"),
    "a constructor": (
        "class Of(Clip):\n    def __init__(self, max_norm=1.0, norm_type=2.0):\n        raise OSError('no')\nClip = Of",
        "raise OSError('no'): OSError: no",
    ),
    "rules": ("def no(self, run):\n    raise OSError('no')\nClip.validate = no", "raise OSError('no'): OSError: no"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_plugin_that_raises_or_lies_is_named(lie: str, installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, *says = LIES[lie]
    with (installed / "made_up" / "options.py").open("a") as file:
        file.write(f"\n{text}\n")
    assert main(["train", "-q", "clip=mine"]) in (1, 2)
    said = capsys.readouterr().err
    assert all(each in said for each in says), said
    assert main(["train", "--cfg", "job", "clip=norm"]) == 0, "whoever does not choose it is not held up"


@pytest.mark.parametrize("method", ["resolve", "validate", "advise", "validate_device"])
@pytest.mark.parametrize("returned", ["None", "'a text'"])
def test_a_method_that_returns_nothing_is_named(
    method: str, returned: str, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = installed / "made_up" / "options.py"
    with file.open("a") as options:
        options.write(f"\n\nClip.{method} = lambda self, run: {returned}\n")
    assert main(["train", "-q", "clip=mine", "output_dir=outputs"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"made_up.options.Clip.{method} ({file}) returns {returned}, and is to " in said
    assert not Path("outputs").exists()


@pytest.mark.parametrize("value", ["", "../../etc", "made_up:"])
def test_an_entry_point_that_is_no_module_is_named(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "site", f"[drivetrain.options]\nx = {value}\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert main(["list", "clip"]) == 0
    assert "the installed package made-up declares options in" in capsys.readouterr().err


def test_two_options_of_one_name(installed: Path, tmp_path: Path) -> None:
    conf = write_package(tmp_path / "other")
    assert prepare([], [str(conf)]), "the same files once more: a plugin's checkout"
    (conf / "optimizer" / "mine.yaml").write_text((conf / "optimizer" / "mine.yaml").read_text() + "# another\n")
    catalog._problems.cache_clear()
    with pytest.raises(UserError, match=rf"optimizer=mine is also in {installed}"):
        prepare([], [str(conf)])


def test_only_what_is_installed_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory becomes importable for the user's own classes, and installs nothing."""
    here = tmp_path / "here"
    write_package(here)
    install(here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_working_directory()
    assert sys.path[-1] == str(here)
    assert "made_up" not in plugins.trusted_packages()
    assert plugins.entry_points(plugins.VERBS) == []


def test_trust_reaches_the_plugins_own_package_only(installed: Path) -> None:
    put(installed / "made_up" / "conf" / "clip" / "mine.yaml", "# not its own\n_target_: posix.system\n")
    with pytest.raises(UserError, match=r"clip\._target_=posix.system is code that drivetrain does not ship"):
        prepare(["clip=mine"])


# Verbs.


def test_a_plugins_verb(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    said = capsys.readouterr().out
    assert "drivetrain hello        from the package made-up" in said
    assert "not available: train from made_up.verbs:command, because another verb has this name" in said
    assert completion.candidates(["drivetrain hel"]) == ["hello"]
    assert main(["hello", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert main(["helo"]) == 2
    assert "'hello'" in capsys.readouterr().err
    assert main(["missing"]) == 2
    assert "the verb missing (from the package made-up) cannot be imported from made_up.nowhere" in capsys.readouterr().err
    assert main(["train", "epochs=0"]) == 2
    assert "epochs=0" in capsys.readouterr().err


def python(code: str, path: Sequence[Path]) -> str:
    env = {"PYTHONPATH": ":".join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def test_finding_options_and_verbs_imports_no_plugin(installed: Path) -> None:
    code = """
import sys
from drivetrain.cli import completion
from drivetrain.cli.main import main
assert main(["help"]) == main(["list"]) == main(["complete", "drivetrain train optimizer=mi"]) == 0
print(sorted({name.split(".")[0] for name in sys.modules} & {"made_up", "torch"}))
"""
    said = python(code, [PACKAGE.parent, installed])
    assert "drivetrain hello" in said
    assert said.endswith("optimizer=mine\n[]\n")
