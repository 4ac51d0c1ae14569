"""Runs a script that was written for DeepSpeed, unchanged: `torchrun ... -m megazero.deepspeed script.py ARGS`.

`import deepspeed` in it, or in what it imports, gives megazero's names.  Before ARGS it passes --local_rank=N as
DeepSpeed's launcher does; `--no_local_rank` before the script leaves that out.  Without torchrun it is the only rank;
under mpirun or srun with several tasks each would be one of its own, which is refused.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from megazero.deepspeed.mirror import stand_for_deepspeed
from megazero.launchers import MeetingError, start_problem

# What torchrun sets.  Port 0 is any free one: nobody else joins.
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
_ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def main(arguments: list[str]) -> None:
    """Run a script as `__main__`.  Raises: SystemExit with code 2, there is no script; and what the script raises."""
    parser = argparse.ArgumentParser(
        prog="python -m megazero.deepspeed", description="Run a script written for DeepSpeed."
    )
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    parser.add_argument("script", help="path of a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    given = parser.parse_args(arguments)
    if not os.path.isfile(given.script):
        parser.error(f"there is no script {given.script}")
    if problem := start_problem(os.environ):
        parser.error(problem)
    if "RANK" in os.environ and "LOCAL_RANK" not in os.environ:
        parser.error("RANK is set, but LOCAL_RANK is not; start it with torchrun, which sets both")
    if "RANK" not in os.environ:
        os.environ.update(_ALONE)
    rank = [] if given.no_local_rank else [f"--local_rank={os.environ['LOCAL_RANK']}"]
    sys.argv[:] = [given.script, *rank, *given.arguments]
    sys.path[: not sys.flags.safe_path] = [
        os.path.dirname(os.path.abspath(given.script))
    ]  # as Python does with a script
    stand_for_deepspeed()
    try:
        runpy.run_path(given.script, run_name="__main__")
    except SystemExit as end:
        if end.code == 2 and rank:  # of argparse
            print(f"{rank[0]} was passed to the script; --no_local_rank before its name leaves it out", file=sys.stderr)
        raise
    except MeetingError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
