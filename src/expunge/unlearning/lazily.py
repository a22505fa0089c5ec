"""A mapping whose values are made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

Value = TypeVar("Value")


class Lazily(Mapping[str, Value]):
    """Values by name, each made once, when it is asked for.

    Example:
        >>> squares = Lazily({"two": lambda: 2**2, "never": lambda: 1 // 0})
        >>> squares["two"], list(squares)
        (4, ['two', 'never'])
    """

    def __init__(self, makers: Mapping[str, Callable[[], Value]]) -> None:
        self._makers, self._made = makers, dict[str, Value]()

    def __getitem__(self, name: str) -> Value:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
