"""A report's page in a browser: it is drawn without errors, and fits the screen of a telephone."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.lightning_tasks.report.report_folders import report, run_folder

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TELEPHONE = 390  # pixels
MEASURE = """
<script>
addEventListener("load", () => {
  const edges = [...document.querySelectorAll(".configs td")].map(cell => cell.getBoundingClientRect().right);
  console.log("measured");
  parent.postMessage(JSON.stringify(
    {page: document.documentElement.scrollWidth, window: innerWidth, cells: Math.max(...edges)}), "*");
});
</script>
</body>"""
FRAME = """<!DOCTYPE html><title>nothing</title>
<script>onmessage = event => { document.title = event.data; }</script>
<iframe src="page.html" style="border: 0; height: 1600px; width: %dpx"></iframe>"""  # windows have a least width


@pytest.fixture
def page(tmp_path):
    folders = [run_folder(tmp_path / "a_recipe_of_language_modeling" / f"version_{n}", n, n / 10) for n in (0, 1)]
    other = {"class_path": "lightning_tasks.LanguageModelingTask", "init_args": {"mechanism": "rpc", "lr": 0.5}}
    folders.append(run_folder(tmp_path / "the_other_recipe_with_a_long_name" / "version_0", 0, 0.5, model=other))
    report(tmp_path, *folders)
    return tmp_path / "report.html"


def browse(address, profile, *options):
    """Standard output of a browser without a window, and what the page's console said."""
    if BROWSER is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command = [BROWSER, *flags, f"--user-data-dir={profile}", *options, address.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_is_drawn_and_logs_no_error(page, tmp_path):
    from matplotlib.image import imread

    screenshot = tmp_path / "page.png"
    _, said = browse(page, tmp_path / "profile", "--window-size=1000,1400", f"--screenshot={screenshot}")
    assert said == []
    pixels = imread(screenshot)[..., :3]
    assert pixels.shape[:2] == (1400, 1000)
    dark = pixels.max(-1) < 0.5
    assert 0.005 < dark.mean() < 0.5  # text
    for color in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):  # the lines of two configurations
        assert (np.abs(pixels - np.array(color) / 255).max(-1) < 0.02).sum() > 100


def test_the_page_fits_a_telephone(page, tmp_path):
    """Wide tables scroll in their boxes; the values of two configurations stand side by side without."""
    (tmp_path / "page.html").write_text(page.read_text().replace("</body>", MEASURE))
    (tmp_path / "frame.html").write_text(FRAME % TELEPHONE)
    text, said = browse(tmp_path / "frame.html", tmp_path / "profile", "--dump-dom")
    assert ["measured" in line for line in said] == [True]
    widths = json.loads(re.search("<title>(.*?)</title>", text)[1])
    assert widths["window"] == TELEPHONE
    assert widths["page"] <= TELEPHONE
    assert widths["cells"] <= TELEPHONE
