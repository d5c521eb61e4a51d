"""Horovod keeps every promise at world sizes 1, 2 and 3, for torch and for MXNet models; below, what only it has."""

from unidist.testing import conformance

test_promises_on_torch = conformance("horovod", zoo="unidist_torch.zoo", world_sizes=(1, 2, 3), framework="torch")
