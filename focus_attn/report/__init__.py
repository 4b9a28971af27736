"""The HTML report: one file that opens offline."""

from focus_attn.report.html import render_report, write_report

__all__ = ["render_report", "write_report"]
