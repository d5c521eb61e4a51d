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
        model = strategy.prepare(net, unidist.SGD(1.0))[0]
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
