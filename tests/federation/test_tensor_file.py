"""Every file of ours tells when it is damaged: one error that names it, or the content as it was, never another one."""

import json
import random
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot, tensors_digest
from expunge.errors import DataError, ExpungeError, ModelError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.checkpoint import load_snapshot, save_snapshot
from expunge.federation.keeping.files import read_json
from expunge.federation.keeping.history import History
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.shards import Shards
from expunge.federation.keeping.tensor_file import read_tensors, write_tensors
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.sharded import train_sharded
from federation.small import clients, norm_net

FLIPS = 400
PLAN = TrainingPlan(rounds=2, epochs=1, batch_size=4, learning_rate=0.1)
HOSTILE = [
    "__metadata__",
    "",
    "a/b",
    "..",
    "/",
    '"quoted"',
    "line\nbreak",
    "nul\0",
    "🦆",
    "\udcff",
    "x" * 10_000,
    "0",
    "1",
]


def engine(names=("ada", "bob", "cyd")):
    return LocalEngine(norm_net(), CrossEntropy(), clients(**{name: 6 + at for at, name in enumerate(names)}))


def trained():
    return train(engine(), Snapshot.of(norm_net()), PLAN, keep=Keep(updates_every=1))


def of_memory(memory):
    vectors = {name: (vector.dtype, vector.tolist()) for name, vector in memory.vectors.items()}
    return list(vectors.items()), memory.shares


def of_history(history):
    rounds = [
        (stored.number, [(name, update.tolist()) for name, update in stored.updates.items()], dict(stored.counts))
        for stored in history.rounds
    ]
    return history.initial.digest, rounds


def of_shards(shards):
    return [
        (own.slices, own.plans, dict(own.left_out), [each.digest for each in own.checkpoints]) for own in shards.shards
    ]


def memory_file(path):
    trained().memory.save(path)
    return lambda: of_memory(Memory.load(path))


def checkpoint_file(path):
    save_snapshot(trained().model, norm_net(), path)
    return lambda: load_snapshot(norm_net(), path).digest


def history_file(path):
    trained().history.save(path)
    return lambda: of_history(History.load(path))


def shards_file(path):
    train_sharded(engine(), Snapshot.of(norm_net()), PLAN, shards=2, slices=2).shards.save(path)
    return lambda: of_shards(Shards.load(path))


FILES = pytest.mark.parametrize("make", [memory_file, checkpoint_file, history_file, shards_file])


def refused(read, path):
    """One sentence of ours that names the file."""
    with pytest.raises((DataError, ModelError)) as caught:
        read()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@FILES
def test_a_flipped_bit_is_told(make, tmp_path):
    path = tmp_path / "file"
    read = make(path)
    truth, good, told, chance = read(), path.read_bytes(), [], random.Random(7)
    header = int.from_bytes(good[:8], "little") + 8
    for number in range(FLIPS):
        place = chance.randrange(header) if number % 2 else chance.randrange(len(good))
        spoiled = bytearray(good)
        spoiled[place] ^= 1 << chance.randrange(8)
        path.write_bytes(spoiled)
        try:
            found = read()
        except ExpungeError as problem:
            told.append(str(problem))
        else:
            assert found == truth, f"a bit of byte {place} was flipped"
    assert len(told) > 0.95 * FLIPS
    assert all(str(path) in sentence and "\n" not in sentence for sentence in told)


@FILES
@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_a_cut_off_file_is_told(make, tmp_path, cut):
    path = tmp_path / "file"
    read = make(path)
    path.write_bytes(path.read_bytes()[:cut])
    refused(read, path)


@FILES
def test_missing_files_and_folders_in_their_place_are_told(make, tmp_path):
    path = tmp_path / "file"
    read = make(path)
    path.unlink()
    refused(read, path)
    path.mkdir()
    refused(read, path)


def rewritten(path, change):
    """The file with something else in it, and a digest that fits: as somebody would write it who means harm."""
    (kind, header), tensors = _header(path), load_file(path)
    write_tensors(path, kind, header["version"], *change(tensors, header["content"]))


def _header(path):
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["expunge"].partition(" ")[2])
    return header["kind"], header


def nested(depth):
    return [nested(depth - 1)] if depth else []


def all_of(change):
    return lambda tensors, content: ({name: change(tensor) for name, tensor in tensors.items()}, content)


ODD_TENSORS = {
    "none": lambda tensors, content: ({}, content),
    "float8": all_of(lambda tensor: tensor.to(torch.float32).to(torch.float8_e4m3fn)),
    "complex": all_of(lambda tensor: tensor.to(torch.complex64)),
    "another shape": all_of(lambda tensor: tensor[None]),
    "a scalar": all_of(lambda tensor: tensor.sum()),
    "infinite": all_of(lambda tensor: tensor * float("inf")),
}
ODD_CONTENTS = {"a list": [3], "nothing": None, "a number": 3, "an empty object": {}, "deep": nested(300)}


@FILES
@pytest.mark.parametrize("change", ODD_TENSORS.values(), ids=ODD_TENSORS)
def test_odd_tensors_are_told_even_where_the_digest_fits(make, change, tmp_path):
    path = tmp_path / "file"
    read = make(path)
    rewritten(path, change)
    refused(read, path)


@pytest.mark.parametrize("make", [memory_file, history_file, shards_file])
@pytest.mark.parametrize("content", ODD_CONTENTS.values(), ids=ODD_CONTENTS)
def test_odd_content_is_told_even_where_the_digest_fits(make, content, tmp_path):
    path = tmp_path / "file"
    read = make(path)
    rewritten(path, lambda tensors, _: (tensors, content))
    refused(read, path)


def test_json_as_deep_as_the_sea(tmp_path):
    path = tmp_path / "file"
    text = json.dumps({"kind": "memory", "version": 2, "content": "CONTENT"}).replace('"CONTENT"', "[" * 100_000)
    digest = tensors_digest([("0", torch.ones(1))], text)
    save_file({"0": torch.ones(1)}, path, metadata={"rounds": "[" * 100_000})
    refused(lambda: Memory.load(path), path)
    save_file({"0": torch.ones(1)}, path, metadata={"expunge": f"{digest} {text}"})
    refused(lambda: Memory.load(path), path)
    for text in ("[" * 100_000, '{"a":' * 100_000, "[]", "3", "null", '"text"', ""):
        path.write_text(text)
        refused(lambda: read_json(path), path)
    path.unlink()
    path.mkdir()
    refused(lambda: read_json(path), path)


@pytest.mark.parametrize("names", [HOSTILE, ["__metadata__", "bob"]], ids=["all", "metadata"])
def test_clients_may_be_called_anything(names, tmp_path):
    source = torch.Generator().manual_seed(3)
    updates = {name: torch.randn(4, generator=source) for name in names}
    memory, history = Memory(), History(Snapshot(torch.zeros(4), {}))
    memory.record(updates, dict.fromkeys(names, 1))
    history.record(0, updates, dict.fromkeys(names, 2))
    memory.save(tmp_path / "memory")
    history.save(tmp_path / "history")
    assert of_memory(Memory.load(tmp_path / "memory")) == of_memory(memory)
    assert of_history(History.load(tmp_path / "history")) == of_history(history)
    assert Memory.load(tmp_path / "memory").clients == tuple(names)


@FILES
def test_only_the_owner_may_read(make, tmp_path):
    make(tmp_path / "file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert [place.name for place in tmp_path.iterdir()] == ["file"]


@FILES
@pytest.mark.parametrize("version", [0, 99, None, "2"])
def test_another_version_or_kind_is_refused_in_a_sentence(make, version, tmp_path):
    path = tmp_path / "file"
    read = make(path)
    kind, header = _header(path)
    write_tensors(path, kind, version, load_file(path), header["content"])
    refused(read, path)
    write_tensors(path, "recipe", header["version"], load_file(path), header["content"])
    refused(read, path)
    with pytest.raises(DataError, match="something else, 'recipe'"):
        read_tensors(path, kind, header["version"])


def test_a_memory_of_the_first_version_is_read(tmp_path):
    """Vectors of a training cannot be made again: a file from before there were digests is still worth something."""
    memory = trained().memory
    shares = memory.shares
    save_file(
        {name: (1 - memory.mass([name])) * v for name, v in memory.vectors.items()},  # sums of w (D_u - D)
        tmp_path / "old",
        metadata={"rounds": json.dumps(shares)},
    )
    read = Memory.load(tmp_path / "old")
    assert read.shares == shares
    assert list(read.vectors) == list(memory.vectors)
    for name, own in memory.vectors.items():
        torch.testing.assert_close(read.vectors[name], own, rtol=1e-12, atol=1e-15)
    numbered = {"1": torch.zeros(2), "0": torch.ones(2)}
    save_file(numbered, tmp_path / "numbers", metadata={"rounds": json.dumps([{"1": 0.5, "0": 0.5}])})
    found = Memory.load(tmp_path / "numbers")
    assert {name: found.vectors[name].tolist() for name in found.clients} == {"0": [2, 2], "1": [0, 0]}


def test_a_foreign_checkpoint_is_believed_as_far_as_it_can_be_checked(tmp_path):
    model, path = norm_net(), tmp_path / "m.safetensors"
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
    assert load_snapshot(norm_net(), path).digest == Snapshot.of(model).digest
    for name, tensor in model.state_dict().items():
        for odd in (tensor[None].clone(), tensor.float().to(torch.float8_e5m2)):
            save_file({**{key: own.clone() for key, own in model.state_dict().items()}, name: odd}, path)
            refused(lambda: load_snapshot(norm_net(), path), path)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_vectors_are_added_up_in_single_precision_at_least(given, kept):
    """256 + 1 is 256 in bfloat16: the small pulls of many rounds would all be lost behind a large one."""
    memory = Memory()
    for size in (512.0, *[2.0] * 40):
        memory.record(
            {"ada": torch.tensor([size], dtype=given), "bob": torch.tensor([0.0], dtype=given)}, {"ada": 1, "bob": 1}
        )
    assert memory.vectors["ada"].dtype == kept
    assert memory.vectors["ada"].item() == (512 + 80) / 2


def test_vectors_are_as_fine_as_the_finest_update():
    memory = Memory()
    for kind in (torch.float32, torch.float64):
        memory.record({"ada": torch.ones(1, dtype=kind), "bob": torch.zeros(1, dtype=kind)}, {"ada": 1, "bob": 1})
    assert memory.vectors["ada"].dtype == torch.float64
