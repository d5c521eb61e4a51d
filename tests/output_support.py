"""What the tests of progress and metrics share: a clock that stands still, and a number that is costly to read."""


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Scalar:
    """A device tensor of one number: reading it is what costs."""

    def __init__(self, value, shape=()):
        self.value, self.shape, self.reads = value, shape, 0

    def item(self):
        self.reads += 1
        return self.value
