"""The pictures of `docs/pictures`, taken of a real demo: its terminal and its report, wide, dark and on a phone.

    OMP_NUM_THREADS=1 PYTHONPATH=src python docs/hooks/screenshots.py

Needs Chromium. Look at what it took before you commit it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from hyper_parallel.cli.demo import run_demo

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
_SETTINGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
_LIGHT, _DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.stderr.write("There is no Chromium here.\nInstall it; on Debian and Ubuntu: apt install chromium\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the demo names its report by its name alone
        report, terminal = Path(folder, "report.html"), Path(folder, "demo.html")
        # No terminal: the bars that are gone at the end would be recorded.
        console = Console(record=True, width=100, force_terminal=False, color_system="truecolor", highlight=False)
        run_demo(console, "40%", 10, Path("report.html"))
        svg = console.export_svg(title="hyper-parallel demo")
        width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()
        # Its fonts come from elsewhere; those that are here do.
        svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
        terminal.write_text(f'<meta charset="utf-8"><body style="margin:0">{svg}', encoding="utf-8")
        take(browser, terminal, "demo", round(float(width)), round(float(height)), _LIGHT)
        take(browser, report, "report-light", 1100, 1410, _LIGHT)
        take(browser, report, "report-dark", 1100, 1410, _DARK)
        take(browser, report, "report-phone", 390, 1390, _LIGHT)
    return 0


def take(browser: str, page: Path, name: str, width: int, height: int, scheme: str) -> None:
    target = PICTURES / f"{name}.png"
    command = [browser, *_SETTINGS, scheme, f"--window-size={width},{height}", f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    sys.exit(main())
