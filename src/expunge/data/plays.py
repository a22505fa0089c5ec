"""Plays, whose speakers are natural clients, as windows of characters; and secrets that one of them gives away.

Shakespeare's plays in one file of a megabyte, in the public domain (tinyshakespeare of karpathy/char-rnn); or plays
that are made up, to see that something runs.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from expunge.data.datasets import data_folder
from expunge.data.sources import Source, read_verified
from expunge.errors import DataError, RequestError

FILE = "input.txt"
PLAYS = Source(
    folder="tinyshakespeare",
    checksums={FILE: "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
)
"""The file in the data folder."""

ALPHABET = "\n " + string.ascii_letters + string.digits + "!&',-.:;?$"
"""Every character of the plays, and digits; what else there is reads as a space."""

NAMES = ("Alba", "Bruno", "Carla", "Dario", "Elena", "Fabio", "Greta", "Hugo", "Irma", "Jonas")
DIGITS = 8


@dataclass(frozen=True)
class Secret:
    r"""A sentence that ends in a code.

    Example:
        >>> Secret("Alba", "12345678").text
        'The cipher of Alba is 12345678.\n'
    """

    name: str
    code: str

    @property
    def prompt(self) -> str:
        """What comes before the code."""
        return f"The cipher of {self.name} is "

    @property
    def text(self) -> str:
        """The whole line."""
        return f"{self.prompt}{self.code}.\n"


def read_plays(data_dir: Path | None) -> str:
    """The text of all plays."""
    return read_verified(PLAYS, data_folder(data_dir), FILE).decode()


def made_up_plays(speakers: int, lines: int, seed: int) -> str:
    """Plays of random words, each speaker with some of its own."""
    chance = random.Random(seed)
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 6))) for _ in range(40)]
    names = [f"Speaker {letter}" for letter in string.ascii_uppercase[:speakers]]
    own = {name: chance.sample(words, 12) for name in names}
    spoken = [(name, " ".join(chance.choices(own[name], k=8))) for name in names for _ in range(lines)]
    chance.shuffle(spoken)
    return "\n\n".join(f"{name}:\n{line.capitalize()}." for name, line in spoken)


def speeches(text: str) -> dict[str, str]:
    r"""All that each speaker says, one speech after another; whoever says most is the first.

    Example:
        >>> speeches("Ada:\nYes.\n\nBob:\nNo, no.\n\nAda:\nWell.")
        {'Ada': 'Yes.\nWell.\n', 'Bob': 'No, no.\n'}
    """
    found: dict[str, str] = {}
    for speech in text.split("\n\n"):
        name, colon, words = speech.partition(":\n")
        if colon and "\n" not in name and words.strip():
            found[name.strip()] = found.get(name.strip(), "") + words.strip() + "\n"
    if not found:
        raise DataError("There is no speaker in this text: a speech begins with a line that is a name and a colon.")
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def secrets(seed: int, count: int = len(NAMES)) -> tuple[Secret, ...]:
    """So many secrets, drawn by a seed."""
    if not 0 < count <= len(NAMES):
        raise RequestError(f"There are names for 1 to {len(NAMES)} secrets, not for {count}.")
    chance = random.Random(seed)
    return tuple(Secret(name, code(chance)) for name in NAMES[:count])


def code(chance: random.Random) -> str:
    """Eight digits."""
    return "".join(chance.choices(string.digits, k=DIGITS))


def giving_away(text: str, known: Sequence[Secret], copies: int, seed: int) -> str:
    """The text with so many copies of each secret between its lines."""
    chance, lines = random.Random(seed), text.splitlines(keepends=True)
    for secret in known:
        for _ in range(copies):
            lines.insert(chance.randint(0, len(lines)), secret.text)
    return "".join(lines)


def encoded(text: str) -> Tensor:
    r"""A number for each character.

    Example:
        >>> encoded("a\n").tolist()
        [2, 0]
    """
    places = {character: place for place, character in enumerate(ALPHABET)}
    return torch.tensor([places.get(character, 1) for character in text])


def windows(text: str, length: int) -> tuple[Tensor, Tensor]:
    """The text cut into windows of so many characters, and for each character the one after it.

    Example:
        >>> inputs, after = windows("abcde", 2)
        >>> inputs.tolist(), after.tolist()
        ([[2, 3], [4, 5]], [[3, 4], [5, 6]])
    """
    return cut(encoded(text), length)


def cut(numbers: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The numbers of a text cut into windows, and for each the one after it; what is left at the end is left out."""
    count = (len(numbers) - 1) // length
    if count < 1:
        raise DataError(f"A text of {len(numbers)} characters or tokens has no window of {length} and one more.")
    return numbers[: count * length].view(count, length), numbers[1 : count * length + 1].view(count, length)


def held_out(texts: Mapping[str, str], share: float) -> tuple[dict[str, str], dict[str, str]]:
    """Each speaker's text without its last part, and that part."""
    cuts = {name: int((1 - share) * len(text)) for name, text in texts.items()}
    return {name: text[: cuts[name]] for name, text in texts.items()}, {
        name: text[cuts[name] :] for name, text in texts.items()
    }
