"""`python -m tests.trainables.teachers.cache.long_job JOB.json`: trains a job, for a test that kills it."""

import sys
from pathlib import Path

from tests.trainables.jobs import train
from trainables.config import TrainConfig
from trainables.distributed.group import Group

if __name__ == "__main__":
    train(Group(), TrainConfig.model_validate_json(Path(sys.argv[1]).read_text()))
