import sys

from drivetrain.cli.main import main

sys.exit(main(sys.argv[1:]))
