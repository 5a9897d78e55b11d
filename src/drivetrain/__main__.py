import sys

from drivetrain.cli import main

sys.exit(main(sys.argv[1:]))
