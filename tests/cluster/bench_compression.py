"""What gradient compression buys on a slow link: step time and accuracy, with and without, interleaved in one run.

    python tests/cluster/bench_compression.py            two hosts in network namespaces, 100 Mbit/s between them; root

One process on each host trains the same model on real digits, in turn with each kind of compression.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of each host's link")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args)
        return
    from hosts import Hosts, why_not

    from unidist.launch.environments import interpreter_for

    if reason := why_not():
        sys.exit(reason)
    python, variables = interpreter_for("torch")
    with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder), 2) as hosts:
        for index in range(2):
            hosts.limit(index, args.rate)
        common = {**os.environ, **variables, "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        ranks = [
            hosts[index].start([python, str(Path(__file__)), *sys.argv[1:]], env={**common, "RANK": str(index)})
            for index in range(2)
        ]
        outputs = [process.communicate()[0] for process in ranks]
        print(outputs[0], end="")
        if any(process.returncode for process in ranks):
            sys.exit(outputs[1])


def rank(args: argparse.Namespace) -> None:
    import torch
    from torch import nn

    import digits
    import unidist
    from unidist.bench.compare import compare, table

    (images, labels), (test_images, test_labels) = digits.load()
    train, test = (images.reshape(-1, 64), labels), (test_images.reshape(-1, 64), test_labels)
    with unidist.Strategy("torch") as strategy:
        kinds = {
            "no compression": None,
            "fp16": "fp16",
            "bf16": "bf16",
            "TopK(0.01)": unidist.TopK(0.01),
            "PowerSGD(2)": unidist.PowerSGD(2),
        }
        models, contestants = {}, {}
        for name, kind in kinds.items():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
            spec = unidist.SGD(0.05, momentum=0.9)
            model, optimizer = strategy.prepare(net, spec, compression=kind)
            step = strategy.train_step(model, optimizer, lambda m, x, y: nn.functional.cross_entropy(m(x), y))
            models[name], contestants[name] = (
                model,
                stepper(step, strategy.loader(train, global_batch=64, shuffle=True)),
            )
        lines = compare(contestants, rounds=args.rounds, steps=args.steps, barrier=strategy.barrier)
        strategy.print(
            table(lines, f"2 hosts, {args.rate} each, {sum(p.numel() for p in net.parameters())} parameters")
        )
        for name, model in models.items():
            logits = strategy.predict(model, strategy.loader(test, global_batch=64))
            updates = (args.rounds + 1) * args.steps
            accuracy = (logits.argmax(1) == test[1]).mean()
            strategy.print(f"{name:>16}  accuracy {accuracy:.4f} on held-out digits after {updates} updates")


def stepper(step, loader):
    def endless():
        while True:
            yield from loader

    batches = endless()

    def run(steps):
        for _ in range(steps):
            step(*next(batches))

    return run


if __name__ == "__main__":
    main()
