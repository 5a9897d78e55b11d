"""scikit-learn's gradient boosting, fitted on the training rows of a table's model, and measured in the same way."""

from __future__ import annotations

from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.step import rng
from drivetrain.core.step.source import Source
from drivetrain.core.step.target_kinds import TargetKind

MOST = 100_000  # rows for fitting
LEAST = 1e-7  # least probability for a logit


class Baseline:
    """HistGradientBoosting of a table's rows, with its defaults. Called with inputs it returns outputs like a model."""

    name = "scikit-learn's HistGradientBoosting"

    def __init__(self, source: Source, kind: TargetKind | None, classes: int) -> None:
        from sklearn.dummy import DummyClassifier
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits

        x, y = source.fetch(rng.permutation(0, 0, len(source))[:MOST])
        self.kind, self.classes, self.rows = kind, classes, len(x)
        made = HistGradientBoostingRegressor if kind == "values" else HistGradientBoostingClassifier
        targets = y.reshape(len(y), -1).T.cpu().numpy()
        with threadpool_limits(1, user_api="openmp"):  # on a machine with other work several threads wait for one another
            self.fitted = [
                (DummyClassifier() if kind != "values" and len({*target}) == 1 else made(random_state=0)).fit(
                    x.cpu().numpy(), target
                )
                for target in targets
            ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of classes (n, classes) or of labels, or values (n, k)."""
        given = x.float().cpu().numpy()
        if self.kind == "values":
            found = np.stack([each.predict(given) for each in self.fitted], 1)
        elif self.kind == "labels":
            shares = np.stack([each.predict_proba(given) @ each.classes_ for each in self.fitted], 1).clip(LEAST, 1 - LEAST)
            found = np.log(shares / (1 - shares))
        else:
            found = np.full((len(given), self.classes), np.log(LEAST))
            found[:, self.fitted[0].classes_.astype(int)] = np.log(self.fitted[0].predict_proba(given).clip(LEAST))
        return torch.from_numpy(found).float().to(x.device)
