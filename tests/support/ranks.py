"""What the trainers of several ranks have come to."""

import copy
from typing import Any


def saved(trainer: Any) -> Any:
    """Weights and state as a checkpoint has them, on rank 0."""
    state = trainer.state()
    with trainer.evaluator.eval_weights():
        full = copy.deepcopy(trainer.parallel.full_state_dict(trainer.model, state))
    trainer.parallel.finish_collectives()
    return full


def train_to(update: int, trainer: Any) -> Any:
    """Train to this update; what is saved then."""
    trainer.max_updates = update
    trainer.fit()
    return saved(trainer)


def weights(trainer: Any) -> dict[str, Any]:
    """The weights that are saved, as lists; a rank other than 0 has none."""
    return {name: weight.tolist() for name, weight in saved(trainer)[0].items() if weight is not None}
