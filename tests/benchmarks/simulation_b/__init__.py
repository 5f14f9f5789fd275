"""Simulated GPU clusters on which a search for throughput can be tried, written from publications about real ones alone.

    cluster = draw_cluster(seed=7, size=320)   # or size=700: hardware, models, disturbances and a grid of points
    testbed = Testbed(cluster, seed=1)         # an afternoon on that cluster: a clock, a tenant, cold caches
    trial = testbed.measure(cluster.points[0], num_steps=40)
    answer = truth(cluster)                    # arrays in the order of cluster.points

`measure` starts the training of a point and runs `num_steps` optimizer steps. Its `Trial` has an outcome:

- `ok`: `step_times_s`, and `phases_s` with a row a step and the columns of `PHASES`. A row is a mean over ranks and adds up
  to the step's time. Where one rank waits for data, the others wait in all-reduce.
- `oom`: memory ran out, at once or after the steps that are returned: the allocator's pool grows in a run.
- `failed`: a worker died, or hung until a timeout. The same point may run the next time.

All outcomes cost `wall_s`, of which `startup_s` come before the first step. The first steps are slow (autotuning); after them,
steps that take batches loaded in that time are faster than the loader can go on. `peak_memory_fraction` is the largest so far.

A testbed has one clock, `now_s`, which trials move; add to it to wait. GPU heat, page cache and the tenant, who comes and goes,
are the testbed's and outlast a trial. Trials run one after the other; equal calls in an equal order give equal answers.

`truth` is what a run of many hours gets: hot GPUs, full page cache, grown memory pool, the mean over all disturbances. With a
tenant, `images_per_s` is the mean over time and `quiet_images_per_s` that without. `fits` is False where the long run ends out
of memory. `bottleneck` names what limits the best point.

`global_batch_size` is over all workers, and a rank gets the quotient rounded up; `loader_workers` is per GPU; ranks fill node
after node. A GPU costs `cluster.gpu.price` dollars an hour; paid by GPU, one worker is nearly always the cheapest, and paid by
node (`cluster.gpus_per_node`), it is not.
"""

from tests.benchmarks.simulation_b.cluster import Cluster, Point, Tenant, draw_cluster
from tests.benchmarks.simulation_b.pipeline import PHASES
from tests.benchmarks.simulation_b.testbed import Testbed, Trial
from tests.benchmarks.simulation_b.truth import Truth, bottleneck, truth

__all__ = ["PHASES", "Cluster", "Point", "Tenant", "Testbed", "Trial", "Truth", "bottleneck", "draw_cluster", "truth"]
