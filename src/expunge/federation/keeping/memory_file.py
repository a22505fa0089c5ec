"""A memory on disk: one safetensors file, which older versions of it can be read from.

Its vectors are in the file; or, in the folder of a state, in files of their own beside it (vector_files.py), so that
nothing is read or written of those that stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expunge.core.vectors import Layout, length
from expunge.federation.keeping.filed import Block, Filed
from expunge.federation.keeping.place import Place
from expunge.federation.keeping.pulls import weighted_mean
from expunge.federation.keeping.rounds import KeptRound
from expunge.federation.keeping.stretches import Held, Stretch
from expunge.federation.keeping.tensor_file import TensorFile, read_tensors, reading, write_tensors
from expunge.federation.keeping.vector_files import VectorFiles, write_vectors
from expunge.federation.training.recipe import ClientRule, Recipe
from expunge.federation.training.works import ROUNDING

KIND, VERSION = "memory", 4
"""Of the file; in version 1 the vectors stood under the clients' own names, in version 2 rounds had shares only, and up
to version 3 a vector was the sum of ``w_u (D_u - D)``."""

APART, FOLDER = 5, "vectors"
"""Version of a file whose vectors are apart, and the name of the folder beside it that they are in."""


@dataclass(frozen=True, eq=False)
class MemoryContent:
    """All that a memory holds."""

    recipe: Recipe
    rounds: list[KeptRound]
    stretches: list[Stretch]
    place: Place | None
    parameters: tuple[str, ...] | None = None
    layout: Layout | None = None


def write_memory(path: Path, memory: MemoryContent) -> None:
    """Write it whole or not at all, vectors and all."""
    clients = list(dict.fromkeys(name for stretch in memory.stretches for name in stretch.vectors))
    numbers, tensors = {name: number for number, name in enumerate(clients)}, dict[str, Tensor]()
    for at, stretch in enumerate(memory.stretches):
        tensors |= {f"{at}.{numbers[name]}": stretch.vectors[name] for name in stretch.vectors}
    content, own = _described(memory)
    stretches = [[stretch.rounds.start, stretch.rounds.stop] for stretch in memory.stretches]
    write_tensors(path, KIND, VERSION, tensors | own, {**content, "clients": clients, "stretches": stretches})


def write_apart(path: Path, memory: MemoryContent) -> None:
    """Write it with its vectors beside it; only what is new or has changed of these is written.

    Args:
        path: in a folder that is not in its place yet, so that both appear there together.
        memory: whose vectors may be beside another such file.
    """
    blocks, stretches = list[dict[str, str]](), list[Any]()
    for stretch in memory.stretches:
        own = list(write_vectors(path.parent / FOLDER, stretch.vectors))
        numbers = list(range(len(blocks), len(blocks) + len(own)))
        stretches.append([stretch.rounds.start, stretch.rounds.stop, numbers, stretch.vectors.length])
        blocks += own
    content, tensors = _described(memory)
    write_tensors(path, KIND, APART, tensors, {**content, "blocks": blocks, "stretches": stretches})


def _described(memory: MemoryContent) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All but the vectors."""
    tensors, place = dict[str, Tensor](), memory.place
    content: dict[str, Any] = {
        "rounds": [each.as_dict() for each in memory.rounds],
        "recipe": memory.recipe.as_dict(),
    }
    if memory.parameters is not None:
        content["parameters"] = list(memory.parameters)
    if memory.layout is not None:
        content["layout"] = [[name, list(shape)] for name, shape in memory.layout.shapes]
    if place is not None:
        tensors |= {"start": place.start, "now": place.now}
        tensors |= {"momentum": place.momentum} if place.momentum is not None else {}
        tensors |= {"origin": place.origin} if place.origin is not None else {}
        content["place"] = {"first": place.first, "travelled": place.travelled}
    return content, tensors


def read_memory(path: Path, client: ClientRule | None = None) -> MemoryContent:
    """Read it back, with a client rule that is not ours as it is given; what does not fit together is refused."""
    found = read_tensors(path, KIND, VERSION, others=(2, 3, APART))
    with reading(path, KIND):
        content = found.content if found.content is not None else _first_version(found)
        if "recipe" not in content:
            content = _second_version(found, content)
        _require_vectors(found.tensors)
        stretches = _beside(path, content) if found.version == APART else _inside(found, content)
        rounds = [KeptRound.from_dict(each) for each in content["rounds"]]
        if found.version < VERSION:
            rounds, stretches = _third_version(rounds, stretches)
        recipe, chosen = Recipe.from_dict(content["recipe"], client), content.get("parameters")
        if chosen is not None and not all(isinstance(name, str) for name in chosen):
            raise ValueError("the names of its parameters are not texts")
        parameters = tuple(chosen) if chosen is not None else None
        return MemoryContent(recipe, rounds, stretches, _place(found, content), parameters, _layout(content))


def _inside(found: TensorFile, content: Mapping[str, Any]) -> list[Stretch]:
    """With vectors that are in the file."""
    stretches = []
    for at, (first, last) in enumerate(content["stretches"]):
        numbered = {name: f"{at}.{number}" for number, name in enumerate(content["clients"])}
        own = {name: found.tensors[key] for name, key in numbered.items() if key in found.tensors}
        stretches.append(Stretch(range(first, last), Held(own)))
    return stretches


def _beside(path: Path, content: Mapping[str, Any]) -> list[Stretch]:
    """With vectors that are in files beside it, each read when it is asked for."""
    files = {number: dict(own) for number, own in enumerate(content["blocks"])}
    source = VectorFiles(path.parent / FOLDER, files)
    source.require_all()
    return [
        Stretch(range(first, last), Filed(source, tuple(Block(number) for number in numbers), length))
        for first, last, numbers, length in content["stretches"]
    ]


def _place(found: TensorFile, content: Mapping[str, Any]) -> Place | None:
    if "place" not in content:
        return None
    start, now, momentum = found.tensors["start"], found.tensors["now"], found.tensors.get("momentum")
    first, travelled = int(content["place"]["first"]), float(content["place"]["travelled"])
    return Place(start, now, momentum, first, travelled, found.tensors.get("origin"))


def _layout(content: Mapping[str, Any]) -> Layout | None:
    """Older files have none."""
    if "layout" not in content:
        return None
    return Layout(tuple((str(name), torch.Size(int(size) for size in shape)) for name, shape in content["layout"]))


def _first_version(found: TensorFile) -> dict[str, Any]:
    """What a file of version 1 holds, as version 2 wrote it; its vectors are then found under their numbers."""
    rounds, names = json.loads(found.metadata["rounds"]), list(found.tensors)
    found.tensors.update({str(index): found.tensors.pop(name) for index, name in enumerate(names)})
    return {"clients": names, "rounds": rounds}


def _second_version(found: TensorFile, content: dict[str, Any]) -> dict[str, Any]:
    """What a file of version 2 holds, as this version writes it: one stretch, shares alone, no place, plain rules."""
    found.tensors.update({f"0.{index}": found.tensors.pop(str(index)) for index in range(len(content["clients"]))})
    rounds = [{"shares": shares} for shares in content["rounds"]]
    stretches = [[0, len(rounds)]] if found.tensors else []
    return {**content, "rounds": rounds, "stretches": stretches, "recipe": Recipe().as_dict()}


def _third_version(rounds: Sequence[KeptRound], stretches: Sequence[Stretch]) -> tuple[list[KeptRound], list[Stretch]]:
    """Sums of ``w_u (D_u - D)`` as sums of pulls, which they tell where weights are alike; the rest is blur."""
    pulls, blurs, read = [dict(each.pulls) for each in rounds], [dict[str, float]() for _ in rounds], []
    for stretch in stretches:
        vectors, numbers = Held(), stretch.rounds
        for name in stretch.vectors:
            vector = stretch.vectors[name]
            shares = {number: rounds[number].shares.get(name, 0.0) for number in numbers}
            known = {number: 1 / (1 - share) for number, share in shares.items() if 0 < share <= 1 - ROUNDING}
            usual = float(length(vector)) / max(len(known), 1)
            lengths = {number: rounds[number].pulls.get(name, usual) for number in known}
            factor = weighted_mean([(known[number], lengths[number]) for number in known])
            vectors[name] = factor * vector
            for number, share in shares.items():
                alone = share > 1 - ROUNDING
                blur = (
                    rounds[number].far if alone else abs(known.get(number, factor) - factor) * lengths.get(number, 0.0)
                )
                blurs[number] |= {name: blur} if blur > ROUNDING * usual else {}
                if name in pulls[number]:
                    pulls[number][name] = rounds[number].far if alone else known.get(number, 1.0) * pulls[number][name]
        read.append(Stretch(numbers, vectors))
    return [replace(each, pulls=pulls[at], blurs=blurs[at]) for at, each in enumerate(rounds)], read


def _require_vectors(vectors: Mapping[str, Tensor]) -> None:
    if len({vector.shape for vector in vectors.values()}) > 1 or any(vector.dim() != 1 for vector in vectors.values()):
        raise ValueError("its vectors are not of one length")
    if not all(vector.is_floating_point() for vector in vectors.values()):
        raise ValueError("a vector is not of floating-point numbers")
    if not all(bool(torch.isfinite(vector).all()) for vector in vectors.values()):
        raise ValueError("a vector is NaN or infinite")
