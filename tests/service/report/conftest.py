"""A sweep's records, for the tests of what is drawn from them."""

from pathlib import Path

import pytest

from service.report.records import Records, records_of_run
from tests.service.report.runs import SPACE, sweep_dir


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Of a sweep in which every point has run."""
    return records_of_run(sweep_dir(tmp_path / "s", SPACE).root)
