"""Models of every kind forget a client: by the loss on its data they come near retrained ones, from far away.

What is trained how long was chosen on client 0 with seeds below 10; here another client leaves, of another seed.
"""

import pytest

from kinds.federated import forgotten
from kinds.kinds import KINDS

NEEDED = {"masked encoder": "transformers", "language model": "transformers", "adapters": "peft"}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_client_is_forgotten(name):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    found = forgotten(KINDS[name], "client-3", seed=50)
    assert found.nothing < -5, found
    assert abs(found.result) <= 3, found
    assert found.others[1] < found.others[0] + 0.05, found
    assert found.outcome.succeeded
