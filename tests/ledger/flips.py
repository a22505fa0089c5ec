"""Single flipped bits, drawn at random and always the same for a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator


def flipped(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(count):
        bit = chance.randrange(8 * len(content))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)
