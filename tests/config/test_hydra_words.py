"""Words that Hydra's users type: each works, or one line says what to type. Nothing here trains."""

import os
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import drivetrain
from drivetrain.cli.main import main
from drivetrain.config import catalog
from drivetrain.config.hydra_words import HONOURED, HydraSettings, instead, split, translated
from drivetrain.config.other_tools import ELSEWHERE
from drivetrain.launch.job import prepare, prepare_run
from drivetrain.launch.launcher import overrides_of
from drivetrain.run import directory
from drivetrain.run.result import Result
from drivetrain.sweeps.store import Sweep, one_job
from drivetrain.sweeps.store import prepare as prepare_sweep
from tests.support.put import put
from tests.support.refusals import problems_of

SMALL = "defaults:\n  - override /optimizer: sgd\noptimizer:\n  lr: 0.05\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config dir with an experiment, and a config beside its groups."""
    put(tmp_path / "conf" / "experiment" / "small.yaml", "# @package _global_\n" + SMALL)
    (tmp_path / "conf" / "mine.yaml").write_text(SMALL)
    return tmp_path / "conf"


# --- idioms ---


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("~clip", "clip=none"), ("~surgery", "surgery=[]"), ("~parallel", "parallel=single"), ("~batch", "batch=fixed"),
        ("~optimizer", "~optimizer"), ("~clip=norm", "~clip=norm"), ("optimizer@mine=sgd", "optimizer@mine=sgd"),
        ("+experiment=fast", "recipe=fast"), ("experiment=fast,naive", "recipe=fast,naive"), ("+epochs=3", "+epochs=3"),
        ("precision=glob(bf*)", "precision=bf16,bf16_pure"), ("clip=glob([n*,v*],exclude=none)", "clip=norm,value"),
    ],
)  # fmt: skip
def test_idioms_in_drivetrains_words(typed: str, meant: str) -> None:
    assert translated([typed]) == [meant]


def test_a_glob_that_matches_nothing() -> None:
    assert "'clip=glob(x*)' matches nothing: there is: agc, none" in problems_of(translated, ["clip=glob(x*)"])[0]


def test_a_glob_sweeps_over_what_it_matches() -> None:
    jobs = prepare_sweep(translated(["clip=glob([n*,v*])", "epochs=range(1,3)", "optimizer.lr=choice(0.1,0.2)"]))
    assert len(jobs) == 3 * 2 * 2
    assert {job.job.run.named("clip") for job in jobs if job.job} == {"clip=none", "clip=norm", "clip=value"}


def test_shuffle_is_refused_because_a_resumed_sweep_must_make_the_same_jobs() -> None:
    assert "leave out shuffle" in problems_of(lambda: prepare_sweep(["epochs=shuffle(range(1,4))"]))[0]


def test_an_experiment_of_a_config_dir_is_a_recipe(own: Path) -> None:
    for words in (["+experiment=small"], ["experiment=small"]):
        job = prepare_run(words, [str(own)])
        assert (job.run.named("optimizer"), job.run.optimizer.lr) == ("optimizer=sgd", 0.05)


def test_an_experiment_can_do_no_more_than_a_recipe(own: Path) -> None:
    (own / "experiment" / "bad.yaml").write_text("optimizer:\n  lr: ${oc.env:LR}\noutput_dir: x\n")
    told = problems_of(prepare_run, ["+experiment=bad"], [str(own)])
    assert any("oc.env:LR" in line for line in told)
    assert any("'output_dir'" in line for line in told)


def test_config_name_is_a_recipe(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-cd", str(own), "--config-name", "mine", "--cfg", "job", "-p", "optimizer.lr"]) == 0
    assert capsys.readouterr().out == "0.05\n"
    assert main(["train", "-cn", "config", "optimizer.lr=3", "--cfg", "job", "-p", "optimizer.lr"]) == 0
    assert capsys.readouterr().out == "3\n"


# --- what is shown ---


def test_cfg_shows_the_config_hydras_node_or_both(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for what in ("job", "hydra", "all"):
        assert main(["train", "hydra.job.name=mine", "epochs=3", "--cfg", what]) == 0
        shown[what] = yaml.safe_load(capsys.readouterr().out)
    assert list(shown["hydra"]) == ["hydra"]
    assert shown["all"] == {**shown["job"], **shown["hydra"]}
    node = shown["hydra"]["hydra"]
    assert (node["job"]["name"], node["overrides"]["task"]) == ("mine", ["epochs=3"])
    assert node["job"]["override_dirname"] == "epochs=3"
    assert main(["train", "--cfg", "all", "-p", "hydra.job.nam"]) == 2
    assert "in hydra.job: did you mean 'name'" in capsys.readouterr().err
    assert main(["train", "--cfg", "job", "-p", "updates"]) == 0, "a value that is null is there"


def test_info_says_who_chose_what(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--info", "defaults", "-cd", str(own), "+experiment=small", "clip=norm"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "small.yaml:" in lines["optimizer"]
    assert "command line" in lines["clip"]
    assert "default" in lines["data"]
    assert main(["train", "--info", "-cd", str(own)]) == 0
    said = capsys.readouterr().out
    assert str(own) in said
    assert "hydra-core" in said


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--hydra-help"], "drivetrain train --help"), (["-sc", "install=bash"], "drivetrain completion bash"),
        (["--experimental-rerun", "x"], "recipe=RUN/recipe.yaml"), (["--config-path", "x"], "--config-dir FOLDER"),
        (["--config-nam", "x", "--nope"], "did you mean"), (["hydra.sweep.dir=x"], "say -m"),
        (["-m", "hydra.run.dir=x", "epochs=1,2"], "hydra.sweep.dir="),
        (["--config-name", "nope"], "recipe=nope is not known"), (["hydra.run.dri=x"], "'hydra.run.dir'"),
        (["hydra.job.env_set.A=1"], "`drivetrain train --help`"), (["hydra/job_logging=none"], "it takes hydra.run.dir"),
        (["hydra.mode=MULTIRUN", "epochs=1,2"], "behind -m"), (["hydra.job.name=3"], "must be a text"),
        (["resume=x", "hydra.run.dir=y"], "leave out hydra.run.dir"), (["-m", "resume=x", "hydra.sweep.dir=y"], "no sweep"),
        (["-c", "config.yaml"], "recipe=config.yaml"), (["--cfg", "jobb"], "one of job, hydra, all"),
        (["ema=True"], "ema=true is no option"), (["augment=nope"], "there is: color_jitter"),
        (["optimizer.lr=${oc.decode:${oc.env:A}}"], "in quotes"),
    ],
)  # fmt: skip
def test_one_line_says_what_to_type(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    told = capsys.readouterr()
    assert part in told.err
    assert told.out == ""
    assert all(line.startswith("error: ") for line in told.err.splitlines())


def test_other_verbs_refuse_what_is_for_one_run() -> None:
    assert "for one run by `drivetrain train`" in problems_of(prepare, ["hydra.run.dir=x"])[0]
    assert all(f"hydra.{key}" in instead("hydra.verbose=true") for key in HONOURED)


# --- where runs go ---


def test_run_dir_is_resolved_as_in_hydra() -> None:
    words = ["hydra.run.dir=r/${hydra:job.name}/${model.width}/${hydra.job.override_dirname}", "hydra.job.name=me", "epochs=2"]
    job = prepare_run([*words, "runtime.seed=3"])
    assert job.new_run_dir() == Path("r/me/16/epochs=2,runtime.seed=3")
    assert prepare_run(["epochs=2"]).new_run_dir().parts[0] == "outputs"


def test_a_directory_that_has_a_run_or_a_file_of_its_name_is_not_taken(tmp_path: Path) -> None:
    word = f"hydra.run.dir={tmp_path}"
    mine = (".hydra/mine.yaml", "notes.txt")
    for name in mine:
        put(tmp_path / name, "mine")
    assert prepare_run([word]).make_run_dir() == tmp_path
    (tmp_path / "config.yaml").write_text("the run's")
    directory.remove(tmp_path)  # as where the run was refused
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(mine)
    (tmp_path / "config.yaml").write_text("mine")
    assert "already has a config.yaml" in problems_of(prepare_run, [word])[0]
    (tmp_path / "result.json").write_text("{}")
    assert f"go on with it by resume={tmp_path}" in problems_of(prepare_run, [word])[0]


def test_the_hydra_folder_is_what_hydra_writes_and_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_RATE", "0.0625")
    job = prepare_run(["optimizer.lr=${oc.env:MY_RATE}", "runtime.seed=3", "hydra.job.name=mine"])
    assert job.run.optimizer.lr == 0.0625
    job.write_files(tmp_path)
    folder = tmp_path / ".hydra"
    assert OmegaConf.load(folder / "config.yaml") == job.composed.unresolved
    assert yaml.safe_load((folder / "overrides.yaml").read_text()) == ["optimizer.lr=${oc.env:MY_RATE}", "runtime.seed=3"]
    node = OmegaConf.load(folder / "hydra.yaml").hydra
    assert (node.job.name, node.runtime.choices.optimizer, node.overrides.hydra) == ("mine", "adamw", ["hydra.job.name=mine"])
    for file in tmp_path.rglob("*.yaml"):
        assert "0.0625" not in file.read_text(), file
    (folder / "hydra.yaml").write_text("hydra: of a script with @hydra.main\n")
    (folder / "config.yaml").write_text("theirs")
    job.write_files(tmp_path)
    assert (folder / "config.yaml").read_text() == "theirs"


def test_a_jobs_folder_is_named_by_subdir(tmp_path: Path) -> None:
    settings, _ = split(["hydra.sweep.subdir=${hydra.job.num}/${optimizer.lr}"])
    sweep = Sweep(tmp_path, ["optimizer.lr=0.1,0.2", *settings.typed], [], settings)
    entries = sweep.add(prepare_sweep(["optimizer.lr=0.1,0.2"]))
    assert [entry.run_dir for entry in entries] == [tmp_path / "0" / "0.1", tmp_path / "1" / "0.2"]
    assert one_job(tmp_path, 1).run_dir == entries[1].run_dir


@pytest.mark.parametrize(
    ("subdir", "part"),
    [("same", "two jobs"), ("../${hydra.job.num}", "inside the sweep's"), ("jobs.json", "inside"), (".", "inside"),
     ("/x", "inside"), ("${nope}", "cannot be resolved")],
)  # fmt: skip
def test_a_folder_that_is_no_jobs_own(subdir: str, part: str, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, [], [], HydraSettings({"sweep.subdir": subdir}))
    assert part in problems_of(sweep.add, prepare_sweep(["epochs=1,2"]))[0]


# --- the environment ---


def test_a_text_of_the_environment_becomes_what_its_key_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "7")
    job = prepare_run(["epochs=${oc.env:N}", "updates=${oc.env:NONE,3}", "output_dir=${oc.env:N}", "parallel=ddp",
                       "parallel.nproc=${oc.env:NONE,2}", "batch.global_batch=${oc.env:NONE,64}"])  # fmt: skip
    assert (job.run.values["epochs"], job.run.values["updates"], job.run.values["output_dir"]) == (7, 3, "7")
    assert (job.run.parallel.nproc, job.run.batch.global_batch) == (2, 64)
    typed = ["epochs=7", "updates=3", "parallel=ddp", "parallel.nproc=2", "batch.global_batch=64"]
    assert job.config_hash == prepare_run(typed).config_hash
    assert "number" in problems_of(prepare_run, ["optimizer.lr=${oc.env:NONE,fast}"])[0]
    assert "the environment has no NONE" in problems_of(prepare_run, ["optimizer.lr=${oc.env:NONE}"])[0]


def test_an_own_option_may_read_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "0.5")
    (tmp_path / "optimizer").mkdir()
    text = catalog.option_files()["optimizer"]["sgd"].read_text()
    (tmp_path / "optimizer" / "mine.yaml").write_text(text.replace("lr: ", "lr: ${oc.env:RATE} #", 1))
    assert prepare_run(["optimizer=mine"], [str(tmp_path)]).run.optimizer.lr == 0.5


# --- answers ---


def test_names_of_other_frameworks_lead_to_drivetrains() -> None:
    """All keys in one command; of a group's options each by itself."""
    names = {name: present for name, present in ELSEWHERE.items() if name != "experiment"}
    of_keys = problems_of(prepare, [f"{name}=1" for name in names if "=" not in name])
    for name, present in names.items():
        told = problems_of(prepare, [name]) if "=" in name else [line for line in of_keys if name in line]
        assert any(f"use {present}" in line for line in told), name


@pytest.mark.parametrize(
    ("word", "part"),
    [("lr=1", "'optimizer.lr'"), ("seed=1", "'runtime.seed'"), ("momentum=0.9", "'scheduler.momentum' or 'optimizer.momentum'")],
)
def test_a_setting_without_its_group(word: str, part: str) -> None:
    assert part in problems_of(prepare, [word])[0]


def test_one_package_needs_no_brackets() -> None:
    assert prepare(["trust=my_pkg"]).run.values["trust"] == ["my_pkg"]


def test_a_config_dir_that_is_too_high_or_too_low(tmp_path: Path) -> None:
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    assert f"say --config-dir {tmp_path / 'conf'}" in problems_of(prepare, [], [str(tmp_path)])[0]
    low = tmp_path / "conf" / "optimizer"
    assert f"say --config-dir {tmp_path / 'conf'}" in problems_of(prepare, [], [str(low)])[0]
    assert "FOLDER/<group>/<option>.yaml" in problems_of(prepare, [], [str(tmp_path / "notes")])[0]


def test_a_typo_in_a_target_hides_no_other_mistake(tmp_path: Path) -> None:
    put(tmp_path / "optimizer" / "mine.yaml", "# mine\n_target_: drivetrain.optimizer.Sdg\nlr: 0.1\n")
    words = ["optimizer=mine", "trust=[drivetrain]", "epochs=0", "runtime.deterministic=true"]
    told = "\n".join(problems_of(prepare, words, [str(tmp_path)]))
    assert "optimizer._target_=drivetrain.optimizer.Sdg cannot be imported" in told
    assert "did you mean 'drivetrain.optimizer.torch_optim.Sgd'" in told
    assert "epochs=0" in told
    assert "runtime.cudnn_benchmark=false" in told, "the rule of another option"


def test_a_module_that_imports_what_is_not_there_gets_no_similar_class(tmp_path: Path) -> None:
    (tmp_path / "conf" / "loss").mkdir(parents=True)
    (tmp_path / "conf" / "loss" / "gce.yaml").write_text("# mine\n_target_: half_written.Gce\n")
    (tmp_path / "half_written.py").write_text("from drivetrain.loss import Missing\n")
    told = problems_of(prepare, ["loss=gce", "trust=[half_written]"], [str(tmp_path / "conf")])[0]
    assert "cannot import name 'Missing' from 'drivetrain.loss'" in told
    assert "did you mean" not in told


def test_a_section_of_a_recipe_that_is_no_group_is_named_beside_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("nothing: 1\nunchanced:\n  seed: 5\n")
    told = problems_of(prepare, [f"recipe={tmp_path / 'r.yaml'}"])
    assert [name for line in told for name in ("nothing", "unchanced") if f"has no '{name}'" in line] == ["nothing", "unchanced"]


def test_a_rule_says_nothing_of_an_option_that_was_not_understood() -> None:
    told = problems_of(prepare, ["batch=accumulate", "batch.accumulation_steps=3", "batch.global_bach=99"])
    assert len(told) == 1, told


@pytest.mark.parametrize("name", ["HYDRA_FULL_ERROR", "DRIVETRAIN_TRACEBACK"])
def test_whole_tracebacks_on_demand(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(name, "1")
    assert main(["train", "epochs=0"]) == 2
    assert "Traceback" in capsys.readouterr().err


# --- a config of the user's own program ---


def test_options_named_in_a_config() -> None:
    config = OmegaConf.create(
        {"model": "mlp", "surgery": ["channels_last"], "epochs": 2, "runtime": {"seed": 3}, "hydra": {"x": 1}}
    )
    assert overrides_of(config) == ["model=mlp", "surgery=[channels_last]", "epochs=2", "runtime.seed=3"]
    assert overrides_of({"lr": "${rate}", "rate": 2}) == ["lr=2", "rate=2"]


def test_a_config_that_hydra_composed_from_conf_makes_the_same_run() -> None:
    words = ["model=mlp", "optimizer=sgd", "optimizer.lr=0.5", "augment=[flip_crop]", "augment.flip_crop.pad=1", "clip=norm",
             "model.hidden=[8,9]", "optimizer.lr_multipliers={head.*:3}", "epochs=3"]  # fmt: skip
    job = prepare(words)
    again = prepare(overrides_of(OmegaConf.create(job.composed.unresolved)))
    assert again.composed.unresolved == job.composed.unresolved
    assert again.composed.choices == job.composed.choices


def test_references_to_the_environment_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "0.5")
    config = OmegaConf.create({"rate": "${oc.env:RATE}", "optimizer": {"lr": "${..rate}"}})
    words = overrides_of(config)
    assert [word for word in words if word.startswith("optimizer")] == ["optimizer.lr='${oc.env:RATE}'"]
    assert OmegaConf.create({"x": "${oc.env:RATE}"}).x == "0.5", "the resolver is back"
    assert prepare(words[1:]).run.optimizer.lr == 0.5


def test_what_a_config_cannot_be() -> None:
    told = problems_of(overrides_of, {"optimizer": {"_target_": "torch.optim.SGD"}, "model": {"_target_": "my.Net"}})
    assert len(told) == 2
    assert "did you mean 'sgd'?" in told[0]
    assert "cannot be resolved" in problems_of(overrides_of, {"epochs": "???"})[0]
    assert "give a list" in problems_of(drivetrain.train, "epochs=1")[0]


def test_a_result_shows_itself_in_a_notebook() -> None:
    result = Result("completed", metrics={"test": {"final": {"accuracy": 0.5}, "best": {"accuracy": 0.75}}}, overrides=["a=<b>"])
    shown = result._repr_html_()
    assert "<td>0.5 (best 0.75)</td>" in shown
    assert "a=&lt;b&gt;" in shown
    assert "None" not in shown


def test_a_script_with_hydra_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes into the directory that Hydra made, whose own files stay; a second run gets one of its own."""
    from hydra.core.hydra_config import HydraConfig

    put(tmp_path / ".hydra" / "hydra.yaml", "hydra: theirs\n")
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    node = OmegaConf.create({"runtime": {"output_dir": str(tmp_path)}})
    monkeypatch.setattr(HydraConfig, "get", lambda: node)
    config = OmegaConf.create({"model": "mlp", "updates": 1, "log_every": 1, "runtime": {"threads": 1}})
    first, second = drivetrain.train(config), drivetrain.train(config)
    assert (first.status, first.run_dir) == ("completed", tmp_path)
    assert second.run_dir is not None
    assert Path(os.path.relpath(second.run_dir, tmp_path)).parts[0] == "outputs"
    assert (tmp_path / ".hydra" / "hydra.yaml").read_text() == "hydra: theirs\n"
