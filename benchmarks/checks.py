"""Claims about results, each with the figure that was found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    text: str
    value: float
    wanted: str
    holds: bool
    """False also where there is no figure (NaN): what was not measured is not shown."""


def at_most(text: str, value: float, limit: float) -> Check:
    return Check(text, value, f"at most {limit:g}", value <= limit)


def at_least(text: str, value: float, limit: float) -> Check:
    return Check(text, value, f"at least {limit:g}", value >= limit)


def rounds_to(text: str, value: float, figure: str) -> Check:
    """`figure` as it is printed somewhere: its digits say how far to round."""
    decimals = len(figure.partition(".")[2])
    return Check(text, value, figure, f"{value:.{decimals}f}" == figure)
