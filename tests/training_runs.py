"""A tiny training run, as the tests of the loop use it, and as a program of its own:

python training_runs.py OUTPUT kill            a run of two stages that is killed in the middle of its last step
torchrun ... training_runs.py OUTPUT           the same recipes on several processes: DDP, then sharded
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from tiny import tiny_model, tokens
from transformers import TrainerCallback

from focus_attn import FocusConfig
from focus_attn.training import Data, Recipe, Stage, Start, train

CONFIG = FocusConfig(num_groups=4, window=8, num_sinks=2, router_dim=8)
STAGE = Stage(
    steps=6, length=64, sequences=2, learning_rate=1e-2, warmup=2, budget=0.5, bias_rate=1e-2, options={"probes": 8}
)


def stage(**changes):
    return Stage(**{**vars(STAGE), **changes})


def recipe(*stages, **changes):
    chosen = {
        "stages": stages or (STAGE,),
        "start": None,
        "focus": CONFIG,
        "precision": "fp32",
        "data": Data(held_out=2),
        "log_every": 2,
        "save_every": 2,
        "evaluate_every": 3,
        "gradient_checkpointing": False,
    }
    return Recipe(**{**chosen, **changes})


TWO_STAGES = recipe(
    stage(steps=4), stage(steps=3, objective="lm+distill", trains="everything", length=48, base_learning_rate=1e-3)
)


def run(output, chosen=None, model=None, text=None, **options):
    model = tiny_model() if model is None else model
    text = tokens(12, 200) if text is None else text
    return train(model, text, chosen or recipe(), output=output, **{"log": lambda line: None, **options})


def rows_with_answers():
    """Every third document has none: a forward may have fewer than another, or none."""
    masks = [torch.arange(200) % 50 > 40 if number % 3 else torch.zeros(200) for number in range(12)]
    return [{"input_ids": ids, "completion_mask": mask} for ids, mask in zip(tokens(12, 200), masks, strict=True)]


def routers(result):
    return {
        f"{index} {name}": tensor.clone()
        for index, layer in enumerate(result.model.focus_layers())
        if layer.router is not None
        for name, tensor in layer.router.state_dict().items()
    }


def assert_same(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **{"atol": 0.0, "rtol": 0.0, **tolerance}, msg=name)


class AtStep(TrainerCallback):
    """Calls `act` in the middle of an optimiser step, gradients made, weights not yet moved."""

    def __init__(self, step, act, steps=None):
        self.step, self.act, self.steps = step, act, steps  # of a stage that has this many

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step and self.steps in (None, state.max_steps):
            self.act()


MOVED_CENTROIDS = {"centroid_rate": 0.3}, {"recluster_every": 2}


def parallel_recipe(trains, sharding="none", **changes):
    """Four sequences a step, whose order of summation is all that several processes may change."""
    average = 0.5 if trains == "routers" else 0.0
    options = {"probes": 0, "answer_weight": 5.0}
    chosen = stage(
        trains=trains, sequences=4, steps=3, base_learning_rate=1e-3, average=average, options=options, **changes
    )
    start = Start(how="coverage", blocks=2, length=64, steps=2, budget=0.5)
    return recipe(chosen, start=start, sharding=sharding, gradient_checkpointing=True, evaluate_every=2)


def run_on_answers(output, chosen):
    return run(output, chosen, text=rows_with_answers())


if __name__ == "__main__":
    torch.set_num_threads(1)
    output = Path(sys.argv[1])
    if sys.argv[2:] == ["kill"]:
        run(output, TWO_STAGES, callbacks=[AtStep(3, lambda: os.kill(os.getpid(), signal.SIGKILL), steps=3)])
    else:
        for trains in ("routers", "everything"):
            for sharding in ("none", "fsdp"):
                run_on_answers(output / f"{trains}-{sharding}", parallel_recipe(trains, sharding))
        for moved in MOVED_CENTROIDS:
            run_on_answers(output / next(iter(moved)), parallel_recipe("everything", bias_rate=0.0, **moved))
        torch.distributed.destroy_process_group()
