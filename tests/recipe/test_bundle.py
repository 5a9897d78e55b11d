"""A recipe with its own code: made, looked into, refused without its word, and run with it."""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from drivetrain.cli.main import main
from drivetrain.config import bundles, plugins
from drivetrain.core import paths
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.recipe import bundle, cache, places
from drivetrain.recipe.bundle import Bundle
from drivetrain.sweeps import grid
from tests.support.command import only_run, run, train
from tests.support.places import site

RECIPE = """\
description: a network and a clipping of its own
defaults:
  - override /model: own
  - override /clip: mine
model:
  target: their_pkg.nets.Net
clip:
  max_norm: 0.5
"""
NETS = """\
import math

import torch

import their_pkg


class Net(torch.nn.Linear):
    def __init__(self, shape, classes):
        super().__init__(math.prod(shape), classes)

    def forward(self, x):
        return super().forward(x.flatten(1))
"""
CLIP = """\
from drivetrain.clip import Norm


class Mine(Norm):
    pass
"""
OPTION = """\
# bounds gradients in their way
_target_: their_pkg.clips.Mine
max_norm: 1.0  # of all gradients
norm_type: 2.0  # 2 is the Euclidean norm
"""


def write_package(place: Path, name: str = "their_pkg") -> Path:
    """A package with a network, an option, and a file that a bundle does not take; it leaves a mark when it is imported."""
    package = place / name
    (package / "conf" / "clip").mkdir(parents=True)
    (package / "__init__.py").write_text("import builtins\nbuiltins.their_pkg_was_imported = True\n")
    (package / "nets.py").write_text(NETS)
    (package / "clips.py").write_text(CLIP)
    (package / "conf" / "clip" / "mine.yaml").write_text(OPTION)
    (package / "notes.txt").write_text("not for a bundle")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "nets.cpython-311.pyc").write_bytes(b"other code")
    return package


@pytest.fixture(autouse=True)
def _own_import_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own, and no package or path left of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(paths, "added", {*paths.added})
    monkeypatch.setattr(plugins, "_attached", {})
    monkeypatch.setattr(cache, "on_fetch", [])
    yield
    forget_package(monkeypatch)


def forget_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the process as one that has not imported a bundle's package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "their_pkg"]:
        del sys.modules[name]
    monkeypatch.setattr(plugins, "_attached", {})
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if "bundles" not in folder])


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle as a sender makes it, in a folder without the package."""
    sender = tmp_path / "sender"
    write_package(sender)
    (sender / "mine.yaml").write_text(RECIPE)
    with monkeypatch.context() as there:
        there.chdir(sender)
        assert main(["recipe", "bundle", "mine.yaml", "--with", "their_pkg"]) == 0
    return (sender / "mine.zip").rename(tmp_path / "mine.zip")


def was_imported() -> bool:
    import builtins

    return getattr(builtins, "their_pkg_was_imported", False)


@pytest.fixture(autouse=True)
def _not_imported() -> Iterator[None]:
    import builtins

    yield
    if was_imported():
        del builtins.their_pkg_was_imported


def problem(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        prepare(words)
    (line,) = caught.value.problems
    return line


def archive(files: dict[str, bytes | str], **attributes: object) -> bytes:
    """A zip archive of these files, with these attributes of its entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            for key, value in attributes.items():
                setattr(info, key, value)
            writer.writestr(info, content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


# --- making and looking ---


def test_a_bundle_holds_the_recipe_the_package_and_their_hashes(made, capsys):
    with zipfile.ZipFile(made) as opened:
        names = opened.namelist()
        manifest = json.loads(opened.read("manifest.json"))
        lines = [f"{cache.sha256_of(opened.read(name))}  {name}\n" for name in sorted(names) if name != "manifest.json"]
    code = ["their_pkg/__init__.py", "their_pkg/clips.py", "their_pkg/conf/clip/mine.yaml", "their_pkg/nets.py"]
    assert names == ["manifest.json", "recipe.yaml", *code]
    assert manifest["hash"] == cache.sha256_of("".join(lines).encode())  # as `sha256sum … | sha256sum` prints it
    assert not was_imported()


def test_the_same_files_make_the_same_bytes(made, tmp_path):
    package = write_package(tmp_path / "again")
    for number, file in enumerate(package.rglob("*.py")):
        os.utime(file, (number, number))
    again, left_out = bundle.make(RECIPE.encode(), package)
    assert again.archive() == made.read_bytes()
    assert left_out == ["their_pkg/notes.txt"]


def test_inspect_lists_the_code_and_runs_nothing(made, capsys):
    assert main(["recipe", "inspect", "mine.zip"]) == 0
    shown = capsys.readouterr().out
    word = bundle.load(made).word
    for part in (
        "target: their_pkg.nets.Net", "their_pkg/nets.py", cache.sha256_of(NETS.encode()),
        "its import statements name: builtins, drivetrain, math, torch\n",
        "the recipe names: model.target=their_pkg.nets.Net", "its options: clip=mine",
        f"drivetrain train recipe=mine.zip trust={word}",
    ):  # fmt: skip
        assert part in shown
    assert not was_imported()
    assert not (made.parent / "cache").exists()
    assert main(["recipe", "show", "mine.zip"]) == 0
    assert capsys.readouterr().out == RECIPE


def test_inspect_says_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / "x.zip").write_bytes(Bundle("p", {"recipe.yaml": b"", "p.py": b"(" * 10_000}).archive())
    assert main(["recipe", "inspect", "x.zip"]) == 0
    assert "p.py is no Python that can be parsed, or is too long" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mine.yaml"], "the form is drivetrain recipe bundle FILE --with my_pkg"),
        (["mine.yaml", "--with", "nowhere_pkg"], "there is no package nowhere_pkg"),
        (["mine.yaml", "--with", "json"], "the name json, which is taken"),
        (["mine.yaml", "--with", "other"], "mine.yaml:6: model.target=their_pkg.nets.Net is not in the package other"),
        (["mine.yaml", "--with", "their_pkg", "x.tar"], "the name of a bundle ends in .zip"),
        (["mine.yaml", "--with", "their_pkg", "there.zip"], "there.zip is there already"),
        (["mine.yaml", "--with", "linked"], "is a link: a bundle has regular files only"),
        (["nameless.yaml", "--with", "their_pkg"], "nameless.yaml:3: no class of their_pkg is named: set model.target"),
    ],
)
def test_a_bundle_that_cannot_be_made(tmp_path, capsys, words, says):
    write_package(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "nameless.yaml").write_text(RECIPE.replace("target: their_pkg.nets.Net", "freeze: []"))
    (tmp_path / "other.py").write_text("")
    (tmp_path / "there.zip").write_text("")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "__init__.py").write_text("")
    (tmp_path / "linked" / "secret.yaml").symlink_to("/etc/passwd")
    assert main(["recipe", "bundle", *words]) == 2
    assert says in capsys.readouterr().err


# --- the word ---


def test_without_its_word_nothing_is_imported_or_extracted(made, tiny):
    word = bundle.load(made).word
    base = [w for w in tiny() if not w.startswith("model=")]
    for trust in ([], ["trust=their_pkg"], ["trust=[their_pkg,other]"], [f"trust=their_pkg@{'0' * 64}"]):
        says = problem(*base, "recipe=mine.zip", *trust)
        assert says.startswith("recipe=mine.zip brings code, the package their_pkg")
        assert says.endswith(f"If you trust it, say trust=[{word}]")
        assert not trust or "does not name exactly its files" in says
    assert not was_imported()
    assert not (made.parent / "cache").exists()
    assert main(["recipe", "check", "mine.zip"]) == 2
    assert main(["recipe", "check", "mine.zip", f"trust=[{word}]"]) == 0


def test_with_its_word_it_may_name_its_classes_and_its_options(made, tiny):
    word = bundle.load(made).word
    job = prepare([w for w in tiny() if not w.startswith("model=")] + ["recipe=mine.zip", f"trust={word}"])
    assert type(job.run.parts["clip"]).__module__ == "their_pkg.clips"
    assert job.run.parts["clip"].max_norm == 0.5
    folder = bundle.folder(word)
    assert sys.path[-1] == str(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["their_pkg"]
    assert not {str(Path.cwd()), ""} & {*sys.path}


def test_what_a_bundle_may_not_name(tmp_path, tiny):
    """Classes of other packages, paths, and whatever else no recipe may."""
    for text, says in (
        (RECIPE.replace("their_pkg.nets.Net", "os.system"), "a recipe cannot set 'model.target'"),
        (RECIPE + "output_dir: /tmp\n", "a recipe cannot set 'output_dir'"),
        (RECIPE + "trust: [their_pkg]\n", "a recipe cannot set 'trust'"),
        (RECIPE + "checkpointing:\n  _target_: their_pkg.nets.Net\n", "_target_"),
    ):
        write_package(tmp_path / str(len(text)))
        made, _ = bundle.make(text.encode(), tmp_path / str(len(text)) / "their_pkg")
        (tmp_path / "x.zip").write_bytes(made.archive())
        base = [w for w in tiny() if not w.startswith("model=")]
        assert says in problem(*base, "recipe=x.zip", f"trust=[{made.word},os]")


def test_a_changed_file_has_another_word(made, tiny):
    old = bundle.load(made)
    new = Bundle(old.package, {**old.files, "their_pkg/nets.py": NETS.encode() + b"#"})
    made.write_bytes(new.archive())
    assert f"trust=[{new.word}]" in problem("recipe=mine.zip", f"trust={old.word}")


def test_code_that_was_changed_after_it_was_extracted_is_written_anew(made):
    found = bundle.load(made)
    folder = bundle.extract(found)
    (folder / "their_pkg" / "nets.py").write_text("raise SystemExit('other code')")
    (folder / "their_pkg" / "more.py").write_text("")
    (folder / "their_pkg" / "__pycache__").mkdir()
    (folder / "their_pkg" / "__pycache__" / "nets.cpython-311.pyc").write_bytes(b"other code")
    assert bundle.extract(found) == folder
    assert (folder / "their_pkg" / "nets.py").read_text() == NETS
    assert sorted(p.name for p in (folder / "their_pkg").iterdir()) == ["__init__.py", "clips.py", "conf", "nets.py"]


def test_it_hides_nothing_and_nothing_hides_it(made, tmp_path, tiny):
    """A package of the same name that is importable is a reason to refuse."""
    word = bundle.load(made).word
    write_package(tmp_path / "site")
    sys.path.append(str(tmp_path / "site"))
    assert "is also at" in problem(*tiny(), "recipe=mine.zip", f"trust={word}")
    installed = Bundle("torch", {"recipe.yaml": b"", "torch/__init__.py": b""})
    (tmp_path / "x.zip").write_bytes(installed.archive())
    assert "the package torch is also at" in problem(*tiny(), "recipe=x.zip", f"trust={installed.word}")


@pytest.mark.parametrize("word", ["their_pkg@123", "@" + "0" * 64, "their_pkg@" + "0" * 64, "../x@" + "0" * 64])
def test_a_word_that_names_no_bundle(word, tiny):
    assert f"trust=[{word}]" in problem(*tiny(), f"trust=['{word}']")


def test_a_bundle_from_an_address(made, tiny, capsys):
    found = bundle.load(made)
    with site() as host:
        address = f"{host.has('/mine.zip', made.read_bytes())}#sha256={cache.sha256_of(made.read_bytes())}"
        assert main(["recipe", "inspect", address]) == 0
        assert f"'recipe={address}' trust={found.word}" in capsys.readouterr().out
        base = [w for w in tiny() if not w.startswith("model=")]
        assert "brings code" in problem(*base, f"recipe={address}")
        assert prepare([*base, f"recipe={address}", f"trust={found.word}"]).composed.recipe.name == "mine"
        assert len(host.asked) == 1


# --- hostile archives ---

GOOD = Bundle("p", {"recipe.yaml": b"", "p.py": b""})
MANIFEST = json.dumps({"format": 1, "package": "p", "hash": GOOD.hash, "files": {}})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no zip archive"),
        (b"PK\x05\x06" + bytes(18), "has no manifest.json"),
        (GOOD.archive()[:-30], "is no zip archive"),
        (archive({"../evil.py": ""}), "'../evil.py' is no plain file name"),
        (archive({"/etc/evil.py": ""}), "is no plain file name"),
        (archive({"p\\..\\evil.py": ""}), "no plain file name"),
        (archive({"p/.git/config.json": ""}), "is no plain file name"),
        (archive({"p/../../evil.py": ""}), "is no plain file name"),
        (archive({"p/": ""}), "is no plain file name"),
        (archive({"p/x.py": "/etc/passwd"}, external_attr=0o120777 << 16), "is a link or no regular file"),
        (archive({"p/x.so": ""}), "is of a kind that a bundle does not have"),
        (archive({"p/x.pyc": ""}), "is of a kind that a bundle does not have"),
        (archive({"p/X.py": "", "p/x.py": ""}), "is there twice"),
        (archive({f"p/x{n}.py": "" for n in range(501)}), "has 501 files, and at most 500"),
        (archive({"p/x.py": "#" * (2**20 + 1)}), "p/x.py is too large"),
        (archive({f"p/x{n}.py": "#" * 2**20 for n in range(9)}), "is too large"),
        (archive({"manifest.json": "[" * 100_000}), "has no manifest.json that can be read"),
        (archive({"manifest.json": "[]"}), "has no manifest.json that can be read"),
        (archive({"manifest.json": MANIFEST, "recipe.yaml": "", "p.py": ""}), "is not what its manifest.json says"),
        (archive({"manifest.json": MANIFEST.replace("1", "2", 1)}), "has format 2"),
        (Bundle("p", {"recipe.yaml": b"", "p.py": b"", "q.py": b""}).archive(), "q.py is no file of the package p"),
        (Bundle("p", {"recipe.yaml": b""}).archive(), "it needs either p/__init__.py or p.py"),
        (Bundle("p", {"p.py": b""}).archive(), "it has no recipe.yaml"),
        (Bundle("p", {"recipe.yaml": b"", "p/__init__.py": b"", "p/a.py": b"", "p/a.py/b.py": b""}).archive(), "is below a file"),
        (Bundle("os", {"recipe.yaml": b"", "os.py": b""}).archive(), "the name os, which is taken"),
        (Bundle("drivetrain", {"recipe.yaml": b"", "drivetrain.py": b""}).archive(), "the name drivetrain, which is taken"),
        (Bundle("p", {"recipe.yaml": b"#" * (2**16 + 1), "p.py": b""}).archive(), "its recipe.yaml is larger than 64 KiB"),
    ],
)
def test_a_hostile_archive_is_refused_by_one_message(tmp_path, content, says):
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(UserError) as caught:
        places.read("x.zip")
    assert says in caught.value.problems[0]
    assert caught.value.problems[0].startswith("bundle x.zip")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.zip"]


def test_a_damaged_archive_is_refused_or_the_same(tmp_path):
    random, content, problems = Random(0), GOOD.archive(), []
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(len(content))] = random.randrange(256)
        (tmp_path / "x.zip").write_bytes(damaged)
        try:
            assert bundle.load(tmp_path / "x.zip").word == GOOD.word
        except UserError as error:
            problems += error.problems
    assert len(problems) > 50
    assert all(problem.startswith("bundle ") and problem.isprintable() for problem in problems)


def test_an_archive_of_many_bytes_is_not_read(tmp_path):
    with (tmp_path / "x.zip").open("wb") as file:
        file.truncate(bundle.MAX_ARCHIVE + 1)
    with pytest.raises(UserError, match="is larger than 4 MiB"):
        places.read("x.zip")


# --- runs ---


@pytest.fixture
def run_dir(made: Path, tiny, tmp_path: Path) -> Path:
    """The files of a run that this user has recorded; its bundle is in no cache any more."""
    folder = tmp_path / "run"
    folder.mkdir()
    word = bundle.load(made).word
    base = [w for w in tiny("runtime.device=cpu") if not w.startswith("model=")]
    prepare([*base, "recipe=mine.zip", f"trust={word}"]).write_files(folder)
    made.unlink()
    for path in (tmp_path / "cache").rglob("*.zip"):
        path.unlink()
    return folder


def test_a_run_records_its_bundle_and_goes_on_by_it(run_dir):
    recorded = json.loads((run_dir / "environment.json").read_text())
    word = bundle.load(run_dir / "their_pkg.zip").word
    assert recorded["recipe"] == {"given": "mine.zip", "sha256": cache.sha256_of(RECIPE.encode()), "trust": word}
    assert type(prepare([f"resume={run_dir}"]).run.parts["clip"]).__name__ == "Mine"


def test_the_recipe_of_a_run_makes_its_bundle_again(run_dir, tmp_path, capsys, monkeypatch):
    assert main(["recipe", "export", str(run_dir), "again.yaml"]) == 0
    assert "`drivetrain recipe bundle again.yaml --with their_pkg`" in capsys.readouterr().out
    assert main(["recipe", "bundle", "again.yaml", "--with", str(tmp_path / "sender" / "their_pkg")]) == 0
    word = bundle.load(Path("again.zip")).word
    forget_package(monkeypatch)
    assert main(["recipe", "check", "again.zip", f"trust=[{word}]"]) == 0
    job = prepare(["recipe=again.zip", f"trust={word}"])
    assert job.run.model.target == "their_pkg.nets.Net"
    assert job.run.clip.max_norm == 0.5


def test_a_strangers_run_with_a_bundle_asks_for_the_word(run_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    word = bundle.load(run_dir / "their_pkg.zip").word
    assert problem(f"resume={run_dir}", "runtime.device=cpu").endswith(f"If you trust it, say trust=[{word}]")
    words = [f"resume={run_dir}", "runtime.device=cpu", f"trust={word}"]
    assert "model.target=" in problem(*words)
    assert prepare([*words, "model.target=their_pkg.nets.Net"]).run_dir == run_dir


def test_a_run_with_another_bundle_in_it_is_not_taken(run_dir):
    found = bundle.load(run_dir / "their_pkg.zip")
    other = Bundle("their_pkg", {**found.files, "their_pkg/nets.py": b"raise SystemExit"})
    (run_dir / "their_pkg.zip").write_bytes(other.archive())
    assert "there is no such bundle in the cache" in problem(f"resume={run_dir}")


def test_every_job_of_a_sweep_has_it(made, tiny):
    base = [w for w in tiny() if not w.startswith("model=")]
    jobs = grid.prepare([*base, "recipe=mine.zip", f"trust={bundle.load(made).word}", "clip.max_norm=1,2"])
    assert [job.problems for job in jobs] == [[], []]


def test_the_manifest_of_trust_words():
    assert bundles.attach(["trust=[their_pkg]"]) is None
    assert bundle.WORD.match("my_pkg@" + "a" * 64)
    assert not bundle.WORD.match("my-pkg@" + "a" * 64)


@pytest.mark.slow
@pytest.mark.own_process
def test_a_bundle_is_trained_by_two_ranks_resumed_evaluated_and_predicted_with(made, tmp_path):
    word = bundle.load(made).word
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ["recipe=mine.zip", "data=digits", "updates=20", "runtime.device=cpu"]
    refused = train(*words, cwd=tmp_path, env=env)
    assert refused.code == 2, refused
    assert f"trust=[{word}]" in refused.err
    done = train(*words, f"trust={word}", "parallel=ddp", "parallel.nproc=2", cwd=tmp_path, env=env)
    assert done.code == 0, done
    found = only_run(tmp_path / "outputs")
    more = train(f"resume={found}", "updates=30", cwd=tmp_path, env=env)
    assert more.code == 0, more
    assert json.loads((found / "result.json").read_text())["updates"] == 30
    judged = run("evaluate", str(found), f"trust={word}", cwd=tmp_path, env=env)
    assert judged.code == 0, judged
    predicted = run("predict", str(found), "--data", "test", "--out", "out.csv", f"trust={word}", cwd=tmp_path, env=env)
    assert predicted.code == 0, predicted
    stranger = {"XDG_CACHE_HOME": str(tmp_path / "theirs"), "XDG_STATE_HOME": str(tmp_path / "them")}
    asks = run("predict", str(found), "--data", "test", "--out", "out2.csv", cwd=tmp_path, env=stranger)
    assert asks.code == 2, asks
    assert word in asks.err
    assert not (tmp_path / "theirs").exists()
    words = [f"trust=[{word}]", "model.target=their_pkg.nets.Net"]
    told = run("predict", str(found), "--data", "test", "--out", "out2.csv", *words, cwd=tmp_path, env=stranger)
    assert told.code == 0, told
    assert (tmp_path / "out.csv").read_text() == (tmp_path / "out2.csv").read_text()
