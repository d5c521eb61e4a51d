"""How a job ends when its ranks do not end alike: under `unidist run`, on every engine."""

import os
import re
import subprocess
import sys

import pytest

from project import ROOT

PATIENCE = 300.0

ENGINES = {
    "torch": ["torch"],
    "mxnet": ["mxnet", "--servers", "1"],
    "mxnet dist_async": ["mxnet", "--servers", "1", "--option", "kvstore=dist_async"],
    "oneflow": ["oneflow"],
    "horovod torch": ["horovod"],
    "horovod mxnet": ["horovod", "--option", "framework=mxnet"],
}

TRAINED = """
import importlib, os, sys, time
import numpy as np
import unidist
if os.environ["UNIDIST_RANK"] == "1":
    {before}
class Done(Exception):
    pass
def normalised(framework):
    "A model that has running statistics: to evaluate it, the ranks make them equal."
    native = importlib.import_module(framework)
    if framework == "mxnet":
        model = native.gluon.nn.Sequential()
        model.add(native.gluon.nn.Dense(3, in_units=3), native.gluon.nn.BatchNorm(in_channels=3))
        model.initialize()
        return model
    return native.nn.Sequential(native.nn.Linear(3, 3), native.nn.BatchNorm1d(3))
def read(tensor):
    return tensor.asnumpy() if hasattr(tensor, "asnumpy") else tensor.detach().numpy()
def parameters(model):
    gluon = hasattr(model, "collect_params")
    return [each.data() for each in model.collect_params().values()] if gluon else model.parameters()
def train(strategy):
    model, optimizer = strategy.prepare(normalised(strategy.framework), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, lambda m, x: (m(x) ** 2).mean())
    def steps(count):
        for _, x in zip(range(count), strategy.loader(np.ones((80, 3), np.float32), global_batch=4)):
            step(x)
    steps(3)
    {during}
{strategy}
{after}
print("the end")
"""
CLOSED = """
try:
    with unidist.Strategy() as strategy:
        rank = strategy.rank
        train(strategy)
except Done:
    pass
"""
NEVER_CLOSED = """
strategy = unidist.Strategy()
rank = strategy.rank
train(strategy)
"""
IN_A_FUNCTION = """
def job():
    train(unidist.Strategy())
job()
"""
FORKED = """
    child = os.fork()
    if child == 0:
        import atexit
        atexit.register(print, "at exit of a child", flush=True)
        sys.exit(5)
    print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    steps(3)
"""


def run(engine: str, folder, strategy: str = CLOSED, **lines: str) -> tuple[int, str]:
    script = folder / "train.py"
    lines = {"before": "pass", "during": "pass", "after": "", **lines}
    script.write_text(TRAINED.format(strategy=strategy, **lines))
    command = [sys.executable, "-m", "unidist", "run", "--nproc", "2", "--backend", *ENGINES[engine], str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


def first_cause(output: str) -> str:
    """The first line of the summary. No native stack has come before it."""
    lines = [line for line in output.splitlines() if line.startswith("unidist: ") and " failed first: " in line]
    assert len(lines) == 1, output
    assert not re.search(r"terminate called|Check failed|Stack trace|SIGABRT", output), output
    return lines[0]


def test_a_strategy_that_is_never_closed(engine, tmp_path):
    code, output = run(engine, tmp_path, NEVER_CLOSED, after="time.sleep(3 * rank)")
    assert code == 0, output
    assert output.count("the end") == 2


def test_a_strategy_that_is_never_closed_with_many_steps_queued(engine, tmp_path):
    """Nobody reads what they compute, and the last reference to the Strategy goes before they are done."""
    code, output = run(engine, tmp_path, IN_A_FUNCTION, during="steps(20); steps(20)")
    assert code == 0, output
    assert output.count("the end") == 2


@pytest.mark.parametrize("engine", [name for name in ENGINES if "async" not in name])  # whose workers do not wait
def test_a_strategy_that_is_never_closed_with_fewer_steps_on_one_rank(engine, tmp_path):
    """Which ends last: by then the others are at their end, too, and wait for what is queued."""
    fewer = "steps(20)\n    if strategy.rank == 0: steps(20)\n    else: time.sleep(3)"
    code, output = run(engine, tmp_path, IN_A_FUNCTION, during=fewer)
    assert code == 1, output
    assert "worker 1 " in first_cause(output)


def test_a_child_that_the_script_forks_ends_like_any_other(engine, tmp_path):
    """Inside a Strategy, by sys.exit(): what the engine does at the end of a process is not the child's to do."""
    code, output = run(engine, tmp_path, during=FORKED.strip())
    assert code == 0, output
    assert output.count("the child ended with 5") == 2, output
    assert output.count("at exit of a child") == 2, output
    assert output.count("the end") == 2, output
    assert not re.search(r"terminate called|SIGABRT", output), output


def test_one_rank_closes_its_strategy_early(engine, tmp_path):
    """By a `break` or a `return`; the others wait for it in their next operation."""
    waits = "strategy.mean(1.0)" if "async" in engine else "steps(2)"  # its workers do not wait for each other
    code, output = run(engine, tmp_path, during=f"if strategy.rank == 1: return\n    {waits}")
    assert code == 1, output
    assert first_cause(output)
    queued = (
        r"RanksDisagree: the ranks close their Strategy after different numbers of steps.*\d+ on rank 0, \d+ on rank 1"
    )
    assert re.search(rf"worker 1 .*has closed its Strategy while others were still at work|{queued}", output), output


def test_one_rank_exits_before_an_evaluation(engine, tmp_path):
    during = "if strategy.rank == 1: sys.exit(0)\n    with strategy.evaluate(model): pass"
    code, output = run(engine, tmp_path, during=during)
    assert code == 1, output
    assert "worker 1 " in first_cause(output)
    assert "sys.exit(0) has left its Strategy" in first_cause(output)


CAUGHT_IN_A_GROUP = """
    model, optimizer = strategy.prepare(normalised(strategy.framework), unidist.SGD(0.1), accumulate=2)
    losses = []
    def loss_fn(m, x):
        losses.append(0)
        if strategy.rank == 1 and len(losses) == 6:
            raise Done
        return (m(x) ** 2).mean()
    step = strategy.train_step(model, optimizer, loss_fn)
    for _, x in zip(range(20), strategy.loader(np.ones((80, 3), np.float32), global_batch=4)):
        {reads}
"""
READS = {
    "each loss": "read(step(x))",
    "the parameters": "step(x); [read(each) for each in parameters(strategy.unwrap(model)) if len(losses) == 6]",
}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("engine", [name for name in ENGINES if "async" not in name])  # whose workers do not wait
def test_an_error_that_one_rank_has_caught_in_an_accumulation_group(engine, reads, tmp_path):
    """The others may be a micro-batch further, or read what they have queued: they wait for the update that this one
    has broken off."""
    code, output = run(engine, tmp_path, during=CAUGHT_IN_A_GROUP.format(reads=READS[reads]).strip())
    assert code == 1, output
    assert "worker 1 " in first_cause(output)


ON_MAIN, MORE = "if strategy.is_main:", "    steps(20); steps(20)"


def test_one_rank_alone_saves(engine, tmp_path):
    """Under `if strategy.is_main`, as scripts for a single process do; the others go on to their next steps."""
    code, output = run(
        engine, tmp_path, during=f"{ON_MAIN} strategy.save({str(tmp_path / 'out')!r}, model=model)\n{MORE}"
    )
    assert code == 1, output
    # Workers of dist_async do not wait for rank 0 in their steps, but at the end.
    assert ("worker 1 " if "async" in engine else "worker 0 ") in first_cause(output)
    assert re.search(r"on every rank|[Ee]very rank must make the same calls", first_cause(output))
    assert not (tmp_path / "out").exists()


# torch and OneFlow abort when they meet different collectives, and dist_async goes on without a word to the others.
@pytest.mark.parametrize("call", ["mean(1.0)", "barrier()"])
@pytest.mark.parametrize("engine", ["mxnet", "horovod torch", "horovod mxnet"])
def test_one_rank_alone_makes_a_call(engine, call, tmp_path):
    code, output = run(engine, tmp_path, during=f"{ON_MAIN} strategy.{call}\n{MORE}")
    assert code == 1, output
    assert "worker 0 " in first_cause(output)
    assert "the ranks do not make the same calls" in first_cause(output)


SKIPPED = """
    model, optimizer = strategy.prepare({model}, unidist.SGD(0.1))
    losses = []
    def loss_fn(m, x):
        losses.append(0)
        if strategy.rank == 1 and len(losses) == {bad}:
            raise ValueError("a bad batch")
        return (m(x) ** 2).mean()
    step = strategy.train_step(model, optimizer, loss_fn)
    for _, x in zip(range(6), strategy.loader(np.ones((80, 3), np.float32), global_batch=4)):
        try:
            step(x)
        except ValueError:
            continue
"""


# Models with running statistics exchange them before their loss, which torch pairs with another rank's gradients.
PLAIN, NORMALISED = "normalised(strategy.framework)[0]", "normalised(strategy.framework)"


@pytest.mark.parametrize(
    ("model", "bad"), [(PLAIN, 3), (PLAIN, 6), (NORMALISED, 3)], ids=["midst", "last", "statistics"]
)
@pytest.mark.parametrize("engine", [name for name in ENGINES if "async" not in name])
def test_one_rank_skips_a_batch(engine, model, bad, tmp_path):
    """It has caught the error of a step, in the midst or the last one. Its next pairs with that of the others, who have
    one more to make when it is done."""
    code, output = run(engine, tmp_path, during=SKIPPED.format(model=model, bad=bad).strip())
    assert code == 1, output
    assert "worker 1 " in first_cause(output) or "RanksDisagree" in output, output


def test_an_error_that_every_rank_has_caught_is_not_blamed(engine, tmp_path):
    code, output = run(
        engine, tmp_path, during="raise Done", after="time.sleep(1)\nif rank == 1: raise KeyError('real')"
    )
    assert code == 1, output
    assert "worker 1 " in first_cause(output)
    assert "KeyError: 'real'" in output
    assert "Done" not in output.partition("failed first")[2]


def test_one_rank_ends_before_its_strategy(engine, tmp_path):
    """The others do not wait for it until the start times out."""
    code, output = run(engine, tmp_path, before="sys.exit(0)")
    assert code == 1, output
    assert re.search(r"RanksMissing: rank 1 on \S+ ended while the ranks were meeting", output), output
