"""Two processes sum a tensor over gloo. Run by `unidist setup`."""

import importlib
import multiprocessing
import os
import tempfile


def rank(number: int, meeting: str) -> None:
    torch = importlib.import_module("torch")
    importlib.import_module("torch.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    tensor = torch.full((3,), number + 1.0)
    torch.distributed.all_reduce(tensor)
    assert tensor.numpy().tolist() == [3.0] * 3, tensor  # through numpy too: they must fit together
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank, args=(n, f"{directory}/meeting"), daemon=True) for n in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in ranks))
