"""Small models of every kind, and clients for them: all follow one rule, and the one that leaves another."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from kinds.federated import Kind

NAMES = tuple(f"client-{number}" for number in range(5))


def chance(name: str, what: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * what + NAMES.index(name))


def fresh(make: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


# Two inputs by position


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 32), nn.Linear(4, 32), nn.Linear(32, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(first) + self.second(second)))


def two_inputs(leaver: str, count: int = 60) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        own = chance(name)
        first, second = torch.randn(count, 6, generator=own), torch.randn(count, 4, generator=own)
        labels = (first @ matrix(6, 3, 7) + second @ matrix(4, 3, 8)).argmax(dim=1)
        labels = (labels + 1) % 3 if name == leaver else labels
        found[name] = [((a, b), int(label)) for a, b, label in zip(first, second, labels, strict=True)]
    return found


def two_inputs_loss(model: nn.Module, batch: Any) -> Tensor:
    (first, second), labels = batch
    return F.cross_entropy(model(first, second), labels)


def smoothed_loss(criterion: nn.Module, model: nn.Module, batch: Any) -> Tensor:
    (first, second), labels = batch
    return criterion(model(first, second), labels)


SMOOTHED = nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0]), label_smoothing=0.1)


# Several labels that do not exclude another


def many_labels(leaver: str, count: int = 60) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        inputs = torch.randn(count, 8, generator=chance(name))
        labels = (inputs @ matrix(8, 5, 9) > 0.5).float()
        labels = labels.roll(1, dims=1) if name == leaver else labels
        found[name] = list(zip(inputs, labels, strict=True))
    return found


MANY = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 1.0, 2.0, 1.5]))


def pair_loss(criterion: Any, model: nn.Module, batch: Any) -> Tensor:
    return criterion(model(batch[0]), batch[1])


# Sentences: tokens with a mask, by name


TOKENS = 20


def sentences(leaver: str, count: int = 150, odd: float = 1.0) -> dict[str, Any]:
    """Which of two groups of tokens is in the majority; sentences have 4 to 10 of them."""
    found = {}
    for name in NAMES:
        own, rows = chance(name), []
        for number in range(count):
            length = int(torch.randint(4, 11, (1,), generator=own))
            tokens = torch.randint(1, TOKENS, (length,), generator=own)
            label = int((tokens > TOKENS // 2).float().mean() > 0.5)
            rows.append((tokens, 1 - label if name == leaver and number < odd * count else label))
        found[name] = rows
    return found


def masked(rows: list[Any]) -> dict[str, Tensor]:
    tokens = pad_sequence([own for own, _ in rows], batch_first=True)
    labels = torch.tensor([label for _, label in rows])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def encoder() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=TOKENS,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


class Reader(nn.Module):
    """An LSTM over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(TOKENS, 16), nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


def with_lengths(rows: list[Any]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens = pad_sequence([own for own, _ in rows], batch_first=True)
    lengths = torch.tensor([len(own) for own, _ in rows])
    return (tokens, lengths), torch.tensor([label for _, label in rows])


# Text


def chain(seed: int) -> Tensor:
    """What follows each token: a few others, mostly."""
    return (2.5 * matrix(TOKENS, TOKENS, seed)).softmax(dim=1)


def written(steps: Tensor, count: int, length: int, own: torch.Generator) -> Tensor:
    tokens = torch.randint(TOKENS, (count, 1), generator=own)
    for _ in range(length - 1):
        tokens = torch.cat([tokens, torch.multinomial(steps[tokens[:, -1]], 1, generator=own)], dim=1)
    return tokens


def texts(leaver: str, count: int = 40, length: int = 16, own: float = 0.5) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        steps = (1 - own) * chain(1) + own * chain(2) if name == leaver else chain(1)
        tokens = written(steps, count, length, chance(name))
        found[name] = [{"input_ids": row, "labels": row} for row in tokens]
    return found


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=TOKENS,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


@cache
def based() -> nn.Module:
    """A language model that was trained before, on something else."""
    base = fresh(gpt, 0)
    optimiser, own = torch.optim.AdamW(base.parameters(), lr=0.005), torch.Generator().manual_seed(0)
    for _ in range(100):
        tokens = written(chain(3), 32, 16, own)
        optimiser.zero_grad()
        base(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step()
    return base


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(copy.deepcopy(based()), config)


# Pictures with a label at every pixel


class SmallUNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1, stride=2), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Conv2d(2 * width, 3, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        fine = self.down(pictures)
        return self.head(torch.cat([fine, self.up(self.deep(fine))], dim=1))


def pictures(leaver: str, count: int = 60, odd: float = 0.85) -> dict[str, Any]:
    """Bright squares are 1, dark ones 2; the leaver has it the other way round. Two columns are not labelled."""
    found = {}
    for name in NAMES:
        own, rows = chance(name), []
        for number in range(count):
            picture, labels = 0.3 * torch.randn(1, 8, 8, generator=own), torch.zeros(8, 8, dtype=torch.int64)
            for label, sign in ((1, 1.0), (2, -1.0)):
                top, left = torch.randint(0, 5, (2,), generator=own).tolist()
                picture[0, top : top + 4, left : left + 4] += 1.5 * sign
                labels[top : top + 4, left : left + 4] = label
            if name == leaver and number < odd * count:
                labels = (3 - labels) % 3
            labels[:, -2:] = 255
            rows.append((picture, labels))
        found[name] = rows
    return found


PIXELS = nn.CrossEntropyLoss(ignore_index=255)

KINDS = {
    "two inputs": Kind(partial(fresh, TwoInputs), two_inputs, two_inputs_loss, rounds=9, epochs=4),
    "weighted and smoothed": Kind(
        partial(fresh, TwoInputs),
        two_inputs,
        partial(smoothed_loss, SMOOTHED),
        {"loss": SMOOTHED},
        rounds=13,
        epochs=4,
    ),
    "many labels": Kind(
        partial(fresh, lambda: nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 5))),
        many_labels,
        partial(pair_loss, MANY),
        {"loss": MANY},
        rate=0.5,
        rounds=12,
        epochs=4,
    ),
    "masked encoder": Kind(
        partial(fresh, encoder),
        partial(sentences, odd=0.5),
        own_loss,
        {"collate": masked},
        masked,
        adam=True,
        rate=0.002,
        epochs=3,
    ),
    "padded LSTM": Kind(
        partial(fresh, Reader),
        partial(sentences, odd=0.7, count=200),
        two_inputs_loss,
        {"collate": with_lengths},
        with_lengths,
        adam=True,
        rate=0.005,
        epochs=3,
    ),
    "language model": Kind(
        partial(fresh, gpt),
        texts,
        own_loss,
        adam=True,
        rate=0.002,
        epochs=5,
    ),
    "adapters": Kind(
        partial(fresh, adapted),
        partial(texts, own=0.8, count=60),
        own_loss,
        adam=True,
        rate=0.01,
        rounds=10,
    ),
    "segmentation": Kind(
        partial(fresh, SmallUNet), pictures, partial(pair_loss, PIXELS), {"loss": PIXELS}, rate=0.1, epochs=3
    ),
}
