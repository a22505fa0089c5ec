"""Messages travel exactly, each kind of them, and what is foreign is refused with a sentence."""

from __future__ import annotations

import copy
import json
from collections import abc
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from expunge.core.vectors import Snapshot
from expunge.errors import DataError
from expunge.federation.messages.tasks import Draw, Gradient, Losses, Reply, Sum, Task, Train, Trained
from expunge.federation.messages.wire import MESSAGES, Packed, UnknownModelError, pack, unpack
from expunge.federation.training.recipe import SGD, Adam, AdamW
from federation.small import linear, norm_net

TENSORS = [
    torch.tensor([1.5, float("nan"), -0.0, float("inf"), 1e-310], dtype=torch.float64),
    torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).T,  # not contiguous
    torch.tensor(3.25, dtype=torch.bfloat16),
    torch.empty(0, 4, dtype=torch.float16),
    torch.tensor([True, False]),
    torch.tensor([[-(2**62), 7]]),
]
OPTIMISERS = [SGD(0.9, nesterov=True), Adam(weight_decay=0.1), AdamW(betas=(0.5, 0.6)), SGD(proximal_mu=0.3)]


def example(kind: Any, turn: int) -> Any:
    """A value of this type; another one at each turn."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Tensor:
        return TENSORS[turn % len(TENSORS)]
    if kind is Snapshot:
        model = Snapshot.of(norm_net(turn))
        return model if turn % 2 else replace(model, layout=None)
    if kind == SGD | Adam:
        return OPTIMISERS[turn % len(OPTIMISERS)]
    if origin in (Union, UnionType):
        return None if turn % 3 == 0 else example(next(part for part in parts if part is not NoneType), turn)
    if origin is Literal:
        return parts[turn % len(parts)]
    if origin is tuple:
        kinds = parts[:1] * (turn % 3) if parts[-1] is Ellipsis else parts
        return tuple(example(part, turn + number) for number, part in enumerate(kinds))
    if origin is abc.Mapping:
        return {name: example(parts[1], turn + number) for number, name in enumerate(["a.b", "a/b", "é"])}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{part.name: example(hints[part.name], turn + n) for n, part in enumerate(fields(kind))})
    values = {int: [0, 2**55, -1], float: [0.1, float("inf"), 1e-300], str: ["", 'ü"\n'], bool: [True, False]}
    return values[kind][turn % len(values[kind])]


def same(one: Any, other: Any) -> bool:
    """Alike to the last bit, in kind and value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if is_dataclass(one) and not hasattr(one, "shapes"):
        return all(same(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def through_json(packed: Packed) -> Packed:
    return Packed(packed.tensors, json.loads(json.dumps(packed.described)))


@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("kind", [*get_args(Task), *get_args(Reply)], ids=lambda kind: kind.__name__)
def test_every_kind_of_message_travels_exactly(kind, turn):
    message = example(kind, turn)
    assert same(message, unpack(through_json(pack(message))))


def test_no_kind_of_message_is_forgotten():
    assert set(MESSAGES.values()) == {*get_args(Task), *get_args(Reply)}


def train_task() -> Train:
    return Train(Snapshot.of(norm_net()), 1, 8, 0.1, 5, (1, 2), Draw(3, 4, True))


def test_a_known_model_is_only_named():
    task = train_task()
    whole, named = pack(task), pack(task, known=task.model.digest)
    assert named.tensors == {}
    assert named.digest == whole.digest
    assert same(unpack(named, kept=whole.model), task)
    assert pack(task, known="another").tensors.keys() == whole.tensors.keys()
    with pytest.raises(UnknownModelError, match=task.model.digest):
        unpack(named)


def test_the_digest_tells_messages_apart():
    model = Snapshot.of(linear())
    direction = torch.ones(12, dtype=torch.float64)
    messages = [
        Losses(model, direction, (0.0, 1.0)),
        Losses(model, direction, (0.0, 2.0)),
        Losses(model, -direction, (0.0, 1.0)),
        Losses(model, direction.float(), (0.0, 1.0)),
        Losses(model.moved(model.parameters + 1), direction, (0.0, 1.0)),
        Losses(model, direction, (0.0, 1.0), exclude=(1,)),
    ]
    assert len({pack(message).digest for message in messages}) == len(messages)
    assert pack(messages[0]).digest == pack(Losses(model, direction.clone(), (0.0, 1.0))).digest


def leaves(written: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in the JSON there is anything at all."""
    entries = written.items() if isinstance(written, dict) else enumerate(written) if isinstance(written, list) else ()
    return [path, *(place for key, entry in entries for place in leaves(entry, (*path, key)))]


def changed(written: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    written = copy.copy(written)
    written[path[0]] = changed(written[path[0]], path[1:], value)
    return written


FOREIGN = [None, True, -7, 0.5, "x", "0", [], ["x"], [[1]], {}, {"digest": "x", "buffers": [], "layers": [[1, 2]]}]


@pytest.mark.parametrize("kind", [*get_args(Task), *get_args(Reply)], ids=lambda kind: kind.__name__)
def test_foreign_pieces_are_refused_or_of_the_right_kind(kind):
    """Every place in the JSON with every wrong thing: a DataError, or a message whose fields fit."""
    packed = through_json(pack(example(kind, 1)))
    for path in leaves(packed.described):
        for value in FOREIGN:
            foreign = Packed(packed.tensors, changed(packed.described, path, value))
            try:
                message = unpack(foreign)
            except DataError:
                continue
            assert type(message) in MESSAGES.values()
            assert same(unpack(pack(message)), message)  # it is well-formed: it can be written again


@pytest.mark.parametrize("kind", [*get_args(Task), *get_args(Reply)], ids=lambda kind: kind.__name__)
def test_a_missing_piece_is_refused(kind):
    packed = through_json(pack(example(kind, 1)))
    for name in packed.tensors:
        with pytest.raises(DataError):
            unpack(Packed({key: t for key, t in packed.tensors.items() if key != name}, packed.described))
    for name in packed.described["fields"]:
        cut = {key: entry for key, entry in packed.described["fields"].items() if key != name}
        with pytest.raises(DataError, match="fields"):
            unpack(Packed(packed.tensors, {**packed.described, "fields": cut}))
    with pytest.raises(DataError, match="fields"):
        unpack(Packed(packed.tensors, {**packed.described, "fields": {**packed.described["fields"], "more": 1}}))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("fields", "epochs"), 1.0, "Train.epochs is not a whole number"),
        (("fields", "epochs"), True, "Train.epochs is not a whole number"),
        (("fields", "learning_rate"), "0.1", "Train.learning_rate is not a number"),
        (("fields", "learning_rate"), 10**400, "Train.learning_rate is not a number that a float can hold"),
        (("fields", "exclude"), 3, "Train.exclude is not a list"),
        (("fields", "exclude", 0), "1", "Train.exclude is not a whole number"),
        (("fields", "draw", "from_back"), 1, "Train.draw.from_back is not a truth value"),
        (("fields", "draw"), [], "Train.draw is not the fields"),
        (("fields", "model", "layers", 0, 1), [9], "layers make up"),
        (("fields", "model", "layers"), 3, "layers"),
        (("fields", "model", "layers"), [["a", [-1]], ["b", [40]]], "a model with layers"),
        (("fields", "model", "buffers"), ["x"], "not a tensor"),
        (("fields", "model", "digest"), "0", "not known here"),
        (("kind",), "Exec", "'Exec' is not known"),
        (("kind",), ["Train"], "is not known"),
        ((), [], "is not known"),
    ],
)
def test_the_refusal_says_what_is_wrong(path, value, reason):
    packed = through_json(pack(train_task()))
    with pytest.raises(DataError, match=reason):
        unpack(Packed(packed.tensors, changed(packed.described, path, value)))


def test_a_model_must_be_the_one_that_it_names():
    packed = pack(Gradient(Snapshot.of(norm_net())))
    for name, tensor in packed.tensors.items():
        with pytest.raises(DataError, match="not the model that it names"):
            unpack(Packed({**packed.tensors, name: tensor + 1}, packed.described))
    flat = next(name for name in packed.tensors if name.endswith("/parameters"))
    with pytest.raises(DataError, match="layers make up"):
        unpack(Packed({**packed.tensors, flat: packed.tensors[flat][None]}, packed.described))


def test_numbers_of_other_libraries_are_written_as_numbers():
    count, cost = torch.tensor(4), torch.tensor(0.5)
    reply = unpack(through_json(pack(Sum(torch.ones(1), count, cost))))
    assert (type(reply.count), reply.count) == (int, 4)
    assert (type(reply.sample_gradients), reply.sample_gradients) == (float, 0.5)


def test_packing_leaves_the_message_alone():
    update = torch.arange(6.0).view(2, 3).T
    reply = Trained(update, {"x": update[0]}, 1, 1, 1.0)
    pack(reply)
    assert reply.update is update
    assert reply.buffers["x"].data_ptr() == update.data_ptr()
