"""Functions that tests run on other processes: importable where pytest is not installed."""


def add_ranks(start: int) -> float:
    import unidist

    with unidist.Strategy() as strategy:
        return float(strategy.all_reduce(start * (1 - strategy.rank) + strategy.rank, "sum"))


def largest_parts_lose_nothing() -> tuple[float, bool]:
    """(difference between what was sent plus what waits and all gradients, whether something waits), after 5 steps."""
    import torch

    import unidist
    from unidist_torch import compression

    with unidist.Strategy("torch") as strategy:
        net = torch.nn.Linear(40, 30, bias=False)
        torch.nn.init.zeros_(net.weight)
        model = torch.nn.parallel.DistributedDataParallel(net)
        waiting = compression.Waiting(0.05)
        model.register_comm_hook(waiting, compression.largest_part)
        sent, all_gradients = torch.zeros(30, 40), torch.zeros(30, 40)
        for step in range(5):
            torch.manual_seed(10 * step + strategy.rank)
            x = torch.randn(8, 40)
            loss = model(x).sum()  # its gradient does not depend on the weights
            loss.backward()
            sent += net.weight.grad
            net.weight.grad = None
            all_gradients += x.sum(0).expand(30, 40)
        rest = sum(waiting.rest.values())
        total = strategy.all_reduce(all_gradients, "mean")
        kept = strategy.all_reduce(rest, "mean")
        return float((sent + kept - total).abs().max() / total.abs().max()), bool(kept.abs().max() > 0)


def data_loaders_taken_over() -> list[object]:
    """What strategy.loader makes of DataLoaders with various samplers: the samples seen by all, or the error."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

    import unidist

    with unidist.Strategy("torch") as strategy:
        data = TensorDataset(torch.arange(10))
        own = DistributedSampler(data, shuffle=True, seed=4)
        wrong = DistributedSampler(data, num_replicas=2, rank=1 - strategy.rank)
        weighted = WeightedRandomSampler(torch.ones(10), 10)
        results: list[object] = []
        for sampler in (own, wrong, weighted):
            try:
                loader = strategy.loader(DataLoader(data, batch_size=2, sampler=sampler, num_workers=1))
                results.append(strategy.gather([x for (x,) in loader]).tolist())
            except unidist.UnidistError as error:
                results.append(str(error))
        return results


def many_buckets(kind: str) -> float:
    """The largest difference between ranks after training a model whose gradients travel in several buckets."""
    import torch

    import unidist

    compression = {"powersgd": unidist.PowerSGD(2, start=2), "topk": unidist.TopK(0.1), "fp16": "fp16"}[kind]
    with unidist.Strategy("torch", bucket_cap_mb=1) as strategy:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(6)])
        model, optimizer = strategy.prepare(net, unidist.SGD(0.01), compression=compression)
        step = strategy.train_step(model, optimizer, lambda m, x: m(x).square().mean())
        torch.manual_seed(strategy.rank)
        for _ in range(6):
            step(torch.randn(8, 500))
        own = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
        low, high = strategy.all_reduce(own, "min"), strategy.all_reduce(own, "max")
        return float((high - low).abs().max())


class _Texts:
    """A stream of (text, label): its collated batches do not tell how many elements went in."""

    def __iter__(self):
        return iter([("a" * (n + 1), n) for n in range(12)])


class _SplitsItself:
    """A stream that shares itself out over workers, as torch's documentation suggests."""

    def __iter__(self):
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(worker, 16, workers))


def odd_streams() -> tuple[list[int], list[int]]:
    """(elements in each batch of texts, elements seen of a stream that splits itself)."""
    import unidist

    with unidist.Strategy("torch") as strategy:
        seen: list[int] = []
        for batch in strategy.loader(_SplitsItself(), global_batch=8, workers=2):
            seen += [int(n) for part in strategy.all_gather(batch) for n in part]
        texts = strategy.loader(_Texts(), global_batch=4)
        return [texts.latest.counts[-1][0] for _ in texts], sorted(seen)


def twelve_in_a_row() -> int:
    """How many Strategies were opened, used and closed, one after the other, in the same processes."""
    import unidist

    done = 0
    for _ in range(12):
        with unidist.Strategy("torch", timeout=60) as strategy:
            done += strategy.all_reduce(1.0, "sum") == strategy.world_size
    return done


def unusual_models() -> dict[str, object]:
    """What becomes of torch models that a wrapper around the loss could trip over."""
    import torch

    import unidist

    class Unusual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.ones(4))  # a name that the reducer has, too
            self.register_buffer("center", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)  # assigned, as DINO does
            return (x * self.weights).sum(1)

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).square().mean()

    with unidist.Strategy("torch") as strategy:
        model, optimizer = strategy.prepare(Unusual(), unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, lambda m, x: m.loss(x))
        torch.manual_seed(strategy.rank)
        for _ in range(3):
            step(torch.randn(4, 4))
        with strategy.forward():
            loss = model(x=torch.randn(4, 4)).square().mean()
        strategy.backward(loss)
        strategy.step(optimizer)
        with strategy.evaluate(model):
            center = model.center.clone()
        detached = ""
        try:
            strategy.train_step(model, optimizer, lambda m, x: m.loss(x).detach())(torch.randn(4, 4))
        except unidist.UnidistError as error:
            detached = str(error)
        apart = {
            name: float((strategy.all_reduce(each, "max") - strategy.all_reduce(each, "min")).abs().max())
            for name, each in (("weights", model.weights.detach()), ("center", center))
        }
        moved = bool((model.weights != 1).any())
        return {"apart": apart, "moved": moved, "detached": detached, "hooks": _survives_pickling(model)}


def _survives_pickling(model: object) -> bool:
    import pickle

    hooks = list(model._forward_pre_hooks.values())  # type: ignore[attr-defined]
    pickle.loads(pickle.dumps(hooks))
    return bool(hooks)


def native_training_after_the_strategy() -> bool:
    """Whether a torch model of which a layer was frozen can be trained on, unfrozen, when the Strategy is closed."""
    import torch

    import unidist

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    net[0].requires_grad_(False)
    with unidist.Strategy() as strategy:
        model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        strategy.train_step(model, optimizer, lambda m, x: m(x).square().mean())(torch.ones(2, 4))
    net[0].requires_grad_(True)
    before = net[0].weight.detach().clone()
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    return bool((net[0].weight != before).any())


def ranks_that_went_apart() -> None:
    """One of them changes its model after the last step, when nothing else compares them."""
    import torch

    import unidist

    net = torch.nn.Linear(4, 1)
    with unidist.Strategy() as strategy:
        strategy.prepare(net)
        if strategy.rank == 1:
            net.weight.data.add_(1)
