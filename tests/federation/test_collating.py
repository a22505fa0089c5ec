"""Whatever people keep their samples in is taken for what it is, or refused with the line that makes it fit."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from expunge.core.batch import Batch
from expunge.core.losses import CrossEntropy, PerSample
from expunge.core.vectors import Snapshot
from expunge.errors import DataError
from expunge.federation.engines.client import Client
from expunge.federation.engines.fitting import require_fitting
from expunge.federation.engines.local_data import LocalData
from expunge.federation.messages.tasks import Gradient, Train

INPUTS, LABELS = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 0, 1, 1, 0])
ROWS = list(zip(INPUTS, LABELS.tolist(), strict=True))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


SAME = {
    "tensors": (INPUTS, LABELS),
    "arrays": (INPUTS.numpy(), LABELS.numpy()),
    "rows": ROWS,
    "arrays in rows": [(x.numpy(), y) for x, y in ROWS],
    "lists in rows": [(x.tolist(), y) for x, y in ROWS],
    "a torch dataset": TensorDataset(INPUTS, LABELS),
    "a loader": DataLoader(TensorDataset(INPUTS, LABELS), batch_size=2),
    "a shuffling loader": DataLoader(ROWS, batch_size=2, shuffle=True),
    "a loader without batches": DataLoader(TensorDataset(INPUTS, LABELS), batch_size=None),
    "a batch": Batch.of(INPUTS, LABELS),
}


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_the_same_samples_in_other_clothes(source):
    data = LocalData(source, "ada")
    assert len(data) == 6
    assert data.warnings == ()
    for own in (data.take([4, 1]), data.first(5).take(torch.tensor([4, 1]))):
        assert torch.equal(own.inputs[0], INPUTS[[4, 1]])
        assert torch.equal(own.targets, LABELS[[4, 1]])
    assert data.available([1]).tolist() == [0, 2, 3, 4, 5]


NAMED = {
    "columns": {"input_ids": INPUTS, "label": LABELS},
    "rows": [{"input_ids": x.tolist(), "label": y} for x, y in ROWS],
    "pairs with a dict": [({"input_ids": x}, y) for x, y in ROWS],
    "columns with a dict": ({"input_ids": INPUTS.numpy()}, LABELS),
    "targets": [{"input_ids": x, "targets": y} for x, y in ROWS],
}


@pytest.mark.parametrize("source", NAMED.values(), ids=NAMED)
def test_inputs_by_name(source):
    batch = LocalData(source, "ada").take([4, 1])
    assert batch.inputs == ()
    assert torch.equal(batch.named["input_ids"], INPUTS[[4, 1]])
    assert torch.equal(batch.targets, LABELS[[4, 1]])


@pytest.mark.parametrize("source", [[((x, x + 1), y) for x, y in ROWS], ((INPUTS, INPUTS + 1), LABELS)])
def test_several_inputs_by_position(source):
    batch = LocalData(source, "ada").take([4, 1])
    assert torch.equal(batch.inputs[1], INPUTS[[4, 1]] + 1)


def test_numbers_in_rows_have_the_precision_of_tensors():
    batch = LocalData([([0.5, 1.0], 0.25)], "ada").take([0])
    assert (batch.inputs[0].dtype, batch.targets.dtype) == (torch.float32, torch.float32)


REFUSED = {
    r"two DataLoaders: give the one": (DataLoader(ROWS), DataLoader(ROWS)),
    r"a stream.*list\(dataset\)": Stream(),
    r"a stream, and.*list\(dataset\)": DataLoader(Stream()),
    r"none of them is 'labels'.*collate=": [{"x": 1.0, "y": 2}],
    r"has 'text', which is no number: .*remove_columns\(\['text'\]\)": [{"text": "good", "label": 1}],
    r"do not go into one batch.*pads": [(torch.ones(2), 0), (torch.ones(3), 1)],
    r"must give \(input, target\) pairs, of several": [(1.0, 2.0, 3)],
    r"6 inputs but 5 targets": (INPUTS, LABELS[:5]),
    r"has a NaN": (INPUTS / 0 * 0, LABELS),
    r"must be a pair of tensors, a map-style dataset or a DataLoader, not str": "data.csv",
    r"without tensors in it": {"train": ROWS, "label": ROWS},
}


@pytest.mark.parametrize(("reason", "source"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_taken_is_refused_with_the_line_that_helps(reason, source):
    with pytest.raises(DataError, match=reason):
        LocalData(source, "ada").take([0, 1] if len(source) > 1 else [0])


@pytest.mark.parametrize("sampler", [SubsetRandomSampler([0, 2]), WeightedRandomSampler([1.0] * 6, 6)])
def test_of_a_loader_that_draws_all_samples_are_taken_and_it_is_said(sampler):
    data = LocalData(DataLoader(ROWS, sampler=sampler), "ada")
    assert len(data) == 6
    assert data.warnings == (
        "The data of client 'ada' is a DataLoader that draws samples: all of its dataset are taken.",
    )


# Padding


SENTENCES = [([1, 2, 3], 0), ([4], 1), ([5, 6], 1), ([7, 8, 9, 10], 0), ([2, 2], 1)]


def padded(rows):
    tokens = pad_sequence([torch.tensor(own) for own, _ in rows], batch_first=True)
    return {"tokens": tokens, "labels": torch.tensor([label for _, label in rows])}


class Bag(nn.Module):
    """Sees how far its batch was padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 2, padding_idx=0)
        self.widths: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.widths.append(tokens.shape[1])
        return self.embedding(tokens).sum(dim=1)


@pytest.mark.parametrize("source", [SENTENCES, DataLoader(SENTENCES, collate_fn=padded)], ids=["rows", "loader"])
def test_every_training_batch_is_padded_by_itself(source):
    model = Bag()
    data = LocalData(source, "ada", padded if source is SENTENCES else None)
    client = Client(data, model, CrossEntropy())
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3))
    client.perform(Train(Snapshot.of(model), 1, 2, 0.1, 3))
    assert model.widths == [max(len(SENTENCES[i][0]) for i in part) for part in torch.split(order, 2)]


def test_a_padded_batch_has_the_gradient_of_its_samples():
    model = Bag().double()
    client = Client(LocalData(SENTENCES, "ada", padded), model, CrossEntropy())
    found = client.perform(Gradient(Snapshot.of(model)))
    singles = [
        nn.functional.cross_entropy(model(torch.tensor([own])), torch.tensor([label])) for own, label in SENTENCES
    ]
    exact = torch.autograd.grad(sum(singles), model.embedding.weight)[0]
    assert torch.allclose(found.total, exact.flatten())


def test_a_collate_that_loses_samples_is_refused():
    with pytest.raises(DataError, match="makes 1 samples of 2"):
        LocalData(ROWS, "ada", lambda rows: Batch.of(*(torch.zeros(1) for _ in range(2)))).take([0, 1])


# Whether data, model and loss go together


@pytest.mark.parametrize(
    ("model", "source", "loss", "reason"),
    [
        (nn.Linear(3, 2), (INPUTS, LABELS), CrossEntropy(), "cannot take the data of client 'ada'"),
        (nn.Linear(2, 2), [{"x": 1.0, "label": 0}], CrossEntropy(), "unexpected keyword argument 'x'"),
        (nn.Linear(2, 2), (INPUTS, LABELS + 5), CrossEntropy(), "'ada' has labels 5 to 6"),
        (nn.Linear(2, 2), (INPUTS, torch.tensor([0] * 5 + [9])), CrossEntropy(), "'ada' has labels 0 to 9"),
        (nn.Flatten(0, 1), (INPUTS, LABELS), CrossEntropy(), r"outputs of shape \(8,\) for 4 samples"),
        (nn.Linear(2, 1), (INPUTS, LABELS), PerSample(lambda z, y: (z - z.mean()).sum(1) + 0 * y), "no sum over"),
    ],
)
def test_what_does_not_go_together_is_told_of_its_client(model, source, loss, reason):
    model.register_parameter("spare", nn.Parameter(torch.zeros(1)))
    with pytest.raises(DataError, match=reason):
        require_fitting(model, LocalData(source, "ada"), loss)


def test_trying_leaves_the_model_in_its_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    model[1].eval()
    require_fitting(model, LocalData((INPUTS, LABELS), "ada"), CrossEntropy())
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_sample_whose_label_does_not_count_is_refused_where_it_is_read():
    model = nn.Linear(2, 2)
    client = Client(LocalData([*ROWS, (INPUTS[0], -100)], "ada"), model, CrossEntropy())
    with pytest.raises(DataError, match="has the label -100, which does not count"):
        client.perform(Gradient(Snapshot.of(model)))


def test_numpy_columns_share_no_type_with_lists():
    with pytest.raises(DataError, match="must be a pair"):
        LocalData((np.zeros((2, 2)).tolist(), [0, 1]), "ada")
