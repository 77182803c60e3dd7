"""Training over two hosts: the link between them fails and comes back, is slow, loses packets, and goes for good."""

import pytest
from endure import JOBS, WORKERS, Fault, endure
from hosts import refusal

SHORT = [
    Fault("dead", loss=1.0, seconds=1.5),
    Fault("slow", delay=0.1, steps=1),
    Fault("lossy", loss=0.05, steps=5),
]
LIMIT = 6.0  # seconds: longer than a step on a busy machine, and than TCP takes to go on after 1.5 s


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", JOBS)
def test_training_survives_a_bad_link_and_ends_in_an_error_without_one(backend):
    if refusal():
        pytest.skip(f"there can be no two hosts here: {refusal()}")
    outcome = endure(backend, SHORT, LIMIT)
    assert len(outcome.compared) == WORKERS, outcome.output
    assert len({text.partition(",")[0] for text in outcome.compared}) == 1, outcome.compared
    assert all(made >= fault.steps for fault, made, _ in outcome.paces)
    if backend == "gloo":  # each host's name means 127.0.1.1 to itself, until the job does what the error says
        assert len(outcome.refused) == len(outcome.errors) == WORKERS
        assert all("Connection refused" in text and "GLOO_SOCKET_IFNAME" in text for text in outcome.refused)
    assert outcome.status and all(outcome.status), outcome.output
    for seconds, text in outcome.errors:
        assert LIMIT <= seconds < LIMIT + 20 and f"waited longer than {LIMIT:g} s (DISTDL_TIMEOUT) in " in text, text
