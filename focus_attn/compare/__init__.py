"""Methods x models x data in one table: `focus compare`, and the recipes of the paper's tables."""

from focus_attn.compare.recipe import Comparison, Dataset, Method

__all__ = ["Comparison", "Dataset", "Method"]
