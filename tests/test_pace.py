"""How many steps may wait in an engine's queue."""

import pytest

from unidist.training import pace
from unidist.training.pace import LEAST, MOST, Pace


class Engine:
    """Does a step in so many seconds, when it is waited for."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.now, self.done = seconds, 1.0, 0
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)

    def wait_for(self, steps):
        step = steps[-1]
        assert step >= self.done, "waited for twice"
        self.now += (step + 1 - self.done) * self.seconds
        self.done = step + 1


@pytest.mark.parametrize(("seconds", "most"), [(1.0, LEAST), (1 / 16, 32), (1 / 4096, MOST)])
def test_two_seconds_of_work_wait(monkeypatch, seconds, most):
    engine = Engine(monkeypatch, seconds)
    steps = Pace(engine.wait_for)
    waiting = []
    for step in range(600):
        steps.told(step)
        steps.keep()
        waiting.append(len(steps))
        assert step + 1 - engine.done == len(steps) < MOST
    assert max(waiting[200:]) == most - 1


def test_an_engine_that_becomes_slow(monkeypatch):
    engine = Engine(monkeypatch, 0.001)
    steps = Pace(engine.wait_for)
    for step in range(400):
        engine.seconds = 0.001 if step < 200 else 2.0
        steps.keep()
        steps.told(step)
    assert len(steps) <= LEAST
