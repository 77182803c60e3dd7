"""A training that was interrupted goes on with the random numbers that it would have had."""

import pytest
import torch
from saved_models import equip, make, train

import distdl


@pytest.mark.parametrize("kind", ["sharded", "modules"])
def test_dropout_goes_on_where_it_was(kind, tmp_path):
    def work():
        P = distdl.world()
        model = make(kind, P, dropout=0.5)
        steps, schedule = equip(model)
        train(model, steps, schedule, P, 0, 2)
        distdl.save(tmp_path, model, steps, schedule)
        return train(model, steps, schedule, P, 2, 4)

    def resume(random):
        P = distdl.world()
        make(kind, P, dropout=0.5)  # so that the layers that follow have other numbers
        model = make(kind, P, seed=1, dropout=0.5)
        steps, schedule = equip(model)
        train(model, steps, schedule, P, 0, 1)
        distdl.load(tmp_path, model, steps, schedule, random=random)
        return train(model, steps, schedule, P, 2, 4)

    torch.manual_seed(3)
    (expected,) = set(map(tuple, distdl.run_workers(work, 2)))
    torch.manual_seed(4)
    for workers in (2, 3):
        (found,) = set(map(tuple, distdl.run_workers(lambda: resume(True), workers)))
        assert found == pytest.approx(expected, rel=1e-9)
    (other,) = set(map(tuple, distdl.run_workers(lambda: resume(False), 2)))
    assert other != pytest.approx(expected, rel=1e-6)


def test_torch_generator_goes_on(tmp_path):
    model = torch.nn.Linear(2, 2)
    torch.manual_seed(5)
    distdl.save(tmp_path, model)
    expected = torch.rand(3)
    torch.manual_seed(6)
    distdl.load(tmp_path, model, random=False)
    assert not torch.equal(torch.rand(3), expected)
    distdl.load(tmp_path, model)
    assert torch.equal(torch.rand(3), expected) and torch.initial_seed() == 5
