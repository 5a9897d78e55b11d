"""The limits of the control groups that this process is in, wherever the kernel or a container put them."""

import pytest

from drivetrain.core import cgroup, cpus, limits


@pytest.mark.parametrize(
    ("own", "files", "memory", "cores"),
    [
        ("0::/\n", {"memory.max": "1000\n", "cpu.max": "50000 100000\n"}, [1000], [0.5]),  # a container with groups of its own
        ("0::/a/b\n", {"a/b/memory.max": "900\n", "a/memory.max": "500\n", "a/cpu.max": "max 100000\n"}, [900, 500], []),
        ("0::/a\n", {"a/memory.max": "max\n"}, [], []),
        ("0::/of/the/host\n", {"memory.max": "700\n"}, [700], []),  # the path is the host's, the files are the container's
        (
            "4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "800\n", "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            [800, 9223372036854771712], [1.5],
        ),
        ("12:cpuset:/a\n", {"cpuset/a/memory.max": "1\n"}, [], []),
        (None, {}, [], []),  # no Linux
    ],
)  # fmt: skip
def test_the_limits_of_every_group_count(own, files, memory, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    assert (cgroup.memory_bytes(), cgroup.cores()) == (memory, cores)
    if memory:
        assert limits.memory_bytes() == min(memory)
    assert cpus.usable_cores(1) >= 1
    if cores:
        assert cpus.usable_cores(1) == max(1, int(min(cores)))
