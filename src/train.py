"""`python -m src.train …` is `drivetrain train …`, run from a checkout."""

import os
import sys

os.environ.setdefault("PYTHONSAFEPATH", "1")  # neither do the interpreters that libraries start from this one
if not sys.path[0] or sys.path[0] == os.getcwd():  # Python puts it there; nothing is imported from it without trust
    del sys.path[0]
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # works uninstalled, too

from drivetrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], program=True))
