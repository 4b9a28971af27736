"""What a run on a model that does not fit here would take, from stated assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from focus_attn.compare.recipe import Comparison, Method
from focus_attn.compare.training import training_recipe, tuning_options

PEAK, USED = 989e12, 0.4  # bf16 FLOP/s of an H100 SXM, and the share of it that training reaches
# Tokens a second of a model too small to fill a GPU: SmolLM2-135M on an H200 that other trainings shared took 4 to 14
# thousand a second with the published gate by its formula, hard gates up to 77 (`seconds_of_last_call` in results).
MOST_TRAINED, MOST_MEASURED = 1e4, 1e5
MEMORY, FILLED = 80e9, 0.7  # bytes of its memory, and the share that weights and what belongs to them may take
BYTES, BYTES_TRAINED = 2, 16  # of a weight in bf16; of a trained one with gradient, fp32 copy and Adam's two moments
# FLOP a token and parameter: forward; with backward and recomputation, weights frozen or not.
FORWARD, FROZEN, TRAINED = 2, 6, 8

ASSUMPTIONS = (
    f"Estimated costs: {PEAK / 1e12:.0f} TFLOP/s (H100 SXM, bf16) used to {USED:.0%}, but no more than "
    f"{MOST_TRAINED:,.0f} tokens trained and {MOST_MEASURED:,.0f} measured a second (a model of 135 million parameters "
    "was trained at 4 to 14 thousand here with the published gate, at up to 77 thousand with hard ones); for each "
    f"parameter and token {FORWARD} FLOP forward, {FROZEN} in training with frozen weights (forward, recomputation, "
    f"gradient of the activations), {TRAINED} where the weights are trained too; the attention's own products, small "
    "beside these at such lengths, loading and benchmarks are left out; a frozen weight takes "
    f"{BYTES} bytes, a trained one {BYTES_TRAINED}, and each {BYTES} more in the model that a row is trained on a copy "
    f"of, of at most {FILLED:.0%} of a GPU's {MEMORY / 1e9:.0f} GB. A model that needs several GPUs is spread over "
    "them by transformers, which was not tried here. Estimates, no measurements."
)


@dataclass(frozen=True)
class Estimate:
    tokens_trained: float
    tokens_measured: float
    gpus: int
    gpu_hours: float

    def __str__(self) -> str:
        return (
            f"{self.gpu_hours:.2g} GPU hours on {self.gpus} GPU{'s' * (self.gpus != 1)} "
            f"({self.tokens_trained / 1e6:.3g} M tokens trained, {self.tokens_measured / 1e6:.3g} M measured)"
        )


def estimate(comparison: Comparison, parameters: float, tokens: float | None = None) -> Estimate:
    """Of the whole comparison on one model.

    Args:
        tokens: trained on with all weights, instead of what the rows say.
    """
    flop = trained = 0.0
    bytes_each = BYTES if tokens is None else BYTES_TRAINED
    for method in comparison.methods if tokens is None else ():
        count, each = _training(comparison, method)
        trained += count * len(comparison.seeds_of(method))
        flop += count * len(comparison.seeds_of(method)) * each * parameters
        bytes_each = BYTES_TRAINED if each == TRAINED else bytes_each
    if tokens is not None:
        trained, flop = tokens, tokens * TRAINED * parameters
    places = sum(length * one.blocks for one in comparison.data.values() for length in one.lengths)
    measured = float(places * sum(len(comparison.seeds_of(method)) for method in comparison.methods))
    copied = 0 if tokens is not None else BYTES  # rows are trained on a copy of the model
    gpus = math.ceil(parameters * (bytes_each + copied) / (MEMORY * FILLED))
    training = max(flop / (PEAK * USED), trained / MOST_TRAINED)
    measuring = max(measured * FORWARD * parameters / (PEAK * USED), measured / MOST_MEASURED)
    return Estimate(trained, measured, gpus, (training + measuring) / 3600)


def _training(comparison: Comparison, method: Method) -> tuple[float, int]:
    """(tokens, FLOP a token and parameter) of a row; rows that are served differently share their training."""
    if method.tune is not None:
        options = tuning_options(comparison, method)
        count = options["steps"] * options["sequences"] * options["length"]
        return count, TRAINED if options["how"] == "full" else FROZEN
    if method.focus is None:
        return 0.0, 0
    recipe = training_recipe(comparison, method, 0)
    same = [other for other in comparison.methods if other.focus is not None and other.focus == method.focus]
    same = [other for other in same if other.training == method.training and other.train_on == method.train_on]
    if same[0] is not method:
        return 0.0, 0
    return sum(stage.tokens for stage in recipe.stages), TRAINED if recipe.trains_base else FROZEN
