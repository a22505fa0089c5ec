"""What the law asks of a request for erasure: dates, grounds and exceptions (GDPR, Articles 12, 17 and 19).

No legal advice: dates are counted by the calendar, without holidays, which is never later than the law has it.
"""

from __future__ import annotations

import calendar
import re
from datetime import date, timedelta

from expunge.errors import RequestError

GROUNDS = {
    "a": "the data is no longer needed for its purpose",
    "b": "consent was withdrawn",
    "c": "the person objected",
    "d": "the data was processed unlawfully",
    "e": "a law demands the erasure",
    "f": "the data is of a child's use of an online service",
}
"""Article 17(1)."""

EXCEPTIONS = {
    "a": "freedom of expression and information",
    "b": "a law demands the processing, or a task in the public interest",
    "c": "public health",
    "d": "archives, research or statistics, which the erasure would seriously impair",
    "e": "legal claims",
}
"""Article 17(3)."""

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def due_date(received: date, months: int = 1) -> date:
    """The same day so many months later, or the last day of that month.

    Example:
        >>> due_date(date(2026, 1, 31))
        datetime.date(2026, 2, 28)
    """
    year, month = divmod(received.year * 12 + received.month - 1 + months, 12)
    return date(year, month + 1, min(received.day, calendar.monthrange(year, month + 1)[1]))


def read_date(text: str, what: str) -> date:
    """A day, as 2026-11-16.

    Example:
        >>> read_date("2026-11-16", "--received")
        datetime.date(2026, 11, 16)
    """
    try:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            raise ValueError(text)
        found = date.fromisoformat(text)
        due_date(found, 12)  # the last years of the calendar have none
    except (ValueError, OverflowError) as problem:
        raise RequestError(f"{what} takes a day such as 2026-11-16, not {text[:40]!r}.") from problem
    return found


def duration(text: str) -> timedelta:
    """A span such as 7d, 12h, 30m or 0.

    Example:
        >>> duration("7d").days
        7
    """
    found = re.fullmatch(r"(\d{1,6})([dhms]?)", text.strip(), re.ASCII)
    if not found or (not found[2] and int(found[1])):
        raise RequestError(f"--grace takes a span such as 7d, 12h or 0, not {text[:40]!r}.")
    return timedelta(seconds=int(found[1]) * _UNITS.get(found[2], 1))


def article(letter: str, known: dict[str, str], paragraph: int) -> str:
    """The article that a letter stands for; the whole of it will do, too.

    Example:
        >>> article("b", GROUNDS, 1), article("17(3)(e)", EXCEPTIONS, 3)
        ('17(1)(b)', '17(3)(e)')
    """
    short = letter.removeprefix(f"17({paragraph})(").removesuffix(")")
    if short not in known:
        listed = ", ".join(f"{key} ({text})" for key, text in known.items())
        raise RequestError(f"There is no {letter[:40]!r} in Article 17({paragraph}): say one of {listed}.")
    return f"17({paragraph})({short})"


def in_words(found: str) -> str:
    """An article in words.

    Example:
        >>> in_words("17(1)(b)")
        'Art. 17(1)(b): consent was withdrawn'
    """
    known = GROUNDS if found.startswith("17(1)") else EXCEPTIONS
    return f"Art. {found}: {known[found[-2]]}"
