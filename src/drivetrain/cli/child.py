"""`python -m drivetrain.cli.child`: the command in a process that ends with its standard input, so with its starter."""

from __future__ import annotations

import sys

from drivetrain.core.machine.paths import remove_working_directory

if __name__ == "__main__":
    remove_working_directory()
    from drivetrain.cli.main import main
    from drivetrain.core.machine.forking import end_with_input

    end_with_input()
    sys.exit(main(sys.argv[1:], program=True))
