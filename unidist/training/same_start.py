"""Do all ranks hold the same model, in structure and in value, and train it alike? Asked once, before `prepare` makes
their values equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unidist.collectives import Collectives
from unidist.errors import RanksDisagree


def compare_ranks(
    state: Mapping[str, Any],
    to_numpy: Callable[[Any], np.ndarray[Any, Any]],
    collectives: Collectives,
    settings: Mapping[str, object],
) -> str | None:
    """A sentence when values differ, None when they do not. A different structure, or other settings, raise
    `RanksDisagree`."""
    structure = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in state.items()]
    # A function, as a rate may be, is another object on every rank.
    structure += [f"{name}={'a function' if callable(value) else repr(value)}" for name, value in settings.items()]
    values = hashlib.blake2b(digest_size=16)
    for tensor in state.values():
        values.update(to_numpy(tensor).tobytes())
    text = "\n".join(structure).encode()
    digests = collectives.all_gather(
        np.frombuffer(hashlib.blake2b(text, digest_size=16).digest() + values.digest(), np.uint8)
    )
    if any((digest[:16] != digests[0][:16]).any() for digest in digests):
        raise RanksDisagree(_difference(text, collectives))
    others = [str(rank) for rank, digest in enumerate(digests) if (digest != digests[0]).any()]
    if not others:
        return None
    return (
        f"rank{'s' * (len(others) > 1)} {', '.join(others)} began with other values than rank 0 (an unseeded "
        "initialisation?): all ranks now have those of rank 0"
    )


def _difference(text: bytes, collectives: Collectives) -> str:
    """Every rank gets every structure, so that every rank can say the same."""
    longest = collectives.all_reduce(len(text), "max")
    padded = np.zeros(longest, dtype=np.uint8)
    padded[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    structures = [raw.tobytes().rstrip(b"\0").decode().split("\n") for raw in collectives.all_gather(padded)]
    lines = []
    for rank, theirs in enumerate(structures):
        extra = [line for line in theirs if line not in set(structures[0])]
        absent = [line for line in structures[0] if line not in set(theirs)]
        if extra or absent:
            theirs_only, rank_0_only = (", ".join(listed[:3]) or "nothing" for listed in (extra, absent))
            lines.append(f"rank {rank} has {theirs_only} where rank 0 has {rank_0_only}")
    what = "; ".join(lines) or "the same names, in another order"
    return f"the ranks built different models, or train them differently: {what}"
