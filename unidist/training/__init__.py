"""From a batch and a loss to an update that is the same on every engine."""
