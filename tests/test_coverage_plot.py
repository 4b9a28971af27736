"""benchmarks/coverage_plot.py draws the reports that are kept."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import coverage_plot

REPORTS = Path(__file__).parents[1] / "results" / "report"


def test_kept_reports_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    reports = [json.loads((REPORTS / f"k8_{length}.json").read_text()) for length in (2048, 8192)]
    coverage_plot.draw(reports, tmp_path / "layers.svg")
    drawn = (tmp_path / "layers.svg").read_text()
    for text in ("2,048 tokens", "8,192 tokens", "Focus", *(label for _, label, _, _ in coverage_plot.LINES)):
        assert drawn.count(f">{text}<") == 1
