"""How a model answers: against values worked out by hand, and that padding never counts."""

import math

import pytest
import torch
from torch import nn

from expunge.bench.answering import answered, probabilities, rouge_recall, said, truth_ratios
from expunge.data.tokens import ANSWER, END, PADDING, UNCOUNTED, Tokens
from expunge.models import GPT

TOKENS = Tokens(["Where was Ada born? Ada was born in Rome, and died in Paris."], 300)
ASKED = [("Where was Ada born?", "In Rome."), ("Who?", "Ada was born in Rome, and died in Paris.")]


class Follows(nn.Module):
    """After each token another one, with probability 0.6; all others share the rest."""

    def __init__(self, after: dict[int, int], size: int = 5) -> None:
        super().__init__()
        self._scores = torch.full((size, size), math.log(0.4 / (size - 1)))
        for token, following in after.items():
            self._scores[token, following] = math.log(0.6)

    def forward(self, inputs):
        return self._scores[inputs]


def test_a_probability_is_the_geometric_mean_over_the_tokens_that_count():
    rows = torch.tensor([[3, 4, 3, 4], [3, 3, 0, 0]]), torch.tensor([[UNCOUNTED, 3, 4, 4], [UNCOUNTED, 3, -100, -100]])
    found = probabilities(Follows({3: 4, 4: 3}), rows)
    torch.testing.assert_close(found, torch.tensor([(0.6 * 0.6 * 0.1) ** (1 / 3), 0.1], dtype=torch.float64))


def test_a_truth_ratio_is_the_mean_of_the_wrong_over_the_paraphrased():
    ratios = truth_ratios(torch.tensor([0.5, 0.1]), torch.tensor([[0.1, 0.2, 0.6], [0.2, 0.2, 0.2]]))
    torch.testing.assert_close(ratios, torch.tensor([0.6, 2.0]))


@pytest.mark.parametrize(
    ("right", "answer", "recall"),
    [
        ("The cat sat on the mat.", "The cat sat on the mat.", 1.0),
        ("the cat sat on the mat", "mat the on sat cat the", 3 / 6),  # in their order: "the sat the"
        ("a b c d", "x a y c d z", 3 / 4),
        ("a b", "", 0.0),
        ("Rome (1958)", "in ROME, 1958!", 1.0),
        ("a a b", "a b", 2 / 3),  # a word counts as often as it is there
    ],
)
def test_rouge_counts_the_longest_common_words_in_order(right, answer, recall):
    assert rouge_recall(right, answer) == pytest.approx(recall)


def test_only_answers_and_their_ends_are_targets():
    inputs, targets = TOKENS.rows(ASKED, 40)
    for row, (question, answer) in enumerate(ASKED):
        counted = targets[row][targets[row] != UNCOUNTED].tolist()
        assert counted == [*TOKENS.encoded(" " + answer), END]
        before = inputs[row].tolist().index(ANSWER)
        assert inputs[row][:before].tolist() == TOKENS.encoded(question)
        assert (targets[row][:before] == UNCOUNTED).all()
        assert inputs[row][before + 1 :].tolist()[: len(counted) - 1] == counted[:-1]  # each is what comes after
    whole = TOKENS.rows(ASKED, 40, whole=True)[1]
    question, answer = ASKED[0]
    everything = [*TOKENS.encoded(question), ANSWER, *TOKENS.encoded(" " + answer), END]
    assert whole[0][whole[0] != UNCOUNTED].tolist() == everything[1:]


def test_what_does_not_fit_is_left_out_and_a_question_leaves_room_for_its_answer():
    inputs, targets = TOKENS.rows([(ASKED[1][1], ASKED[1][1])], 8)
    assert inputs[0].tolist().index(ANSWER) == 3
    assert targets[0].tolist() == [UNCOUNTED] * 3 + TOKENS.encoded(" " + ASKED[1][1])[:5]
    assert TOKENS.fitting(ASKED[1][1], ASKED[1][1], 8) == TOKENS.decoded(TOKENS.encoded(" " + ASKED[1][1])[:4]).strip()
    assert TOKENS.fitting(*ASKED[0], 40) == ASKED[0][1]


def test_padding_does_not_count():
    torch.manual_seed(0)
    model = GPT(TOKENS.size, 60, width=16, depth=2, heads=2)
    short, long = (probabilities(model, TOKENS.rows(ASKED, length)) for length in (40, 60))
    torch.testing.assert_close(short, long, rtol=1e-5, atol=0.0)
    together = answered(model, TOKENS, [question for question, _ in ASKED], 40, "cpu")
    assert together == [answered(model, TOKENS, [question], 40, "cpu")[0] for question, _ in ASKED]


def test_the_likeliest_token_is_said_until_the_end_or_until_a_row_is_full():
    ends = Follows({ANSWER: 3, 3: 4, 4: END})
    assert said(ends, [[ANSWER], [PADDING, 3, ANSWER]], 6, "cpu") == [[3, 4], [3, 4]]
    never = Follows({ANSWER: 3, 3: 3})
    assert said(never, [[ANSWER], [4, ANSWER]], 4, "cpu") == [[3, 3, 3], [3, 3]]


def test_a_model_that_learnt_an_answer_says_it():
    torch.manual_seed(0)
    model = GPT(TOKENS.size, 40, width=32, depth=1, heads=2)
    inputs, targets = TOKENS.rows(ASKED, 40)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets).backward()
        optimiser.step()
    assert answered(model, TOKENS, [question for question, _ in ASKED], 40, "cpu") == [right for _, right in ASKED]
    assert float(probabilities(model, (inputs, targets)).min()) > 0.8
