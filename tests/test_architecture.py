"""The house's rules: which module may know which, what the loop may not know, and what costs a start its time."""

import ast
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import drivetrain
from drivetrain.config.compose import options
from drivetrain.config.validate import shipped_targets

PACKAGE = Path(drivetrain.__file__).parent
MODULES = {p.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): p for p in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}

# Group modules are those that conf/ names; a package that mirrors its conf folder counts as one.
GROUPS = {target.split(".")[1] for target in shipped_targets()}
# Layers above the leaves and the group modules; what is not named here is a leaf and may import leaves alone.
ABOVE = [
    {"resume", "writing", "trainer", "dry"},
    {"build"},
    {"recipe", "compose", "check", "replay", "environment", "terminal"},
    {
        "job", "launch", "elastic", "export", "sweep", "trial", "catalogue", "recipe_verbs", "show", "pack", "completion", "cli",
        "__main__", "__init__",
    },
]  # fmt: skip
LEAVES = {"measure.result", "measure.statistics"}  # of a package that is above
ABOVE[-1].add("measure")


def layer(module: str) -> int:
    """0 for leaves, 1 for group modules, then ABOVE."""
    top = module.split(".")[0]
    if module in LEAVES:
        return 0
    if top in GROUPS:
        return 1
    return next((n for n, names in enumerate(ABOVE, 2) if top in names), 0)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """What a file imports when it runs; imports for the type checker alone are left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(path))
    return found


def ours(path: Path) -> set[str]:
    """The modules of the package that a file imports, such as "plan" or "models.mlp"."""
    names = {name.removeprefix("drivetrain.") for name in imports(path) if name.startswith("drivetrain.")}
    return {n if n in MODULES else n.rpartition(".")[0] for n in names} - {""}


# --- who knows whom ---


def test_the_layers_name_modules_that_there_are():
    assert len(GROUPS) >= 18
    assert {n.split(".")[0] for n in MODULES} >= GROUPS | {"resume", "trainer", "build", "launch", "cli"}
    assert ours(MODULES["trainer"]) >= {"resume", "plan", "errors"}  # the reader of imports reads them
    assert "surgery" in ours(MODULES["build"])


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_one_way(module):
    """Leaves ← group modules, never each other ← resume, trainer ← build ← the config's side ← launch, cli."""
    mine = layer(module)
    for other in ours(MODULES[module]):
        if other.split(".")[0] == module.split(".")[0]:
            continue  # within one package
        theirs = layer(other)
        peers_may = mine != 1  # group modules do not know each other
        assert theirs < mine or (theirs == mine and peers_may), f"{module} imports {other}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_imports_the_launcher_or_the_checkout(module):
    assert not {name for name in imports(MODULES[module]) if name.split(".")[0] in ("src", "tests", "bench")}


@pytest.mark.parametrize("module", [*sorted(GROUPS), "trainer", "resume", "build", "plan", "loader"])
def test_no_config_library_below_the_config_side(module):
    """The config is resolved once: what runs sees plain values, never OmegaConf's."""
    files = [p for name, p in MODULES.items() if name.split(".")[0] == module]
    assert files
    for path in files:
        assert not {n for n in imports(path) if n.split(".")[0] in ("omegaconf", "hydra")}
        assert "OmegaConf" not in path.read_text()


def test_knobs_are_plain_values_when_they_reach_an_option(make):
    trainer = make("model.hidden=[8,8]", "batch=accumulate", "clip=norm", "precision=amp", "ema=ema")
    parts = [trainer.batch, trainer.precision, trainer.scheduler, trainer.ema, trainer.loss, trainer.parallel, trainer.saving]
    values = [value for part in parts for value in vars(part).values()]
    assert len(values) > 15
    assert not [v for v in values if type(v).__module__.startswith("omegaconf")]


# --- the size of things ---


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_grows_past_what_one_reads_at_a_sitting(module):
    assert len(MODULES[module].read_text().splitlines()) <= 330


def test_the_loop_stays_under_250_lines():
    assert len(MODULES["trainer"].read_text().splitlines()) < 250


# --- what the loop may not know ---

# Options whose names are plain words of the loop, and what they mean there.
WORDS = {
    "best": "the best metrics so far", "last": "an update's last micro-batch", "sync": "the context of a micro-batch",
    "step": "of optimizer, scheduler and clock", "value": "a metric's", "device": "where tensors are",
    "split": "Tensor.split", "none": "None", "default": "a field's", "ema": "the seam's own name",
    "tensor": "torch.Tensor",
}  # fmt: skip


def words_of_code(path: Path) -> set[str]:
    """Lower-case words of a file's names and of its strings that are no docstrings."""
    tree = parsed(path)
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    }
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    with path.open("rb") as file:
        names = [t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.NAME]
    found = " ".join(names + [t for t in texts if t not in docstrings])
    return {word.lower() for word in re.findall(r"[A-Za-z0-9]+", found.replace("_", " "))} | {n.lower() for n in names}


def test_the_loop_names_no_technique():
    """An option whose name is a plain word of the loop goes into WORDS, with what it means there."""
    techniques = {name for names in options().values() for name in names} - set(WORDS)
    assert len(techniques) > 30
    words = words_of_code(MODULES["trainer"])
    assert {"micro", "parallel", "precision"} <= words
    assert words & techniques == set()


def test_the_loop_asks_no_seam_what_it_is():
    for node in ast.walk(parsed(MODULES["trainer"])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            raise AssertionError(f"trainer.py:{node.lineno}: isinstance")


READS = {"item", "cpu", "numpy", "tolist", "synchronize", "nonzero"}


def reads(function: ast.AST) -> list[str]:
    """What in a function brings a number from the device to the host."""
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    found = [n.func.attr for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr in READS]
    return found + [n.func.id for n in calls if isinstance(n.func, ast.Name) and n.func.id in ("float", "bool", "int")]


def test_the_step_reads_nothing_back():
    functions = {n.name: n for n in ast.walk(parsed(MODULES["trainer"])) if isinstance(n, ast.FunctionDef)}
    assert reads(functions["_log"])  # the reader of reads reads them
    assert reads(functions["_run"]) == reads(functions["_skip"]) == []
    for module in ("optimizer", "scheduler", "clip", "ema"):
        for path in (p for name, p in MODULES.items() if name.split(".")[0] == module):
            assert not {r for r in reads(parsed(path)) if r in READS}, path


# --- what a start costs ---


def test_a_config_is_answered_without_torch():
    modules = sorted({target.removeprefix("drivetrain.").rpartition(".")[0] for target in shipped_targets()})
    code = f"""
import importlib, sys
loaded = []
for name in {modules!r}:
    try:
        importlib.import_module("drivetrain." + name)
        loaded.append(name)
    finally:
        assert "torch" not in sys.modules, name + " imports torch"
from drivetrain import launch
from drivetrain.core.errors import UserError
for words in ([], ["precision=amp", "parallel=ddp", "optimizer=sgd", "surgery=[channels_last]", "logger=[files,tensorboard]"]):
    launch.prepare(words)
    assert "torch" not in sys.modules, words
try:
    launch.prepare(["precision=ampp", "optimizer.lr=-1"])
except UserError as error:
    print("refused", len(error.problems))
heavy = [n for n in ("torch", "timm", "torchvision", "numpy", "PIL", "sklearn") if n in sys.modules]
print("loaded", len(loaded), heavy)
"""
    env = {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert f"loaded {len(modules)} []" in done.stdout, done.stdout + done.stderr
    assert "refused 2" in done.stdout
