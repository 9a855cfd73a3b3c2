"""Scripts run in this process, which is afterwards as it was before."""

import multiprocessing
import os
import signal
import sys
import textwrap
import threading

import pytest

from remat_kit._doctor.script import Script, left_threads, running


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_process_is_as_it_was_before(tmp_path):
    script = tmp_path / "train.py"
    text = f"""
        import multiprocessing, os, signal, sys, threading, time
        import helper_of_the_script
        os.chdir({str(tmp_path)!r})
        os.environ["OF_THE_SCRIPT"] = "1"
        sys.path.append("/of/the/script")
        sys.argv.append("more")
        sys.stdout = sys.stderr
        signal.signal(signal.SIGTERM, lambda *_: None)
        def forever():
            while True:
                time.sleep(0.01)
        threading.Thread(target=forever, name="forever").start()
        threading.Thread(target=forever, name="forever too", daemon=True).start()
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
        """
    script.write_text(textwrap.dedent(text))
    script.with_name("helper_of_the_script.py").touch()

    def state():
        names = sorted(t.name for t in threading.enumerate() if "forever" in t.name)
        handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        streams = sys.stdout, sys.stderr, sys.modules["__main__"]
        return (
            os.getcwd(),
            dict(os.environ),
            list(sys.path),
            list(sys.argv),
            handlers,
            names,
            streams,
        )

    before = state()
    with running(Script(str(script), ("--lr", "1"))) as run:
        run()
        assert sys.argv == [str(script), "--lr", "1", "more"]
        assert os.environ["OF_THE_SCRIPT"] == "1"
    assert state() == before
    assert not multiprocessing.active_children()
    assert "helper_of_the_script" not in sys.modules
    assert not left_threads()
