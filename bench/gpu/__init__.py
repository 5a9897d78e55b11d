"""One command for the day a CUDA device is there: `python -m bench.gpu smoke|right|clock|speed|verbs` (docs/gpu.md).

The checkout need not be installed: its src/ is put on the path here, for this process and for those that it starts.
"""

import os
import sys
from importlib.util import find_spec

from bench.harness import ROOT

if find_spec("drivetrain") is None:
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
