"""The wheel has the package with its config and recipes, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import drivetrain

ROOT = Path(drivetrain.__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the checkout."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("drivetrain is installed, not run from a checkout")
    folder = tmp_path_factory.mktemp("wheel")
    leave = shutil.ignore_patterns(".*", "outputs", "build", "dist", "*.egg-info", "__pycache__")
    copy = shutil.copytree(ROOT, folder / "checkout", ignore=leave)
    alone = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", str(copy), *alone, "-w", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_every_module_option_and_recipe_is_in_it_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    yamls = {f"drivetrain/{p.relative_to(ROOT).as_posix()}" for d in ("conf", "recipes") for p in (ROOT / d).rglob("*.yaml")}
    assert {"drivetrain/conf/config.yaml", "drivetrain/recipes/fast.yaml"} < yamls
    assert len(yamls) > 45
    modules = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "drivetrain").rglob("*.py")}
    assert names == yamls | modules | {"drivetrain/py.typed", "drivetrain/conf/measured.json"}


def test_it_brings_its_command_and_licence(wheel):
    (about,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert "drivetrain = drivetrain.cli.main:main" in wheel.read(f"{about}/entry_points.txt").decode()
    assert any(name.endswith("LICENSE") for name in wheel.namelist())
    assert f"Version: {drivetrain.__version__}" in wheel.read(f"{about}/METADATA").decode()


def test_it_finds_its_config_from_anywhere(wheel, tmp_path):
    """Unpacked, away from the checkout: options, recipes and a composed config are there."""
    wheel.extractall(tmp_path / "site")
    code = """
import drivetrain
from drivetrain.core.machine import paths
from drivetrain.launch.job import prepare
from drivetrain.recipe import lookup
print(drivetrain.__file__)
print(paths.conf_dir(), lookup.names(), prepare(["recipe=fast"]).run.choices["precision"])
"""
    env = {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    where, said = done.stdout.splitlines()
    assert where.startswith(str(tmp_path))
    assert said.startswith(str(tmp_path / "site" / "drivetrain" / "conf"))
    assert all(f"'{file.stem}'" in said for file in (ROOT / "recipes").glob("*.yaml"))
    assert said.endswith("bf16")
