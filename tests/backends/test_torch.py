"""The torch backend keeps every promise, at world sizes 1, 2 and 3."""

from unidist.testing import conformance

test_promises = conformance("torch", zoo="unidist_torch.zoo", world_sizes=(1, 2, 3))
