"""Does the doctor name what was planted, and does what it prescribes hold? Each case many times over, as a user runs it.

    python -m bench.doctor --repeats 20 --proofs 5

A repeat looks; a proof also tries the overrides, and its claim is verified by the command that the doctor prints. The
campaign writes as it goes, and goes on where it was.
"""

from __future__ import annotations

import argparse
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
from bench.harness import RESULTS, ROOT, machine, table, write


def main() -> None:
    """Run the campaign, or what is left of it, and write bench/results/doctor-cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--proofs", type=int, default=5, help="of cases that an override mends")
    parser.add_argument("--profile-s", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS / "doctor-cpu.json")
    given = parser.parse_args()
    content: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"machine": machine()}
    content["profile_s"] = given.profile_s
    found = content.setdefault("cases", {})
    for n in range(max(given.repeats, given.proofs)):  # case by case in turn: a bad minute of the machine hits all alike
        for name in given.only:
            left = found.setdefault(name, {"looks": [], "proofs": []})
            if len(left["looks"]) <= n < given.repeats:
                left["looks"].append(_look(CASES[name], given.profile_s))
                _tell(name, left["looks"])
            if CASES[name].mended_by_words and len(left["proofs"]) <= n < given.proofs:
                left["proofs"].append(_proof(CASES[name], given.profile_s))
                _tell(name, left["proofs"])
            given.out.write_text(json.dumps(content, indent=2))
    write(given.out, content)
    header = ("planted", "named", "of", "gain prescribed", "holds", "of")
    table("the doctor, by fresh processes", header, [_row(name, found[name]) for name in given.only])


def _look(case: Case, profile_s: float) -> dict[str, Any]:
    """One look: the verdict, and whether it is the planted one's with its line."""
    with tempfile.TemporaryDirectory() as folder:
        said, seconds = _drivetrain(Path(folder), "doctor", *bottlenecks.words(case), "prove=false", f"profile_s={profile_s}")
    verdict, evidence = said.partition("verdict: ")[2].splitlines()[:2]
    right = case.verdict in verdict and (case.mark is None or bottlenecks.place(case.mark) in evidence)
    return {"named": right, "verdict": verdict, "evidence": evidence.strip().replace(f"{ROOT}/", ""), "seconds": seconds}


def _proof(case: Case, profile_s: float) -> dict[str, Any]:
    """The override that it prescribes, its gain, and what its own verification says of it, in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        said, seconds = _drivetrain(Path(folder), "doctor", *bottlenecks.words(case), f"profile_s={profile_s}")
        gain = re.search(r"\n([\d.]+) × the samples a second \(([\d.]+) to ([\d.]+)\):\n  (.*)\n", said)
        verify = re.search(r"\n  drivetrain (recipe verify .*)", said)
        if gain is None or verify is None:
            return {"gain": None, "holds": False, "said": said.splitlines()[-1], "seconds": seconds}
        words = [w for w in shlex.split(verify[1]) if w not in ("-cd", str(Path(folder) / "mine"))]
        again, _ = _drivetrain(Path(folder), *words, fine=(0, 1))
    ours = set(bottlenecks.words(case))
    more = [w for w in shlex.split(gain[4])[2:] if "=" in w and w not in ours]
    judged = next(line for line in again.splitlines() if line.startswith(("holds", "does not hold")))
    return {
        "gain": [float(gain[n]) for n in (1, 2, 3)], "words": more, "holds": "not faster" not in judged, "said": judged,
        "seconds": seconds,
    }  # fmt: skip


def _drivetrain(folder: Path, *words: str, fine: tuple[int, ...] = (0,)) -> tuple[str, float]:
    """What a drivetrain command says, and its seconds."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    verb = 2 if words[0] == "recipe" else 1
    command = [sys.executable, "-m", "drivetrain", *words[:verb], *bottlenecks.config_dir(folder), *words[verb:]]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in fine:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout, time.perf_counter() - began


def _tell(name: str, done: list[dict[str, Any]]) -> None:
    last = {k: v for k, v in done[-1].items() if k != "evidence"}
    print(f"{len(done):3d} {name:10s} {last}", flush=True)


def _row(name: str, left: dict[str, Any]) -> tuple[str, ...]:
    looks, proofs = left["looks"], left["proofs"]
    gains = ", ".join(f"{p['gain'][0]:.2f}" for p in proofs if p["gain"])
    held = (gains, str(sum(p["holds"] for p in proofs)), str(len(proofs))) if proofs else ("–", "–", "–")
    return (name, str(sum(look["named"] for look in looks)), str(len(looks)), *held)


if __name__ == "__main__":
    main()
