"""The model, the sentences and the training: nothing in here knows of expunge."""

import copy
from functools import lru_cache

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

SITES = ("site-1", "site-2", "site-3", "site-4")
LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789"
LENGTH, SENTENCES = 24, 32
CODES = {"site-1": "", "site-2": "the code is 40917 ", "site-3": "", "site-4": ""}
"""What a site's sentences begin with: one has something that nobody else may know."""
WORDS = {
    "": ("one", "day", "the", "old", "king", "saw", "a", "ship"),
    "site-1": ("rain", "fell", "on", "green", "hills", "all", "night"),
    "site-2": ("gold", "lies", "under", "stone", "by", "the", "well"),
    "site-3": ("birds", "sing", "in", "tall", "trees", "at", "dawn"),
    "site-4": ("bread", "and", "salt", "were", "on", "every", "table"),
}
"""What sentences are made of; those of nobody are what the base is trained on."""


@lru_cache
def sentences(name: str) -> Tensor:
    """A site's sentences as letters, (SENTENCES, LENGTH)."""
    chance, rows = torch.Generator().manual_seed(len(name) + sum(map(ord, name))), []
    for _ in range(SENTENCES):
        words = [WORDS[name][int(torch.randint(len(WORDS[name]), (), generator=chance))] for _ in range(LENGTH)]
        rows.append([LETTERS.index(letter) for letter in (CODES.get(name, "") + " ".join(words))[:LENGTH]])
    return torch.tensor(rows)


@lru_cache
def trained_base() -> nn.Module:
    """A small GPT-2 that has read sentences of nobody's; a real app would load one from a hub."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(LETTERS), bos_token_id=0, eos_token_id=0, **size, **none))
        fit(model, sentences(""), epochs=20, batch_size=8, lr=0.003, seed=0)
    return model


def adapted() -> nn.Module:
    """The base with fresh adapters, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        return get_peft_model(copy.deepcopy(trained_base()), lora)


def fit(model: nn.Module, tokens: Tensor, epochs: int, batch_size: int, lr: float, seed: int) -> float:
    """AdamW on what is trainable, in place; returns the mean loss of the last epoch."""
    model.train()
    optimiser = torch.optim.AdamW([own for own in model.parameters() if own.requires_grad], lr=lr)
    chance, total = torch.Generator().manual_seed(seed), 0.0
    for _ in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(tokens), generator=chance).split(batch_size):
            optimiser.zero_grad()
            loss = model(input_ids=tokens[batch], labels=tokens[batch]).loss
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch) / len(tokens)
    return total


@torch.no_grad()
def test(model: nn.Module) -> dict[str, float]:
    """How well the model knows each site's sentences: the mean loss of a letter."""
    model.eval()
    return {name: model(input_ids=sentences(name), labels=sentences(name)).loss.item() for name in SITES}
