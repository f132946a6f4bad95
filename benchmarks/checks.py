"""Claims about results, each with the figure that was found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    text: str
    value: float
    limit: float
    at_most: bool

    @property
    def holds(self) -> bool:
        """False also where there is no figure (NaN): what was not measured is not shown."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def wanted(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}"


def at_most(text: str, value: float, limit: float) -> Check:
    return Check(text, value, limit, at_most=True)


def at_least(text: str, value: float, limit: float) -> Check:
    return Check(text, value, limit, at_most=False)
