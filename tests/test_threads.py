"""Every thread that the product starts is listed here, with what it calls of CUDA; one that calls anything binds its device."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
STARTS = {"Thread", "ThreadPoolExecutor", "Timer", "to_thread"}
NOTHING, BOUND, ONE_GPU = "nothing", "binds its device", "its process sees one GPU"
THREADS = {
    "service/cluster/local_ray.py": NOTHING,
    "service/cluster/parallel_map.py": NOTHING,
    "service/runs/stored/driver_lease.py": NOTHING,
    "service/runs/pack.py": NOTHING,
    "service/runs/recorder.py": NOTHING,
    "service/sweeps/trial_functions.py": NOTHING,
    "service/runs/stored/segments.py": NOTHING,
    "service/runs/stored/stored_runs.py": NOTHING,
    "service/runs/stored/stored_session.py": NOTHING,
    "service/tracking/sync.py": NOTHING,
    "service/tracking/ui_app.py": NOTHING,
    "trainables/data/loader/batch_reader.py": NOTHING,  # it fills memory that the training thread has pinned
    "trainables/data/loader/loader_server.py": NOTHING,  # of a process that never imports CUDA
    "trainables/data/storage/remote_shards.py": NOTHING,
    "trainables/data/storage/staging.py": NOTHING,
    "trainables/device/device_batches.py": BOUND,  # decodes, records an event
    "trainables/distributed/rank_pool.py": NOTHING,  # waits for its parent's end
    "trainables/disk_writer.py": NOTHING,  # waits for a checkpoint's copy by its event; the rows of a cache bind it
    "trainables/metrics/telemetry.py": NOTHING,  # NVML, which needs no context
    "trainables/teachers/cache/publish.py": NOTHING,
    "trainables/teachers/service/actor.py": ONE_GPU,
    "trainables/teachers/service/client.py": NOTHING,  # the training thread copies what the event loop has received
    "trainables/worker/evaluation_actor.py": ONE_GPU,
    "trainables/worker/hangs/hang_watch.py": NOTHING,
    "trainables/worker/recorder.py": NOTHING,
}


def called_names(path: Path) -> set[str]:
    """The last part of the name of everything that a module calls or hands on."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    return calls | {node.id for node in nodes if isinstance(node, ast.Name)}


def test_every_thread_is_known_with_what_it_calls_of_cuda() -> None:
    modules = [*(ROOT / "service").rglob("*.py"), *(ROOT / "trainables").rglob("*.py")]
    names = {str(path.relative_to(ROOT)): called_names(path) for path in modules}
    starting = {module: called for module, called in names.items() if called & STARTS}
    assert starting.keys() == THREADS.keys()
    bound = {module for module, called in starting.items() if "bind_thread" in called}
    assert bound == {module for module, what in THREADS.items() if what == BOUND}


def test_rows_that_a_caches_thread_waits_for_bind_it_to_their_device() -> None:
    assert "bind_thread" in called_names(ROOT / "trainables/teachers/rows.py")
