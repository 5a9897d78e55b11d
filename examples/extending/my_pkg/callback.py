"""callbacks=[my_pkg.callback.WeightNorm]"""

from __future__ import annotations

from drivetrain import Callback, Event


class WeightNorm(Callback):
    """Logs the norm of the weights beside the loss, and notes in a file how the run ended."""

    needs_model = True  # so that events have it

    def update(self, event: Event) -> None:
        squares = sum(float(p.detach().square().sum()) for p in event.model.parameters())
        event.log({"weight_norm": squares**0.5})

    def end(self, event: Event) -> None:
        (event.run_dir / "notes.txt").write_text(f"{event.status} after {event.update} updates: {event.metrics}\n")
