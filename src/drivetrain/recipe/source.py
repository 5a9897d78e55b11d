"""Where a recipe came from, as a run records it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """What `recipe=` was given, and the SHA-256 of the recipe's text."""

    given: str  # a name, a path or a pinned address
    sha256: str

    def record(self) -> dict[str, str]:
        """The entry of environment.json. The query of an address is left out: it may hold a key."""
        from drivetrain.core.overrides import redact

        address = redact(f"recipe={self.given}").removeprefix("recipe=")
        return {"given": address, "sha256": self.sha256}
