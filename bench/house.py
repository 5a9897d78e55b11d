"""The size and the order of the code: `python -m bench.house [--tree DIR]`.

Statements by package, files above 500 lines, public classes that share a name, the names that some packages import from others,
and the files that an override and a sample pass: those in which a function runs while `optimizer.lr=0.02` is composed and
checked, and while the loop makes an update of a run with `loader=sync`.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

LINES = 500
PAIRS = (("measure", "ui"), ("measure", "recipe"), ("measure", "engine"))
WALKS = {"an override": ("launch/job.py", "prepare"), "a sample": ("engine/trainer.py", "_train")}
WALK = """
import sys
file, function, inside, passed = sys.argv[1], sys.argv[2], 0, {}
def look(frame, event, _):
    global inside
    place = frame.f_code.co_filename.partition("src/drivetrain/")[2]
    here = place == file and frame.f_code.co_name == function
    inside += here * ((event == "call") - (event == "return"))
    if place and (inside or here) and frame.f_code.co_flags & 1:  # a function, no body of a module or class
        passed[place] = None
import drivetrain
from drivetrain.launch.job import prepare
words = ["model=mlp", "loader=sync", "optimizer.lr=0.02", "updates=1", "saving=none", "runtime.device=cpu"]
sys.setprofile(look)
prepare(words) if function == "prepare" else drivetrain.train([*words, "logger=[]"])
sys.setprofile(None)
print("\\n".join(passed), file=sys.stderr)
"""


def package_of(path: Path) -> str:
    """The package of a file, by its place in the source folder."""
    return path.parts[0].removesuffix(".py")


def shared_names(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Public classes of several packages: name → packages. What core says of a group's class bears its name."""
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and path.name != "groups.py" and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(package_of(path))
    return {name: packages for name, packages in found.items() if len(packages) > 1}


def imported(trees: dict[Path, ast.Module], package: str, other: str) -> set[str]:
    """The names that a package imports from another one."""
    froms = [
        node
        for path, tree in trees.items() if package_of(path) == package
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    ]  # fmt: skip
    return {f"{n.module}.{a.name}" for n in froms for a in n.names if f"{n.module}.".startswith(f"drivetrain.{other}.")}


def walk(tree: Path, file: str, function: str) -> list[str]:
    """The files in which a function runs while `function` of `file` does, in the order in which they are reached."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-c", WALK, file, function]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if line.endswith(".py")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent, help="another checkout")
    tree = parser.parse_args().tree.resolve()
    src = tree / "src/drivetrain"
    texts = {path.relative_to(src): path.read_text() for path in sorted(src.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    statements: Counter[str] = Counter()
    for path, module in trees.items():
        statements[package_of(path)] += sum(isinstance(node, ast.stmt) for node in ast.walk(module))
    print(f"{statements.total():,} statements:", ", ".join(f"{name} {count:,}" for name, count in statements.most_common()))
    long = {path: lines for path, text in texts.items() if (lines := len(text.splitlines())) > LINES}
    print(f"{len(long)} files above {LINES} lines:", ", ".join(f"{path} {lines}" for path, lines in long.items()))
    shared = shared_names(trees)
    print(f"{len(shared)} class names in several packages:", ", ".join(shared))
    for package, other in PAIRS:
        print(f"{package} imports {len(imported(trees, package, other))} names of {other}")
    for what, place in WALKS.items():
        passed = walk(tree, *place)
        print(f"{what} passes {len(passed)} files:", ", ".join(passed))


if __name__ == "__main__":
    main()
