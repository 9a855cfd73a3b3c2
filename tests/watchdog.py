"""An end for what would never end."""

import contextlib
import signal


@contextlib.contextmanager
def watched(seconds=60):
    """Fail where the block takes so much processor time that it may well run forever.

    What runs inside takes milliseconds where it is right, and would take years where it is
    exponential. The limit lies so far from both that it measures no speed.
    """

    def stop(signum, frame):
        raise AssertionError(f"still running after {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
