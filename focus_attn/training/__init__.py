"""Fitting routers to a frozen model."""

from focus_attn.training.coverage import CoverageFit, fit_coverage
from focus_attn.training.layer_fit import LayerFit
from focus_attn.training.objectives import FarAttention, coverage_loss, far_attention

__all__ = [
    "CoverageFit",
    "FarAttention",
    "LayerFit",
    "coverage_loss",
    "far_attention",
    "fit_coverage",
]
