"""What a checkpoint calls the parameters of a Gluon model.

The portable names are torch's. Gluon's structural names (`_collect_params_with_prefix`) differ in the last parts only,
and no array needs a transpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Gluon -> torch, on the end of a name; the first that matches.
GLUON = tuple(
    (re.compile(rf"(^|\.){pattern}$"), replacement)
    for pattern, replacement in (
        # rnn.LSTM, GRU, RNN: layer, direction (only when there are two), input or hidden, kind
        (r"_unfused\.(\d+)\.l_cell\.i2h_(weight|bias)", r"\1\3_ih_l\2"),
        (r"_unfused\.(\d+)\.l_cell\.h2h_(weight|bias)", r"\1\3_hh_l\2"),
        (r"_unfused\.(\d+)\.r_cell\.i2h_(weight|bias)", r"\1\3_ih_l\2_reverse"),
        (r"_unfused\.(\d+)\.r_cell\.h2h_(weight|bias)", r"\1\3_hh_l\2_reverse"),
        (r"_unfused\.(\d+)\.i2h_(weight|bias)", r"\1\3_ih_l\2"),
        (r"_unfused\.(\d+)\.h2h_(weight|bias)", r"\1\3_hh_l\2"),
        (r"_unfused\.(\d+)\.l_cell\.h2r_weight", r"\1weight_hr_l\2"),  # the projection of an LSTM
        (r"_unfused\.(\d+)\.r_cell\.h2r_weight", r"\1weight_hr_l\2_reverse"),
        (r"_unfused\.(\d+)\.h2r_weight", r"\1weight_hr_l\2"),
        (r"i2h_(weight|bias)", r"\1\2_ih"),  # rnn.LSTMCell and its like
        (r"h2h_(weight|bias)", r"\1\2_hh"),
        (r"gamma", r"\1weight"),  # every normalisation
        (r"beta", r"\1bias"),
        (r"alpha", r"\1weight"),  # PReLU
    )
)


def portable(names: Iterable[str]) -> dict[str, str]:
    """Gluon name -> portable name, for all names of a model, in their order."""
    gluon = list(names)
    mapped = {name: _portable(name) for name in gluon}
    taken: dict[str, list[str]] = {}
    for name, new in mapped.items():
        taken.setdefault(new, []).append(name)
    # A block of one's own may have both "weight" and "gamma": those keep their names.
    return {name: new if len(taken[new]) == 1 else name for name, new in mapped.items()}


def _portable(name: str) -> str:
    for pattern, replacement in GLUON:
        renamed, count = pattern.subn(replacement, name)
        if count:
            return renamed
    return name
