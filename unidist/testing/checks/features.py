"""Beyond the plain step: batch normalisation over ranks, precision, compression, local SGD, the compiler."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidist.compression import PowerSGD, TopK
from unidist.errors import UsageError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, check, close, refused


def equal_on_all_ranks(case: Case, model: Any) -> None:
    for everywhere in case.strategy.all_gather({"p": case.parameters(model)}):
        close(everywhere["p"], case.parameters(model), tolerance=0)


def trained(case: Case, *, epochs: int = 10, **features: Any) -> tuple[Any, float, float]:
    """An mlp after training with these features: the model, its first and its last loss over all the data."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.3, momentum=0.5), **features)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    loader = case.strategy.loader(reference.data(48), per_device_batch=4, shuffle=True, seed=3)
    losses = [case.strategy.mean([step(x, y) for x, y in loader]) for _ in range(epochs)]
    return model, losses[0], losses[-1]


@check
def batch_normalisation_over_all_ranks(case: Case) -> None:
    """The step on the shares of a batch is the plain step on the whole batch, running statistics included."""
    case.requires("sync_batchnorm")
    whole = 4 * case.backend.devices * case.size
    x, y = reference.data(whole * 2)
    numbers = np.random.RandomState(2)  # by chance a normalisation could blow up what rounding left
    weights = [
        np.asarray(numbers.uniform(-0.5, 0.5, parameter.shape) if np.ptp(parameter) else parameter).astype(
            parameter.dtype
        )
        for parameter in case.parameters(case.zoo.with_buffers())
    ]
    alone, together = case.zoo.with_buffers(), case.zoo.with_buffers()
    for model in (alone, together):
        case.backend.load_state(model, dict(zip(case.backend.state(model), weights, strict=True)))
    model, optimizer = case.strategy.prepare(together, SGD(0.1), sync_batchnorm=True)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for batch in case.strategy.loader((x, y), per_device_batch=4):
        step(*batch)
    for first in range(0, len(x), whole):
        rows = slice(first, first + whole)
        case.zoo.local_step(alone, case.backend.from_numpy(x[rows]), case.backend.from_numpy(y[rows]), 0.1)
    close(case.parameters(model), case.parameters(alone))
    # One sample more: the ranks that have none left must not count.
    for batch in case.strategy.loader((x[: whole + 2], y[: whole + 2]), per_device_batch=4):
        step(*batch)
    for rows in (slice(0, whole), slice(whole, whole + 2)):
        case.zoo.local_step(alone, case.backend.from_numpy(x[rows]), case.backend.from_numpy(y[rows]), 0.1)
    close(case.parameters(model), case.parameters(alone))


@check
def batch_normalisation_of_a_single_row(case: Case) -> None:
    """As an uneven tail may leave it: refused with what to do about it, or trained without spoiling the statistics."""
    model, optimizer = case.strategy.prepare(case.zoo.with_buffers(), SGD(0.1))
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    said = ""
    for x, y in case.strategy.loader(reference.data(case.backend.devices * case.size), per_device_batch=1):
        try:
            step(x, y)
        except UsageError as error:
            said = str(error)
    if said:
        for words in (f"rank {case.rank} of {case.size}", "single row", "tail='drop'", "batch size"):
            assert words in said, said
        assert ("sync_batchnorm=True" in said) == (case.size > 1), said
    assert all(np.isfinite(parameter).all() for parameter in case.parameters(model)), "the statistics are not finite"


@check
def mixed_precision(case: Case) -> None:
    """Parameters stay float32 and equal; the result is near that of full precision, and not the same."""
    case.requires("mixed_precision")
    for precision in ("bf16", "fp16"):
        model, first, last = trained(case, precision=precision)
        plain, _, plain_last = trained(case)
        equal_on_all_ranks(case, model)
        assert all(parameter.dtype == np.float32 for parameter in case.parameters(model))
        assert last < first
        assert abs(last - plain_last) < 0.05, f"{precision}: {last} against {plain_last}"
        assert any((a != b).any() for a, b in zip(case.parameters(model), case.parameters(plain), strict=True))
    with refused(UsageError, "precision"):
        case.strategy.prepare(case.mlp(), SGD(0.1), precision="fp8")  # type: ignore[call-overload]


@check
def compressed_gradients(case: Case) -> None:
    """Ranks stay equal to the last bit, and learn nearly as well."""
    case.requires("compression")
    exact, _, plain = trained(case)
    for compression in ("fp16", "bf16", TopK(0.25), PowerSGD(rank=1, start=2)):
        model, first, last = trained(case, compression=compression)
        equal_on_all_ranks(case, model)
        assert last < first
        assert abs(last - plain) < 0.15, f"{compression}: {last} against {plain}"
        changed = zip(case.parameters(model), case.parameters(exact), strict=True)
        travels = case.size > 1
        assert any((a != b).any() for a, b in changed) is travels, f"{compression} compressed nothing, or for nobody"
    with refused(UsageError, "compression"):
        case.strategy.prepare(case.mlp(), SGD(0.1), compression="zip")  # type: ignore[call-overload]
    for feeding_back in (TopK(0.25), PowerSGD()):
        with refused(UsageError, "loss scale", "bf16"):
            case.strategy.prepare(case.mlp(), SGD(0.1), precision="fp16", compression=feeding_back)


@check
def everything_is_the_largest_part(case: Case) -> None:
    """TopK(1.0) sends all of it: the exact step."""
    case.requires("compression")
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5), compression=TopK(1.0))
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for x, y in case.strategy.loader(reference.data(40), per_device_batch=4, shuffle=True, seed=3):
        step(x, y)
    close(case.parameters(model), case.train_serially(SGD(0.5), 40, epochs=1)[0].parameters)


@check
def local_sgd(case: Case) -> None:
    """Each rank on its own, parameters averaged every second update and at the end of the pass."""
    case.requires("local_sgd")
    share = 4 * case.backend.devices
    samples = share * case.size * 5
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5), sync_every=2)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    loader = case.strategy.loader(reference.data(samples), per_device_batch=4)
    for number, (x, y) in enumerate(loader, 1):
        step(x, y)
        if case.size > 1 and number % 2:
            everywhere = case.strategy.all_gather(case.parameters(model)[0])
            assert ((everywhere[0] == everywhere[1]).all()) == (number == 5), f"after update {number}"
    x, y = reference.data(samples)
    ranks = [reference.Serial(reference.weights(), SGD(0.5)) for _ in range(case.size)]
    for number in range(1, 6):
        for rank, serial in enumerate(ranks):
            first = ((number - 1) * case.size + rank) * share
            serial.step(x[first : first + share], y[first : first + share])
        if number in (2, 4, 5):
            means = [np.mean(parts, axis=0) for parts in zip(*(serial.parameters for serial in ranks), strict=True)]
            for serial in ranks:
                serial.parameters = [mean.copy() for mean in means]
    close(case.parameters(model), ranks[0].parameters)


@check
def averages_by_hand(case: Case) -> None:
    """`sync_every=0`: average_gradients between backward and step gives the usual step; average_parameters the mean."""
    case.requires("local_sgd")
    if case.strategy.capabilities.spelled_out is True:
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5), sync_every=0)
        for x, y in case.strategy.loader(reference.data(4 * case.backend.devices * case.size), per_device_batch=4):
            with case.strategy.forward(model):
                loss = case.zoo.cross_entropy(model, x, y)
            case.strategy.backward(loss)
            case.strategy.average_gradients(model)
            case.strategy.step(optimizer)
        serial = reference.Serial(reference.weights(), SGD(0.5))
        serial.step(*reference.data(4 * case.backend.devices * case.size))
        close(case.parameters(model), serial.parameters)
    model = case.strategy.prepare(case.mlp(), SGD(0.5), sync_every=0)[0]
    state = {name: np.full(tensor.shape, float(case.rank)) for name, tensor in case.backend.state(model).items()}
    case.backend.load_state(model, state)
    case.strategy.average_parameters(model)
    close(case.parameters(model), [np.full(array.shape, (case.size - 1) / 2) for array in state.values()])


@check
def compiled_step(case: Case) -> None:
    """The framework's compiler must not change what is learned."""
    case.requires("compile")
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy, compile=True)
    whole = 4 * case.backend.devices * case.size
    for x, y in case.strategy.loader(reference.data(whole * 3), per_device_batch=4, shuffle=True, seed=3):
        step(x, y)
    case.close_to_serial(model, case.train_serially(SGD(0.5), whole * 3, epochs=1)[0])
