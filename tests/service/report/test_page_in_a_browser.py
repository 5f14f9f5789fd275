"""The page as a browser prints and pictures it at once, in Chromium."""

import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from service.report.page import write_page
from service.report.records import records_of_run
from tests.service.report.runs import sweep_dir

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: nothing draws the page"),
]


def browse(page: Path, *options: str) -> str:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent}/profile", *options]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=True, timeout=120).stdout


def test_all_figures_are_drawn_once_the_page_is_loaded_and_fit_the_paper(tmp_path: Path) -> None:
    page = write_page(records_of_run(sweep_dir(tmp_path / "s", {"data.global_batch_size": [64, 128]}).root))
    document = browse(page, "--window-size=1400,900", "--dump-dom")
    assert document.count('class="plot js-plotly-plot"') == document.count("<figure>") > 0
    browse(page, f"--print-to-pdf={tmp_path}/page.pdf", "--no-pdf-header-footer", "--blink-settings=preferredColorScheme=0")
    pdf = (tmp_path / "page.pdf").read_bytes()
    streams = re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL)
    drawn = b"\n".join(zlib.decompressobj().decompress(stream) for stream in streams if stream[:1] == b"\x78")
    assert b"0 .4471 .698 rg" in drawn  # the first color of a figure's series, #0072b2
    assert b".9098 .9176 .9333 rg" not in drawn  # the ink of the dark page, #e8eaee
    scales = {float(scale) for scale in re.findall(rb"cm\nq\n([\d.]+) 0 0 [\d.]+ ", drawn)}
    assert scales == {3.125}  # 75 units an inch: nothing was so wide that it had to be made smaller
