"""Every error a user of expunge can meet: one sentence that says what is wrong and what to do."""

from collections.abc import Collection
from itertools import islice

NAMED = 20
"""A sentence names at most so many clients."""


class ExpungeError(Exception):
    """Base of all errors that expunge raises on purpose; the command line prints its one line."""


class RequestError(ExpungeError):
    """The request cannot be met as asked: an unknown client, foreign samples, a bad option."""


class DataError(ExpungeError):
    """A dataset is missing, corrupt or not usable (a NaN, no samples, the wrong shape)."""


class ModelError(ExpungeError):
    """A model or checkpoint does not fit: another architecture, a NaN in its weights."""


class NumericalError(ExpungeError):
    """A computation met numbers it cannot go on with, such as negative curvature at the first step."""


class SiteError(ExpungeError):
    """A site of a federation did not answer in time, speaks another version, or failed at its task."""


def listed(names: Collection[str]) -> str:
    """Names for a sentence: all of them, or, where they are many, the first ones and how many there are.

    Example:
        >>> listed(["ada", "bob"]), listed([str(number) for number in range(100_000)])[-20:]
        ('ada, bob', '19 and 99,980 others')
    """
    more = len(names) - NAMED
    first = ", ".join(islice(names, NAMED))
    return first if more <= 0 else f"{first} and {more:,} others"
