"""A process that forks ranks, jobs, variants or probes: what is forked can use the devices, and is not left behind.

A process that has started CUDA could fork none that uses it.
"""

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


def test_ranks_jobs_variants_and_probes_can_use_the_devices(tmp_path):
    ways = {
        "train": 2,
        "sweep": 2,
        "compare": 1,
        "doctor": 1,
        "certify": 1,
        "bisect": 1,
    }  # a first variant that ends ends the others
    assert_safe(take(tmp_path, *ways), ways)


@pytest.mark.slow
def test_so_can_the_variants_of_a_search_and_of_an_ablation(tmp_path):
    ways = {"tune": 1, "ablate": 1}
    assert_safe(take(tmp_path, *ways), ways)


def assert_nothing_is_left(found: dict[str, dict]) -> None:
    for name, left in found.items():
        interrupted = "returned" if name in ("train", "train_at_start", "sweep") else "interrupted"  # these have a result
        assert left == {"ended": interrupted, "processes": [], "files": []}, name


def test_a_signal_leaves_no_forked_process_and_no_folder(tmp_path):
    assert_nothing_is_left(take(tmp_path, "stop", "train", "train_at_start", "sweep", "compare", "doctor", "certify"))


@pytest.mark.slow
def test_so_it_is_on_the_longer_ways(tmp_path):
    assert_nothing_is_left(take(tmp_path, "stop", "ablate", "tune", "bisect"))
