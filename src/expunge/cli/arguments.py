"""Arguments that several commands share, and how their texts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expunge.cli.choices import DEVICES
from expunge.cli.completion import among
from expunge.errors import RequestError

# Typer 0.20 with click 8.5 loses the help of arguments: the commands' own texts say what they are.
RunArgument = Annotated[Path, typer.Argument(metavar="RUN")]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        help="With MNIST, FashionMNIST or cifar-10-batches-bin; the digits need none.",
        envvar="EXPUNGE_DATA",
    ),
]
DeviceOption = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or auto.", autocompletion=among(DEVICES))]
JsonOption = Annotated[bool, typer.Option("--json", help="Print results as JSON on standard output.")]


def whole_numbers(text: str, option: str) -> list[int]:
    """Read numbers that are separated by commas, each once.

    Example:
        >>> whole_numbers("3,1,3", "--seeds")
        [3, 1]
    """
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as problem:
        raise RequestError(f"{option} takes whole numbers separated by commas, not {text!r}.") from problem
    if option == "--seeds" and min(numbers) < 0:
        raise RequestError(f"A seed is a whole number of at least 0, not {min(numbers)}.")
    return numbers


def sample_indices(values: list[str]) -> dict[str, list[int]]:
    """Read which samples of whom.

    Example:
        >>> sample_indices(["ada:0,2", "bob:1", "ada:5"])
        {'ada': [0, 2, 5], 'bob': [1]}
    """
    chosen: dict[str, list[int]] = {}
    for value in values:
        name, found, indices = value.partition(":")
        if not found or not indices:
            raise RequestError(f"--samples takes CLIENT:INDEX,INDEX,..., not {value!r}.")
        chosen.setdefault(name, []).extend(whole_numbers(indices, "--samples"))
    return chosen


def torch_device(name: str) -> str:
    """The device that is meant, refused where it is not there.

    Example:
        >>> torch_device("cpu")
        'cpu'
    """
    import torch

    if name not in DEVICES:
        raise RequestError(f"--device can be {', '.join(DEVICES[:-1])} or {DEVICES[-1]}, not {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("There is no CUDA device here: use --device cpu or --device auto.")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
