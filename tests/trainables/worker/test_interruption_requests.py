"""Why a worker ends its stage early: it got SIGTERM."""

import subprocess
import sys

import pytest


@pytest.mark.processes
def test_the_first_sigterm_is_a_notice_and_the_second_ends_the_process() -> None:
    code = """if True:
        import os, signal
        from trainables.worker import interruption_requests as requests
        requests.is_preempted = lambda: False
        requests.note_sigterm()
        ask = requests.InterruptionRequests()
        print(ask())
        os.kill(os.getpid(), signal.SIGTERM)
        print(ask(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("still here")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("None\npreempted\n", -15)
