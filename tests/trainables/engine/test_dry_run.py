"""What fits together passes the dry run. What does not is tested where an experiment is checked."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainables.jobs import config
from trainables.engine.dry_run import check_fit

SEVERAL = [{"model": "convnet_large", "weights": "w"}, {"model": "resnet8", "weights": "w"}]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"teacher": None, "teachers": SEVERAL},
        {"teacher": None, "teachers": SEVERAL, "distill": {"method": ["rkd", "kd"], "options": {}}},
        {"teacher": {"cache": "folder"}},
        {"teacher": {"service": 1}},
        {"teacher": None},
        {"distill": {"method": "none"}},
        {"model": "resnet8", "scale": {"sync_batch_norm": True}, "teacher": None},
    ],
    ids=str,
)
def test_a_job_whose_parts_fit_passes(tmp_path: Path, sections: dict[str, Any]) -> None:
    settings = {"data": {"image_size": 16}, "scale": {}, **sections}
    check_fit(config(tmp_path, **settings), num_classes=10)
