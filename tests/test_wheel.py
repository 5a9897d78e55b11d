"""What is installed: the package with its config and recipes, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import drivetrain

ROOT = Path(drivetrain.__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the checkout."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("drivetrain is installed, not run from a checkout")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    leave = shutil.ignore_patterns(".*", "outputs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=leave)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(copy),
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
    ]
    done = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_config_and_recipes_travel_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    yamls = {f"drivetrain/{p.relative_to(ROOT).as_posix()}" for d in ("conf", "recipes") for p in (ROOT / d).rglob("*.yaml")}
    assert "drivetrain/conf/config.yaml" in yamls
    assert "drivetrain/recipes/fast.yaml" in yamls
    assert len(yamls) > 45
    assert yamls - names == set()


def test_every_module_is_in_it_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "drivetrain").rglob("*.py")}
    assert modules - names == set()
    rest = {n for n in names if not n.endswith(".yaml") and ".dist-info/" not in n} - modules
    assert rest == {"drivetrain/py.typed", "drivetrain/conf/measured.json"}
    assert not [n for n in names if "test" in n.split("/") or "tests" in n.split("/") or n.startswith(("src", "bench"))]


def test_it_brings_its_command_and_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
    assert "drivetrain = drivetrain.cli.main:main" in archive.read(entry).decode()
    assert any(n.endswith("LICENSE") for n in archive.namelist())
    (metadata,) = [n for n in archive.namelist() if n.endswith("METADATA")]
    assert f"Version: {drivetrain.__version__}" in archive.read(metadata).decode()


def test_it_finds_its_config_from_anywhere(wheel, tmp_path):
    """Unpacked, away from the checkout: options, recipes and a composed config are there."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = """
import drivetrain
from drivetrain.core import paths
from drivetrain.launch.job import prepare
from drivetrain.recipe import places
print(drivetrain.__file__)
print(paths.conf_dir(), places.names(), prepare(["recipe=fast"]).run.choices["precision"])
"""
    env = {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    where, said = done.stdout.splitlines()
    assert where.startswith(str(tmp_path))
    assert said.startswith(str(tmp_path / "site" / "drivetrain" / "conf"))
    assert all(f"'{file.stem}'" in said for file in (ROOT / "recipes").glob("*.yaml"))
    assert said.endswith("bf16")
