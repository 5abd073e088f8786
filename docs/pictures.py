"""``python docs/pictures.py``: photographs the status page and the report of a real job for the site, where Chromium is.

A page names a picture in a comment, ``<!-- picture: NAME.png TEXT -->``. The site shows those that have been taken, so it builds
without a browser; they are not committed, since each run has other seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

_PICTURES = Path(__file__).parent / "pictures"
_ROOT = Path(__file__).parents[1]
_COMMENT = re.compile(r"^<!-- picture: (\S+\.png) (.+) -->$", re.MULTILINE)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=2",
)  # fmt: skip
_WITHIN = 300.0  # seconds for the job


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """mkdocs calls it with each page's text."""

    def shown(found: re.Match[str]) -> str:
        return f"![{found[2]}](pictures/{found[1]})" if (_PICTURES / found[1]).exists() else ""

    return _COMMENT.sub(shown, markdown)


def main() -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        print("no pictures in the site: there is no Chromium (apt-get install chromium)", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="kc-") as directory:
        place = Path(directory)
        _run_job(place)
        _PICTURES.mkdir(exist_ok=True)
        for name, size in (("status", "1200,600"), ("report", "1200,1180")):
            profile = place / f"profile-{name}"
            photograph = [f"--screenshot={_PICTURES / name}.png", f"--window-size={size}", f"--user-data-dir={profile}"]
            subprocess.run(
                [browser, *_FLAGS, *photograph, (place / f"{name}.html").as_uri()],
                check=True, stderr=subprocess.DEVNULL, timeout=120,
            )  # fmt: skip


def _run_job(place: Path) -> None:
    """Four ranks without a GPU. Leaves the page at a moment at which much is under way, and the report."""
    programs = Path(sys.executable).parent
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KCOORD_")},
        "KCOORD_LOCAL_DIR": str(place / "local"), "KCOORD_STORE": str(place / "store"), "KCOORD_STORE_CREATE": "1",
        "KCOORD_JOB": "pretrain", "KCOORD_PAGE": "0", "OMP_NUM_THREADS": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }  # fmt: skip
    command = [programs / "kcoord-torchrun", "--standalone", "--nproc-per-node", "4", "train_ddp.py", "--steps", "5"]
    job = subprocess.Popen(command, env=environ, cwd=_ROOT / "examples", stdout=subprocess.DEVNULL)
    try:
        _save_page(programs, environ, place / "status.html", job)
        if job.wait(_WITHIN):
            raise SystemExit("no pictures: the job failed")
    finally:
        job.kill()
        job.wait()
    subprocess.run([programs / "kcoord", "report", "pretrain", "--output", place / "report.html"],
                   env=environ, check=True, stdout=subprocess.DEVNULL)  # fmt: skip


def _save_page(programs: Path, environ: dict[str, str], file: Path, job: subprocess.Popen[bytes]) -> None:
    most, address = -1, ""
    while job.poll() is None:
        if not address:
            status = subprocess.run([programs / "kcoord", "status", "--json"], env=environ, capture_output=True)
            address = json.loads(status.stdout)["page"] or "" if status.returncode == 0 else ""
            continue
        try:
            with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
                page = answer.read().decode()
        except OSError:  # the agent ends with the job
            return
        shown = json.loads(re.findall(r'id="now">(.*?)</script>', page, re.DOTALL)[0])
        telling = len(shown["jobs"]) + sum(2 + len(f["waiting"]) for f in shown["flights"])
        if telling >= most:
            most = telling
            file.write_text(page)
        time.sleep(0.3)


if __name__ == "__main__":
    main()
