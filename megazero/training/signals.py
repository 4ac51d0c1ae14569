"""Asks a run to stop: SIGTERM, SIGUSR1 (Slurm's warning before the time limit) and SIGINT (Ctrl-C).

    first signal      the loop finishes the current step, saves, and the command exits with 75
    within 2 seconds  the same request: Ctrl-C reaches a whole process group, and launchers forward their signals
    any later one     the process ends at once; the newest complete checkpoint stays

The interpreter writes each signal's number into a pipe that a thread reads; the main thread may hang in a collective.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megazero.terminal import warn

EXIT_FAILED = 1
EXIT_REFUSED = 2  # by the configuration, or by the owner of the run's directories
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_SECONDS = 2.0
_KILLED_WITHIN_SECONDS = 10.0  # unless the kernel cannot let go of it, such as of a read from a server that is gone


class StopRequest:
    """Receives requests to stop this run, by signals.  Picklable until `listen`, so that ranks can be started with it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.mark: Path | None = None  # a file; its existence is the request for all ranks of the launcher
        self._clock = clock
        self._first: float | None = None  # time of the first signal
        self._listens = False
        self._owner = os.getpid()

    def listen(self) -> None:
        """Handle the signals of this process from now on.  Called in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # With any Python handler the signal does not end the process; the number is already in the pipe.
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=(reader,), name="stop-signals", daemon=True).start()
        self._listens = True

    def close(self) -> None:
        """Ignore signals from now on, since the run is saved, and torchrun sends SIGTERM as soon as the first rank ends."""
        if self._listens:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # stays so while the interpreter shuts down

    def wanted(self) -> bool:
        """Whether to stop after the current step."""
        return self._first is not None or (self.mark is not None and self.mark.exists())

    def spread(self, folder: Path) -> None:
        """Share this request with the ranks that will be started, through a file in `folder`."""
        self.mark = folder / "stop"
        if self._first is not None:
            self.mark.touch()

    def take(self, number: int) -> None:
        """Handle one signal."""
        name, now = signal.Signals(number).name, self._clock()
        if self._first is None:
            self._first = now
            if self.mark is not None:
                with contextlib.suppress(OSError):  # the launcher has ended
                    self.mark.touch()
            self._log(f"{name}: finishing this step, then saving; a second signal ends at once")
        elif now - self._first > SAME_REQUEST_SECONDS:
            self._log(f"{name} again: ended at once, nothing more is saved")
            self._end_at_once()

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] in STOP_SIGNALS:
                self.take(number[0])

    def _log(self, line: str) -> None:
        # Only the first rank of a machine prints; ranks that were started here leave it to the launcher.
        if os.getpid() == self._owner and os.environ.get("LOCAL_RANK", "0") == "0":
            warn(line)

    def _end_at_once(self) -> None:
        children = multiprocessing.active_children()
        for child in children:
            child.kill()
        for child in children:  # who waits for this command may use their devices and ports next
            child.join(_KILLED_WITHIN_SECONDS)
        if self.mark is not None and os.getpid() == self._owner:
            shutil.rmtree(self.mark.parent, ignore_errors=True)
        os._exit(EXIT_FAILED)


def die_of_signals() -> None:
    """Let every signal end this process at once, as before `listen`."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
