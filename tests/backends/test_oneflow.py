"""The OneFlow backend keeps every promise in both of its views, at world sizes 1, 2 and 3."""

from unidist.testing import conformance

test_mirrored = conformance("oneflow", zoo="unidist_oneflow.zoo", world_sizes=(1, 2, 3), view="mirrored")
test_consistent = conformance("oneflow", zoo="unidist_oneflow.zoo", world_sizes=(1, 2, 3), view="consistent")
