"""A process that forks ranks, jobs or arms never starts CUDA: what is forked from it afterwards could not use the devices."""

import json
import os
import subprocess
import sys

import pytest

from tests.support import command


def take(tmp_path, *ways: str) -> dict[str, dict]:
    """Take these ways of forking, on a machine that seems to have two CUDA devices (support/forks.py)."""
    path = f"{command.PACKAGE}{os.pathsep}{command.ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forks", *ways],
        cwd=tmp_path, env=command.environment() | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_safe(found: dict[str, dict], ways: dict[str, int]) -> None:
    assert found.keys() == ways.keys()
    for name, forks in ways.items():
        assert found[name]["started"] == [], name
        assert not found[name]["initialized"], name
        assert len(found[name]["forks"]) >= forks, (name, found[name])
        assert set(found[name]["forks"]) == {"usable"}, name


def test_ranks_jobs_arms_and_probes_can_use_the_devices(tmp_path):
    ways = {"train": 2, "sweep": 2, "compare": 2, "doctor": 1, "certify": 1, "bisect": 2}
    assert_safe(take(tmp_path, *ways), ways)


@pytest.mark.slow
def test_so_can_the_arms_of_a_search_and_of_an_ablation(tmp_path):
    ways = {"tune": 3, "ablate": 3}
    assert_safe(take(tmp_path, *ways), ways)
