"""The peer of `startup`: Ray started, and a `TorchTrainer` whose function does nothing. `python -m tests.benchmarks.bare WORKERS`

Prints when its train function was entered and when `fit` returned, in unix seconds.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer


def main(num_workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entered = Path(folder) / "entered"

        def train(settings: dict[str, Any]) -> None:
            if ray.train.get_context().get_world_rank() == 0:
                entered.write_text(str(time.time()))

        # The CPUs that `distill train` reserves for the same workers.
        ray.init(address="local", num_cpus=max(2, 2 * num_workers))
        TorchTrainer(
            train,
            train_loop_config={},
            scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()
        ended = time.time()
        ray.shutdown()
        print(json.dumps({"entered": float(entered.read_text()), "ended": ended}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
