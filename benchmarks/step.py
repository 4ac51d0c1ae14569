"""One step of megazero beside a peer's on the same work, interleaved.

    python -m benchmarks.step --peer fsdp2 --world 2 --model small --dtype fp32 --accumulation 1

The same model, initial weights, tokens and optimizer; the losses of the first steps must agree.  `megazero` uses the same
matrix products as the peers; `megazero, its own products` is what a run has (megazero/layers/gemm.py).  The floor is a
rank's compute without any communication, and in a pipeline the idle time that its schedule prescribes.  Ranks of megazero
that run on one machine exchange through memory, where the peers take gloo's sockets; --over-gloo has it take them too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from benchmarks.report import machine, table
from benchmarks.rows import KINDS, OVER_GLOO, SHIPPED, Kind, LossesDifferError, measure, setting_of
from benchmarks.setting import DTYPES, MODELS, positive
from benchmarks.worlds import ContenderFailedError
from megazero.settings import ConfigError


def kind_of(peer: str) -> Kind:
    """The kind in which a peer competes."""
    return next(kind for kind in KINDS.values() if peer in kind.peers)


def main() -> None:
    """Measure, print one table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [peer for kind in KINDS.values() for peer in kind.peers]
    parser.add_argument("--peer", choices=[*peers, *KINDS], required=True, help="or all peers of a kind")
    parser.add_argument("--world", type=positive, default=2)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--accumulation", type=positive, help="micro-batches per step (pipelines: 8)")
    parser.add_argument("--zero-stage", type=int, choices=range(4), help="ours, where it is not the kind's")
    parser.add_argument("--over-gloo", action="store_true", help="also megazero without memory that ranks share")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--steps", type=positive, help="of each contender in a round")
    given = parser.parse_args()
    kind = KINDS[given.peer] if given.peer in KINDS else kind_of(given.peer)
    setting = setting_of(kind, given.model, given.world, given.dtype, given.accumulation, given.zero_stage)
    try:
        setting.config()
    except ConfigError as error:
        parser.error(str(error))
    steps = given.steps or (4 if given.model == "tiny" else 1)
    contenders = [
        SHIPPED,
        *([OVER_GLOO] if given.over_gloo else []),
        *(kind.peers if given.peer in KINDS else [given.peer]),
    ]
    try:
        lines = measure(setting, contenders, rounds=given.rounds, steps=steps)
    except (ContenderFailedError, LossesDifferError) as error:
        raise SystemExit(str(error)) from error
    print(
        f"{kind.title}, {given.model}, {given.world} ranks, {given.dtype}, {setting.accumulation} micro-batches of "
        f"{setting.micro_batch_size} x {setting.size.seq_len} tokens, {given.rounds} rounds of {steps} steps"
    )
    print(table(lines))
    print(json.dumps({"machine": machine(), "setting": asdict(setting), "lines": [asdict(line) for line in lines]}))


if __name__ == "__main__":
    main()
