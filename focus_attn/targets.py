"""The files that a command is to write, looked at before the work and not after it."""

from __future__ import annotations

import os
from pathlib import Path


def check_results(json_file: Path | None, plot: Path | None) -> None:
    """The numbers and the plot of a command."""
    check_targets(json_file)
    if plot is not None:
        from focus_attn.report.bench_plots import check_plot_file

        check_plot_file(plot)


def check_targets(*files: Path | None) -> None:
    """ValueError where one of them could not be written."""
    for file in files:
        if file is None:
            continue
        if not file.parent.is_dir():
            raise ValueError(f"the folder of {str(file)!r} does not exist: create it or choose another place")
        if file.is_dir():
            raise ValueError(f"{str(file)!r} is a folder: name a file, in it perhaps")
        if not os.access(file.parent, os.W_OK):
            raise ValueError(f"nothing can be written into {str(file.parent)!r}: choose another place")
