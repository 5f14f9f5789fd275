"""When a job hangs, and that in one line: which rank the others wait for, and where it is."""

import pickle
from typing import Literal

import pytest

from trainables.metrics.heartbeat import Position
from trainables.stacks import ProcessReport
from trainables.teachers.service.client import RESPONSE_TIMEOUT_S
from trainables.worker.hangs.hang_report import SILENT_S, Rank, format_ranks, hang_error, limit_s, quiet_s, stragglers

TRAINING = 0x7F0000000010
POOL = """\
Thread 0x00007f0000000020 (most recent call first):
  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker
  File "/usr/lib/python3.11/threading.py", line 982 in run
"""


def stacks(*frames: str) -> str:
    lines = "".join(f'  File "{frame}\n' for frame in frames)
    return f"{POOL}\nThread 0x{TRAINING:016x} (most recent call first):\n{lines}\nCurrent thread 0x01 (most recent call first):\n"


def rank(number: int, position: Position, *, text: str = "", collective: int | None = None) -> Rank:
    last = None if collective is None else (collective, "gloo:all_reduce")
    position = position._replace(thread_id=TRAINING)
    return Rank(number, "10.0.0.1", position, process=ProcessReport("sleeping", text), collective=last)


def at(part: str, step: int = 12) -> Position:
    return Position(part, step, quiet_s=31.4)


def limit(position: Position | None, hang_after_s: float | Literal["auto"] = 10.0, **settings: bool) -> float:
    return limit_s([Rank(0, "10.0.0.1", position)], hang_after_s, **settings)


SLEEPS = stacks('/x/my_method.py", line 41 in forward', '/x/step.py", line 140 in run_student')
WAITS = stacks('/x/torch/autograd/graph.py", line 9 in _engine_run_backward')


def message(*ranks: Rank) -> str:
    return str(hang_error(ranks))


def test_a_job_has_not_gone_on_for_as_long_as_none_of_its_ranks_has() -> None:
    ranks = [Rank(0, "", Position("student", quiet_s=3.0), 1.0), Rank(1, "", Position("student", quiet_s=30.0))]
    assert quiet_s(ranks) == 4.0  # rank 1 may wait for rank 0


def test_a_rank_that_does_not_answer_has_not_gone_on_since_its_answer_and_has_no_allowance() -> None:
    ranks = [Rank(0, "", Position("student", quiet_s=9.0, batch_s=0.5)), Rank(1, "", Position(), 20.0)]
    assert quiet_s(ranks) == 9.0
    assert limit_s(ranks, 10.0) == 10.0
    assert limit_s(ranks[1:], 10.0) == 100.0


def test_ranks_without_a_job_are_not_waited_for() -> None:
    ranks = [Rank(0, "", None), Rank(1, "", None)]
    assert quiet_s(ranks) == 0.0
    ranks[1].position, ranks[1].silent_s = Position("student", quiet_s=1.0, batch_s=0.5), 11.0
    assert (quiet_s(ranks), limit_s(ranks, 10.0)) == (12.0, 10.0)


@pytest.mark.parametrize(
    ("position", "allowance"),
    [
        (Position(), 10.0),
        (Position("timing", 9), 10.0),
        (Position("backward"), 10.0),  # the first step may compile
        (Position("eval", 9), 10.0),
        (Position("fill"), 10.0),
        (Position("backward", 9, batch_s=0.5), 1.0),
        (Position("eval", 9, batch_s=0.5), 1.0),
        (Position("other", 9), 1.0),
        (Position("checkpoint", 9), 5.0),
    ],
)
def test_operations_that_may_take_long_have_a_multiple(position: Position, allowance: float) -> None:
    assert limit(position) == 10.0 * allowance


def test_a_compilation_has_ten_times_as_long_and_zero_is_never() -> None:
    position = Position("backward", 9, batch_s=0.5)
    assert limit(position, takes_long=True) == 100.0
    assert limit(position, 0.0) == float("inf")


@pytest.mark.parametrize(("batch_s", "limit_s"), [(None, 1200.0), (0.5, 120.0), (30.0, 900.0)])
def test_auto_waits_for_thirty_of_the_last_step_and_never_less_than_two_minutes(batch_s: float | None, limit_s: float) -> None:
    assert limit(Position("student", 3, batch_s=batch_s), "auto") == limit_s
    assert limit(Position("eval", 3, batch_s=batch_s), "auto") == limit_s


def test_a_teacher_service_has_longer_than_its_client_waits_for_it() -> None:
    waiting = Position("teacher", 80, batch_s=0.5)
    assert limit(waiting, "auto", has_service=True) > RESPONSE_TIMEOUT_S
    assert limit(waiting, "auto") == 120.0


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
    assert message(*ranks).endswith("rank 1 of 2 hangs in backward of step 13; rank 0 waits for it in data of step 14")


@pytest.mark.parametrize(
    ("process", "why"), [(ProcessReport("stopped", ""), "its process is stopped"), (None, "its node does not answer")]
)
def test_a_rank_that_does_not_answer_is_the_cause_wherever_the_others_are(process: ProcessReport | None, why: str) -> None:
    silent = Rank(1, "10.0.0.2", at("backward"), SILENT_S, process)
    assert message(rank(0, at("student"), collective=50), silent).endswith(
        f"rank 1 of 2 on 10.0.0.2 does not answer ({why}), and last answered in backward of step 13; "
        "rank 0 waits for it in gloo:all_reduce 50"
    )


def test_a_rank_that_holds_the_interpreter_does_not_answer_and_its_line_is_named() -> None:
    silent = Rank(1, "10.0.0.2", at("student")._replace(thread_id=TRAINING), SILENT_S, ProcessReport("running", SLEEPS))
    assert "rank 1 of 2 hangs in student of step 13 (my_method.py:41 in forward)" in message(rank(0, at("backward")), silent)


def test_a_node_that_is_only_slow_is_not_the_cause_and_its_stacks_are_missed() -> None:
    ranks = [Rank(0, "10.0.0.2", at("backward")), rank(1, at("student"), text=SLEEPS)]
    assert "rank 1 of 2 hangs in student of step 13 (my_method.py:41 in forward); rank 0 waits for it" in message(*ranks)
    assert "rank 0 of 1 hangs in backward of step 13 (its stacks did not arrive)" in message(ranks[0])


def test_a_thread_that_waits_for_another_is_named_by_the_line_that_waits() -> None:
    text = stacks(
        '/usr/lib/python3.11/threading.py", line 355 in wait', '/x/trainables/data/loader/loader.py", line 97 in receive'
    )
    assert "rank 0 of 1 hangs in data of step 13 (loader.py:97 in receive)" in message(rank(0, at("data"), text=text))


def test_where_all_ranks_are_alike_none_is_named_the_cause() -> None:
    same = rank(0, at("backward"), text=WAITS), rank(1, at("backward"))
    assert message(*same).endswith("all 2 ranks hang in backward of step 13 (graph.py:9 in _engine_run_backward)")
    failure = hang_error(same).failure
    assert (failure.rank, failure.position) == (None, None)  # a network may fail twice in the same step


def test_a_model_that_is_being_compiled_does_not_hang_nor_does_what_waits_for_another_jobs_lock() -> None:
    compiling = stacks(
        '/x/torch/_inductor/codecache.py", line 1 in load', '/x/torch/_inductor/compile_fx.py", line 9 in compile_fx'
    )
    compiled = stacks('/x/torch/_dynamo/eval_frame.py", line 9 in compile_wrapper')
    locked = stacks('/x/trainables/locks.py", line 77 in locked', '/x/trainables/data/storage/staging.py", line 50 in stage')
    for text, expected in ((compiling, True), (compiled, False), (locked, True), (SLEEPS, False)):
        assert rank(0, at("student"), text=text).is_compiling_or_locked is expected


def test_the_failure_reaches_the_driver_whole() -> None:
    error = pickle.loads(pickle.dumps(hang_error([rank(0, at("student"), text=SLEEPS)])))
    assert (error.failure.kind, error.failure.rank, error.failure.position) == ("hang", 0, "student of step 13")
    assert "rank 0 (10.0.0.1): student of step 13, my_method.py:41 in forward" in error.stacks
    assert "line 140 in run_student" in error.stacks


def test_ranks_are_numbered_in_runs() -> None:
    assert format_ranks([4]) == "rank 4"
    assert format_ranks([5, 0, 1, 2, 7, 8]) == "ranks 0–2, 5, 7–8"
