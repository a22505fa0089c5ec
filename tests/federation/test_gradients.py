"""What becomes of gradients before a step is seen: a client that clips answers more slowly than its rate says."""

import copy

import pytest
import torch
from torch import nn

import expunge
from expunge.federation.keeping.memory import Memory
from expunge.federation.training.gradients import EVERY, Gradients
from expunge.federation.training.notes import Note
from expunge.federation.training.recipe import SGD, Adam
from expunge.federation.training.watching import Watch
from federation.small import mlp, samples

INPUTS, LABELS = samples(24)


def trained(model, optimiser, between=lambda: None, steps=3, batches=1):
    """Some steps; returns the factor of each, as it was in truth."""
    factors = []
    for number in range(steps):
        optimiser.zero_grad()
        for part in range(batches):
            own = slice(number + part, None, batches)
            (nn.functional.cross_entropy(model(INPUTS[own]), LABELS[own]) / batches).backward()
        made = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone()
        between()
        taken = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        factors.append(float(taken @ made / (made @ made)))
        optimiser.step()
    return factors


def noted(model, watch):
    return watch.note(lambda: {name: tensor.numpy() for name, tensor in model.state_dict().items()})


def clipping(model, longest):
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), longest)


def scaling(model, factor):
    def scale():
        for parameter in model.parameters():
            parameter.grad.data *= factor  # as old code does it: no version of the gradient counts it

    return scale


class TestTheFactor:
    @pytest.mark.parametrize("batches", [1, 2])
    def test_clipping_by_length_is_seen(self, batches):
        model = mlp()
        with Watch(model=model) as watch:
            factors = trained(
                model, torch.optim.SGD(model.parameters(), lr=0.1), clipping(model, 0.1), steps=EVERY, batches=batches
            )
        note = noted(model, watch)
        assert max(factors) < 0.9
        assert note.kept == pytest.approx(sum(factors) / EVERY, rel=1e-4)
        assert note.unlike == pytest.approx(0.0, abs=1e-5)
        assert (note.learning_rate, note.rate) == (0.1, pytest.approx(0.1 * note.kept))
        assert not note.altered

    @pytest.mark.parametrize("steps", [1, 3])
    def test_it_is_seen_where_the_model_is_not_known(self, steps):
        model = mlp()
        with Watch() as watch:
            factors = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), clipping(model, 0.1), steps=steps)
        assert noted(model, watch).kept == pytest.approx(sum(factors) / steps, rel=1e-4)

    def test_long_rounds_are_sampled(self):
        model, steps = mlp(), 3 * EVERY + 1
        with Watch(model=model) as watch:
            factors = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), clipping(model, 0.1), steps=steps)
        looked_at = [own for number, own in enumerate(factors) if number < EVERY or number % EVERY == 0]
        assert noted(model, watch).kept == pytest.approx(sum(looked_at) / len(looked_at), rel=1e-4)

    @pytest.mark.parametrize("longest", [None, 1e6])
    def test_nothing_is_said_where_nothing_is_cut(self, longest):
        model = mlp()
        between = clipping(model, longest) if longest else lambda: None
        with Watch(model=model) as watch:
            trained(model, torch.optim.SGD(model.parameters(), lr=0.1), between)
        assert noted(model, watch).kept == 1.0

    @pytest.mark.parametrize("factor", [1 / 32, 1 / 3, 2.0**-16])
    def test_a_sum_that_is_made_a_mean_is_no_clipping(self, factor):
        model = mlp()
        with Watch(model=model) as watch:
            trained(model, torch.optim.SGD(model.parameters(), lr=0.1), scaling(model, factor))
        assert noted(model, watch).kept == 1.0

    def test_a_sum_that_is_made_a_mean_and_then_clipped_at_times_counts_by_the_clipping(self):
        model, cuts = mlp(), iter([1.0, 0.25, 0.5])

        def between():
            cut = next(cuts)
            for parameter in model.parameters():
                parameter.grad *= cut / 60

        with Watch(model=model) as watch:
            trained(model, torch.optim.SGD(model.parameters(), lr=0.1), between)
        assert noted(model, watch).kept == pytest.approx(1.75 / 3, rel=1e-4)
        assert not noted(model, watch).altered

    @pytest.mark.parametrize("factor", [-0.5, 0.0071])
    def test_what_cannot_be_clipping_is_said(self, factor):
        """Signs turned round; or a sum made a mean and cut in every step, of which nobody knows how much is which."""
        model = mlp()
        with Watch(model=model) as watch:
            trained(model, torch.optim.SGD(model.parameters(), lr=0.1), scaling(model, factor))
        note = noted(model, watch)
        assert (note.kept, note.unlike, note.altered) == (1.0, 1.0, True)
        assert Note.read("ada", note.facts()) == note

    def test_clipping_tensor_by_tensor_is_no_factor(self):
        model = mlp()

        def between():
            for parameter in model.parameters():
                nn.utils.clip_grad_norm_([parameter], 0.02)

        with Watch(model=model) as watch:
            trained(model, torch.optim.SGD(model.parameters(), lr=0.1), between)
        assert noted(model, watch).altered

    @pytest.mark.parametrize("way", ["autograd.grad", "a hook"])
    def test_gradients_that_backward_did_not_leave_so_are_said(self, way):
        model = mlp()
        if way == "a hook":
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        with Watch(model=model) as watch:
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(model(INPUTS), LABELS)
                if way == "a hook":
                    loss.backward()
                else:
                    for parameter, own in zip(
                        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
                    ):
                        parameter.grad = 0.1 * own
                optimiser.step()
        assert noted(model, watch).altered

    @pytest.mark.parametrize("longest", [None, 0.3])
    def test_a_loss_scale_is_taken_back(self, longest):
        """Mixed precision: what backward makes is thousands of times as long, which is no clipping."""
        model, factors = mlp(), []
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        with Watch(model=model) as watch:
            for number in range(3):
                optimiser.zero_grad()
                scaler.scale(nn.functional.cross_entropy(model(INPUTS[number:]), LABELS[number:])).backward()
                scaler.unscale_(optimiser)
                length = nn.utils.clip_grad_norm_(model.parameters(), longest or 1e9)
                factors.append(min(1.0, (longest or 1e9) / float(length)))
                scaler.step(optimiser)
                scaler.update()
        assert noted(model, watch).kept == pytest.approx(sum(factors) / 3, rel=1e-4)

    def test_noise_is_no_factor_and_is_said(self):
        model, generator = mlp(), torch.Generator().manual_seed(0)

        def noise():
            for parameter in model.parameters():
                size = parameter.grad.norm() / parameter.numel() ** 0.5
                parameter.grad += size * torch.randn(parameter.shape, generator=generator)

        with Watch(model=model) as watch:
            trained(model, torch.optim.SGD(model.parameters(), lr=0.1), noise)
        note = noted(model, watch)
        assert note.altered
        assert note.unlike == pytest.approx(0.5, abs=0.1)
        assert note.kept == pytest.approx(1.0, abs=0.25)

    def test_adams_moments_are_told_as_they_were_before_clipping(self):
        """Adam divides by them, so a client that clips answers as fast as one that does not."""
        model = mlp()
        with Watch(model=model) as watch:
            optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
            factors = trained(model, optimiser, clipping(model, 0.1))
        note, kept = noted(model, watch), sum(factors) / 3
        moments = expunge.second_moments(optimiser)
        assert note.rate == note.learning_rate == 0.1
        assert list(note.moments.values()) == pytest.approx([moment / kept for moment in moments], rel=1e-4)

    def test_a_part_that_is_not_sent_may_be_clipped(self):
        model, head = mlp(), mlp()
        with Watch() as watch:
            for own, longest in ((model, 1e6), (head, 0.01)):
                trained(own, torch.optim.SGD(own.parameters(), lr=0.1), clipping(own, longest))
        assert noted(model, watch).kept == 1.0
        assert noted(head, watch).kept < 0.2

    def test_gradients_that_vanish_or_overflow_say_nothing(self):
        weight, gradients = nn.Parameter(torch.ones(2)), Gradients()
        gradients.follow([weight])
        for factor in (0.0, float("inf")):
            weight.grad = None
            (factor * weight).sum().backward()
            gradients.taken([weight])
        assert gradients.factor({weight}) == (1.0, 0.0)

    def test_nothing_is_looked_at_afterwards(self):
        model = mlp()
        with Watch(model=model) as watch:
            trained(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1), clipping(model, 0.01))
        assert noted(model, watch).kept == 1.0
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_note_keeps_it_on_its_way():
    note = Note(SGD(), 0.1, 12, kept=0.25, unlike=0.4)
    assert Note.read("ada", note.facts()) == note
    assert (note.rate, Note(Adam(), 0.1, 12, kept=0.25).rate) == (0.025, 0.1)


def federation(between):
    """A client with wrong labels among four, all of whom change their gradients alike."""
    generator = torch.Generator().manual_seed(3)
    names = ("ada", "bob", "cyd", "dee")
    teacher = torch.randn(8, 3, generator=generator)
    inputs = {name: torch.randn(60, 8, generator=generator) for name in names}
    data = {name: (own, (own @ teacher).argmax(1)) for name, own in inputs.items()}
    data["ada"][1].fill_(2)

    def run(clients, start, memory=None):
        model = copy.deepcopy(start)
        for _ in range(15):
            before, updates = copy.deepcopy(model.state_dict()), {}
            for name in clients:
                own = copy.deepcopy(model)
                optimiser = torch.optim.SGD(own.parameters(), lr=2.0)

                def local(own=own, optimiser=optimiser, name=name):
                    for _ in range(6):
                        optimiser.zero_grad()
                        nn.functional.cross_entropy(own(data[name][0]), data[name][1]).backward()
                        between(own)
                        optimiser.step()

                if memory is None:
                    local()
                else:
                    with memory.watching(name, own):
                        local()
                updates[name] = {key: value - before[key] for key, value in own.state_dict().items()}
            if memory is not None:
                memory.record(updates, dict.fromkeys(clients, 1))
            mean = {key: sum(own[key] for own in updates.values()) / len(updates) for key in before}
            model.load_state_dict({key: before[key] + mean[key] for key in before})
        return model

    return data, run


def test_a_client_is_forgotten_where_everybody_clips(monkeypatch):
    """A rate that is ten times what counts would wear the pull down that is to be taken back."""

    def between(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    data, run = federation(between)
    torch.manual_seed(0)
    start = nn.Linear(8, 3)
    rest = {name: own for name, own in data.items() if name != "ada"}
    retrained, memory = run(tuple(rest), start), Memory(start)
    model = run(tuple(data), start, memory)

    def left(remembered):
        outcome = expunge.forget(model, rest, leaving="ada", memory=remembered)
        new = copy.deepcopy(model)
        outcome.write_to(new)
        apart = [nn.utils.parameters_to_vector(own.parameters()).detach() for own in (new, model, retrained)]
        return float((apart[0] - apart[2]).norm() / (apart[1] - apart[2]).norm()), outcome.warnings

    share, warnings = left(memory)
    assert share < 0.35
    assert not any("Gradients were changed" in warning for warning in warnings)
    monkeypatch.setattr(Gradients, "factor", lambda *_: (1.0, 0.0))
    blind = Memory(start)
    run(tuple(data), start, blind)
    assert left(blind)[0] > 2 * share


def test_other_changes_are_said_by_the_clients_names(tmp_path):
    def between(model):
        for parameter in model.parameters():
            parameter.grad.sign_()

    data, run = federation(between)
    torch.manual_seed(0)
    start = nn.Linear(8, 3)
    memory = Memory(start)
    model = run(tuple(data), start, memory)
    memory.save(tmp_path / "memory")
    rest = {name: own for name, own in data.items() if name != "ada"}
    outcome = expunge.forget(model, rest, leaving="ada", memory=Memory.load(tmp_path / "memory"))
    said = [own for own in outcome.warnings if "Gradients were changed" in own]
    assert len(said) == 1
    assert "at bob, cyd, dee." in said[0]  # how ada trained is in her vector
    assert not any("ada" in own for own in outcome.memory.doubts(None))
