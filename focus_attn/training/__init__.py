"""Learning the groups: the short fit by coverage, and training through hard routing by a recipe."""

from typing import TYPE_CHECKING

from focus_attn.lazy import lazily
from focus_attn.training.balance import nudge_bias
from focus_attn.training.coverage import CoverageFit, fit_coverage
from focus_attn.training.data import Sources
from focus_attn.training.layer_fit import LayerFit
from focus_attn.training.measures import collapsed_routers, group_dominance, probe_groups, stability
from focus_attn.training.objectives import FarAttention, coverage_loss, far_attention
from focus_attn.training.recipe import Data, Recipe, Stage, Start
from focus_attn.training.sensitivity import layer_sensitivity
from focus_attn.training.starts import start_routers
from focus_attn.training.step import StepOptions, StepResult, training_step

if TYPE_CHECKING:
    from focus_attn.training.loop import TrainedRun, train
else:  # the loop brings transformers' Trainer with it: only for those who train
    __getattr__ = lazily(__name__, {"TrainedRun": "loop", "train": "loop"})

__all__ = [
    "CoverageFit",
    "Data",
    "FarAttention",
    "LayerFit",
    "Recipe",
    "Sources",
    "Stage",
    "Start",
    "StepOptions",
    "StepResult",
    "TrainedRun",
    "collapsed_routers",
    "coverage_loss",
    "far_attention",
    "fit_coverage",
    "group_dominance",
    "layer_sensitivity",
    "nudge_bias",
    "probe_groups",
    "stability",
    "start_routers",
    "train",
    "training_step",
]
