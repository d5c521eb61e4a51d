"""Mends a race in OneFlow 0.9 that ends processes with SIGSEGV.

To run an nn.Graph, its engine starts the run (`Push` into the graph's buffers), and only then notes in a queue that it
runs (`EnqueueNNGraph`). When the run has ended, another thread takes it out of the queue (`DequeueNNGraph`). Where the
first thread loses its core in between, a small graph ends before it was noted, and an empty queue is popped: about once
in 10,000 steps on a busy machine.

OneFlow 0.9 is the newest release on PyPI, so we cannot ask for a better one. The library calls `DequeueNNGraph` through
a pointer in its global offset table. Here this pointer is set to a few instructions that wait until the queue holds
something, and then go on with the function itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

DEQUEUE = "_ZN7oneflow2vm19LazyJobStreamPolicy14DequeueNNGraphEv"
# In DequeueNNGraph: mov rcx, [rbx + 0x28]; mov rax, [rbx + 0x18]. So the queue's begin is where it is expected.
FAMILIAR = (0x27, bytes.fromhex("488b4b28 488b4318"))
WAIT_WHILE_EMPTY = bytes.fromhex(
    "488b4718"  # mov rax, [rdi + 0x18]     the queue's begin
    "483b4738"  # cmp rax, [rdi + 0x38]     and its end
    "7509"  # jne done
    "b818000000"  # mov eax, 24             sched_yield
    "0f05"  # syscall
    "ebed"  # jmp to the first line
)  # done:

_RELOCATION = np.dtype([("slot", "<u8"), ("kind", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_SYMBOL = np.dtype([("name", "<u4"), ("info", "<u4"), ("value", "<u8"), ("size", "<u8")])
_LOAD, _DYNAMIC = 1, 2  # kinds of program headers
_PLT_SIZE, _SYMBOLS, _PLT_RELOCATIONS = 2, 6, 23  # entries of the dynamic section
_pages: list[mmap.mmap] = []  # that the pointers lead to


def mend() -> bool:
    """After oneflow was imported, before the first graph. False where this is not the library it is written for."""
    with contextlib.suppress(OSError, AttributeError, ValueError, LookupError, StopIteration, struct.error):
        if platform.machine() == "x86_64":
            offset, expected = FAMILIAR
            if ctypes.string_at(_address(_loaded()[0], DEQUEUE) + offset, len(expected)) == expected:
                call_first(WAIT_WHILE_EMPTY, DEQUEUE)
                return True
    return False


def call_first(code: bytes, name: str) -> None:
    """Whenever the library calls its function `name`, the machine code `code` comes first; it may use rax, rcx, r11."""
    library, base = _loaded()
    address = _address(library, name)
    slot = base + _slot(library, address - base)
    if not _is_writable(slot):
        raise ValueError("the library's pointers are read-only")
    go_on = b"\x48\xb8" + struct.pack("<Q", address) + b"\xff\xe0"  # mov rax, address; jmp rax
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code + go_on)
    _pages.append(page)
    ctypes.c_uint64.from_address(slot).value = ctypes.addressof(ctypes.c_char.from_buffer(page))


def _maps() -> Iterator[tuple[range, list[str]]]:
    """The memory of this process: addresses, and [rights, offset, device, inode, path]."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        place, *rest = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in place.split("-"))
        yield range(begin, end), rest


def _loaded() -> tuple[Path, int]:
    """OneFlow's library, and where in memory it begins."""
    for addresses, (_, offset, *_, path) in _maps():
        if Path(path).name.startswith("liboneflow") and int(offset, 16) == 0:
            return Path(path), addresses.start
    raise ValueError("liboneflow is not loaded")


def _is_writable(address: int) -> bool:
    return any(address in addresses and rights.startswith("rw") for addresses, (rights, *_) in _maps())


def _address(library: Path, name: str) -> int:
    return ctypes.cast(getattr(ctypes.CDLL(str(library)), name), ctypes.c_void_p).value or 0


def _slot(library: Path, function: int) -> int:
    """Where, from its begin, the library has the pointer by which it calls a function of its own."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        first, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
        headers: list[tuple[int, ...]] = [struct.unpack_from("<IIQQQQ", data, first + 56 * n) for n in range(count)]

        def offset(address: int) -> int:
            return next(o + address - a for kind, _, o, a, _, n in headers if kind == _LOAD and a <= address < a + n)

        start, size = next((o, n) for kind, _, o, _, _, n in headers if kind == _DYNAMIC)
        dynamic = dict(struct.iter_unpack("<qQ", data[start : start + size]))
        start = offset(dynamic[_PLT_RELOCATIONS])
        relocations = np.frombuffer(data[start : start + dynamic[_PLT_SIZE]], _RELOCATION)
        start, many = offset(dynamic[_SYMBOLS]), int(relocations["symbol"].max()) + 1
        symbols = np.frombuffer(data[start : start + many * _SYMBOL.itemsize], _SYMBOL)
        [slot] = relocations["slot"][symbols["value"][relocations["symbol"]] == function]
    return int(slot)
