"""A bundle: a recipe with the package that it needs, in one zip archive of which every byte is known by a hash.

The archive holds recipe.yaml, the package's .py, .yaml and .json files, and manifest.json with their hashes. Reading one
imports nothing and writes nothing: its files are in memory, and go into the cache folder only when its code is trusted.
"""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import sys
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from drivetrain.core.errors import UserError
from drivetrain.core.paths import user_cache
from drivetrain.recipe import cache
from drivetrain.recipe.safe_yaml import MAX_BYTES, deceiving

RECIPE, MANIFEST, FORMAT = "recipe.yaml", "manifest.json", 1
SUFFIXES = (".py", ".yaml", ".yml", ".json")
MAX_ARCHIVE, MAX_FILE, MAX_TOTAL, MAX_FILES, MAX_DEPTH = 4 * 2**20, 2**20, 4 * 2**20, 500, 12
MAX_PARSED = 2**18  # bytes of code of which `imports` is told: Python takes seconds for a megabyte
WORD = re.compile(r"([A-Za-z_]\w*)@([0-9a-f]{64})$", re.ASCII)  # of `trust`
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")
_REGULAR = 0o100000


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory: file name → bytes, without the manifest."""

    package: str
    files: Mapping[str, bytes]

    @cached_property
    def hash(self) -> str:
        """The SHA-256 over the lines that `sha256sum` prints of all files, sorted by their names."""
        lines = [f"{cache.sha256_of(content)}  {name}\n" for name, content in sorted(self.files.items())]
        return cache.sha256_of("".join(lines).encode())

    @property
    def word(self) -> str:
        """What `trust` takes for this package with exactly these files."""
        return f"{self.package}@{self.hash}"

    @property
    def code(self) -> dict[str, bytes]:
        """The package's files."""
        return {name: content for name, content in self.files.items() if name != RECIPE}

    def archive(self) -> bytes:
        """The bytes of the zip archive, the same for the same files."""
        listed = {n: {"sha256": cache.sha256_of(c), "bytes": len(c)} for n, c in sorted(self.files.items())}
        manifest = {"format": FORMAT, "package": self.package, "hash": self.hash, "files": listed}
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as writer:  # compressed bytes depend on zlib's version
            for name, content in [(MANIFEST, json.dumps(manifest, indent=1).encode()), *sorted(self.files.items())]:
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.create_system, info.external_attr = 3, (_REGULAR | 0o644) << 16
                writer.writestr(info, content)
        return out.getvalue()

    def imports(self) -> list[str]:
        """The top-level packages that the import statements of its modules name, without its own."""
        return sorted({name for names in self._imported.values() for name in names or ()} - {self.package})

    def unread(self) -> list[str]:
        """The modules of which it is not known what they import."""
        return [file for file, names in self._imported.items() if names is None]

    @cached_property
    def _imported(self) -> dict[str, set[str] | None]:
        """Module → what it imports; None where it cannot be parsed, or the modules before it were MAX_PARSED long."""
        found: dict[str, set[str] | None] = {}
        left = MAX_PARSED
        for file, content in self.code.items():
            if file.endswith(".py"):
                left -= len(content)
                found[file] = _imports(content) if left >= 0 else None
        return found


def load(path: Path) -> Bundle:
    """Read a bundle and check all of it. Raises UserError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_ARCHIVE + 1)
        if len(raw) > MAX_ARCHIVE:
            raise UserError(f"bundle {path} is larger than {MAX_ARCHIVE // 2**20} MiB, the most that a bundle may have")
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            files = _files(path, archive)
    except OSError as error:
        raise UserError(f"bundle {path} cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"bundle {path} is no zip archive that can be read: {error}") from None
    return _checked(path, files)


def _files(path: Path, archive: zipfile.ZipFile) -> dict[str, bytes]:
    """The archive's files, read within the limits, whatever their headers say. Raises UserError."""
    entries = archive.infolist()
    if len(entries) > MAX_FILES:
        raise UserError(f"bundle {path} has {len(entries):,} files, and at most {MAX_FILES} are allowed")
    files: dict[str, bytes] = {}
    for entry in entries:
        if wrong := _entry_problem(entry, files):
            raise UserError(f"bundle {path}: {entry.filename!r} {wrong}")
        with archive.open(entry) as file:
            files[entry.filename] = file.read(MAX_FILE + 1)
        if len(files[entry.filename]) > MAX_FILE or sum(map(len, files.values())) > MAX_TOTAL:
            size = f"{MAX_FILE // 2**20} MiB, and all together {MAX_TOTAL // 2**20} MiB"
            raise UserError(f"bundle {path}: {entry.filename} is too large: a file may have {size}")
    return files


def _entry_problem(entry: zipfile.ZipInfo, before: Mapping[str, bytes]) -> str | None:
    """Why an entry of the archive is none that a bundle has."""
    name, kind = entry.filename, entry.external_attr >> 16 & 0o170000
    if not _NAME.match(name) or name.count("/") > MAX_DEPTH or len(name) > 200:
        return "is no plain file name"
    if kind not in (0, _REGULAR):
        return "is a link or no regular file"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
        return "is encrypted, or compressed in a way that a bundle is not"
    if name.lower() in map(str.lower, before):
        return "is there twice"
    if not name.endswith(SUFFIXES):
        return f"is of a kind that a bundle does not have: it has {', '.join(SUFFIXES)} files"
    return None


def _checked(path: Path, files: dict[str, bytes]) -> Bundle:
    """The bundle of these files, if they are what its manifest says. Raises UserError."""
    try:
        manifest = json.loads(files.pop(MANIFEST))
        package, listed = str(manifest["package"]), {str(n): dict(about) for n, about in manifest["files"].items()}
        form, hash_ = manifest["format"], manifest["hash"]
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"bundle {path} has no {MANIFEST} that can be read: make it by `drivetrain recipe bundle`") from None
    if form != FORMAT:
        raise UserError(f"bundle {path} has format {str(form)[:20]}, and this drivetrain reads {FORMAT}: install a newer one")
    made = Bundle(package, files)
    if wrong := [*_package_problems(package), *_content_problems(made)]:
        raise UserError(f"bundle {path}: {problem}" for problem in wrong)
    differing = sorted(n for n in {*files, *listed} if cache.sha256_of(files.get(n, b"")) != listed.get(n, {}).get("sha256"))
    if differing or hash_ != made.hash:
        raise UserError(f"bundle {path} is not what its {MANIFEST} says ({', '.join(differing) or 'hash'}): it has been changed")
    return made


def _package_problems(package: str) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z_]\w*", package, re.ASCII):
        yield f"{package[:80]!r} is no name of a package"
    elif package in sys.stdlib_module_names or package in ("drivetrain", "src"):
        yield f"its package has the name {package}, which is taken: give it another one"


def _content_problems(bundle: Bundle) -> Iterator[str]:
    """Why these files are no recipe and one package."""
    if RECIPE not in bundle.files:
        yield f"it has no {RECIPE}"
    elif len(bundle.files[RECIPE]) > MAX_BYTES:
        yield f"its {RECIPE} is larger than {MAX_BYTES // 1024} KiB, the most that a recipe may have"
    single, init = f"{bundle.package}.py", f"{bundle.package}/__init__.py"
    outside = [n for n in bundle.code if n != single and not n.startswith(f"{bundle.package}/")]
    nested = [n for n in bundle.files if any(str(above) in bundle.files for above in PurePosixPath(n).parents)]
    for name, content in bundle.code.items():
        if wrong := _text_problem(content):
            yield f"{name}{wrong}"
    if nested:
        yield f"{nested[0]} is below a file"
    if outside:
        yield f"{outside[0]} is no file of the package {bundle.package}"
    if (single in bundle.files) == (init in bundle.files):
        yield f"it needs either {init} or {single}"


def _text_problem(content: bytes) -> str:
    """Why whoever reads a file would not see what Python reads; "" where they would."""
    try:
        text = content.decode("utf-8")
        coding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
    except (UnicodeDecodeError, SyntaxError):
        coding = ""
    if coding not in ("utf-8", "utf-8-sig", "ascii"):
        return " is not UTF-8 text"
    line, character = deceiving(text)
    return f":{line} has the character {character}, by which code can look like other code: write it as an escape" if line else ""


def make(recipe: bytes, package: Path) -> tuple[Bundle, list[str]]:
    """The bundle of a recipe and a package's folder or module, and the files that were left out. Raises UserError."""
    files, left_out = {RECIPE: recipe}, []
    for path in [package] if package.is_file() else sorted(package.rglob("*")):
        name = path.relative_to(package.parent).as_posix()
        parts = PurePosixPath(name).parts
        if "__pycache__" in parts or any(part.startswith(".") for part in parts) or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink():
            raise UserError(f"{path} is a link: a bundle has regular files only")
        if path.suffix not in SUFFIXES:
            left_out.append(name)
            continue
        files[name] = path.read_bytes()
    made = Bundle(package.stem, files)
    if wrong := [*_package_problems(made.package), *_content_problems(made)]:
        raise UserError(f"--with {package}: {problem}" for problem in wrong)
    with tempfile.TemporaryDirectory() as folder:  # what is made here must be readable there
        written = Path(folder) / "bundle.zip"
        written.write_bytes(made.archive())
        load(written)
    return made, left_out


def _imports(content: bytes) -> set[str] | None:
    """The top-level names that a module's import statements name; None where it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = {alias.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    absolute = (node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level)
    return found | {module.partition(".")[0] for module in absolute if module}


def stored(word: str) -> Bundle | None:
    """The bundle that a word of `trust` names, from the cache. One that has been changed counts as missing."""
    path = folder(word).with_suffix(".zip")
    try:
        found = load(path) if path.is_file() else None
    except UserError:
        return None
    return found if found is not None and found.word == word else None


def store(bundle: Bundle) -> None:
    """Keep a bundle in the cache. Raises UserError."""
    cache.write(folder(bundle.word).with_suffix(".zip"), bundle.archive())


def extract(bundle: Bundle) -> Path:
    """The folder with exactly the package's files, written anew unless it has them. Raises UserError."""
    place = folder(bundle.word)
    if _content(place) == bundle.code:
        return place
    shutil.rmtree(place, ignore_errors=True)
    cache.make_folder(place.parent)
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=place.parent))
    try:
        for name, content in bundle.code.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(content)
        temporary.replace(place)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if _content(place) != bundle.code:  # else another process was first
            raise UserError(f"the code of {bundle.word} cannot be written to {place}: {error.strerror}") from None
    return place


def _content(place: Path) -> dict[str, bytes]:
    """The files in a folder. What Python has compiled is removed: it could be other code."""
    for compiled in [*place.rglob("__pycache__")]:
        shutil.rmtree(compiled, ignore_errors=True)
    found = {}
    for path in place.rglob("*"):
        if "__pycache__" in path.relative_to(place).parts:  # of another rank, which runs the same code
            continue
        if path.is_symlink() or not path.is_dir():
            found[path.relative_to(place).as_posix()] = b"" if path.is_symlink() else path.read_bytes()
    return found


def folder(word: str) -> Path:
    """Where the code of a bundle is extracted to; beside it is the archive."""
    return user_cache() / "bundles" / word.partition("@")[2]
