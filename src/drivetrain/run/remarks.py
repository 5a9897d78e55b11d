"""The remarks on a run's figures, as sentences for its last lines and its page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from drivetrain.core.options.selection import Figure
from drivetrain.run.reader import Points
from drivetrain.run.result import Result

FEWEST = 4  # fewest evaluations for a curve
LEARNT = 0.99  # times the first training loss: a loss above has hardly learnt
GROWN = 1.05  # times its least value: a loss on held-out data above this has overfitted
SOLVED = 1e-3  # times the first training loss: a loss below has nothing left to lose
LATE, FELL = 0.25, 0.05  # a loss is still improving if it fell by this share within the last part of this length
WIDE = 0.1  # widest interval of a reliable share


def of_curves(train: Points, evaluated: Points, name: str = "loss", kept_best: bool = False) -> Iterator[str]:
    """Yield a remark if the losses on training and held-out data diverge, or if the latter still falls at the end.

    `kept_best`: the run has kept its best checkpoint.
    """
    found = [(update, values[name]) for update, values in zip(evaluated.updates, evaluated.values, strict=True) if name in values]
    seen = [(update, loss) for update, loss in zip(train.updates, train.curve("loss"), strict=True) if loss is not None]
    if not found or not seen or not all(math.isfinite(loss) and loss > 0 for _, loss in (*found, *seen)):
        return
    of_set = f"{evaluated.set} loss"
    (least_at, least), (end, last) = min(found, key=lambda each: each[1]), found[-1]
    if least > LEARNT * seen[0][1]:
        yield f"hardly learnt: the {of_set} is {last:.4g} at the end, and the training loss was {seen[0][1]:.4g} at first"
    if len(found) < FEWEST or least > LEARNT * seen[0][1]:
        return
    before = [loss for update, loss in seen if update <= least_at]
    if last > GROWN * least and last > SOLVED * seen[0][1] and before and seen[-1][1] < before[-1]:
        yield (
            f"overfitted since update {least_at:,}: the {of_set} rose from {least:.4g} to {last:.4g}, and the training loss fell "
            f"from {before[-1]:.4g} to {seen[-1][1]:.4g}: {'' if kept_best else 'stop=early or saving=best keeps the best, and '}"
            "augment= or a larger optimizer.weight_decay may help"
        )
        return
    earlier = [loss for update, loss in found if update <= (1 - LATE) * end]
    if earlier and last == least and last < (1 - FELL) * min(earlier):
        yield (
            f"still improving: the {of_set} fell from {min(earlier):.4g} to {last:.4g} in the run's last quarter: more epochs "
            "may help"
        )


def of_test(result: Result, commonest: Mapping[str, float]) -> Iterator[str]:
    """Yield accuracies that do not exceed the share of a test set's commonest class, and those from too few samples."""
    for name, accuracy in result.tested().items():
        figure, found = Figure.parse(name), result.interval("test", name, accuracy)
        if found is None or figure != Figure("accuracy", set=figure.set):
            continue
        low, high = found
        samples = f"{result.shares[name]:,} samples of the test set {figure.set}".rstrip()
        if low <= commonest.get(figure.set, -1):
            alone = f"{commonest[figure.set]:.4g} of its commonest class alone"
            yield f"at chance: the accuracy of {accuracy:.4g} on the {samples} is not surely above the {alone}"
        elif high - low > WIDE:
            yield f"few samples: the accuracy of {accuracy:.4g} on the {samples} may be anything from {low:.2f} to {high:.2f}"
