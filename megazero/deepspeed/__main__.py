"""Runs a script that was written for DeepSpeed, unchanged: `torchrun ... -m megazero.deepspeed script.py ARGS`.

`import deepspeed` in the script, and in modules that it imports, gives megazero's names.  Like DeepSpeed's launcher, this
passes --local_rank=N before ARGS, but only if the script knows the option; `--no_local_rank` before the script omits it.
Without torchrun, the process is the only rank.  Several tasks of mpirun or srun are refused, since each would train alone.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from megazero.deepspeed.mirror import stand_for_deepspeed
from megazero.launchers import MeetingError, start_problem

# What torchrun sets.  Port 0 is any free one: nobody else joins.
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
_ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def pass_local_rank(rank: str) -> None:
    """Add --local_rank=N to the arguments of argparse parsers that know it.  Others refuse it, as transformers 5 does."""
    parse, option = argparse.ArgumentParser.parse_known_args, f"--local_rank={rank}"

    def parse_known_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if args is None or list(args) == sys.argv[1:]:
            names = [name for name in ("--local_rank", "--local-rank") if name in parser._option_string_actions]
            args = [f"{name}={rank}" for name in names[:1]] + [value for value in sys.argv[1:] if value != option]
        return parse(parser, args, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[assignment,method-assign]


def main(arguments: list[str]) -> None:
    """Run a script as `__main__`.  Raises: SystemExit with code 2: the script does not exist; any error of the script."""
    parser = argparse.ArgumentParser("python -m megazero.deepspeed", description="Run a script written for DeepSpeed.")
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
    sys.argv[:] = [given.script, *given.arguments]
    if not given.no_local_rank:
        text = Path(given.script).read_text(encoding="utf-8", errors="replace")
        if "local_rank" in text or "local-rank" in text:  # it may be read without argparse
            sys.argv.insert(1, f"--local_rank={os.environ['LOCAL_RANK']}")
        pass_local_rank(os.environ["LOCAL_RANK"])
    # as Python does with a script
    sys.path[: not sys.flags.safe_path] = [os.path.dirname(os.path.abspath(given.script))]
    stand_for_deepspeed()
    try:
        runpy.run_path(given.script, run_name="__main__")
    except MeetingError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
