import subprocess
import sys
from pathlib import Path


def test_64k_tokens_through_stock_take_at_most_3_gib() -> None:
    """8 heads x 64 in fp32: a mask of 64K x 64K alone would take 4 GiB a head. A process of its own, for its peak."""
    code = "from benchmarks.stock_cpu import print_peak; print_peak(65536)"
    root = Path(__file__).parent.parent
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert 0 < float(answer.stdout) <= 3
