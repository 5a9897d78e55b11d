"""The house's rules: which module may know which, what the loop may not know, and what costs a start its time."""

import ast
import functools
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import drivetrain
from drivetrain.config.catalog import options, shipped_targets
from drivetrain.core.machine.paths import conf_dir

PACKAGE = Path(drivetrain.__file__).parent
MODULES = {p.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): p for p in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}

GROUPS = sorted({path.name for path in conf_dir().iterdir() if path.is_dir()} - {"saving"})
# Every package and the floor it stands on. A module imports from floors below its own, or from its own package.
# A new package must be added here; config groups (the folders of conf/) stand on one floor and do not know each other.
FLOORS = [
    ["core"],
    ["recipe"],
    ["config"],
    ["testing"],  # what the tests of plugins call
    ["run"],
    ["saving"],  # a group, and the files that strategies and the trainer save by
    GROUPS,
    ["engine"],
    ["ui"],
    ["launch"],
    ["inference"],
    ["sweeps"],
    ["measure"],
    ["cli"],
    ["drivetrain"],  # the package's own __init__ and __main__
]
FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
HELP = "move the code down to a lower floor, pass what is needed as an argument, or move the module up (FLOORS in this file)"


def package_of(module: str) -> str:
    """The package that a module belongs to; the root's own modules belong to "drivetrain"."""
    return "drivetrain" if module in ("__init__", "__main__", "") else module.split(".")[0]


def test_a_group_imports_its_base_class_alone():
    """So a wrong word is answered without importing options that nobody chose."""
    for group in [*GROUPS, "saving"]:
        imported = [n.module for n in ast.walk(parsed(MODULES[group])) if isinstance(n, ast.ImportFrom)]
        assert len(imported) == 1, f"{group}/__init__.py imports {imported}: name an option's class by its module"


def modules_of(package: str) -> list[str]:
    return [module for module in MODULES if package_of(module) == package]


PACKAGES = sorted({package_of(module) for module in MODULES})


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path, for_types: bool = False) -> set[str]:
    """The names that a file imports when it runs, and with `for_types` those that it imports for the type checker alone."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not for_types:
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


def ours(path: Path, for_types: bool = False) -> set[str]:
    """The modules of the package that a file imports, such as "plan" or "models.mlp"."""
    names = {name.removeprefix("drivetrain.") for name in imports(path, for_types) if name.startswith("drivetrain.")}
    return {n if n in MODULES else n.rpartition(".")[0] for n in names} - {""}


# --- who knows whom ---


def test_every_module_stands_on_a_floor():
    packages = {package_of(module) for module in MODULES}
    assert packages - set(FLOOR_OF) == set(), f"these packages have no floor: add them to FLOORS in {__file__}"
    assert set(FLOOR_OF) - packages == set(), f"FLOORS in {__file__} names packages that do not exist"
    assert len(GROUPS) >= 18
    assert "core.errors" in ours(MODULES["engine.trainer"])  # the reader of imports reads them


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down(package):
    for module in modules_of(package):
        for other in ours(MODULES[module]):
            theirs = package_of(other)
            assert package == theirs or FLOOR_OF[theirs] < FLOOR_OF[package], (
                f"{module} imports {other} from a floor that is not below: {HELP}"
            )


def folder_of(module: str) -> str:
    """The dotted folder of a module: "measure.benchmark" of measure.benchmark.compare; a package is its own."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def within(folder: str, other: str) -> bool:
    """True if a folder is another one or lies in it."""
    return f"{folder}.".startswith(f"{other}.")


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_no_circle_of_files_or_packages():
    files = {module: {other for other in ours(path) if other != module} for module, path in MODULES.items()}
    assert cycles({"a": {"b"}, "b": {"a"}}) == [["a", "b"]]
    assert cycles(files) == [], f"these files import each other: {HELP}"
    # For types as well. An option is read without torch, so that the step that it makes stands in a file of its own.
    typed = {module: {other for other in ours(path, True) if other != module} for module, path in MODULES.items()}
    assert cycles(typed) == [["parallel.pipeline", "parallel.pipeline_stages"]], f"these files know each other: {HELP}"
    # Every folder, those within measure and optimizer too; a folder and its own sub-folders are one package and its parts.
    packages: dict[str, set[str]] = {folder_of(module): set() for module in MODULES}
    for module, others in files.items():
        mine = folder_of(module)
        packages[mine] |= {other for other in map(folder_of, others) if not within(other, mine) and not within(mine, other)}
    assert packages["measure.benchmark"] >= {"launch", "core"}  # the reader of imports reads them
    assert cycles(packages) == [], f"these packages import each other: {HELP}"


def test_one_module_writes_csv():
    """It knows formulas."""
    writes = [name for name, path in MODULES.items() if re.search(r"csv\.writer|DictWriter|to_csv\(", path.read_text())]
    assert writes == ["core.machine.csv_rows"]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_the_launcher_or_the_checkout(package):
    for module in modules_of(package):
        assert not {name for name in imports(MODULES[module]) if name.split(".")[0] in ("src", "tests", "bench")}, module


@pytest.mark.parametrize("module", [*GROUPS, "saving", "engine", "core"])
def test_no_config_library_below_the_config_side(module):
    """The config is resolved once: what runs sees plain values, never OmegaConf's."""
    files = [
        p
        for name, p in MODULES.items()
        if name.split(".")[0] == module and name not in ("core.options.overrides", "core.options.hydra_parts")
    ]
    assert files
    for path in files:
        assert not {n for n in imports(path) if n.split(".")[0] in ("omegaconf", "hydra")}
        assert "OmegaConf" not in path.read_text()


def test_one_module_uses_what_hydra_does_not_document():
    """So the next Hydra is answered in one place."""
    documented = ("omegaconf.errors.", "hydra.errors.", "hydra.compose", "hydra.initialize_config_dir")

    def is_internal(name: str) -> bool:
        outside = name.startswith(("hydra.", "omegaconf.")) and not name.startswith(documented)
        return outside and (name.count(".") > 1 or re.match("_(?!_)", name.split(".")[-1]) is not None)

    assert is_internal("hydra._internal.utils.x")
    assert is_internal("omegaconf._utils")
    assert not is_internal("omegaconf.OmegaConf")
    using = {name for name, path in MODULES.items() if any(map(is_internal, imports(path, for_types=True)))}
    assert using == {"core.options.hydra_parts"}
    of_one_version = r"register_new_resolver|version_base=|OmegaConf\._|\b(hydra|omegaconf)\._"
    members = re.compile(of_one_version + r"|\._(get_node|get_flag|set_flag|metadata|content|resolve_\w+)\(")
    assert not [name for name, path in MODULES.items() if members.search(path.read_text()) and name != "core.options.hydra_parts"]


def test_settings_are_plain_values_when_they_reach_an_option(make):
    trainer = make("model.hidden=[8,8]", "batch=accumulate", "clip=norm", "precision=amp", "ema=ema")
    parts = [
        trainer.batch,
        trainer.precision,
        trainer.scheduler,
        trainer.ema,
        trainer.evaluator.loss,
        trainer.parallel,
        trainer.saving,
    ]
    values = [value for part in parts for value in vars(part).values()]
    assert len(values) > 15
    assert not [v for v in values if type(v).__module__.startswith("omegaconf")]


# --- what things are called ---


def test_a_class_name_has_one_meaning():
    """No two packages have a public class of the same name. What `core` knows of a group's class bears that one's name."""
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and module != "core.options.groups" and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(package_of(module))
    assert found["Optimizer"] == {"optimizer"}
    assert not {name: sorted(of) for name, of in found.items() if len(of) > 1}, "name a class by what it holds: CompareSettings"


LINES = 500


def test_a_long_file_says_why():
    """The first line of a file of more than 500 lines is `# long: why it is one file`."""
    texts = {module: path.read_text().splitlines() for module, path in MODULES.items()}
    long = {module for module, lines in texts.items() if len(lines) > LINES}
    told = {module for module, lines in texts.items() if re.match(r"# long: \w+", "".join(lines[:1]))}
    assert long - told == set(), "split these by what their parts hide, or say in the first line why each is one file"


# --- what parts know of each other ---


def test_nobody_replaces_a_part_of_a_trainer():
    """A technique wraps the step in build.py; it does not write into a finished trainer."""
    pattern = re.compile(r"\btrainer\.(micro|update|zero_grad|watch|precision|step|loss|forward) =")
    assert pattern.search("trainer.step = wrapped")  # the pattern finds what it is for
    assert not {name for name, path in MODULES.items() if pattern.search(path.read_text())}


def test_nobody_replaces_anothers_method_or_class():
    """Changes of torch stand in core.torch_patches. A changed module takes the place of the other one."""
    pattern = re.compile(r"method-assign|\.__class__ = |vars\((?!self\b)\w+\)(\.update\(|\[.*\] = )|\w\.forward = |\bsetattr\(")
    assert pattern.search("norm.__class__ = Other")
    assert pattern.search("setattr(optimizer, name, wrapped)")
    assert pattern.search("block.forward = wrapped")
    assert pattern.search("vars(trainer).update(parts)")
    # An option fills in its own copy.
    found = {
        (name, line.strip())
        for name, path in MODULES.items()
        for line in path.read_text().splitlines()
        if pattern.search(line) and not re.search(r"\bself\.\w+ = ", line)
    }
    # Settings that are given back, streams, a config's values, a loss's numbers.
    values = {"core.machine.isolation", "ui.terminal", "model.transformers", "measure.certify.record"}
    assert {name for name, _ in found} - values <= {"core.machine.torch_patches", "core.step.modules", "core.options.option"}, (
        found
    )


# Lines of a package in which the word `Any` stands: what two packages pass to each other has a type. They only become fewer.
ANY = {
    "adapter": 4,
    "batch": 2,
    "checkpointing": 4,
    "cli": 23,
    "config": 28,
    "core": 96,
    "data": 84,
    "debug": 9,
    "engine": 9,
    "inference": 5,
    "launch": 3,
    "loader": 13,
    "loss": 8,
    "measure": 25,
    "metrics": 12,
    "model": 24,
    "optimizer": 41,
    "parallel": 12,
    "recipe": 9,
    "run": 9,
    "saving": 4,
    "sweeps": 9,
    "task": 1,
    "ui": 12,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_few_values_may_be_of_any_type(package):
    lines = [line for module in modules_of(package) for line in MODULES[module].read_text().splitlines()]
    found = sum(bool(re.search(r"\bAny\b", line)) for line in lines)
    most = ANY.get(package, 0)
    assert found <= most, (
        f"{found} lines of {package} say Any, and {most} may: give what is passed on a type (core/typed.py, core/step/trees.py)"
    )


def test_the_trainers_fields_have_types():
    (trainer,) = [n for n in ast.walk(parsed(MODULES["engine.trainer"])) if isinstance(n, ast.ClassDef)]
    fields = [n for n in trainer.body if isinstance(n, ast.AnnAssign)]
    assert len(fields) > 20
    assert not [ast.unparse(field.target) for field in fields if "Any" in ast.unparse(field.annotation)]


def test_options_are_asked_what_they_can_do_not_what_they_are_called():
    """A rule asks for a property, such as run.compile.captures_step. Only what composes, validates and shows knows names."""
    knows = {
        "config.compose",
        "config.composed",
        "config.validate",
        "config.keys",
        "recipe.reader",
        "ui.recipe_tree",
        "core.options.run_spec",
    }
    assert {name for name, path in MODULES.items() if "choices[" in path.read_text()} <= knows


# --- what the loop may not know ---

# Options whose names are plain words of the loop, and what they mean there.
WORDS = {
    "best": "the best metrics so far", "last": "an update's last micro-batch", "sync": "the context of a micro-batch",
    "step": "of optimizer, scheduler and clock", "value": "a metric's", "device": "where tensors are",
    "split": "Tensor.split", "none": "None", "default": "a field's", "ema": "the seam's own name",
    "tensor": "torch.Tensor", "stream": "of micro-batches", "pipeline": "a data set with its augmentation (loader.Pipeline)",
    "precision": "the seam's own name",
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
    words = words_of_code(MODULES["engine.trainer"])
    assert {"micro", "parallel", "precision"} <= words
    assert words & techniques == set()


def test_the_loop_asks_no_seam_what_it_is():
    for node in ast.walk(parsed(MODULES["engine.trainer"])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            raise AssertionError(f"engine/trainer.py:{node.lineno}: isinstance")


READS = {"item", "cpu", "numpy", "tolist", "synchronize", "nonzero"}


def reads(function: ast.AST) -> list[str]:
    """The calls of a function that bring a number from the device to the host."""
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    found = [n.func.attr for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr in READS]
    return found + [n.func.id for n in calls if isinstance(n.func, ast.Name) and n.func.id in ("float", "bool", "int")]


def test_the_step_reads_nothing_back():
    def functions(module: str) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in ast.walk(parsed(MODULES[module])) if isinstance(n, ast.FunctionDef)}

    assert reads(functions("engine.training_log")["train"])  # the reader of reads reads them
    loop, step = functions("engine.trainer"), functions("engine.step")
    assert reads(loop["_train"]) == reads(loop["_settle"]) == []
    assert [reads(step[name]) for name in ("micro_batch", "update", "zero_grad")] == [[], [], []]
    for module in ("optimizer", "scheduler", "clip", "ema"):
        for path in (p for name, p in MODULES.items() if name.split(".")[0] == module):
            assert not {r for r in reads(parsed(path)) if r in READS}, path


# --- what opens files ---

# Packages whose files are those of a run: they are opened by core.files, which follows no link and waits for no pipe.
OF_RUNS = ("run", "saving", "engine", "ema", "logger", "loss", "debug", "launch", "inference", "sweeps")
OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "load_file", "safe_open"}
OPEN_THEMSELVES = {
    "run.environment": "the kernel's /proc/cpuinfo",
    "run.directory": "the run's directory itself, as a directory",
    "saving.checkpoint_io": "weights that were verified just before, and a handle to sync what was written",
    "ema.profiles": "averages that were verified just before",
    "logger.trackers": "a picture that this process has drawn just before",
    "debug.profile": "files that this process has written just before, at places that core.files gave",
    "launch.launcher": "a file in a temporary folder of this process",
    "launch.heartbeat": "the kernel's /proc",
    "inference.export": "files in a temporary folder of its own",
    "inference.predict": "the operator's own output",
    "inference.inputs": "`read_text` is the data option's",
}


def opens(path: Path) -> list[str]:
    """The calls in a file that open files, but for those of core.files."""
    calls = [node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    ours = {name.rpartition(".")[2] for name in imports(path) if name.startswith("drivetrain.core.machine.files.")}
    plain = [f.id for f in calls if isinstance(f, ast.Name) and f.id in OPENERS - ours]
    named = [f for f in calls if isinstance(f, ast.Attribute) and f.attr in OPENERS]
    return plain + [f.attr for f in named if ast.unparse(f.value) not in ("files", "self")]


def test_files_of_runs_are_opened_by_the_one_boundary():
    found = {name for package in OF_RUNS for name in modules_of(package) if opens(MODULES[name])}
    assert found - set(OPEN_THEMSELVES) == set(), "open files by core.files; if that cannot be, say why in OPEN_THEMSELVES"
    assert set(OPEN_THEMSELVES) - found == set(), "these open nothing themselves any more: take them out of OPEN_THEMSELVES"


# --- what a start costs ---


def test_a_home_that_is_not_there_is_no_traceback():
    """`Path.expanduser` raises RuntimeError for ~nobody: core.paths.expanded does not."""
    users = [str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if ".expanduser()" in file.read_text("utf-8")]
    assert not users


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
from drivetrain.launch.job import prepare
from drivetrain.core.errors import UserError
for words in ([], ["precision=amp", "parallel=ddp", "optimizer=sgd", "surgery=[channels_last]", "logger=[files,tensorboard]"]):
    prepare(words)
    assert "torch" not in sys.modules, words
try:
    prepare(["precision=ampp", "optimizer.lr=-1"])
except UserError as error:
    print("refused", len(error.problems))
heavy = [n for n in ("torch", "timm", "torchvision", "numpy", "PIL", "sklearn") if n in sys.modules]
print("loaded", len(loaded), heavy)
"""
    env = {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert f"loaded {len(modules)} []" in done.stdout, done.stdout + done.stderr
    assert "refused 2" in done.stdout


COMPRESSED = re.compile(
    r"(?<!each)(?<!all)(?<!one) of which\b|\bof whose\b|\b[Ww]hat is (wrong|said|done|known|meant|given|made)\b|^What\b"
    r"|\b[Ss]ays? of\b|\bin (the )?place of\b|\b[Ww]hoever\b|\bof those that\b"
    # A plainer verb: report, show, continue, mean, free; a plainer preposition: next to, except, in addition to.
    r"|(?<![-`])\b[Tt](old|ells?)\b|\b[Gg]o(es)? on\b|\bwent on\b|\bstands? for\b|\b[Gg]iv(e|es|en) back\b"
    r"|(?<!`)\bbesides?\b(?!`)|\b(after|each|than|of|in|at least) so (many|much)\b|\ban? (\w+ )?\w+ of (its|their|your) own\b"
)


def test_sentences_put_the_thing_first():
    """Docstrings and comments have a noun and an active verb where a compressed relative clause stood."""
    found = []
    for path in MODULES.values():
        nodes = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        comments = re.findall(r"# (.*)", path.read_text(encoding="utf-8"))
        for text in [*comments, *(" ".join((ast.get_docstring(n) or "").split()) for n in nodes)]:
            found += [f"{path}: …{text[max(0, m.start() - 40) : m.end() + 40]}…" for m in COMPRESSED.finditer(text)]
    assert not found, "\n".join(found)
