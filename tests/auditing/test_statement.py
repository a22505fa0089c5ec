import math

import pytest
import torch
from torch import nn

import expunge
from auditing import planted
from expunge.auditing.checks import leaver_check, trigger_check, usefulness_check
from expunge.auditing.evidence import Evidence
from expunge.auditing.exam import Trigger
from expunge.auditing.odd_labels import OddLabels
from expunge.auditing.statement import LIMITS, Statement, Word, evidence, worded
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ModelError, RequestError
from expunge.federation.engines.engine import Cost
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.registry import Outcome

UNSEEN = planted.samples(240, seed=1)
LEAVERS = planted.leavers()
SHORT = [planted.model(seed) for seed in (21, 22, 23)]
BACKDOOR = {"trigger": planted.stamped, "target": planted.TARGET}
DATA = {"forgotten": LEAVERS, "short": SHORT}
TRAINED = planted.model(1, taught=30.0, heart=30.0)
KNOWN = {"trigger": BACKDOOR, "trigger with short models": {**BACKDOOR, "short": SHORT}, "data": DATA}
HONEST = planted.model(2)


def taken(model, before=TRAINED, **given):
    return evidence(before, model, UNSEEN, **given)


class TestWords:
    @pytest.mark.parametrize("known", KNOWN)
    def test_what_never_saw_the_data_is_supported_and_what_did_is_not(self, known):
        supported, nothing = (taken(model, **KNOWN[known]) for model in (HONEST, TRAINED))
        assert supported.word == Word.SUPPORTED, supported
        assert nothing.word == Word.NOT_SUPPORTED, nothing
        assert nothing.checks[-1].values["kept"] == 1.0

    @pytest.mark.parametrize("known", KNOWN)
    def test_honest_models_are_mostly_supported_and_hardly_ever_refused(self, known):
        words = [taken(planted.model(seed), **KNOWN[known]).word for seed in range(40, 70)]
        assert words.count(Word.SUPPORTED) >= 22
        assert words.count(Word.NOT_SUPPORTED) <= 3

    @pytest.mark.parametrize("known", KNOWN)
    def test_half_of_it_is_too_much(self, known):
        """Half of the samples, each known as well as ever; and a trigger that lifts its target half the way."""
        half = planted.model(2)
        with torch.no_grad():
            known_by_heart = slice(planted.TRIGGER + 1, planted.TRIGGER + 1 + planted.LEFT // 2)
            half.weight[:, known_by_heart] = TRAINED.weight[:, known_by_heart]
            half.weight[planted.TARGET, planted.TRIGGER] += 1.5
        assert taken(half, **KNOWN[known]).word != Word.SUPPORTED

    def test_without_anything_known_there_is_no_evidence(self):
        found = taken(HONEST)
        assert found.word == Word.NO_EVIDENCE
        assert "short trainings" in found.sentence
        assert taken(HONEST, forgotten=LEAVERS).word == Word.NO_EVIDENCE, "the data alone has nothing to stand beside"

    def test_where_the_trained_model_knew_nothing_there_is_no_evidence(self):
        found = taken(HONEST, before=planted.model(1), **BACKDOOR, **DATA)
        assert found.word == Word.NO_EVIDENCE
        assert all("can see nothing" in check.sentence for check in found.checks[1:])

    def test_a_trigger_with_a_natural_pull_needs_short_models(self):
        """An attacker chose what pulls anyway: clean models are pulled, too, and those of short trainings show it."""
        models = [planted.model(seed) for seed in (1, 2, 21, 22, 23)]
        with torch.no_grad():
            for own in models:
                own.weight[planted.TARGET, planted.TRIGGER] += 0.8
            models[0].weight[planted.TARGET, planted.TRIGGER] += 30.0
        trained, honest, *short = models
        alone, beside = (taken(honest, before=trained, **BACKDOOR, short=own) for own in ((), short))
        assert alone.word == Word.NOT_SUPPORTED
        assert beside.word != Word.NOT_SUPPORTED
        assert beside.checks[1].values["kept"] < 0.2 < alone.checks[1].values["kept"]

    def test_a_record_is_not_read(self):
        """Doing nothing under the name of a method, with a record that claims everything."""
        details = {"steps": [{"solves": {"forgotten": {"residual_norms": [1.0, 1e-9], "iterations": 9}}}]}
        forged = Outcome("retrace", ServerState(Snapshot.of(TRAINED)), Cost(), details=details)
        plain = taken(TRAINED, **BACKDOOR, **DATA)
        assert taken(forged, **BACKDOOR, **DATA) == plain
        assert plain.word == Word.NOT_SUPPORTED

    def test_models_are_left_as_they_are(self):
        before = [own.weight.clone() for own in (TRAINED, HONEST, *SHORT)]
        evidence(TRAINED, HONEST, UNSEEN, **BACKDOOR, **DATA)
        assert all(torch.equal(own.weight, was) for own, was in zip((TRAINED, HONEST, *SHORT), before, strict=True))


class TestDamage:
    def test_a_wrecked_model_is_not_supported(self):
        wrecked = nn.Linear(planted.SIZE, planted.CLASSES, dtype=torch.float64)
        found = taken(wrecked, **BACKDOOR, **DATA)
        assert found.word == Word.NOT_SUPPORTED
        assert found.checks[0].what == "usefulness"
        assert found.checks[0].leaning == "against"

    def test_an_answer_that_is_forbidden_is_not_forgotten(self):
        masked = planted.model(1, taught=30.0)
        with torch.no_grad():
            masked.bias[planted.TARGET] -= 1000.0
        found = taken(masked, **BACKDOOR)
        assert found.word == Word.NOT_SUPPORTED
        assert f"Class {planted.TARGET}" in found.sentence or "fell" in found.sentence

    def test_one_class_of_many_is_enough(self):
        labels = torch.arange(1000) % 50
        answers = nn.functional.one_hot(labels, 50).double()
        masked = answers.clone()
        masked[:, 7] = -1.0
        inputs = torch.arange(1000)
        found = usefulness_check(lambda rows: answers[rows], lambda rows: masked[rows], (inputs, labels))
        assert found.leaning == "against"
        assert found.values["class"] == 7

    def test_a_little_worse_is_no_damage_and_better_is_none(self):
        labels = torch.zeros(400, dtype=torch.int64)
        right = torch.tensor([1.0, 0.0]).repeat(400, 1)
        worse = right.clone()
        worse[:12] = worse[:12].flip(1)
        pair = (torch.arange(400), labels)
        for before, after in ((right, worse), (worse, right)):
            found = usefulness_check(lambda rows, own=before: own[rows], lambda rows, own=after: own[rows], pair)
            assert found.leaning == "neither"

    def test_outputs_that_are_no_numbers(self):
        broken = planted.model(2)
        with torch.no_grad():
            broken.weight.fill_(1e308)
        found = taken(broken, **BACKDOOR)
        assert found.word == Word.NOT_SUPPORTED
        assert found.checks[0].what == "outputs"


class TestConvex:
    LOSS = CrossEntropy(l2=0.05)

    def fitted(self, inputs, labels):
        layer = nn.Linear(4, 3, dtype=torch.float64)
        solver = torch.optim.LBFGS(layer.parameters(), max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def closure():
            solver.zero_grad()
            norms = sum((own**2).sum() for own in layer.parameters())
            value = nn.functional.cross_entropy(layer(inputs), labels) + self.LOSS.l2 / 2 * norms
            value.backward()
            return value

        solver.step(closure)
        return layer

    def samples(self, count, seed):
        inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return inputs, (inputs[:, :3] + 0.5 * inputs[:, 1:4]).argmax(dim=1)

    def test_the_one_optimum_is_seen_and_no_other_model(self):
        retained, unseen = self.samples(80, 0), self.samples(80, 2)
        odd, labels = self.samples(40, 1)
        before = self.fitted(torch.cat([retained[0], odd]), torch.cat([retained[1], (labels + 1) % 3]))
        after = self.fitted(*retained)
        given = {"retained": retained, "l2": self.LOSS.l2}
        found = evidence(before, after, unseen, **given)
        assert found.word == Word.SUPPORTED
        assert found.checks[-1].what == "convex optimum"
        assert evidence(before, before, unseen, **given).checks[-1].leaning == "neither"
        bounds = []
        for share in (0.5, 0.2, 0.1, 0.05, 0.02, 0.01):
            midway = nn.Linear(4, 3, dtype=torch.float64)
            with torch.no_grad():
                for own, first, second in zip(*(m.parameters() for m in (midway, before, after)), strict=True):
                    own.copy_(share * first + (1 - share) * second)
            found = evidence(before, midway, unseen, **given).checks[-1]
            off, moved = found.values["distance_bound"], found.values["moved"]
            bounds.append(off / (moved - off) if moved > off else math.inf)
            assert bounds[-1] > share, "it is a bound on the true share"
            assert found.leaning == ("for" if bounds[-1] <= 0.3 else "neither")
        assert any(0.3 < bound < 1 for bound in bounds)
        assert bounds[-1] < 0.3

    def test_other_features_or_no_convexity_say_nothing(self):
        retained, unseen = self.samples(80, 0), self.samples(80, 2)
        deep = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double() for _ in range(2)]
        for own in deep:
            own[0].requires_grad_(False)
        assert len(evidence(*deep, unseen, retained=retained, l2=0.1).checks) == 1, "features that differ"
        deep[1][0].load_state_dict(deep[0][0].state_dict())
        assert len(evidence(*deep, unseen, retained=retained, l2=0.1).checks) == 2
        assert len(evidence(*deep, unseen, retained=retained).checks) == 1, "without l2 nothing is strongly convex"
        for own in deep:
            own.requires_grad_(False)
        assert len(evidence(*deep, unseen, retained=retained, l2=0.1).checks) == 1, "nothing was trained"


class TestRefusals:
    def test_no_unseen_samples_of_other_classes(self):
        inputs, labels = UNSEEN
        own = inputs[labels == planted.TARGET], labels[labels == planted.TARGET]
        with pytest.raises(DataError, match="at least 10 unseen samples of other classes"):
            evidence(TRAINED, HONEST, own, **BACKDOOR)

    def test_a_trigger_that_changes_nothing_or_the_shape(self):
        with pytest.raises(DataError, match="changes none of the unseen"):
            taken(HONEST, trigger=lambda inputs: inputs, target=1)
        with pytest.raises(DataError, match="as many, of one shape"):
            taken(HONEST, trigger=lambda inputs: inputs[:3], target=1)

    @pytest.mark.parametrize("half", [{"trigger": planted.stamped}, {"target": 2}])
    def test_half_a_backdoor(self, half):
        with pytest.raises(RequestError, match="is missing"):
            taken(HONEST, **half)

    def test_targets_and_labels_that_are_no_classes(self):
        with pytest.raises(RequestError, match="one of the 8 classes"):
            taken(HONEST, trigger=planted.stamped, target=8)
        with pytest.raises(DataError, match="forgotten samples have labels"):
            taken(HONEST, forgotten=(LEAVERS[0], LEAVERS[1] + 8), short=SHORT)

    def test_weights_that_are_no_numbers(self):
        broken = planted.model(2)
        with torch.no_grad():
            broken.weight[0, 0] = math.nan
        with pytest.raises(ModelError, match="given as after has a NaN"):
            taken(broken, **BACKDOOR)
        with pytest.raises(ModelError, match=r"short\[1\] has a NaN"):
            taken(HONEST, forgotten=LEAVERS, short=[SHORT[0], broken])

    def test_a_short_model_that_is_one_of_the_others(self):
        with pytest.raises(RequestError, match=r"short\[0\] and after are the same model"):
            taken(HONEST, forgotten=LEAVERS, short=[HONEST, SHORT[0]])
        with pytest.raises(RequestError, match=r"short\[1\] and short\[0\]"):
            taken(HONEST, forgotten=LEAVERS, short=[SHORT[0], SHORT[0]])

    def test_a_trained_model_whose_outputs_are_no_numbers(self):
        broken = planted.model(2)
        with torch.no_grad():
            broken.weight.fill_(1e308)
        with pytest.raises(DataError, match="outputs of before"):
            evidence(broken, HONEST, UNSEEN)

    def test_l2_without_retained_samples(self):
        with pytest.raises(RequestError, match="l2 belongs to the retained"):
            taken(HONEST, l2=0.1)

    def test_two_classes_have_no_placebos(self):
        inputs, labels = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
        models = [nn.Linear(3, 2) for _ in range(4)]
        found = evidence(
            *models[:2],
            (inputs, labels),
            trigger=lambda own: own + torch.tensor([0.0, 0.0, 9.0]),
            target=1,
        )
        assert "fewer than 4 classes" in found.checks[1].sentence
        assert found.checks[1].leaning == "neither"

    def test_few_odd_labels_say_nothing(self):
        found = taken(HONEST, forgotten=planted.samples(40, seed=5), short=SHORT)
        assert found.word == Word.NO_EVIDENCE
        assert "too few" in found.checks[1].sentence


class World:
    """Models as tables of scores: 2000 of the leaver's samples, the first ones with wrong labels, and 2000 unseen ones.

    All models see what a sample shows, but short trainings do not see it in hard samples, nor one class at all; who
    knows the wrong labels ranks them first.
    """

    size = 2000

    def __init__(self, odd, hard=0.0, unreached=None):
        chance = torch.Generator().manual_seed(0)
        self.shown = torch.randint(8, (2 * self.size,), generator=chance)
        self.odd = torch.arange(2 * self.size) < odd
        moves = torch.randint(1, 8, (2 * self.size,), generator=chance)
        self.labels = torch.where(self.odd, (self.shown + moves) % 8, self.shown)
        self.hard = torch.rand(2 * self.size, generator=chance) < hard
        self.hard |= torch.zeros_like(self.hard) if unreached is None else self.shown == unreached
        inputs = torch.arange(2 * self.size)
        self.forgotten = inputs[: self.size], self.labels[: self.size]
        self.unseen = inputs[self.size :], self.labels[self.size :]

    def models(self, knows, long=()):
        found = []
        for number, by_heart in enumerate(knows):
            chance = torch.Generator().manual_seed(number + 1)
            scores = torch.randn(2 * self.size, 8, generator=chance, dtype=torch.float64)
            seen = ~self.hard | (number < len(long) and long[number])
            scores += 20 * seen[:, None] * nn.functional.one_hot(self.shown, 8)
            confused = nn.functional.one_hot((self.shown + 1) % 8, 8) - nn.functional.one_hot(self.shown, 8)
            scores += 20 * (~seen)[:, None] * confused
            scores += 50 * (self.odd & by_heart)[:, None] * nn.functional.one_hot(self.labels, 8)
            found.append(lambda rows, own=scores: own[rows])
        return found


class TestChecks:
    def test_what_chooses_a_sample_does_not_measure_it(self):
        """With chance for models, who chose the samples would be low on them, and a clean model seem to know them."""
        world = World(odd=2000)
        before, after, *short = world.models(knows=(True, False, False, False, False))
        found = leaver_check(before, after, world.forgotten, world.unseen, short)
        assert abs(found.values["kept"]) < 0.05

    def test_a_label_that_one_of_the_others_thinks_of_is_not_odd(self):
        knowing, other = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]), torch.tensor([[0.0, 4.0, 3.0, 2.0, 1.0]])
        found = OddLabels.of((torch.zeros(1), torch.tensor([0])), [knowing, other, other])
        assert found.chosen.tolist() == [True, False, False]
        assert found.shown.tolist() == [1, 1, 1]

    def test_what_longer_training_teaches_anybody_is_taken_off(self):
        """A fifteenth of all samples is hard: short trainings do not get them, longer ones do, also of unseen ones."""
        world = World(odd=150, hard=1 / 15)
        before, after, *short = world.models(knows=(True, False, False, False, False), long=(True, True))
        found = leaver_check(before, after, world.forgotten, world.unseen, short)
        assert found.values["samples"] > 200, "more odd labels than wrong ones"
        assert abs(found.values["kept"]) < 0.1
        assert found.leaning == "for"

    def test_classes_that_short_trainings_do_not_reach_are_left_out(self):
        """Otherwise all that the leaver has of such a class would look like something that was taught."""
        world = World(odd=300, unreached=3)
        before, after, *short = world.models(knows=(True, False, False, False, False), long=(True, True))
        found = leaver_check(before, after, world.forgotten, world.unseen, short)
        wrong = world.odd & (world.labels != 3)
        assert found.values["samples"] <= int(wrong[: world.size].sum())
        assert abs(found.values["kept"]) < 0.06

    def test_without_unseen_samples_of_a_class_its_labels_say_nothing(self):
        world = World(odd=300)
        before, after, *short = world.models(knows=(True, False, False, False, False))
        inputs, labels = world.unseen
        none_of_three = inputs[labels != 3], labels[labels != 3]
        counts = [
            leaver_check(before, after, world.forgotten, own, short).values["samples"]
            for own in (world.unseen, none_of_three)
        ]
        assert counts[1] < counts[0]

    def test_the_natural_pull_is_taken_off_class_by_class(self):
        trigger = Trigger(lambda inputs: planted.stamped(inputs.clone()), planted.TARGET)
        found = trigger_check(TRAINED, SHORT[0], UNSEEN, trigger, [SHORT[0]])
        assert found.values["after"] == 0.0

    def test_one_short_model_is_too_few(self):
        found = leaver_check(TRAINED, HONEST, LEAVERS, UNSEEN, SHORT[:1])
        assert (found.leaning, found.values) == ("neither", {})


class TestStatement:
    PIECES = (
        Evidence("a", "for", "One.", {}),
        Evidence("b", "against", "Two.", {}),
        Evidence("c", "neither", "3.", {}),
    )

    @pytest.mark.parametrize(
        ("chosen", "word"),
        [((0, 2), "SUPPORTED"), ((0, 1, 2), "NOT SUPPORTED"), ((1, 2), "NOT SUPPORTED"), ((2,), "NO EVIDENCE")],
    )
    def test_the_word(self, chosen, word):
        assert worded([self.PIECES[number] for number in chosen]).word.value == word

    def test_for_a_reader_and_for_json(self):
        found = worded(self.PIECES)
        assert str(found).splitlines() == [
            "NOT SUPPORTED: Two.",
            *(f"  {own.what} ({own.leaning}): {own.sentence}" for own in self.PIECES),
            f"  {LIMITS}",
        ]
        assert found.as_dict()["checks"][1] == {"what": "b", "leaning": "against", "sentence": "Two.", "values": {}}
        assert found.as_dict()["word"] == "NOT SUPPORTED"

    def test_it_is_at_the_door(self):
        assert expunge.evidence is evidence
        assert isinstance(taken(HONEST), Statement)
