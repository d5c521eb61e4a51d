"""Brings OneFlow up: it builds its cluster while it is imported, so everything has to be in place before."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unidist.plugin import BackendUnavailable, CommunicationError, StateError, World, say
from unidist_oneflow import graph_queue

# In this order: each needs symbols of those before it.
LIBRARIES = (
    "cublas/lib/libcublasLt.so.11",
    "cublas/lib/libcublas.so.11",
    "cudnn/lib/libcudnn.so.8",
    "cudnn/lib/libcudnn_ops_infer.so.8",
    "cudnn/lib/libcudnn_ops_train.so.8",
    "cudnn/lib/libcudnn_cnn_infer.so.8",
    "cudnn/lib/libcudnn_cnn_train.so.8",
)
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "grpc_proxy")


def check_not_imported() -> None:
    if "oneflow" in sys.modules:
        raise StateError(
            "oneflow was imported before Strategy: it fixes its cluster while it is imported, so it has to come after. "
            "Move `import oneflow`, and the import of modules that need it, below the line that makes the Strategy."
        )


def bring_up(world: World, graphs: bool, verbose: bool, timeout: float, log_folder: Path) -> Callable[..., Any]:
    """Import oneflow as this rank of the cluster. The ranks have met before, so all of them are on their way here.

    Returns the function that it has registered for the end of the process.
    """
    os.environ.update(
        MASTER_ADDR=str(world.master_addr),
        MASTER_PORT=str(world.master_port),
        WORLD_SIZE=str(world.world_size),
        RANK=str(world.rank),
        LOCAL_RANK=str(max(0, world.local_rank)),
    )
    os.environ.setdefault("GLOG_log_dir", str(log_folder))  # else it makes a folder "log" wherever the user stands
    if not verbose:
        os.environ.setdefault("GLOG_minloglevel", "3")  # it complains about missing GPUs again and again
    # With oneDNN, log_softmax is off by 3e-6 on a CPU (3e-7 without), and nothing was seen to be faster for it.
    os.environ.setdefault("ONEFLOW_ENABLE_ONEDNN_OPTS", "0")
    waiting = WaitForMaster(world, timeout)
    if world.rank > 0:
        sys.meta_path.insert(0, waiting)
    try:
        with without_proxies(), contextlib.nullcontext() if verbose else quiet(), registered_at_exit() as registered:
            importlib.import_module("oneflow")
    except ImportError as error:
        raise BackendUnavailable(
            f"oneflow cannot be imported by {sys.executable}: {error}. Its wheel is a CUDA build and needs cuBLAS 11 "
            "and cuDNN 8 also where there is no GPU: `python -m unidist setup oneflow` makes an environment with them."
        ) from error
    finally:
        if waiting in sys.meta_path:
            sys.meta_path.remove(waiting)
    if graphs and not graph_queue.mend() and world.rank == 0:
        say(
            "unidist: this is not the build of OneFlow that is known here: a small nn.Graph of it may end its process "
            "(SIGSEGV), about once in 10,000 steps on a busy machine. graph=False does without."
        )
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, handler)  # OneFlow puts its own beneath Python's: no KeyboardInterrupt comes
    [oneflow_exit] = [function for function in registered if getattr(function, "__module__", None) == "oneflow"]
    return oneflow_exit


class WaitForMaster:
    """Stands in the way of one import: the last one before OneFlow connects to rank 0.

    A connection that is refused because rank 0 is still importing costs a rank 10 seconds.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self._world, self._timeout = world, timeout

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "oneflow.framework.env_util":
            return
        address, until = (self._world.master_addr, self._world.master_port), time.monotonic() + self._timeout
        while True:
            try:
                socket.create_connection(address, 5.0).close()  # type: ignore[arg-type]
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise CommunicationError(
                        f"rank 0 said it would start OneFlow on {address[0]}:{address[1]}, and has not within "
                        f"{self._timeout:g} s ({error.strerror or error}): see its output"
                    ) from error
            time.sleep(0.02)


@contextlib.contextmanager
def registered_at_exit() -> Iterator[list[Callable[..., Any]]]:
    """What is given to atexit.register inside: OneFlow deletes the name of what it gives."""
    register, given = atexit.register, list[Callable[..., Any]]()

    def noting(function: Callable[..., Any], /, *values: Any, **named: Any) -> Callable[..., Any]:
        given.append(function)
        return register(function, *values, **named)

    atexit.register = noting
    try:
        yield given
    finally:
        atexit.register = register


def preload_libraries() -> None:
    """Load the CUDA libraries that the wheel is linked to from the nvidia-* packages, where these are installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in list(spec.submodule_search_locations or ()) if spec else ():
        for name in LIBRARIES:
            with contextlib.suppress(OSError):  # the import says better what is missing
                ctypes.CDLL(str(Path(folder) / name), ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def without_proxies() -> Iterator[None]:
    """OneFlow's gRPC would send the connections within the cluster, all made during the import, through a proxy."""
    hidden = {name: os.environ.pop(name) for name in PROXIES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow what the libraries print on file 2, which Python cannot; shown when the import fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as heard:
        os.dup2(heard.fileno(), 2)
        try:
            yield
        except BaseException:
            heard.seek(0)
            os.write(kept, heard.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
