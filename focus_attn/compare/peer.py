"""The peer of a row, set to a cost at a length and fitted to text where it learns something."""

from __future__ import annotations

from torch import nn

from focus_attn.baselines import BASELINES, make_baseline
from focus_attn.baselines.seam import Baseline, FittedBaseline, Kind
from focus_attn.compare.data import Texts
from focus_attn.compare.recipe import Method, options_of

FULL = "full"
FIT_BLOCKS = 8  # of training text, of the length that is measured


def make_peer(
    method: Method, model: nn.Module, length: int, budget: float | None, texts: Texts, seed: int = 0
) -> Baseline | None:
    """None: the model attends itself, densely or with Focus. ValueError: the peer cannot do what the row asks.

    seed: of what the peer draws, such as where its centroids begin, unless the row names one.
    """
    if method.is_focus or method.attention == FULL:
        return None
    options = {**drawn_with(method, seed), **method.options}
    peer = make_baseline(method.attention, budget=budget, length=length, model=model, **options)
    if isinstance(peer, FittedBaseline):
        peer.fit(model, texts.train_blocks(length, FIT_BLOCKS))
    return peer


def drawn_with(method: Method, seed: int) -> dict[str, int]:
    """The seed, if it is not the usual one, where the row's peer draws something and the row names no seed for it."""
    if not seed or method.is_focus or method.attention == FULL or "seed" in method.options:
        return {}
    return {"seed": seed} if "seed" in options_of(method.attention, method.budget is not None) else {}


def kind_of(method: Method) -> Kind:
    if method.is_focus:
        return "skips"
    return BASELINES[method.attention].kind  # type: ignore[attr-defined]


def needs_text(method: Method) -> bool:
    return not method.is_focus and hasattr(BASELINES[method.attention], "fit")
