"""Reading the tables that come with scikit-learn, without importing it, which takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError

if TYPE_CHECKING:
    import numpy as np

DIABETES = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
WINE = (
    "alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium", "total_phenols", "flavanoids", "nonflavanoid_phenols",
    "proanthocyanins", "color_intensity", "hue", "od280_od315", "proline",
)  # fmt: skip


def data_file(name: str) -> Path:
    """Return the path of a file in scikit-learn's folder of data. Raises UserError."""
    from importlib.util import find_spec

    spec = find_spec("sklearn")
    root = Path(next(iter(spec.submodule_search_locations or [""]))) if spec else Path()
    file = root / "datasets" / "data" / name
    if not file.is_file():
        raise UserError(f"scikit-learn's file {name} is not there: pip install scikit-learn")
    return file


def read_diabetes() -> dict[str, np.ndarray]:
    """Return the columns of diabetes, as measured, and "progression"."""
    import numpy as np

    table = np.loadtxt(data_file("diabetes_data_raw.csv.gz"))
    return {**dict(zip(DIABETES, table.T, strict=True)), "progression": np.loadtxt(data_file("diabetes_target.csv.gz"))}


def read_wine() -> dict[str, np.ndarray]:
    """Return the columns of wine, and "grower", the class 0 … 2."""
    import numpy as np

    table = np.loadtxt(data_file("wine_data.csv"), delimiter=",", skiprows=1)
    return dict(zip((*WINE, "grower"), table.T, strict=True))
