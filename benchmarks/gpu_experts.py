"""FLOP/s of a mixture of experts beside a dense gated MLP of equal FLOPs: forward and backward of one layer on one device.

    python -m benchmarks.gpu_experts                   8,192 tokens in bf16, experts of Qwen3-30B-A3B and of Mixtral 8x7B
    python -m benchmarks.gpu_experts --device cpu      in small: does it run at all?

    layer       router, dispatch, the experts' products, combine
    products    the experts' products alone, of rows that are sorted already: dealt evenly; or half of all to one expert,
                half of the rest to another, and so on
    dense       one MLP, whose inner size is that of a token's experts together

In turns; medians.  FLOPs are those of the products of tokens with their experts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import markdown, write_whole
from megazero.layers.experts import Choice, ExpertLinear, MixtureOfExperts, Router, Routing
from megazero.layers.mlp import gated
from megazero.layers.sequence_shard import TokenLayout
from megazero.layers.spec import Initializer, NamedRows, expert_spec, rows_spec
from megazero.parallel_state import Axis

# hidden size, inner size of an expert, experts, experts of a token
SIZES = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "Mixtral 8x7B": (4096, 14336, 8, 2)}
WHOLE = Axis("ep")
SMALL = {"tiny": (32, 16, 4, 2)}


def halved(experts: int, pairs: int) -> Tensor:
    """A choice for each pair: half of all takes the last expert, half of the rest the one before, ..."""
    return (experts - 1 - torch.arange(1, pairs + 1).log2().floor().long().flip(0)).clamp_(0)


def cases_of(sizes: tuple[int, int, int, int], tokens: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """What is timed: each does a forward and a backward."""
    hidden, inner, experts, k = sizes
    up = [tuple(NamedRows(f"{expert} {key}", inner) for key in ("gate", "up")) for expert in range(experts)]
    down = [(NamedRows(f"{expert} down", hidden),) for expert in range(experts)]
    scores, zeros = (NamedRows("router.weight", experts),), Initializer("zeros")
    layer = MixtureOfExperts(
        Router(rows_spec(scores, hidden, None, zeros), Choice(k, renormalize=True), WHOLE),
        ExpertLinear(expert_spec(up, hidden, zeros), WHOLE),
        ExpertLinear(expert_spec(down, inner, zeros), WHOLE),
    ).to(device, torch.bfloat16)
    for weight in layer.parameters():  # drawn here: on a CPU a billion take half a minute
        weight.data.normal_(std=0.02)
    x = torch.randn(tokens, 1, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    shapes = (2 * k * inner, hidden), (hidden, k * inner)
    dense = [torch.randn(shape, device=device).bfloat16().mul_(0.02).requires_grad_() for shape in shapes]
    each = torch.arange(tokens * k, device=device) % experts
    choices = each, halved(experts, tokens * k).to(device)
    routings = [Routing.of(chosen.view(tokens, k), experts, WHOLE) for chosen in choices]
    many = torch.randn(tokens * k, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    layout = TokenLayout(torch.zeros(1, dtype=torch.int64, device=device))
    slope, wide = torch.randn_like(x), torch.randn_like(many)

    def products(routing: Routing) -> Callable[[], None]:
        return lambda: layer.down(gated(layer.up(many, routing)), routing).backward(wide)

    return {
        "dense": lambda: F.linear(gated(F.linear(x, dense[0])), dense[1]).backward(slope),
        "products, even": products(routings[0]),
        "products, halved": products(routings[1]),
        "layer": lambda: layer(x, layout).backward(slope),
    }


def milliseconds(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Of one run, the mean of some in a row."""
    begun = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begun) / repeats


def main() -> None:
    """Time every case in turns, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, small = torch.device(given.device), given.device == "cpu"
    tokens, rows, lines = 64 if small else 8192, [], []
    for name, sizes in (SMALL if small else SIZES).items():
        cases = cases_of(sizes, tokens, device)
        times: dict[str, list[float]] = {case: [] for case in cases}
        for number in range(2 if small else 6):  # the first warms up
            for case, run in cases.items():
                times[case] += [milliseconds(run, device, 1 if small else 4)] * (number > 0)
        hidden, inner, _, k = sizes
        for case, found in times.items():
            rate = 18 * tokens * k * hidden * inner / median(found) / 1e9
            share = median(times["dense"]) / median(found)
            rows.append((name, case, f"{median(found):.2f}", f"{rate:.0f}", f"{share:.2f}"))
            lines.append({"model": name, "case": case, "ms": median(found), "tflops": rate, "of_dense": share})
    print(markdown(("experts of", "what", "ms", "TFLOP/s", "of dense"), rows))
    if given.out is not None:
        write_whole(given.out, json.dumps({"tokens": tokens, "lines": lines}) + "\n")


if __name__ == "__main__":
    main()
