"""Fills the object stores of all nodes of RAY_ADDRESS, prints `full`, and frees them after so many seconds.

A program by itself: `python -m tests.faults.storm.object_store SECONDS`.
"""

import logging
import sys
import time

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

BLOCK_BYTES = 1 << 22


class Filler:
    """What one node's object store is full of."""

    def fill(self, num_bytes: float) -> None:
        """Put so much, and read it: what somebody reads can neither be evicted nor spilled."""
        references = [ray.put(np.zeros(BLOCK_BYTES, np.uint8)) for _ in range(1 + int(num_bytes // BLOCK_BYTES))]
        self.blocks = references, ray.get(references)


def main(seconds: float) -> None:
    """Fill, wait, and leave."""
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    wheres = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=True) for node in nodes]
    actor = ray.remote(num_cpus=0)(Filler)
    fillers = [actor.options(scheduling_strategy=where).remote() for where in wheres]
    sizes = [node["Resources"]["object_store_memory"] for node in nodes]
    ray.get([filler.fill.remote(size) for filler, size in zip(fillers, sizes, strict=True)], timeout=120)
    print("full", flush=True)
    time.sleep(seconds)


if __name__ == "__main__":
    main(float(sys.argv[1]))
