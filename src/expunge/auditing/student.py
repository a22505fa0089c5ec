"""Student's t by scipy's special functions: loading scipy.stats takes longer than all that an audit asks."""

from __future__ import annotations

from scipy.special import stdtr, stdtrit


def chance_beyond(value: float, freedom: int) -> float:
    """The chance of a larger value.

    Example:
        >>> round(chance_beyond(2.776, 4), 3)
        0.025
    """
    return float(stdtr(freedom, -value))


def value_beyond(chance: float, freedom: int) -> float:
    """The value that is surpassed with this chance.

    Example:
        >>> round(value_beyond(0.025, 4), 3)
        2.776
    """
    return -float(stdtrit(freedom, chance))
