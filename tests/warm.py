"""Importing this imports the package and takes a step of a small model: what is forked afterwards finds both there.

The server from which programs are forked imports it too.
"""

import ctypes
import pkgutil
import re
from importlib import import_module
from itertools import product
from pathlib import Path

import torch
import torch._dynamo  # imported by every optimizer
from harness import DEVICE
from worlds import LLAMA, LR, engine_on, micro_batches, run_of, whole

import megazero
from megazero import registry
from megazero.layers.linear import product_t

for _module in pkgutil.walk_packages(megazero.__path__, "megazero."):
    if _module.name not in ("megazero.cli.__main__", "megazero.training.callbacks.tasks"):  # lm_eval's 1,000 modules
        import_module(_module.name)

# A start traces a whole step on fake tensors for its line on activations: `test_annexes` has it back, and no other run.
_tables = registry._tables()
_tables[:] = [{seam: names for seam, names in table.items() if seam != "start line"} for table in _tables]
if DEVICE.type == "cpu" and not torch.cuda.device_count():  # nothing can be forked from what has touched a GPU
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    for _accumulation in (1, 4):
        _run = run_of(1, model=LLAMA, zero={"stage": 3}, training={"accumulation": _accumulation})
        _engine = engine_on(0, _run)
        _engine.train_step(micro_batches(_run, _engine.state, 0), LR)
        whole(_engine, "model")
        _engine.sharded_model.close()
    # oneDNN compiles a product for each new shape: here those of micro-batches and shards of the tests' small models
    for _rows, _columns, _inner in product((16, 32, 64, 128), (16, 32, 64, 128), (16, 32, 64)):
        _x, _w, _gradient = torch.ones(_rows, _inner), torch.ones(_columns, _inner), torch.ones(_rows, _columns)
        for _factors in ((_x, _w), (_gradient, _w.t()), (_gradient.t(), _x.t())):
            product_t(*_factors)


def _use_huge_pages() -> None:
    """A fork copies an entry for each page.  A process with torch has 60,000 of them; of 2 MiB each they are 150, and it
    takes a third of the time.  Where the kernel does not know how (Linux 6.1), all stays as it is."""
    collapse, size = 25, 2 << 20  # MADV_COLLAPSE
    madvise, maps = ctypes.CDLL(None).madvise, Path("/proc/self/maps").read_text()
    for begin, end in re.findall(r"^(\w+)-(\w+) rw-p \w+ 00:00 0 +(?:\[heap\])?$", maps, re.MULTILINE):
        first, last = -(-int(begin, 16) // size) * size, int(end, 16) // size * size
        if first < last:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), collapse)


_use_huge_pages()
