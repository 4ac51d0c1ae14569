"""Asking a run to stop: SIGTERM, SIGUSR1 (Slurm's warning before the time limit) and SIGINT (Ctrl-C).

    first signal      the loop ends after the step under way, saves, and the command exits with 75
    within 2 seconds  the same request: Ctrl-C reaches a whole process group, and launchers pass on what they get
    any later one     the process ends at once; the newest complete checkpoint stays

A signal is acted on by a thread that waits at a pipe, into which the interpreter writes the signal's number: the main
thread may be inside a collective that never ends, where no handler of its own would run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

EXIT_FAILED = 1
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_SECONDS = 2.0


class StopRequest:
    """Whether this run was asked to stop.  A plain value until `listen`; a rank that is started gets it by argument.

    Args:
        clock: in seconds; monotonic.

    Attributes:
        mark: a file that stands for the request among the ranks of a launcher; it lies in the launcher's own folder.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.mark: Path | None = None
        self._clock = clock
        self._first: float | None = None  # when the first signal came
        self._listens = False
        self._owner = os.getpid()

    def listen(self) -> None:
        """Take the signals of this process from here on.  Called in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, _leave_it_to_the_thread)
        threading.Thread(target=self._watch, args=(reader,), name="stop-signals", daemon=True).start()
        self._listens = True

    def close(self) -> None:
        """The run is over and saved: a signal that still comes must not change how it ends.

        torchrun sends SIGTERM to the ranks of a run that was stopped as soon as it sees the first of them end.
        """
        if self._listens:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # stays so while the interpreter shuts down

    def wanted(self) -> bool:
        """Whether to stop after the step under way."""
        return self._first is not None or (self.mark is not None and self.mark.exists())

    def spread(self, folder: Path) -> None:
        """Let ranks that are about to start share this request through a file in `folder`."""
        self.mark = folder / "stop"
        if self._first is not None:
            self.mark.touch()

    def take(self, number: int) -> None:
        """Act on one signal."""
        name, now = signal.Signals(number).name, self._clock()
        if self._first is None:
            self._first = now
            if self.mark is not None:
                with contextlib.suppress(OSError):  # the launcher has ended
                    self.mark.touch()
            self._say(f"{name}: finishing this step, then saving; a second signal ends at once")
        elif now - self._first > SAME_REQUEST_SECONDS:
            self._say(f"{name} again: ended at once, nothing more is saved")
            self._end_at_once()

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] in STOP_SIGNALS:
                self.take(number[0])

    def _say(self, line: str) -> None:
        # Of the ranks of one machine the first speaks; ranks that were started here leave it to the launcher.
        if os.getpid() == self._owner and os.environ.get("LOCAL_RANK", "0") == "0":
            print(line, file=sys.stderr, flush=True)

    def _end_at_once(self) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        if self.mark is not None and os.getpid() == self._owner:
            shutil.rmtree(self.mark.parent, ignore_errors=True)
        os._exit(EXIT_FAILED)


def die_of_signals() -> None:
    """Let every signal end this process at once, as before `StopRequest.listen`."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """A handler in Python keeps the signal from ending the process; the wakeup pipe already has the number."""
