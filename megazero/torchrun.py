"""torchrun with the exit code of its ranks: `python -m megazero.torchrun` in place of `torchrun`, with the same arguments.

    ranks              0     2     75    others     torchrun was told to stop
    torchrun           0     1     1     1          1
    this               0     2     75    1          75, once its ranks have saved and ended

So Kubernetes and SkyPilot can restart a run that was stopped, but not a run with a wrong configuration.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> int:
    """Run torchrun with this process's arguments; return the exit code."""
    try:
        main()
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        exit_code = error.get_first_failure()[1].exitcode
        return exit_code if exit_code in (2, 75) else 1
    except SignalException as error:
        print(f"torchrun: {error}; its ranks have ended", file=sys.stderr)
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(run())
