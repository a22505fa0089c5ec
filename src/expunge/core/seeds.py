"""Seeds derived from the run's own: nothing random without one."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: object) -> int:
    """A seed of its own for every purpose, from the run's seed and names: nothing random without a seed.

    Example:
        >>> derived_seed(0, 1, "ada") == derived_seed(0, 1, "ada") != derived_seed(0, 2, "ada")
        True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")
