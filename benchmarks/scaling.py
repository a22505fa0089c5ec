"""Seconds and peak memory of a request beside retraining, from a small network to a large one, on one device.

Data are random with something to learn: what is measured is time, which depends on shapes alone. Requests are medians
of five after one warm-up, which is told apart; of those that take long, of at least two. Retraining is timed where it
is short; else one round is, and all rounds take as many times as long (``retraining`` in the scenario of each variant
says which).

Usage: python benchmarks/scaling.py --device cuda [--only cnn] [--only resnet18] [--out results/scaling/results.json]
       python benchmarks/scaling.py --tiny            to see that it runs
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.bench.results import Results, Row, Series, Variant, environment, utc_now
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import Adam, AdamW, Recipe
from expunge.models import ViTLite, build
from expunge.models.transformer import Block
from expunge.report.plots import save_figure
from expunge.report.scaling import MEMORY, SECONDS, X_NAME, scaling_figures
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request

LEAVER, CLIENTS, CLASSES, TOKENS, WORDS = "client-4", 10, 10, 128, 4000
ENCODERS = {"3M": (192, 4, 4), "20M": (512, 6, 8), "87M": (768, 12, 12), "300M": (1024, 24, 16)}
"""Width, depth and heads."""
BOOST = 6.0
"""Of a strong attacker: half of the mean update is then its own."""
PATIENCE = 40.0
"""Requests are repeated no longer than so many seconds, but once."""
LARGE = 50_000_000
"""Models with more parameters are trained for one round, and no round is timed twice."""
DECODER = (2048, 14, 16)
"""The same of a decoder of 1B parameters."""

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One model and how it is trained.

    Attributes:
        model: makes it.
        samples: makes so many samples.
        count: of samples in all.
        plan: of the training.
        trained: how many of its rounds are really trained; retraining is timed whole where they are all.
        attack: whether the leaver has a strong backdoor.
    """

    model: Callable[[], nn.Module]
    samples: Callable[[int, torch.Generator], Data]
    count: int
    plan: TrainingPlan
    trained: int
    attack: bool = False


class Encoder(nn.Module):
    """A transformer that tells texts apart."""

    def __init__(self, width: int, depth: int, heads: int, tokens: int = TOKENS) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width) for _ in range(depth)))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits of texts."""
        places = torch.arange(texts.shape[1], device=texts.device).expand(texts.shape)
        logits: Tensor = self.classifier(self.norm(self.blocks(self.word(texts) + self.place(places))).mean(dim=1))
        return logits


def images(size: int) -> Callable[[int, torch.Generator], Data]:
    """Noise around one picture a class."""

    def made(count: int, chance: torch.Generator) -> Data:
        labels = torch.randint(CLASSES, (count,), generator=chance)
        centres = torch.randn(CLASSES, 3, size, size, generator=chance)
        return 0.2 * centres[labels] + torch.randn(count, 3, size, size, generator=chance), labels

    return made


def texts(count: int, chance: torch.Generator) -> Data:
    """Random words, some of which only one class has."""
    labels = torch.randint(CLASSES, (count,), generator=chance)
    words = torch.randint(CLASSES, WORDS, (count, TOKENS), generator=chance)
    return torch.where(torch.rand(count, TOKENS, generator=chance) < 0.1, labels[:, None], words), labels


def decoder(width: int, depth: int, heads: int) -> nn.Module:
    """A language model of Hugging Face's, of which adapters alone are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        use_cache=False,
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    frozen = LlamaForCausalLM(config).to(torch.bfloat16)  # as such models are tuned; adapters stay in float32
    adapted: nn.Module = get_peft_model(frozen, adapters)
    return adapted


def sentences(count: int, chance: torch.Generator) -> Data:
    """Texts whose labels are their own words."""
    words, _ = texts(count, chance)
    return words, words


def cases(*, tiny: bool) -> dict[str, Case]:
    """All models, small to large."""
    size, count = (8, 200) if tiny else (32, 50_000)
    fewer, few, fewest = (60, 60, 60) if tiny else (10_000, 2500, 1000)
    sgd = TrainingPlan(3 if tiny else 20, 1 if tiny else 5, 16 if tiny else 64, 0.02)
    adam = dataclasses.replace(sgd, learning_rate=0.001, recipe=Recipe(Adam()))
    adamw = dataclasses.replace(adam, recipe=Recipe(AdamW()), batch_size=16 if tiny else 32)

    def network(name: str) -> Callable[[], nn.Module]:
        return lambda: build(name, 3, size, CLASSES, seed=0)

    vit = partial(ViTLite, size=size, width=16, depth=1, heads=2) if tiny else network("vit-lite")
    found = {
        "cnn, clean": Case(network("cnn"), images(size), count, sgd, sgd.rounds),
        "cnn, strong backdoor": Case(network("cnn"), images(size), count, sgd, sgd.rounds, attack=True),
        "cnn, Adam": Case(network("cnn"), images(size), count, adam, sgd.rounds),
        "vit-lite": Case(vit, images(size), fewer, adam, 2),
        "resnet18": Case(network("cnn-narrow" if tiny else "resnet18"), images(size), fewer, sgd, 2),
    }
    encoders = {"tiny": (16, 1, 2)} if tiny else ENCODERS
    for name, shape in encoders.items():
        found[f"encoder {name}"] = Case(partial(Encoder, *shape), texts, few, adamw, 2)
    lora = partial(decoder, *((32, 1, 2) if tiny else DECODER))
    found["LoRA on a decoder"] = Case(lora, sentences, fewest, dataclasses.replace(adamw, batch_size=8), 2)
    return found


def federation(case: Case, device: str) -> tuple[Callable[[], LocalEngine], Snapshot, int]:
    """Ten clients with unequal parts of the data: what makes an engine on them, the model that they start from, and how
    many parameters it has, frozen ones, too."""
    inputs, labels = case.samples(case.count, torch.Generator().manual_seed(0))
    shares = torch.tensor([0.5 + number / (CLIENTS - 1) for number in range(CLIENTS)])
    sizes = (shares / shares.sum() * case.count).long().tolist()
    data = {}
    for number, part in enumerate(torch.arange(sum(sizes)).split(sizes)):
        own, targets = inputs[part], labels[part]
        if case.attack and f"client-{number}" == LEAVER:  # its samples alone: they are copies
            own[: len(own) // 2, ..., :6, :6] = 3.0
            targets[: len(own) // 2] = 7
        data[f"client-{number}"] = (own.to(device), targets.to(device))
    torch.manual_seed(0)
    with (
        nullcontext() if case.trained == case.plan.rounds else torch.device(device)
    ):  # a large one takes long elsewhere
        model = case.model().to(device)
    boosts = {LEAVER: BOOST} if case.attack else None
    size = sum(own.numel() for own in model.parameters())
    return partial(LocalEngine, model, CrossEntropy(), data, boosts=boosts), Snapshot.of(model), size


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    """What it gives, and its seconds."""
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    found = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return found, time.perf_counter() - started


def retraining(case: Case, engine: LocalEngine, start: Snapshot, device: str, size: int) -> tuple[float, str]:
    """Seconds without the leaver, and how they are known."""
    stay, keep = engine.without((LEAVER,)), Keep(vectors=False, checkpoints=0)
    if case.trained == case.plan.rounds:
        return timed(lambda: train(stay, start, case.plan, keep=keep), device)[1], "timed"
    once = dataclasses.replace(case.plan, rounds=1, epochs=1)
    if size < LARGE:
        train(stay, start, once, keep=keep)
    _, seconds = timed(lambda: train(stay, start, once, keep=keep), device)
    times = case.plan.rounds * case.plan.epochs
    return seconds * times, f"extrapolated from one epoch of one round, times {times}"


def measured(case: Case, device: str, repeats: int) -> dict[str, Any]:
    """All numbers of a case."""
    made, start, size = federation(case, device)
    engine = made()
    epochs = case.plan.epochs if case.trained == case.plan.rounds else 1
    plan = dataclasses.replace(case.plan, rounds=case.trained if size < LARGE else 1, epochs=epochs)
    state = train(engine, start, plan, keep=Keep(checkpoints=0))
    against, how = retraining(case, engine, start, device, size)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    del engine
    requests = [timed(lambda: _request(made(), state), device)]
    again = min(repeats, max(2, int(PATIENCE / requests[0][1])))
    requests += [timed(lambda: _request(made(), state), device) for _ in range(again)]
    outcome = requests[-1][0]
    seconds = [took for _, took in requests]
    peak = torch.cuda.max_memory_allocated() / 1e9 if device != "cpu" else None
    repairs = [name for name in ("short_round", "correction", "calibration") if name in outcome.details]
    return {
        "parameters": start.parameters.numel(),
        "seconds": statistics.median(seconds[1:]),
        "first": seconds[0],
        "every": [round(took, 4) for took in seconds[1:]],
        "retrain": against,
        "retraining": how,
        "peak": peak,
        "gradients": outcome.cost.sample_gradients,
        "rounds": outcome.cost.rounds,
        "succeeded": outcome.succeeded,
        "repairs": repairs,
    }


def _request(engine: LocalEngine, state: ServerState) -> Any:
    return method("retrace")(engine, state, Request.of(LEAVER))


def written(found: dict[str, dict[str, Any]], out: Path, asked: dict[str, Any]) -> Results:
    """The results so far, in a file, with the picture beside it."""
    rows, series, variants = [], [], {}
    for label, own in found.items():
        common = {"seed": 0, "variant": label}
        rows.append(
            Row(
                "retrace",
                seconds=own["seconds"],
                speedup=own["retrain"] / own["seconds"],
                sample_gradients=own["gradients"],
                rounds=own["rounds"],
                **common,
            )
        )
        rows.append(Row("retrain", seconds=own["retrain"], speedup=1.0, **common))
        told = {name: own[name] for name in ("parameters", "first", "every", "retraining", "succeeded", "repairs")}
        variants[label] = Variant({**told, "peak_gb": own["peak"]}, {}, {})
        for name, y_name, value in (
            ("retrace", SECONDS, own["seconds"]),
            ("retrain", SECONDS, own["retrain"]),
            ("retrace", MEMORY, own["peak"]),
        ):
            if value is not None:
                series.append(Series(name, label, X_NAME, y_name, [float(own["parameters"])], [value]))
    results = Results("scaling", asked, environment(asked["device"]), rows, {}, variants, series, utc_now())
    results.save(out)
    for name, figure in scaling_figures(results).items():
        save_figure(figure, out.parent / f"{name}.svg")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="models and data of next to nothing, to see that it runs")
    parser.add_argument("--only", action="append", default=[], help="models whose name begins so; may be repeated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/scaling/results.json"))
    asked = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for label, case in cases(tiny=asked.tiny).items():
        if asked.only and not label.startswith(tuple(asked.only)):
            continue
        started = time.perf_counter()
        try:
            found[label] = own = measured(case, asked.device, asked.repeats)
        except (torch.OutOfMemoryError, ImportError) as problem:
            print(f"{label} is left out: {str(problem).splitlines()[0]}")
            continue
        print(
            f"{label}: {own['parameters'] / 1e6:.1f}M parameters, {own['seconds']:.3f} s, "
            f"the first {own['first']:.3f} s, retraining {own['retrain']:.1f} s "
            f"({own['retraining']}), {own['peak'] or 0:.1f} GB, "
            f"{', '.join(own['repairs'])}; all in all {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        written(found, asked.out, vars(asked) | {"out": asked.out.name})
        if asked.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
