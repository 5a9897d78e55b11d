"""The commands that README.md and docs/ print, and a small world in which they run as they are printed.

`python -m tests.support.printed WORD …` runs one command with settings added that make it small.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import drivetrain

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(drivetrain.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
WIDEST = 76  # characters of a command's line
PROGRAMS = "drivetrain|python|make|pip|find|srun|torchrun|sbatch"
COMMAND = re.compile(rf"^    (?:\$ )?((?:{PROGRAMS}) .*)$(\n    error: )?", re.M)
# Each program prints its words, one in a line, and an empty line after them.
ECHOED = "".join(f"{name}() {{ printf '%s\\n' {name} \"$@\" ''; }}\n" for name in PROGRAMS.split("|"))


class Printed(NamedTuple):
    """A command of a page, and what the comment at its end says."""

    page: str
    text: str
    comment: str
    fails: bool  # it is printed with its error

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def commands() -> Iterator[Printed]:
    """Every command that a page prints as a line of code, in its order."""
    for page in PAGES:
        for text, error in COMMAND.findall(re.sub(r"\\\n *", "", page.read_text(encoding="utf-8"))):
            command, _, comment = text.partition(" # ")
            yield Printed(page.relative_to(ROOT).as_posix(), command.rstrip(), comment, bool(error))


def lines(page: Path) -> Iterator[str]:
    """Every line of a page's commands, as the site shows it: also of one that goes on after a backslash, or in a script."""
    goes_on = fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if goes_on or re.match(rf"{'' if fenced else '    '}(?:\$ )?(?:{PROGRAMS}) ", line):
            yield line if fenced else line.removeprefix("    ")
            goes_on = line.endswith("\\")


def words_by(shell: str, lines: list[str], folder: Path) -> tuple[list[list[str]], str]:
    """Each line's words as a shell has them, in an empty folder, and what it complained of."""
    folder.mkdir()
    options = ["-f"] if shell == "zsh" else ["--norc"]  # as it is installed
    done = subprocess.run([shell, *options, "-s"], input=ECHOED + "\n".join(lines) + "\n", cwd=folder, text=True,
                          capture_output=True, check=False, env={"PATH": os.environ["PATH"], "HOME": str(folder)})  # fmt: skip
    return [part.split("\n") for part in done.stdout.removesuffix("\n\n").split("\n\n")], done.stderr


# --- to run them ---

SMALL = {  # verb → settings in place of those that are printed, and beside them
    "train": ["updates=2", "runtime.threads=1", "parallel.nproc=2", "hydra.sweeper.n_trials=2"],
    "compare": ["rounds=2", "block_s=0.05", "seeds=2", "max_seeds=2", "runtime.threads=1"],
    "ablate": ["rounds=2", "block_s=0.05", "seeds=2", "max_seeds=2", "epochs=1", "tables=[steps]", "runtime.threads=1"],
    "bisect": ["rounds=6", "block_s=0.05", "seeds=4", "runtime.threads=1"],  # fewer have no interval
    "certify": ["runtime.threads=1"],
    "doctor": ["profile_s=0.2", "rounds=2", "block_s=0.05", "prove=false", "runtime.threads=1"],
    "tune": ["what=lr", "lr_updates=20", "budget_s=20", "rounds=2", "block_s=0.05", "quality=false", "runtime.threads=1"],
}
ALWAYS = ("updates", "epochs", "rounds", "block_s", "runtime.threads", "profile_s", "prove", "seeds", "what", "lr_updates",
          "budget_s", "quality", "max_seeds", "tables")  # fmt: skip
IMPOSSIBLE = {  # what a command has → why it is not run
    "<": "the reader puts something in the place of <…>", "…": "an address or a hash that is shortened on the page",
    "nnodes": "needs two machines", "submitit_slurm": "needs Slurm", "srun": "needs Slurm", "sbatch": "needs Slurm",
    "launcher=ray": "needs Ray",
    "/shared/": "needs Slurm",
    "make ": "installs a virtual environment", "pip ": "installs a package", "drivetrain parameters": "needs what pip installs",
    "optimizer=sign_sgd precision=fp64": "needs what pip installs",
    "--format transformers": "needs a run of model=transformers", "bench.gpu": "needs CUDA",
    "RUN1": "its runs are of three seeds", "parallel=tensor": "needs two devices", "parallel=fsdp": "needs two devices",
    "=PATH": "the reader puts a path in the place of PATH", "outputs/doctor/": "the reader puts something in the place of <…>",
    "resume=RUN resume_changed": "needs two devices", "model.pretrained=true": "needs a network",
    "verify mine.yaml --quick": "the recipe that tune wrote before it claims no speed",
}  # fmt: skip
RUNS = {  # page → the settings of the run that it names, where it is no run of photos
    "docs/finetuning.md": [],  # its weights go into a network of the default model
    "docs/guides/tables.md": ["task=regression", "data=tabular", "data.path=houses.csv", "data.target=price",
                              "batch.global_batch=8"],
    "docs/guides/text.md": ["task=text_classification", "data=jsonl", "data.path=reviews.jsonl", "data.label=stars",
                            "batch.global_batch=8"],
}  # fmt: skip
NETS = """
import torch
import torchmetrics
from sklearn.datasets import load_digits

def Net(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(classes))

def my_loss(output, y):
    return torch.nn.functional.cross_entropy(output, y)

class Cost(torchmetrics.MeanMetric):
    def update(self, output, target):
        super().update((output.argmax(-1) != target).float())

class Pictures(torch.utils.data.Dataset):
    classes = ("a", "b")
    def __init__(self, split):
        self.noise = torch.rand(160, 3, 32, 32)
    def __len__(self):
        return 160
    def __getitem__(self, index):
        return self.noise[index], index % 2
"""


def why_not(command: Printed) -> str | None:
    """The reason why a command is not run here; None if it is."""
    if command.page == "docs/certify.md" and "language_modelling" in command.text:
        return None
    return next((why for part, why in IMPOSSIBLE.items() if part in command.text), None)


def smaller(words: list[str]) -> list[str]:
    """A command's words with sizes of a test in place of its own."""
    verb = words[0]
    small = {word.partition("=")[0]: word for word in SMALL.get(verb, [])}
    given = [small.get(word.partition("=")[0], word) for word in words]
    keys = {word.partition("=")[0] for word in given}
    if (
        verb in ("train", "compare", "doctor", "tune")
        and keys & {"data.root", "data.train", "data.path"}
        and "data.size" not in keys
    ):
        if any(re.match("data=(imagefolder|webdataset|masks|labels_csv)", word) for word in given):
            given.append("data.size=32")
        given.append("batch.global_batch=8")
    flags = next((at for at, word in enumerate(given) if word == "against"), len(given))
    more = [word for key, word in small.items() if key in ALWAYS and key not in keys]
    if "resume" in keys:  # it goes on to the end that it had
        more.remove("updates=2")
    if "resume" in keys and "-m" in words:  # a sweep, with its own settings
        more.remove("runtime.threads=1")
    if any("until: 5ep" in word for word in words):
        more[more.index("updates=2")] = "epochs=6"
    if "--recipe" in words and verb == "compare":  # fewer have no interval to claim
        more[more.index("rounds=2")] = "rounds=8"
    return [*given[:flags], *more, *given[flags:]]


def world(folder: Path, page: str) -> Path:
    """A folder with everything that the commands of a page name; the folder to run them in."""
    import numpy as np
    import torch
    from PIL import Image

    from tests.support import sets

    (folder / "sets").mkdir()
    sets.write(folder / "sets", 32, with_hub=False)
    draw = np.random.default_rng(0)
    for place in ("home/photos", "home/other_photos", "work/photos"):
        for number in range(48):
            file = folder / place / "ab"[number % 2] / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(file)
    work = folder / "work"
    shutil.copytree(ROOT / "examples", work / "examples")
    if page == "examples/slow_loss/README.md":
        return work / "examples" / "slow_loss"
    if page == "docs/extending.md":
        return work
    shards = [*(work / f"train-{number:03d}.tar" for number in range(10)), work / "val.tar"]
    for shard in shards:  # as `tar cf` writes them: image and class of each sample beside each other
        with tarfile.open(shard, "w") as tar:
            for number in range(4):
                for suffix, content in (("jpg", (folder / f"home/photos/{'ab'[number % 2]}/{number}.jpg").read_bytes()),
                                        ("cls", str(number % 2).encode())):  # fmt: skip
                    (file := folder / f"{number}.{suffix}").write_bytes(content)
                    tar.add(file, f"{shard.stem}-{number}.{suffix}")
    (work / "my_pkg.py").write_text(NETS)
    shutil.copy(work / "examples/own_samples/my_lines.py", work)
    shutil.copytree(folder / "sets" / "masked", work / "scans")
    houses = ["rooms,age,heating,price", *(f"{n % 5},{n},{'gas' if n % 3 else 'oil'},{n % 5 * 100 - n}" for n in range(64))]
    (work / "houses.csv").write_text("\n".join(houses))
    (work / "photos.csv").write_text("\n".join(["image,tags", *(f"photos/{'ab'[n % 2]}/{n}.jpg,{'cat|dog' if n % 3 else 'cat'}"
                                                               for n in range(48))]))  # fmt: skip
    if own := re.search(r"This is `(\w+\.py)`.*?```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S):
        (work / own[1]).write_text(own[2])
        shapes = {"trunk.0.weight": (16, 1, 3, 3), "trunk.0.bias": (16,), "trunk.3.weight": (32, 576), "trunk.3.bias": (32,)}
        torch.save({name: torch.zeros(shape) for name, shape in shapes.items()}, work / "weights.pt")
    reviews = [f'{{"text": "it is {"very " * (n % 5)}good", "stars": {n % 2}}}' for n in range(64)]
    (work / "reviews.jsonl").write_text("\n".join(reviews))
    (work / "book.txt").write_text("\n".join(f"Line {n} of a book: it was {'very ' * (n % 5)}late." for n in range(2000)))
    (work / "mine.yaml").write_text("description: mine\ndefaults:\n  - override /model: mlp\nmodel: {hidden: [8]}\n")
    np.save(work / "samples.npy", draw.random((4, 3, 32, 32), dtype=np.float32))
    Image.fromarray(draw.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(work / "photo.jpg")
    shutil.copytree(work / "photos", work / "more_photos")
    text = (ROOT / page).read_text(encoding="utf-8")
    for where in re.findall(r"\bRUN\b|outputs/2026-\S{5}/\S+|outputs/multirun/2026-\S+", text):
        if not (work / where).exists():
            run_in(work, folder, ["train", "-q", *_run_at(where, page)])
    return work


def _run_at(where: str, page: str) -> list[str]:
    """The training that makes a run that a page names."""
    if page in RUNS:
        return [*RUNS[page], "updates=2", f"hydra.run.dir={where}"]
    if "multirun" in where:
        return ["-m", "model=mlp", "updates=2", "optimizer=sgd,adamw", f"hydra.sweep.dir={where}"]
    of_photos = where == "RUN" and page != "docs/recipes.md"  # whose recipe is trained as it is
    photos = ["data=imagefolder", "data.root=photos", "data.size=32", "batch.global_batch=8"] if of_photos else []
    average = ["ema=post_hoc"] if page == "docs/averaging.md" else []
    return [*photos, *average, "model=mlp", "epochs=1", f"hydra.run.dir={where}"]


def run_in(work: Path, folder: Path, words: list[str]) -> None:
    """One command of drivetrain. Raises where it fails."""
    subprocess.run(
        [sys.executable, "-m", "drivetrain", *words], cwd=work, env=environment(folder), check=True, capture_output=True
    )


def environment(folder: Path) -> dict[str, str]:
    paths = {"HOME": str(folder / "home"), "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": f"{PACKAGE}:{ROOT}"}
    return {**os.environ, **paths, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "COMMANDS_PYTHON": sys.executable}


def run(shell: str, command: Printed, work: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a shell as it is printed, where drivetrain and python are this module."""
    ours = "".join(
        f'{name}() {{ "$COMMANDS_PYTHON" -m tests.support.printed {name} "$@"; }}\n' for name in ("drivetrain", "python")
    )
    return subprocess.run([shell, *(["-f"] if shell == "zsh" else ["--norc"]), "-c", ours + command.text], cwd=work, text=True,
                          capture_output=True, check=False, env=environment(folder), timeout=900)  # fmt: skip


def failed(command: Printed, done: subprocess.CompletedProcess[str]) -> bool:
    """True if a command did not do what the page says. In a test's few rounds a bisection or a verification may say no.

    A verification may also say that so short a training with so few seeds cannot tell (4).
    """
    verbs = (["drivetrain", "bisect"], ["drivetrain", "recipe", "verify"])
    answered = (
        done.returncode in (1, 4) and any(command.words[: len(verb)] == verb for verb in verbs) and "error:" not in done.stderr
    )
    return done.returncode != 0 and not answered


def written_by(words: list[str]) -> Path | None:
    """The recipe that a command writes, if it says where: it is not written over one that is there."""
    if "--recipe" in words:
        return Path(words[words.index("--recipe") + 1])
    return Path(words[3]) if words[:2] == ["recipe", "export"] and words[3:] else None


@contextmanager
def aside(file: Path | None) -> Iterator[None]:
    """Within the context a file is not in its place. It comes back unless a new one was written."""
    before = file.read_bytes() if file is not None and file.exists() else None
    if file is not None and before is not None:
        file.unlink()
    try:
        yield
    finally:
        if file is not None and before is not None and not file.exists():
            file.write_bytes(before)


if __name__ == "__main__":
    from drivetrain.core.machine.paths import remove_working_directory

    remove_working_directory()
    from drivetrain.cli.main import main

    given = sys.argv[2:] if sys.argv[1] == "drivetrain" else ["train", *sys.argv[4:]]
    with aside(written_by(given)):
        sys.exit(main(smaller(given)))
