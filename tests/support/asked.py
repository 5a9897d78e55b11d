"""A program that gives commands one after the other in an interpreter of its own, and tells what each said and imported."""

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout

from drivetrain.cli import main as command
from tests.support import composed

HEAVY = {"torch", "timm", "torchvision", "sklearn"}  # packages for which a refusal does not wait


def main() -> None:
    """Read commands, each with its folder, as JSON; print as JSON the exit code, the two outputs and the heavy packages."""
    sys.modules["torchao"] = None  # type: ignore[assignment]  # as on a machine where it is not installed
    found = []
    for place, words in json.load(sys.stdin):
        os.chdir(place)
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = command.main(words)
        found.append((code, out.getvalue(), err.getvalue(), sorted(HEAVY & sys.modules.keys())))
        composed.install()  # after the first, which Hydra composes
    print(json.dumps(found))


if __name__ == "__main__":
    main()
