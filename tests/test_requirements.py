"""The packages that `make train` and `make test` install are locked with hashes, as pyproject.toml and constraints.txt say."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ("run", "test", "tools", "wheel", "docs", "bench", "mutants")  # `oldest` has another torch


def locked(name):
    """Package → its version and its number of hashes, of a lock file."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    matches = [re.match(r"([\w.\-]+)(?:\[[\w,\-]+\])?==([\w.+!]+)", entry) for entry in entries]
    return {normal(m[1]): (m[2], entry.count("--hash=sha256:")) for m, entry in zip(matches, entries, strict=True)}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(requirement):
    return normal(re.match(r"[\w.\-]+", requirement)[0])


@pytest.mark.parametrize("name", [*LOCKS, "oldest"])
def test_every_package_has_hashes(name):
    assert all(hashes for _, hashes in locked(name).values())


def test_what_pyproject_asks_for_is_locked_at_the_versions_of_the_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_test = [part for entry in extras["test"] for part in ([entry] if "[" not in entry else [])]
    chosen = re.search(r"drivetrain\[([\w,]+)\]", extras["test"][0])[1].split(",")
    run, test = locked("run"), locked("test")
    assert {wanted(r) for r in [*project["dependencies"], *extras["timm"], *extras["metrics"]]} <= set(run)
    assert {wanted(r) for r in [*project["dependencies"], *of_test, *(r for extra in chosen for r in extras[extra])]} <= set(test)
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if (match := re.match(r"([\w.\-]+)==([\w.+]+)", line)) and normal(match[1]) in test:
            assert test[normal(match[1])][0] == match[2], f"{line}: run `make lock`"


def test_the_locks_agree_with_each_other():
    versions = {}
    for name in LOCKS:
        for package, (version, _) in locked(name).items():
            assert versions.setdefault(package, version) == version, f"{package}: run `make lock`"


def test_make_lock_resolves_what_the_files_are_locked_from():
    """`make train` sets up what most people train: with timm and the tasks' metrics, which are extras."""
    makefile = (ROOT / "Makefile").read_text()
    assert "pyproject.toml --extra timm --extra metrics -c requirements/test.txt -o requirements/run.txt" in makefile
    assert "pyproject.toml --extra test -o requirements/test.txt" in makefile
    assert {"timm", "torchvision"}.isdisjoint(
        wanted(r) for r in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    )


def test_everything_that_make_the_workflow_and_the_image_install_is_locked():
    texts = [(ROOT / name).read_text() for name in ("Makefile", "Dockerfile", ".github/workflows/test.yml")]
    installs = [
        line for text in texts for line in re.findall(r"^.*(?:pip|PIP\)|UV\)) install.*$|^\t\$\((?:PIP|UV)\).*$", text, re.M)
    ]
    assert len(installs) > 10
    for line in (line for line in installs if ":=" not in line):
        assert "--no-deps" in line or "LOCKED" in line or "--require-hashes" in line, line


def test_actions_are_pinned_by_commit_and_images_by_digest():
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    used = re.findall(r"uses: (\S+)", workflow)
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used), used
    images = re.findall(r"^(?:FROM|ARG BASE=)\s*(?!\$)(\S+)", (ROOT / "Dockerfile").read_text(), re.M)
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in images), images


def test_the_oldest_torch_that_is_tested_is_the_lower_bound():
    (torch,) = [
        r for r in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] if wanted(r) == "torch"
    ]
    assert f"torch>={locked('oldest')['torch'][0].removesuffix('.0')}," in torch
