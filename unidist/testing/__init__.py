"""The conformance suite: the promises of unidist as checks that run on real processes against any backend, by name.

A backend's whole test file:

    from unidist.testing import conformance

    test_promises = conformance("torch", zoo="unidist_torch.zoo", world_sizes=(1, 2, 3))

Each configuration is launched once, with fresh processes, and every check in it is reported as its own test.
"""

from unidist.testing.suite import Configuration, conformance, run

__all__ = ["Configuration", "conformance", "run"]
