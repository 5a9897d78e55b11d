"""Measurements against other loops: `python -m bench.overhead`, `python -m bench.gpu smoke`.

The checkout need not be installed: its src/ is put on the path here, for this process and for those that it starts.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("drivetrain") is None:
    _ours = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("src", "")]
    sys.path[:0] = _ours
    os.environ["PYTHONPATH"] = os.pathsep.join([*_ours, *filter(None, [os.environ.get("PYTHONPATH")])])
