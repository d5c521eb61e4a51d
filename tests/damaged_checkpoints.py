"""Checkpoints that were damaged or made to mislead, loaded on real ranks: run by `test_checkpoint_damage`.

Each ends in `CheckpointError` with nothing changed, or is a good one after all, with which training goes on.
"""

import contextlib
import copy
import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np

import unidist
from unidist.checkpoint import read, write
from unidist.checkpoint.layout import INDEX, digest
from unidist.checkpoint.rng import capture
from unidist.errors import CheckpointError
from unidist.testing import reference
from unidist.testing.case import Case

DEEP: list = []
for _ in range(300):
    DEEP = [DEEP]
INSTEAD = (
    None, True, -1, 2**70, 1.5, -1e308, 10**400, "", "x", "../x", [], {}, [[]], [None], {"": {}}, DEEP,
    {"$float": "nan"}, {"$float": "inf"}, {"$float": 1}, {"$tuple": 1}, {"$items": [[[], 1]]}, {"$items": [1]},
    {"$x": 1},
)  # fmt: skip
# What unidist wrote and a resumed run goes by: whatever else is there instead, it is refused.
DECISIVE = ("world_size", "updates", "loader", "optimizer", "optimizer/kind", "optimizer/groups")


class Run:
    def __init__(self, strategy, zoo, make, folder):
        self.strategy, self.backend = strategy, Case(strategy, zoo, "", folder).backend
        net = zoo.mlp()
        self.model, self.optimizer = strategy.prepare(net, make(net))
        self._step = strategy.train_step(self.model, self.optimizer, zoo.cross_entropy)
        self.loader = strategy.loader(reference.data(24), global_batch=8, shuffle=True, seed=3)

    @property
    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def step(self):
        for x, y in self.loader:
            self._step(x, y)
            break

    def fingerprint(self):
        """All that a load may change."""
        tensors, values = self.backend.optimizer_state(self.model, self.optimizer)
        arrays = {**self.backend.state(self.model), **tensors}
        seen = {name: self.backend.to_numpy(tensor).tobytes() for name, tensor in arrays.items()}
        seen |= {name: array.tobytes() for name, array in {**capture(), **own_generator(self.backend)}.items()}
        # Only a save would show the count of updates to users, and it moves OneFlow's generator.
        updates = self.strategy._trainer.prepared_as(self.model, self.optimizer).schedule.updates
        return seen, repr(values), self.loader.state(), self.loader.epoch, updates


def optimizers(strategy, zoo):
    """A spec, whose settings the code has, and native ones, whose settings come from the checkpoint."""
    made = {"a spec": lambda net: unidist.Adam(0.02), "native SGD": lambda net: zoo.native_sgd(net, 0.1)}
    if strategy.framework == "torch":
        native = sys.modules["torch"].optim
        made["native Adam"] = lambda net: native.Adam(net.parameters(), 0.02)
        made["native RMSprop"] = lambda net: native.RMSprop(net.parameters(), 0.02)
    return made


def own_generator(backend):
    """The framework's, where looking at it does not move it."""
    framework = sys.modules[backend.framework]
    return {"own": np.array(framework.get_rng_state().numpy())} if backend.framework != "mxnet" else {}


# -- damage: each is (what was done, whether it must be refused, a function of the copied directory) -------------------


def paths(value, path=()):
    yield path
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(each, (*path, key))


def replaced(tree, path, new):
    """A copy with another value at the path; the value `paths` (the function) stands for none at all."""
    tree = copy.deepcopy(tree)
    at = tree
    for key in path[:-1]:
        at = at[key]
    if new is paths:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return tree


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def in_the_index(good):
    """Another value, or none, at each place of checkpoint.json, under a new checksum."""
    body = json.loads((good / INDEX).read_text())
    for path in paths(body):
        if path and path != ("sha256",):
            for new in (*INSTEAD, paths):
                if new is not paths and type(new) is type(at(body, path)) and new == at(body, path):
                    continue
                changed = replaced(body, path, new)
                must = path[0] in ("format", "version", "serial", "files") and path[1:2] != ("rng",)
                must = must or "/".join(map(str, path[2:])) in DECISIVE or path[2:3] == ("loader",)
                must = must and path != ("serial",)  # any number will do
                yield f"{'/'.join(map(str, path))} = {str(new)[:20]}", must, lambda to, b=changed: put_index(to, b)


def put_index(to, body):
    with contextlib.suppress(ValueError, RecursionError):  # what has no checksum keeps the old one
        body = body | {"sha256": digest(body)}
    (to / INDEX).write_text(json.dumps(body))


def in_the_headers(good):
    """The same in the header of each file of arrays, with checksums that fit."""
    body = json.loads((good / INDEX).read_text())
    for section, entry in body["files"].items():
        whole = (good / entry["file"]).read_bytes()
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        for path in list(paths(header))[1:8]:  # the first array, part by part: the others are read alike
            for new in (*INSTEAD, paths, [2**60], [-1], [0, 2**62], [1.0], "F8_E4M3", "BF16"):
                text = json.dumps(replaced(header, path, new)).encode()
                data = len(text).to_bytes(8, "little") + text + whole[8 + length :]
                yield f"{section} {path} = {str(new)[:20]}", True, lambda to, d=data, s=section: put_file(to, s, d)
        for name, data in {
            "header beyond the end": (2**63).to_bytes(8, "little") + whole[8:],
            "no array at all": (2).to_bytes(8, "little") + b"{}",
            "nothing": b"",
            "deep header": (90_000).to_bytes(8, "little") + b"[" * 90_000,
        }.items():
            yield f"{section} {name}", True, lambda to, d=data, s=section: put_file(to, s, d)


def put_file(to, section, data):
    body = json.loads((to / INDEX).read_text())
    entry = body["files"][section]
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (to / entry["file"]).write_bytes(data)
    put_index(to, body)


def in_the_arrays(good):
    """Arrays that are missing, of another shape or kind, or under another name, in a checkpoint that is whole."""
    found = read(good)
    for name, array in found.arrays.items():
        rest = {key: each for key, each in found.arrays.items() if key != name}
        rank_1 = name.startswith("rng/1/")  # another rank's: not looked at where there is one
        flat = array.reshape(-1)
        for what, other in {
            "missing": None,
            "longer": np.append(flat, flat[:1]),
            "shorter": flat[:-1],
            "empty": flat[:0],
            "with one more dimension": array[None, None],
            "of another kind": array.astype(np.int16 if array.dtype.kind == "f" else np.float64),
            "complex": array.astype(np.complex64),
            "of bools": array.astype(bool),
            "zero": np.zeros_like(array),
            "not a number": np.full_like(array, np.nan if array.dtype.kind == "f" else 0),
            "largest": np.full_like(array, np.inf if array.dtype.kind == "f" else np.iinfo(array.dtype).max),
        }.items():
            fits = what in ("zero", "not a number", "largest") or (array.ndim == 0 and what != "missing")
            must = not fits and not rank_1
            arrays = rest if other is None else {**rest, name: other}
            yield f"{name} {what}", must, lambda to, a=arrays: write(to, a, found.values)
        section, _, rest_of_name = name.partition("/")
        arrays = {**rest, f"{section}/module.{rest_of_name}": array}
        yield f"{name} renamed", not rank_1, lambda to, a=arrays: write(to, a, found.values)


def in_the_bytes(good, dice):
    """Flipped bits, cut ends, and files that are gone, which nobody made to look good."""
    for file in sorted(good.iterdir()):
        whole = file.read_bytes()
        used = file.name.split("-")[0]
        for bit in dice.sample(range(8 * len(whole)), 60):
            broken = bytearray(whole)
            broken[bit // 8] ^= 1 << bit % 8
            must = file.name != INDEX or chr(whole[bit // 8]) not in " \n"
            yield f"{used} bit {bit}", must, lambda to, n=file.name, b=bytes(broken): (to / n).write_bytes(b)
        for length in (0, 1, 7, 8, 9, *dice.sample(range(len(whole) - 2), 15)):
            yield f"{used} cut at {length}", True, lambda to, n=file.name, b=whole[:length]: (to / n).write_bytes(b)
        yield f"{used} gone", True, lambda to, n=file.name: (to / n).unlink()
        yield f"{used} a folder", True, lambda to, n=file.name: ((to / n).unlink(), (to / n).mkdir())


# -- the trial -----------------------------------------------------------------------------------------------------


def refused(strategy, place, parts, what):
    try:
        strategy.load(place, **parts)
    except CheckpointError as error:
        if str(place) in str(error):
            return True
        raise AssertionError(f"{what}: the path is not in the message {error}") from error
    except Exception as error:
        raise AssertionError(f"{what} ends in {type(error).__name__}: {error}") from error
    return False


def main(zoo, folder, share):
    """`share`: one of how many of the cases is tried, by chance but always the same."""
    warnings.simplefilter("ignore")
    os.fsync = lambda handle: None  # thousands of saves, and none of them about a loss of power
    dice = random.Random(11)
    with unidist.Strategy() as strategy:
        zoo, folder = importlib.import_module(zoo), Path(folder)
        for name, make in optimizers(strategy, zoo).items():
            good, bad = folder / f"good {name}", folder / "bad"
            run = Run(strategy, zoo, make, folder)
            run.step()
            strategy.save(good, **run.parts, note=[1, {"a": None}])
            run.step()
            cases = [*in_the_index(good), *in_the_headers(good), *in_the_arrays(good), *in_the_bytes(good, dice)]
            chosen = dice.sample(cases, len(cases) // int(share))
            before, counts = run.fingerprint(), {"refused": 0, "loaded": 0}
            for what, must, damage in chosen:
                with strategy.main_first():
                    if strategy.is_main:
                        shutil.rmtree(bad, ignore_errors=True)
                        shutil.copytree(good, bad)
                        damage(bad)
                strategy.barrier()
                if refused(strategy, bad, run.parts, what):
                    assert run.fingerprint() == before, f"{what} changed something"
                    counts["refused"] += 1
                    continue
                assert not must, f"{what} was taken for good"
                counts["loaded"] += 1
                run.step()  # whatever was accepted can be trained on
                strategy.load(good, **run.parts)
                before = run.fingerprint()
            strategy.print(f"{name}: {len(chosen)} cases, {counts}")
            assert counts["refused"] > counts["loaded"] > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
