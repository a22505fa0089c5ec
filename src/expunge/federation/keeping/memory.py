"""What the server remembers of each client while training: one vector, no history.

    B_u = sum over rounds of  w_u (Delta_u - Delta)

its update minus the aggregated one, times its weight in that round; nothing in a round that it missed. To first order,
training without u would have ended at ``theta - A_u`` worn down by what the others trained afterwards,
``A_u = B_u / (1 - w_u)``. The vector is derived from the client's data: it is deleted with the client.

It assumes plain averaging on the server (FedAvg), and it does not exist under secure aggregation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.core.vectors import Layout, weighted_sum
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.tensor_file import TensorFile, read_tensors, reading, write_tensors

KIND, VERSION = "memory", 2
"""Of the file; in version 1 the vectors stood under the clients' own names, without a digest."""

Update = Tensor | Mapping[str, Tensor]

_ROUNDING = 1e-9  # shares that add up to one add up to a little less in floating point


class Memory:
    """One vector per client, added to once a round, in single precision at least: rounds are many, half is too coarse.

    Args:
        model: the model that is trained; needed only where updates are recorded as named tensors.

    Example:
        >>> memory = Memory()
        >>> memory.record({"ada": torch.tensor([1.0]), "bob": torch.tensor([3.0])}, weights={"ada": 1, "bob": 1})
        >>> memory.influence(["ada"])
        tensor([-1.])
        >>> memory.without(["ada"]).clients
        ('bob',)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._layout = Layout.of(model) if model is not None else None
        self._vectors: dict[str, Tensor] = {}
        self._rounds: list[dict[str, float]] = []

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients that it remembers."""
        return tuple(self._vectors)

    @property
    def size(self) -> int | None:
        """Length of its vectors; None before the first round."""
        return next((vector.numel() for vector in self._vectors.values()), None)

    @property
    def rounds(self) -> int:
        """How many rounds were recorded."""
        return len(self._rounds)

    @property
    def stored_bytes(self) -> int:
        """What keeping it costs."""
        return sum(v.numel() * v.element_size() for v in self._vectors.values())

    def record(self, updates: Mapping[str, Update], weights: Mapping[str, float]) -> None:
        """Add one round: each participant's update (what it sent minus what it got) and its weight in the average.

        Args:
            updates: for each participant a flat vector, or named tensors (a difference of state dicts).
            weights: for each participant its weight, in any unit: sample counts will do.
        """
        vectors = {name: self._flat(update) for name, update in updates.items()}
        total = float(sum(weights.get(name, 0.0) for name in vectors))
        sound = 0 < total < math.inf and all(weight >= 0 for weight in weights.values())
        if set(updates) != set(weights) or not sound:
            raise RequestError("Each update needs a weight of at least 0, not all zero, under the same client's name.")
        if len({vector.numel() for vector in [*vectors.values(), *self._vectors.values()]}) > 1:
            raise RequestError("The updates differ in length: are they all of the same model?")
        for name, vector in vectors.items():
            if not bool(torch.isfinite(vector).all()):
                raise DataError(f"The update of client {name!r} has a NaN or infinite value: it is not recorded.")
        share = {name: weights[name] / total for name in vectors}
        mean = weighted_sum(vectors.values(), (share[name] for name in vectors))
        for name, vector in vectors.items():
            added = share[name] * (vector - mean)
            known = self._vectors.get(name)
            self._vectors[name] = added if known is None else known + added.to(known.device)
        self._rounds.append(share)

    def copy(self) -> Memory:
        """A memory of its own with the same content."""
        other = Memory()
        other._layout, other._vectors, other._rounds = self._layout, dict(self._vectors), list(self._rounds)
        return other

    def mass(self, names: Iterable[str]) -> float:
        """w_U: the weight of these clients together, averaged over the rounds in which any of them took part."""
        together = [sum(shares.get(name, 0.0) for name in names) for shares in self._rounds]
        present = [weight for weight in together if weight > 0]
        return sum(present) / len(present) if present else 0.0

    def influence(self, names: Iterable[str]) -> Tensor:
        """A_U: the sum of ``B_u`` over these clients, divided by ``1 - w_U``."""
        names = tuple(names)
        missing = [name for name in names if name not in self._vectors]
        if missing:
            known = ", ".join(self._vectors) or "none"
            raise RequestError(f"No vector of client {missing[0]!r} was kept while training; there are: {known}.")
        if not names:
            raise RequestError("Name at least one client whose influence is wanted.")
        mass = self.mass(names)
        if mass > 1 - _ROUNDING:
            raise RequestError("These clients are the whole federation: nothing would be left; retrain instead.")
        return weighted_sum((self._vectors[name] for name in names), (1 / (1 - mass) for _ in names))

    def norms(self, names: Iterable[str]) -> list[float]:
        """``||B_u||`` of each of these clients."""
        return [float(torch.linalg.vector_norm(self._vectors[name])) for name in names]

    def without(self, names: Iterable[str]) -> Memory:
        """The memory as it would be had these clients never taken part: their vectors gone, the others' corrected.

        ``B_v <- (B_v + w_v/(1-w_u) B_u) / (1-w_u)``, one client after another: exact for constant weights, so that
        leaving one by one equals leaving together. Under partial participation w_v is its mean weight over the rounds
        of u (0 where it was absent), and the other way round: an approximation, good while few clients hold most of a
        round's weight to themselves, and poor in rounds of two.
        """
        left = self.copy()
        for name in names:
            left = left._without_one(name)
        return left

    def _without_one(self, gone: str) -> Memory:
        other = Memory()
        other._layout = self._layout
        leaving = self._vectors.get(gone)
        for name, vector in self._vectors.items():
            if name == gone:
                continue
            own, theirs = self._share(name, beside=gone), self._share(gone, beside=name)
            if leaving is not None and own > 0:  # else they never met, and the leaver may have been alone (mass 1)
                vector = (vector + own / (1 - self.mass([gone])) * leaving) / (1 - theirs)
            other._vectors[name] = vector
        for shares in self._rounds:
            rest = 1 - shares.get(gone, 0.0)
            if rest > 0:
                other._rounds.append({name: share / rest for name, share in shares.items() if name != gone})
        return other

    def _share(self, name: str, beside: str) -> float:
        """Mean weight of ``name`` over the rounds in which ``beside`` took part."""
        shared = [shares.get(name, 0.0) for shares in self._rounds if shares.get(beside, 0.0) > 0]
        return sum(shared) / len(shared) if shared else 0.0

    def _flat(self, update: Update) -> Tensor:
        if not isinstance(update, Tensor):
            if self._layout is None:
                raise RequestError("To record named tensors, make the memory with its model: Memory(model).")
            update = self._layout.flatten(update)
        if update.dim() != 1 or not update.is_floating_point():
            raise RequestError("An update is a flat vector or a mapping of parameter names to tensors.")
        return update.detach().to(torch.promote_types(update.dtype, torch.float32))

    def save(self, path: Path) -> None:
        """Write it to one safetensors file."""
        vectors = {str(index): vector for index, vector in enumerate(self._vectors.values())}
        write_tensors(path, KIND, VERSION, vectors, {"clients": list(self._vectors), "rounds": self._rounds})

    @classmethod
    def load(cls, path: Path) -> Memory:
        """Read it back."""
        found, memory = read_tensors(path, KIND, VERSION), cls()
        with reading(path, KIND):
            content = found.content if found.content is not None else _first_version(found)
            vectors = {name: found.tensors[str(index)] for index, name in enumerate(content["clients"])}
            _require_vectors(vectors)
            memory._vectors, memory._rounds = vectors, [_shares(shares) for shares in content["rounds"]]
        return memory


def _first_version(found: TensorFile) -> dict[str, Any]:
    """What a file of version 1 holds, as this version writes it; its vectors are then found under their numbers."""
    rounds, names = json.loads(found.metadata["rounds"]), list(found.tensors)
    found.tensors.update({str(index): found.tensors.pop(name) for index, name in enumerate(names)})
    return {"clients": names, "rounds": rounds}


def _require_vectors(vectors: Mapping[str, Tensor]) -> None:
    if len({vector.shape for vector in vectors.values()}) > 1 or any(vector.dim() != 1 for vector in vectors.values()):
        raise ValueError("its vectors are not of one length")
    if not all(vector.is_floating_point() for vector in vectors.values()):
        raise ValueError("a vector is not of floating-point numbers")
    if not all(bool(torch.isfinite(vector).all()) for vector in vectors.values()):
        raise ValueError("a vector is NaN or infinite")


def _shares(written: Mapping[str, float]) -> dict[str, float]:
    """Each client's share in a round."""
    shares = {name: float(share) for name, share in written.items()}
    if not all(0 <= share <= 1 + _ROUNDING for share in shares.values()):
        raise ValueError("a client's share in a round is not between 0 and 1")
    return shares
