"""A memory on disk: one safetensors file, which older versions of it can be read from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expunge.core.vectors import Layout
from expunge.federation.keeping.place import Place
from expunge.federation.keeping.rounds import KeptRound
from expunge.federation.keeping.stretches import Held, Stretch
from expunge.federation.keeping.tensor_file import TensorFile, read_tensors, reading, write_tensors
from expunge.federation.training.recipe import ClientRule, Recipe

KIND, VERSION = "memory", 3
"""Of the file; in version 1 the vectors stood under the clients' own names, in version 2 rounds had shares only."""


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
    """Write it whole or not at all."""
    clients = list(dict.fromkeys(name for stretch in memory.stretches for name in stretch.vectors))
    numbers = {name: number for number, name in enumerate(clients)}
    tensors, place = dict[str, Tensor](), memory.place
    for at, stretch in enumerate(memory.stretches):
        tensors |= {f"{at}.{numbers[name]}": stretch.vectors[name] for name in stretch.vectors}
    content: dict[str, Any] = {
        "clients": clients,
        "rounds": [each.as_dict() for each in memory.rounds],
        "stretches": [[stretch.rounds.start, stretch.rounds.stop] for stretch in memory.stretches],
        "recipe": memory.recipe.as_dict(),
    }
    if memory.parameters is not None:
        content["parameters"] = list(memory.parameters)
    if place is not None:
        tensors |= {"start": place.start, "now": place.now}
        tensors |= {"momentum": place.momentum} if place.momentum is not None else {}
        content["place"] = {"first": place.first, "travelled": place.travelled}
    write_tensors(path, KIND, VERSION, tensors, content)


def read_memory(path: Path, client: ClientRule | None = None) -> MemoryContent:
    """Read it back, with a client rule that is not ours as it is given; what does not fit together is refused."""
    found = read_tensors(path, KIND, VERSION, older=(2,))
    with reading(path, KIND):
        content = found.content if found.content is not None else _first_version(found)
        if "recipe" not in content:
            content = _second_version(found, content)
        _require_vectors(found.tensors)
        stretches = []
        for at, (first, last) in enumerate(content["stretches"]):
            numbered = {name: f"{at}.{number}" for number, name in enumerate(content["clients"])}
            own = {name: found.tensors[key] for name, key in numbered.items() if key in found.tensors}
            stretches.append(Stretch(range(first, last), Held(own)))
        rounds = [KeptRound.from_dict(each) for each in content["rounds"]]
        recipe, chosen = Recipe.from_dict(content["recipe"], client), content.get("parameters")
        if chosen is not None and not all(isinstance(name, str) for name in chosen):
            raise ValueError("the names of its parameters are not texts")
        parameters = tuple(chosen) if chosen is not None else None
        return MemoryContent(recipe, rounds, stretches, _place(found, content), parameters)


def _place(found: TensorFile, content: Mapping[str, Any]) -> Place | None:
    if "place" not in content:
        return None
    start, now, momentum = found.tensors["start"], found.tensors["now"], found.tensors.get("momentum")
    return Place(start, now, momentum, int(content["place"]["first"]), float(content["place"]["travelled"]))


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


def _require_vectors(vectors: Mapping[str, Tensor]) -> None:
    if len({vector.shape for vector in vectors.values()}) > 1 or any(vector.dim() != 1 for vector in vectors.values()):
        raise ValueError("its vectors are not of one length")
    if not all(vector.is_floating_point() for vector in vectors.values()):
        raise ValueError("a vector is not of floating-point numbers")
    if not all(bool(torch.isfinite(vector).all()) for vector in vectors.values()):
        raise ValueError("a vector is NaN or infinite")
