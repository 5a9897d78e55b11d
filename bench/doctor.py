"""Does the doctor name what was planted, and does what it prescribes hold? Each case many times over, as a user runs it.

    python -m bench.doctor --repeats 20 --proofs 5

A repeat only profiles; a proof also measures the overrides, and verifies its claim by the command that the doctor prints.
The campaign writes its results after each case, and resumes where it was stopped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import bottlenecks
from bench.bottlenecks import CASES, Case
from bench.harness import ROOT, before, machine, parse, table, write


def main() -> None:
    """Run the campaign, or the rest of it, and write bench/results/doctor-cpu.json."""
    given = parse(__doc__, "doctor-cpu.json", repeats=20, proofs=5, profile_s=1.0, only=CASES)
    content: dict[str, Any] = {"machine": machine(), **before(given.out)}
    content["profile_s"] = given.profile_s
    found = content.setdefault("cases", {})
    for n in range(
        max(given.repeats, given.proofs)
    ):  # all cases in each repeat, so that a slow minute of the machine affects all
        for name in given.only:
            results = found.setdefault(name, {"profiles": [], "proofs": []})
            if len(results["profiles"]) <= n < given.repeats:
                results["profiles"].append(_profile(CASES[name], given.profile_s))
                _print_last(name, results["profiles"])
            if CASES[name].fixed_by_overrides and len(results["proofs"]) <= n < given.proofs:
                results["proofs"].append(_proof(CASES[name], given.profile_s))
                _print_last(name, results["proofs"])
            given.out.write_text(json.dumps(content, indent=2))
    write(given.out, content)
    header = ("planted", "named", "of", "gain recommended", "holds", "of")
    table("the doctor, by fresh processes", header, [_row(name, found[name]) for name in given.only])


def _profile(case: Case, profile_s: float) -> dict[str, Any]:
    """One profile: the verdict, and whether it is the planted one with its line."""
    with tempfile.TemporaryDirectory() as folder:
        output, seconds = _drivetrain(
            Path(folder), "doctor", *bottlenecks.overrides_of(case), "prove=false", f"profile_s={profile_s}"
        )
    verdict, evidence = output.partition("verdict: ")[2].splitlines()[:2]
    right = case.verdict in verdict and (case.mark is None or bottlenecks.place(case.mark) in evidence)
    return {"named": right, "verdict": verdict, "evidence": evidence.strip().replace(f"{ROOT}/", ""), "seconds": seconds}


def _proof(case: Case, profile_s: float) -> dict[str, Any]:
    """The override that it recommends, its gain, and the result of its verification, in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        output, seconds = _drivetrain(Path(folder), "doctor", *bottlenecks.overrides_of(case), f"profile_s={profile_s}")
        gain = re.search(r"\n([\d.]+) × the samples a second \(([\d.]+) to ([\d.]+)\):\n  (.*)\n", output)
        verify = re.search(r"\n  drivetrain (recipe verify .*)", output)
        if gain is None or verify is None:
            return {"gain": None, "holds": False, "conclusion": output.splitlines()[-1], "seconds": seconds}
        overrides = [w for w in shlex.split(verify[1]) if w not in ("-cd", str(Path(folder) / "mine"))]
        again, _ = _drivetrain(Path(folder), *overrides, fine=(0, 1))
    ours = set(bottlenecks.overrides_of(case))
    more = [w for w in shlex.split(gain[4])[2:] if "=" in w and w not in ours]
    judged = next(line for line in again.splitlines() if line.startswith(("holds", "does not hold")))
    return {
        "gain": [float(gain[n]) for n in (1, 2, 3)], "overrides": more, "holds": "not faster" not in judged, "conclusion": judged,
        "seconds": seconds,
    }  # fmt: skip


def _drivetrain(folder: Path, *overrides: str, fine: tuple[int, ...] = (0,)) -> tuple[str, float]:
    """The output of a drivetrain command, and its seconds."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    verb = 2 if overrides[0] == "recipe" else 1
    command = [sys.executable, "-m", "drivetrain", *overrides[:verb], *bottlenecks.config_dir(folder), *overrides[verb:]]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in fine:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout, time.perf_counter() - began


def _print_last(name: str, done: list[dict[str, Any]]) -> None:
    last = {k: v for k, v in done[-1].items() if k != "evidence"}
    print(f"{len(done):3d} {name:10s} {last}", flush=True)


def _row(name: str, results: dict[str, Any]) -> tuple[str, ...]:
    profiles, proofs = results["profiles"], results["proofs"]
    gains = ", ".join(f"{p['gain'][0]:.2f}" for p in proofs if p["gain"])
    held = (gains, str(sum(p["holds"] for p in proofs)), str(len(proofs))) if proofs else ("–", "–", "–")
    return (name, str(sum(p["named"] for p in profiles)), str(len(profiles)), *held)


if __name__ == "__main__":
    main()
