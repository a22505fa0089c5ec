"""expunge.audit on a real small federation: what is called what, what is refused, and that nothing is exchanged."""

import json
import math
import subprocess
import sys
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import expunge
from expunge.auditing.membership import loss_threshold_attack
from expunge.auditing.probes import drawn_samples, probe_seed
from expunge.bench.evaluation import Evaluation
from expunge.bench.scenario import Scenario
from expunge.data import Backdoor, stamp
from expunge.errors import DataError, ModelError, RequestError
from expunge.federation.engines.engine import Cost
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.registry import Outcome
from expunge.unlearning.request import Request

BACKDOOR = Backdoor(target=7, size=3, fraction=0.5, boost=4.0)
SCENARIO = Scenario(
    model="softmax",
    clients=5,
    backdoors={"client-3": BACKDOOR},
    plan=TrainingPlan(rounds=6, epochs=3, batch_size=64, learning_rate=0.1),
    seed=4,
)
NONCE = "drawn by the auditor"


@pytest.fixture(scope="module")
def world():
    """A trained federation, eleven retrained models, and the sets that an auditor has."""
    federation = SCENARIO.build()

    def module(snapshot):
        own = deepcopy(federation.model)
        snapshot.write_to(own)
        return own

    state = train(federation.engine(), federation.initial(), SCENARIO.plan)
    stay = federation.engine().without(("client-3",))
    retrained = [train(stay, federation.initial(seed), SCENARIO.plan).model for seed in range(100, 111)]
    kept = [data for name, data in federation.datasets.items() if name != "client-3"]
    dataset = federation.dataset
    return SimpleNamespace(
        federation=federation,
        snapshots=[state.model, *retrained],
        before=module(state.model),
        honest=module(retrained[10]),
        destroyed=module(federation.initial(9)),
        retrained=[module(snapshot) for snapshot in retrained[:10]],
        forgotten=federation.datasets["client-3"],
        unseen=(dataset.test_inputs, dataset.test_labels),
        retained=tuple(torch.cat(parts) for parts in zip(*kept, strict=True)),
        triggered=federation.triggered["client-3"],
        trigger=lambda inputs: stamp(inputs, BACKDOOR, dataset.white),
    )


def audited(world, after, before=None, **changes):
    whole = {
        "retained": world.retained,
        "trigger": world.trigger,
        "target": 7,
        "triggered": world.triggered,
        "retrained": world.retrained,
        "forgotten": world.forgotten,
        "unseen": world.unseen,
        "nonce": NONCE,
    }
    return expunge.audit(before or world.before, after, **(whole | changes))


def drawn_unseen(world, digest):
    chosen = drawn_samples(len(world.unseen[1]), probe_seed(digest, NONCE))
    return tuple(part[chosen] for part in world.unseen)


@pytest.fixture(scope="module")
def nothing(world):
    return audited(world, world.before)


@pytest.fixture(scope="module")
def honest(world):
    return audited(world, world.honest)


class TestVerdicts:
    def test_doing_nothing_is_under_forgotten(self, nothing):
        assert nothing.verdict == "UNDER-FORGOTTEN"
        assert "towards the trained model" in nothing.reason
        for found in nothing.attacks.values():
            assert found.unlearned == found.trained

    def test_one_more_retrained_model_is_equivalent(self, honest):
        assert honest.verdict == "EQUIVALENT", honest.reason
        assert honest.power.retrains == 10
        assert all(found.outcome == "within" for found in honest.findings if found.usable)

    def test_a_destroyed_one_is_damaged(self, world):
        found = audited(world, world.destroyed)
        assert found.verdict == "DAMAGED"
        assert {piece.what: piece.leaning for piece in found.evidence}["retained loss"] == "against"

    def test_before_and_after_exchanged_is_seen(self, world, honest):
        """Everything turns round: the verdict, the attacks, KLoM and the evidence."""
        same = drawn_unseen(world, honest.provenance.after)  # both ways the same questions
        honest = audited(world, world.honest, unseen=same)
        turned = audited(world, world.before, before=world.honest, unseen=same)
        assert turned.verdict != honest.verdict
        for attack, found in honest.attacks.items():
            assert turned.attacks[attack].trained.auc.value != turned.attacks[attack].unlearned.auc.value
            assert found.unlearned != found.trained
        assert turned.klom.before == honest.klom.after != honest.klom.before
        here, there = ({piece.what: piece.values for piece in own.evidence} for own in (honest, turned))
        assert here["retained loss"]["before"] == there["retained loss"]["after"] != here["retained loss"]["after"]
        assert (turned.provenance.before, turned.provenance.after) == (
            honest.provenance.after,
            honest.provenance.before,
        )

    def test_a_clean_request_needs_no_trigger_and_no_retained_samples(self, world):
        found = audited(world, world.honest, trigger=None, target=None, triggered=None, retained=None)
        assert {own.measure.name for own in found.findings}.isdisjoint(
            {"asr", "trigger_pull", "trigger_rank", "nearby_pull"}
        )
        assert "shadow models" not in found.attacks
        assert [piece.what for piece in found.evidence] == ["held-out data", "NO EVIDENCE without retraining"]

    def test_too_few_retrained_models_say_what_would_decide(self, world):
        none = audited(world, world.before, retrained=[])
        assert none.verdict == "UNDECIDED"
        assert "at least 3 are needed, 5 are better" in none.reason
        assert (none.attacks, none.findings, none.power, none.klom) == ({}, (), None, None)
        assert len(none.evidence) == 4
        assert none.evidence[1].what == "NOT SUPPORTED without retraining", "a live trigger is seen all the same"
        two = audited(world, world.before, retrained=world.retrained[:2])
        assert (two.verdict, two.klom) == ("UNDECIDED", None)
        assert list(two.attacks) == ["loss", "modified entropy"], "shadows need more"

    def test_too_few_samples(self, world):
        few = tuple(part[:10] for part in world.forgotten)
        found = audited(world, world.before, forgotten=few, triggered=world.triggered[:10])
        assert (found.verdict, "10 forgotten samples are too few" in found.reason) == ("UNDECIDED", True)

    def test_outputs_that_overflow_are_damaged(self, world):
        wild = deepcopy(world.before)
        with torch.no_grad():
            for parameter in wild.parameters():
                parameter.mul_(1e38)
        found = audited(world, wild)
        assert (found.verdict, found.attacks) == ("DAMAGED", {})
        assert [piece.leaning for piece in found.evidence] == ["against"]
        json.dumps(found.as_dict(), allow_nan=False)


class TestSameCode:
    def test_benchmark_federations_are_told_the_same(self, world, honest):
        evaluation = Evaluation(world.federation, Request.of("client-3"))
        evaluation = evaluation.drawn(evaluation.exam.drawn(probe_seed(world.snapshots[11].digest, NONCE)))
        before, *retrained = (evaluation.measure(snapshot) for snapshot in world.snapshots)
        judged = evaluation.judgement(retrained[10], before, retrained[:10])
        assert (judged.verdict, judged.reason) == (honest.verdict, honest.reason)
        assert [found.value for found in judged.findings] == [found.value for found in honest.findings]

    def test_membership_by_hand(self, world, nothing):
        """Triggered samples beside stamped ones, clean ones beside clean ones."""
        (inputs, labels), own = drawn_unseen(world, nothing.provenance.after), world.before
        keep = labels != 7
        sevens = torch.full((int(keep.sum()),), 7)
        losses = {
            what: F.cross_entropy(own(x), y, reduction="none").detach()
            for what, x, y in (
                ("forgotten", *world.forgotten),
                ("unseen", inputs, labels),
                ("stamped", world.trigger(inputs)[keep], sevens),
            )
        }
        expected = loss_threshold_attack(
            losses["forgotten"],
            world.forgotten[1] + 10 * world.triggered.long(),
            torch.cat([losses["unseen"], losses["stamped"]]),
            torch.cat([labels, sevens + 10]),
        ).auc
        values = {found.measure.name: found.value for found in nothing.findings}
        assert nothing.attacks["loss"].trained.auc.value == pytest.approx(expected, abs=1e-9)
        hits = own(world.trigger(inputs)[keep]).argmax(1) == 7
        assert values["asr"] == pytest.approx(float(hits.double().mean()))

        def odds(x):
            chances = own(x[keep]).detach().double().softmax(1)[:, 7]
            return torch.log(chances / (1 - chances))

        pull = (odds(world.trigger(inputs)) - odds(inputs)).mean()
        assert values["trigger_pull"] == pytest.approx(float(pull), rel=1e-6)
        scores = own(world.trigger(inputs)[keep]).detach()
        assert values["trigger_rank"] == pytest.approx(float((9 - (scores > scores[:, 7:8]).sum(1)).double().mean()))

    def test_retained_loss_and_gradient_by_hand(self, world, honest):
        found = audited(world, world.honest, l2=0.1)
        plain = {piece.what: piece.values for piece in honest.evidence}
        for name, own in (("before", world.before), ("after", world.honest)):
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in own.parameters()])
            own.zero_grad()
            loss = F.cross_entropy(own(world.retained[0]), world.retained[1])
            loss.backward()
            gradient = torch.cat([parameter.grad.reshape(-1) for parameter in own.parameters()])
            assert plain["retained loss"][name] == pytest.approx(loss.item(), rel=1e-5)
            assert plain["retained gradient"][name] == pytest.approx(float(gradient.norm()), rel=1e-4)
            with_l2 = {piece.what: piece.values for piece in found.evidence}
            assert with_l2["retained loss"][name] == pytest.approx(loss.item() + 0.05 * float(flat @ flat), rel=1e-5)
            assert with_l2["retained gradient"][name] == pytest.approx(float((gradient + 0.1 * flat).norm()), rel=1e-4)

    def test_which_samples_carry_the_trigger_matters(self, world, nothing):
        blind = audited(world, world.before, triggered=None)
        values = [{own.measure.name: own.value for own in found.findings} for found in (nothing, blind)]
        assert values[0]["asr"] == values[1]["asr"]
        assert values[0]["distance"] != values[1]["distance"]
        assert nothing.attacks["loss"] != blind.attacks["loss"]


class TestForms:
    def test_state_dicts_datasets_and_outcomes_are_taken(self, world, honest):
        outcome = Outcome("mine", ServerState(world.snapshots[11]), Cost())
        for after in (world.honest.state_dict(), outcome):
            found = audited(
                world,
                after,
                retrained=[own.state_dict() for own in world.retrained],
                forgotten=TensorDataset(*world.forgotten),
                unseen=TensorDataset(*world.unseen),
                retained=TensorDataset(*world.retained),
                triggered=world.triggered.tolist(),
            )
            assert found.judgement == honest.judgement
            assert found.attacks == honest.attacks
        assert found.evidence[-1].what == "solver", "an outcome brings its own records"

    def test_models_are_left_as_they_are(self, world):
        frozen = deepcopy(world.honest).requires_grad_(False)
        state = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
        inputs = world.unseen[0].clone()

        def painted(images):
            images[:, :, :3, :3] = 1.0
            return images

        found = audited(world, frozen, trigger=painted)
        assert all(torch.equal(tensor, state[name]) for name, tensor in frozen.state_dict().items())
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        assert all(parameter.grad is None for parameter in frozen.parameters())
        assert torch.equal(world.unseen[0], inputs), "a trigger that paints in place paints a copy"
        assert found.provenance.after == world.snapshots[11].digest

    def test_json_and_text(self, world, honest):
        content = json.loads(json.dumps(honest.as_dict(), allow_nan=False))
        assert content["verdict"] == "EQUIVALENT"
        assert content["models"] == {
            "before": world.snapshots[0].digest,
            "after": world.snapshots[11].digest,
            "retrained": [snapshot.digest for snapshot in world.snapshots[1:11]],
            "same_start": [],
        }
        assert content["expunge"] == expunge.__version__
        assert content["date"].endswith("+00:00")
        assert set(content["attacks"]) == {"loss", "modified entropy", "shadow models", "RMIA", "LiRA"}
        assert content["klom"]["before"]["value"] > content["klom"]["after"]["value"] > 0
        text = str(honest)
        assert text.startswith("EQUIVALENT: The data was to be forgotten")
        for part in (
            "With 10 retrained models",
            "attack success",
            "What no audit sees",
            "LiRA",
            "KLoM",
            "held-out data",
        ):
            assert part in text


class TestKlom:
    def test_an_honest_model_is_at_the_floor_and_the_trained_one_above(self, honest, nothing):
        assert honest.klom.after.value == pytest.approx(honest.klom.after.noise_floor, rel=0.25)
        assert honest.klom.before.value > 1.25 * honest.klom.before.noise_floor
        assert nothing.klom.after == nothing.klom.before == honest.klom.before


class Noisy(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, inputs):
        return F.dropout(self.own(inputs), 0.5, training=self.training)


class TestRefused:
    def refused(self, error, match, world, after=None, **changes):
        with pytest.raises(error, match=match):
            audited(world, world.honest if after is None else after, **changes)

    def test_models(self, world):
        self.refused(RequestError, r"retrained\[0\] and after are the same", world, after=world.retrained[0])
        self.refused(RequestError, r"retrained\[10\] and before", world, retrained=[*world.retrained, world.before])
        self.refused(
            RequestError, r"retrained\[10\] and retrained\[1\]", world, retrained=[*world.retrained, world.retrained[1]]
        )
        for wrong in (world.retrained[0], None, iter(world.retrained), "retrained"):
            self.refused(RequestError, "a list of models", world, retrained=wrong)
        self.refused(RequestError, "after is a Tensor", world, after=torch.zeros(3))
        self.refused(ModelError, "as after does not fit", world, after={"weight": torch.zeros(3)})
        self.refused(RequestError, "Give the trained model itself", world, before={"weight": torch.zeros(3)})
        broken = deepcopy(world.honest)
        next(broken.parameters()).data[0] = math.nan
        self.refused(ModelError, "given as after has a NaN", world, after=broken)
        self.refused(ModelError, r"given as retrained\[2\] has a NaN", world, retrained=[*world.retrained[:2], broken])
        other = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
        self.refused(ModelError, "outputs of different shapes", world, after=other)
        self.refused(ModelError, "a row of class scores", world, after=nn.Sequential(nn.Flatten(), nn.Linear(64, 1)))

    def test_training_mode(self, world):
        dropout = nn.Sequential(deepcopy(world.honest), nn.Dropout(0.5))
        self.refused(ModelError, r"as after is in training mode \(Dropout\): call .eval", world, after=dropout)
        assert audited(world, dropout.eval()).verdict == "EQUIVALENT"
        norm = nn.Sequential(nn.BatchNorm2d(1), deepcopy(world.honest))
        mean = norm[0].running_mean.clone()
        self.refused(ModelError, r"as after is in training mode \(BatchNorm2d\)", world, after=norm)
        assert torch.equal(norm[0].running_mean, mean)
        self.refused(ModelError, "differently: call .eval", world, after=Noisy(deepcopy(world.honest)))

    def test_samples(self, world):
        inputs, labels = world.forgotten
        cases = {
            "4 forgotten inputs for 5 labels": (inputs[:4], labels[:5]),
            "0 forgotten inputs": (inputs[:0], labels[:0]),
            "labels.long": (inputs, labels.double()),
            "labels 0 to 99": (inputs, torch.where(torch.arange(len(labels)) == 0, 99, labels)),
            "NaN or infinite value": (inputs * math.nan, labels),
            "cannot take the forgotten samples": (inputs[:, :, :3], labels),
            "must be a pair of tensors or a map-style dataset": "samples",
            "no forgotten samples": [],
            "pairs of one shape": [(inputs[0], 1, 2)],
        }
        for match, wrong in cases.items():
            self.refused(DataError, match, world, forgotten=wrong, triggered=None)
        for what in ("unseen", "retained"):
            self.refused(DataError, f"The {what} samples are the forgotten ones", world, **{what: world.forgotten})
        one = labels[0]
        alike, others = (tuple(part[own] for part in (inputs, labels)) for own in (labels == one, labels != one))
        assert min(len(alike[1]), len(others[1])) > 0
        self.refused(DataError, "with the forgotten labels", world, forgotten=alike, unseen=others, triggered=None)

    def test_options(self, world):
        self.refused(RequestError, "target .* is missing", world, target=None)
        self.refused(RequestError, "trigger .* is missing", world, trigger=None)
        self.refused(RequestError, "one of the 10 classes, not 10", world, target=10)
        self.refused(DataError, "as many, of one shape", world, trigger=lambda inputs: inputs[:1])
        self.refused(DataError, "as many, of one shape", world, trigger=lambda inputs: None)
        self.refused(DataError, "truth value for each", world, triggered=[True])
        self.refused(DataError, "truth value for each", world, triggered=world.triggered.long())
        self.refused(RequestError, "A trigger is looked for among class scores", world, loss="squared_error")
        self.refused(RequestError, "l2 belongs to the retained loss", world, l2=0.1, retained=None)


BASE_ONLY = """
import sys
for extra in ("sklearn", "matplotlib", "flwr", "cryptography"):
    sys.modules[extra] = None
import torch
from torch import nn
import expunge

chance = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(300, 4, generator=chance), torch.arange(300) % 2
sets = [(inputs[part], labels[part]) for part in (slice(0, 60), slice(60, 180), slice(180, 300))]
torch.manual_seed(0)
before, after, *retrained = (nn.Linear(4, 2) for _ in range(7))
found = expunge.audit(before, after, retrained, *sets[:2], retained=sets[2])
assert len(found.attacks) == 5 and found.klom is not None
print(found)
"""


def test_the_base_install_is_enough():
    done = subprocess.run([sys.executable, "-c", BASE_ONLY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "AUC of the attack shadow models" in done.stdout
