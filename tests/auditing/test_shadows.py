"""Attacks with shadow models: formulas against plain loops, and what they reach on overfitted networks."""

import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from auditing.overfitted import SHADOWS, TARGETS, world
from expunge.auditing.lira import lira, moderated_variances, u_lira
from expunge.auditing.membership import measure_attack
from expunge.auditing.rmia import rmia
from expunge.auditing.shadows import _classifier, half_splits, shadow_model_attack
from expunge.errors import DataError, RequestError

seeds = st.integers(0, 10_000)


def random_case(seed, shadows=9, samples=6):
    """Signals, masks with at least three shadows on each side, and a target."""
    random = np.random.default_rng(seed)
    masks = random.random((shadows, samples)) < 0.5
    masks[:3], masks[3:6] = True, False
    return random.normal(0, 2, samples), random.normal(0, 2, (shadows, samples)) + masks, masks


class TestHalfSplits:
    @given(st.integers(2, 20), st.integers(40, 80), seeds)
    def test_each_sample_is_in_half_of_the_shadows(self, shadows, samples, seed):
        masks = half_splits(shadows, samples, seed)
        assert masks.shape == (shadows, samples)
        assert masks.dtype == np.bool_
        assert (masks.sum(axis=0) == shadows // 2).all()
        np.testing.assert_array_equal(masks, half_splits(shadows, samples, seed))

    def test_samples_are_drawn_apart(self):
        masks = half_splits(16, 2000, seed=0)
        assert masks.mean(axis=1) == pytest.approx(np.full(16, 0.5), abs=0.05)
        assert abs(np.corrcoef(masks[:, 0], masks[:, 1])[0, 1]) < 1
        assert not np.array_equal(masks, half_splits(16, 2000, seed=1))

    def test_what_cannot_be_split_is_refused(self):
        for arguments in ((1, 10), (4, 1)):
            with pytest.raises(RequestError):
                half_splits(*arguments, seed=0)


class TestLira:
    @given(seeds)
    def test_per_example_and_global_by_loops(self, seed):
        target, shadows, masks = random_case(seed)
        columns = range(len(target))
        sides = {side: [shadows[masks[:, i] == side, i] for i in columns] for side in (True, False)}
        pooled = {
            side: math.sqrt(sum(np.sum((v - v.mean()) ** 2) for v in values) / sum(len(v) - 1 for v in values))
            for side, values in sides.items()
        }
        for mode in ("per-example", "global"):

            def deviation(side, i, mode=mode):
                return np.std(sides[side][i], ddof=1) if mode == "per-example" else pooled[side]

            def log_density(side, i, deviation=deviation):
                return scipy.stats.norm(sides[side][i].mean(), deviation(side, i)).logpdf(target[i])

            online = [log_density(True, i) - log_density(False, i) for i in columns]
            offline = [(target[i] - sides[False][i].mean()) / deviation(False, i) for i in columns]
            assert lira(target, shadows, masks, variance=mode) == pytest.approx(online)
            assert lira(target, shadows, masks, online=False, variance=mode) == pytest.approx(offline)

    @given(seeds)
    def test_swapped_masks_turn_the_online_scores_round(self, seed):
        target, shadows, masks = random_case(seed)
        for mode in ("per-example", "global", "shrunk"):
            there = lira(target, shadows, masks, variance=mode)
            assert lira(target, shadows, ~masks, variance=mode) == pytest.approx(-there)

    @given(seeds, st.floats(0.1, 10), st.floats(-5, 5))
    def test_blind_to_the_scale_of_the_signal(self, seed, scale, shift):
        target, shadows, masks = random_case(seed)
        for mode in ("per-example", "global", "shrunk"):
            moved = lira(scale * target + shift, scale * shadows + shift, masks, variance=mode)
            assert moved == pytest.approx(lira(target, shadows, masks, variance=mode), rel=1e-6, abs=1e-6)

    def test_default_variance_by_the_number_of_shadows(self):
        for shadows, mode in ((63, "shrunk"), (64, "per-example")):
            case = random_case(0, shadows)
            np.testing.assert_array_equal(lira(*case), lira(*case, variance=mode))

    def test_tensors_are_taken_too(self):
        target, shadows, masks = random_case(0)
        tensors = torch.tensor(target), torch.tensor(shadows), torch.tensor(masks)
        np.testing.assert_array_equal(lira(*tensors), lira(target, shadows, masks))

    def test_what_does_not_fit_is_refused(self):
        target, shadows, masks = random_case(0)
        none_out, one_in = masks.copy(), masks.copy()
        none_out[:, 0], one_in[:, 1] = True, False
        one_in[0, 1] = True
        for wrong, message in ((none_out, "shadows without it, and one has 0"), (one_in, "with it, and one has 1")):
            with pytest.raises(DataError, match=message):
                lira(target, shadows, wrong)
        lira(target, shadows, one_in, online=False)  # shadows with the sample are not asked
        with pytest.raises(DataError, match="booleans"):
            lira(target, shadows, masks[:, :3])
        with pytest.raises(DataError, match="The target has signals of 3 samples"):
            lira(target[:3], shadows, masks)
        with pytest.raises(DataError, match="NaN"):
            lira(target, np.where(masks, np.nan, shadows), masks)
        with pytest.raises(DataError, match="copies"):
            lira(target, np.ones_like(shadows), masks)
        with pytest.raises(RequestError, match="no variance 'fixed'"):
            lira(target, shadows, masks, variance="fixed")


class TestModeratedVariances:
    def draws(self, true, freedom, seed=0):
        random = np.random.default_rng(seed)
        return true * random.chisquare(freedom, len(true)) / freedom

    def test_equal_variances_become_the_pooled_one(self):
        found = moderated_variances(self.draws(np.full(4000, 3.0), 7), np.full(4000, 7.0))
        assert found == pytest.approx(np.full(4000, 3.0), rel=0.15)

    @pytest.mark.parametrize("prior", [3.0, 10.0])
    def test_weight_of_the_common_variance_is_found(self, prior):
        """Variances from Smyth's own model: 2 prior / chi-square(prior)."""
        freedom, random = 7, np.random.default_rng(1)
        true = 2.0 * prior / random.chisquare(prior, 20000)
        variances = self.draws(true, freedom)
        found = moderated_variances(variances, np.full(20000, float(freedom)))
        slope = np.polyfit(variances, found, 1)[0]
        assert slope == pytest.approx(freedom / (prior + freedom), rel=0.05)
        assert np.mean((np.log(found) - np.log(true)) ** 2) < 0.7 * np.mean((np.log(variances) - np.log(true)) ** 2)

    def test_a_variance_of_zero_is_lifted(self):
        found = moderated_variances(np.array([0.0, 1.0, 5.0, 0.2]), np.full(4, 3.0))
        assert (found > 0).all()


class TestULira:
    def test_is_lira_between_unlearned_and_retrained(self):
        target, shadows, masks = random_case(3)
        for mode in ("per-example", "global", "shrunk"):
            found = u_lira(target, shadows, shadows, forgotten=masks, absent=~masks, variance=mode)
            np.testing.assert_array_equal(found, lira(target, shadows, masks, variance=mode))

    def test_traces_are_seen_in_both_directions_and_a_retrain_is_not(self):
        """Unlearning that leaves samples worse off than retraining does is a trace, though their loss is large."""
        random, samples = np.random.default_rng(0), 1500
        hardness = random.normal(0, 3, samples)

        def models(count, trace=0.0):
            return hardness + trace + random.normal(0, 1, (count, samples))

        for trace, expected in ((1.0, 0.72), (-1.0, 0.72), (0.0, 0.5)):
            unlearned, retrained = models(8, trace), models(8)
            found = [u_lira(models(1, shift)[0], unlearned, retrained) for shift in (trace, 0.0)]
            assert measure_attack(*found).auc.value == pytest.approx(expected, abs=0.03)

    def test_what_does_not_fit_is_refused(self):
        target, shadows, _ = random_case(0)
        with pytest.raises(DataError, match="that forgot it"):
            u_lira(target, shadows[:1], shadows)
        with pytest.raises(DataError, match="shadows without it"):
            u_lira(target, shadows, shadows[:1])
        with pytest.raises(DataError, match="The target has signals"):
            u_lira(target, shadows, shadows[:, :2])


class TestRmia:
    @staticmethod
    def logs(seed, *shape):
        return np.log(np.random.default_rng(seed).uniform(0.05, 1, shape))

    @given(seeds, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.3, 1.0]))
    def test_pair_by_pair(self, seed, gamma, a):
        _, _, masks = random_case(seed)
        target, shadows = self.logs(seed, 6), self.logs(seed + 1, 9, 6)
        population, others = self.logs(seed + 2, 11), self.logs(seed + 3, 9, 11)

        def guess(p):
            return ((1 + a) * p + 1 - a) / 2

        p, q = np.exp(shadows), np.exp(others).mean(axis=0)
        both = [(p[masks[:, i], i].mean() + p[~masks[:, i], i].mean()) / 2 for i in range(6)]
        out = [guess(p[~masks[:, i], i].mean()) for i in range(6)]
        for online, marginal in ((True, both), (False, out)):
            ratios = np.exp(target) / marginal
            pairs = ratios[:, None] / (np.exp(population) / guess(q))[None] > gamma
            found = rmia(target, shadows, masks, population, others, gamma=gamma, online=online, offline_a=a)
            assert found == pytest.approx(pairs.mean(axis=1))

    def test_a_population_that_shadows_were_trained_on(self):
        _, _, masks = random_case(0)
        target, shadows = self.logs(0, 6), self.logs(1, 9, 6)
        found = rmia(target, shadows, masks, target, shadows, masks)
        np.testing.assert_array_equal(np.sort(found), np.arange(6) / 6)  # each above those that are below it

    def test_what_does_not_fit_is_refused(self):
        _, _, masks = random_case(0)
        target, shadows = self.logs(0, 6), self.logs(1, 9, 6)
        for options in ({"gamma": 0.0}, {"gamma": math.nan}, {"offline_a": 1.5}):
            with pytest.raises(RequestError, match="gamma above 0"):
                rmia(target, shadows, masks, target, shadows, **options)
        with pytest.raises(DataError, match="log-probabilities"):
            rmia(-target, shadows, masks, target, shadows)
        with pytest.raises(DataError, match="at least 1 shadow with it"):
            rmia(target, shadows, np.zeros_like(masks), target, shadows)
        with pytest.raises(DataError, match="at least 1 shadow without it"):
            rmia(target, shadows, np.ones_like(masks), target, shadows)
        with pytest.raises(DataError, match="of 4 shadows"):
            rmia(target, shadows, masks, target, shadows[:4])
        with pytest.raises(DataError, match="The target has signals of 6 samples"):
            rmia(target, shadows, masks, target, shadows[:, :4])
        with pytest.raises(DataError, match="no population's"):
            rmia(target, shadows, masks, [], shadows)


class TestOverfitted:
    """Eight targets that learned noisy labels by heart, sixteen shadows."""

    TRAINED = slice(SHADOWS)
    TARGET_ROWS = range(SHADOWS, SHADOWS + TARGETS)

    def measured(self, attack, masks):
        """Mean AUC and true positive rate over the targets."""
        found = [measure_attack(s[mask], s[~mask]) for s, mask in ((attack(i), masks[i]) for i in self.TARGET_ROWS)]
        return np.mean([f.auc.value for f in found]), np.mean([f.tpr_at_1_percent.value for f in found])

    @pytest.mark.parametrize("online", [True, False])
    def test_lira_and_rmia_see_it_and_better_than_the_loss(self, online):
        masks, trained = world().masks, self.TRAINED
        confidence, log_p = world().signals("confidence"), world().signals("loss")
        others = world().signals("loss", unseen=True)
        loss_auc, _ = self.measured(lambda i: log_p[i], masks)
        for auc, rate in (
            self.measured(lambda i: lira(confidence[i], confidence[trained], masks[trained], online), masks),
            self.measured(
                lambda i: rmia(log_p[i], log_p[trained], masks[trained], others[i], others[trained], online=online),
                masks,
            ),
        ):
            assert auc > max(0.78, loss_auc + 0.05)
            assert rate > 0.15

    def test_one_variance_beats_one_for_each_example_at_16_shadows(self):
        better = {"global": [], "shrunk": []}
        for seed in range(3):
            masks, confidence = world(seed).masks, world(seed).signals("confidence")
            shadows, trained_on = confidence[self.TRAINED], masks[self.TRAINED]
            found = {
                mode: np.array(self.measured(partial(_lira, confidence, shadows, trained_on, mode), masks))
                for mode in ("per-example", "global", "shrunk")
            }
            for mode, gains in better.items():
                gains.append(found[mode] - found["per-example"])
        for gains in better.values():
            auc, rate = np.mean(gains, axis=0)
            assert auc > 0.004
            assert rate > 0.04

    def test_samples_that_nobody_saw_give_one_half(self):
        """Memberships that never were: drawn for unseen samples, for the shadows and apart for each target."""
        confidence, log_p = world().signals("confidence", unseen=True), world().signals("loss", unseen=True)
        seen, masks, trained = world().signals("loss"), world().masks, self.TRAINED
        random, count = np.random.default_rng(5), confidence.shape[1]
        invented = np.concatenate([half_splits(SHADOWS, count, seed=5), random.random((TARGETS, count)) < 0.5])
        for attack in (
            lambda i: lira(confidence[i], confidence[trained], invented[trained]),
            lambda i: lira(confidence[i], confidence[trained], invented[trained], online=False),
            lambda i: rmia(log_p[i], log_p[trained], invented[trained], seen[i], seen[trained], masks[trained]),
        ):
            aucs = [measure_attack(s[m], s[~m]).auc for s, m in ((attack(i), invented[i]) for i in self.TARGET_ROWS)]
            assert sum(found.covers(0.5) for found in aucs) >= TARGETS - 1
            assert np.mean([found.value for found in aucs]) == pytest.approx(0.5, abs=0.02)

    def test_the_shadow_model_attack_sees_it_and_not_where_there_is_nothing(self):
        here, trained = world(), self.TRAINED
        for i in self.TARGET_ROWS[:3]:
            found = shadow_model_attack(
                here.logits[trained], here.masks[trained], here.labels, here.logits[i], here.labels
            )
            assert measure_attack(found[here.masks[i]], found[~here.masks[i]]).auc.low > 0.65
        unseen, labels = here.unseen_logits, here.unseen_labels
        invented = half_splits(SHADOWS, len(labels), seed=7)
        halves = np.random.default_rng(8).random(len(labels)) < 0.5
        nothing = shadow_model_attack(unseen[trained], invented, labels, unseen[SHADOWS], labels)
        assert measure_attack(nothing[halves], nothing[~halves]).auc.covers(0.5)


def _lira(signals, shadows, masks, variance, target):
    return lira(signals[target], shadows, masks, variance=variance)


class TestShadowModelAttack:
    def case(self, per_class, classes=3, seed=0):
        """One shadow of each kind; members are surer of their label, class 2 the other way round."""
        random = np.random.default_rng(seed)
        labels = torch.tensor(np.repeat(np.arange(classes), per_class))
        masks = np.stack([np.ones(len(labels), dtype=bool), np.zeros(len(labels), dtype=bool)])
        sure = np.where(labels.numpy() == 2, -3.0, 3.0) * masks + random.normal(0, 0.5, masks.shape)
        logits = torch.zeros(2, len(labels), classes, dtype=torch.float64)
        logits.scatter_(2, labels.expand(2, -1)[..., None], torch.tensor(sure)[..., None])
        return logits, masks, labels

    def test_a_classifier_for_each_class_where_there_are_enough(self):
        """Members of class 2 are less sure: only a classifier of its own can know."""
        logits, masks, labels = self.case(per_class=60)
        probe, _, probe_labels = self.case(per_class=60, seed=1)
        for label in range(3):
            own = probe_labels == label
            inside, outside = (
                shadow_model_attack(logits, masks, labels, probe[i][own], probe_labels[own]) for i in (0, 1)
            )
            assert measure_attack(inside, outside).auc.value > 0.95

    def test_the_classifier_is_balanced_logistic_regression(self):
        """Beside scikit-learn's, with twice as many members as others."""
        chance = np.random.default_rng(0)
        truth = np.arange(300) < 200
        features = chance.normal(0, (1, 5, 0.1), (300, 3)) + 0.7 * truth[:, None] * (1, 5, 0.1)
        oracle = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", tol=1e-8, max_iter=1000))
        expected = oracle.fit(features, truth).decision_function(features)
        assert _classifier(features, truth)(features) == pytest.approx(expected, abs=1e-3)
        flat = np.column_stack([features, np.ones(300)])
        assert _classifier(flat, truth)(flat) == pytest.approx(expected, abs=1e-3), "what never varies says nothing"

    def test_few_samples_share_one(self):
        logits, masks, labels = self.case(per_class=20)
        inside, outside = (shadow_model_attack(logits, masks, labels, logits[i], labels) for i in (0, 1))
        sure = labels.numpy() != 2
        assert measure_attack(inside[sure], outside[sure]).auc.value > 0.95

    def test_what_does_not_fit_is_refused(self):
        logits, masks, labels = self.case(per_class=5)
        with pytest.raises(DataError, match="no shadow sample has"):
            shadow_model_attack(logits[:, :10], masks[:, :10], labels[:10], logits[0], labels)
        with pytest.raises(DataError, match="the target's 2 classes"):
            shadow_model_attack(logits, masks, labels, logits[0][:, :2], labels)
        with pytest.raises(DataError, match="both members and non-members"):
            shadow_model_attack(logits[:1], masks[:1], labels, logits[0], labels)
        with pytest.raises(DataError, match="one label each"):
            shadow_model_attack(logits, masks, labels[:4], logits[0], labels)
        with pytest.raises(DataError, match="NaN or infinite"):
            shadow_model_attack(logits * math.nan, masks, labels, logits[0], labels)


class TestTheClassifier:
    @pytest.mark.parametrize("apart", [0.0, 0.5, 30.0])
    def test_it_is_at_the_minimum_that_another_solver_finds(self, apart):
        """Members that cannot be told, that can, and that are wholly apart."""
        chance = np.random.default_rng(0)
        truth = np.arange(300) % 3 == 0
        features = chance.normal(size=(300, 4)) + apart * truth[:, None]
        rows = np.column_stack([(features - features.mean(axis=0)) / features.std(axis=0), np.ones(300)])
        signs, weights = np.where(truth, 1.0, -1.0), 150 / np.where(truth, 100, 200)

        def penalised(beta):
            ridge = np.append(beta[:-1], 0.0)
            return weights @ np.logaddexp(0.0, -signs * (rows @ beta)) + 0.5 * ridge @ ridge

        other = minimize(penalised, np.zeros(5), method="BFGS", options={"gtol": 1e-8}).x
        found = _classifier(features, truth)(features)
        assert np.allclose(found, rows @ other, atol=1e-4)
