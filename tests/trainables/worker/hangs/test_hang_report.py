"""A hang in one line: whom the others wait for, where it is, and what keeps it."""

import pickle
from dataclasses import replace

import pytest

from trainables.metrics.heartbeat import Position
from trainables.worker.hangs.hang_report import RankReport, hang_error, numbered, stragglers
from trainables.worker.hangs.process_probe import ProcessState
from trainables.worker.hangs.worker_probe import Collective

TRAINING = 0x7F0000000010
POOL = """\
Thread 0x00007f0000000020 (most recent call first):
  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker
  File "/usr/lib/python3.11/threading.py", line 982 in run
"""
READER = """\
Thread 0x00007f0000000030 (most recent call first):
  File "/usr/lib/python3.11/pathlib.py", line 1044 in open
  File "/x/trainables/data/sources/folder.py", line 70 in read
  File "/x/trainables/data/loader/loader.py", line 12 in _fill
"""


def stacks(*frames: str, others: str = POOL) -> str:
    lines = "".join(f'  File "{frame}\n' for frame in frames)
    return (
        f"{others}\nThread 0x{TRAINING:016x} (most recent call first):\n{lines}\nCurrent thread 0x01 (most recent call first):\n"
    )


def rank(number: int, position: Position, *, text: str = "", state: str = "", collective: int | None = None) -> RankReport:
    process = ProcessState(state, stacks=text)
    last = None if collective is None else Collective(collective, "gloo:all_reduce")
    return RankReport(number, "10.0.0.1", position._replace(thread_id=TRAINING), process, last)


def at(phase: str, step: int = 12) -> Position:
    return Position("train", step, phase)


SLEEPS = stacks('/x/my_method.py", line 41 in forward', '/x/step.py", line 140 in run_student')
WAITS = stacks('/x/torch/autograd/graph.py", line 9 in _engine_run_backward')


def message(*ranks: RankReport) -> str:
    return str(hang_error(ranks, 31.4))


def test_the_rank_behind_is_named_with_its_line_and_the_collective_that_the_others_wait_in() -> None:
    ranks = [rank(n, at("backward"), text=WAITS, collective=56) for n in (0, 1, 3)]
    ranks.insert(2, rank(2, at("student"), text=SLEEPS, collective=55))
    assert message(*ranks) == (
        "no progress for 31 s: rank 2 of 4 hangs in student of step 13 (my_method.py:41 in forward); "
        "ranks 0–1, 3 wait for it in gloo:all_reduce 56"
    )


def test_in_the_same_phase_the_one_is_the_straggler_that_has_not_begun_the_collective() -> None:
    ranks = [rank(0, at("backward"), collective=55), rank(1, at("backward"), collective=56)]
    assert [straggler.rank for straggler in stragglers(ranks)] == [0]


def test_without_collectives_the_one_is_the_straggler_that_is_least_far() -> None:
    ranks = [rank(0, at("data", 13)), rank(1, at("backward", 12))]
    assert [straggler.rank for straggler in stragglers(ranks)] == [1]


@pytest.mark.parametrize("state", ["is stopped (SIGSTOP)", "has died"])
def test_a_stopped_or_dead_process_is_the_cause_wherever_the_others_are(state: str) -> None:
    ranks = [rank(0, at("student"), collective=50), rank(1, at("backward"), state=state, collective=51)]
    line = f"rank 1 of 2 on 10.0.0.1 {state}, and last answered in backward of step 13; rank 0 waits for it in gloo:all_reduce 50"
    assert message(*ranks).endswith(line)


def test_a_node_that_does_not_answer_is_the_cause() -> None:
    silent = RankReport(1, "10.0.0.2", at("student"), None, is_answering=False)
    line = "rank 1 of 2 on 10.0.0.2 is on a node that does not answer, and last answered in student of step 13; rank 0 waits"
    assert line in message(rank(0, at("data")), silent)


def test_a_node_that_is_only_slow_is_not_the_cause_and_its_stacks_are_missed() -> None:
    ranks = [RankReport(0, "10.0.0.2", at("backward"), None), rank(1, at("student"), text=SLEEPS)]
    assert "rank 1 of 2 hangs in student of step 13 (my_method.py:41 in forward); rank 0 waits for it" in message(*ranks)
    assert "rank 0 of 1 hangs in backward of step 13 (its stacks did not arrive)" in message(ranks[0])


def test_a_rank_whose_loader_process_is_stopped_is_the_cause_and_the_line_says_so() -> None:
    ranks = [rank(0, at("data")), rank(1, at("data"), text=SLEEPS)]
    ranks[1] = replace(ranks[1], process=ProcessState(stopped_child="its loader process is stopped (SIGSTOP)", stacks=SLEEPS))
    assert message(*ranks).endswith(
        "rank 1 of 2 waits for data in data of step 13 (my_method.py:41 in forward), and its loader process is stopped (SIGSTOP)"
        "; rank 0 waits for it in data of step 13"
    )


def test_waiting_for_data_names_the_thread_that_reads() -> None:
    text = stacks('/usr/lib/python3.11/queue.py", line 171 in get', others=POOL + "\n" + READER)
    assert "rank 0 of 1 waits for data in data of step 13 (folder.py:70 in read)" in message(rank(0, at("data"), text=text))


def test_waiting_for_data_names_the_thread_of_the_loader_process_that_reads_and_its_stacks_are_in_the_record() -> None:
    text = stacks('/x/trainables/data/loader/loader_process.py", line 97 in receive')
    one = rank(0, at("data"), text=text)
    one = replace(one, process=ProcessState(stacks=text, loader_stacks=POOL + "\n" + READER))
    error = hang_error([one], 31.4)
    assert "rank 0 of 1 waits for data in data of step 13 (folder.py:70 in read)" in str(error)
    assert error.stacks.endswith("its loader process:\n" + POOL + "\n" + READER)


def test_a_thread_that_waits_for_a_disk_is_said_of_the_rank_behind() -> None:
    ranks = [rank(0, at("data"), text=SLEEPS), rank(1, at("backward"))]
    ranks[0] = replace(ranks[0], process=ProcessState(waits_for_disk=True, stacks=SLEEPS))
    assert (
        "rank 0 of 2 waits for data in data of step 13 (my_method.py:41 in forward), where a disk or a network file system does "
        "not answer (a thread in state D); rank 1 waits for it"
    ) in message(*ranks)


def test_a_checkpoint_that_is_not_written_is_told_apart_from_a_lost_peer() -> None:
    text = stacks('/x/trainables/rundir.py", line 35 in replacing')
    ranks = [
        rank(0, Position("checkpoint", 20), text=text, collective=80),
        rank(1, at("backward", 20), text=WAITS, collective=81),
    ]
    assert message(*ranks).endswith(
        "rank 0 of 2 does not get its checkpoint written in checkpoint after step 20 (rundir.py:35 in replacing); "
        "rank 1 waits for it in gloo:all_reduce 81"
    )


def test_where_all_ranks_are_alike_none_is_named_the_cause() -> None:
    same = rank(0, at("backward"), text=WAITS), rank(1, at("backward"))
    assert message(*same).endswith(
        "rank 0 of 2 hangs in backward of step 13 (graph.py:9 in _engine_run_backward), and so does rank 1"
    )


def test_a_model_that_is_being_compiled_does_not_hang_nor_does_what_waits_for_another_jobs_lock() -> None:
    compiling = stacks(
        '/x/torch/_inductor/codecache.py", line 1 in load', '/x/torch/_inductor/compile_fx.py", line 9 in compile_fx'
    )
    compiled = stacks('/x/torch/_dynamo/eval_frame.py", line 9 in compile_wrapper')
    locked = stacks('/x/trainables/locks.py", line 77 in locked', '/x/trainables/data/storage/staging.py", line 50 in stage')
    assert rank(0, at("student"), text=compiling).is_compiling_or_locked
    assert rank(0, Position("start"), text=locked).is_compiling_or_locked
    assert not rank(0, at("student"), text=compiled).is_compiling_or_locked


def test_the_failure_reaches_the_driver_whole() -> None:
    error = pickle.loads(pickle.dumps(hang_error([rank(0, at("student"), text=SLEEPS)], 31.4)))
    assert (error.failure.kind, error.failure.rank, error.failure.position) == ("hang", 0, "student of step 13")
    assert "rank 0 (10.0.0.1): student of step 13, my_method.py:41 in forward" in error.stacks
    assert "line 140 in run_student" in error.stacks


def test_ranks_are_numbered_in_runs() -> None:
    assert numbered([4]) == "rank 4"
    assert numbered([5, 0, 1, 2, 7, 8]) == "ranks 0–2, 5, 7–8"
