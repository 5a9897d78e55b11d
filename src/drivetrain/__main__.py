import sys

from drivetrain.core.machine.paths import remove_working_directory

remove_working_directory()

from drivetrain.cli.main import main  # noqa: E402

sys.exit(main(sys.argv[1:], program=True))
