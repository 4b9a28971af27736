"""What happens around the steps of a stage: seeds, balance, log lines, the end of the time."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from focus_attn.training.balance import nudge_bias
from focus_attn.training.centroids import SeenTokens, follow_means, recluster
from focus_attn.training.distributed import any_rank, rank
from focus_attn.training.measures import probe_groups, stability

if TYPE_CHECKING:
    from focus_attn.training.trainer import FocusTrainer

LOG_FILE = "log.jsonl"


class StageCallback(TrainerCallback):
    """A callback that knows its trainer; `attach` is called when there is one."""

    trainer: FocusTrainer

    def attach(self, trainer: FocusTrainer) -> None:
        self.trainer = trainer


class SeedEachStep(StageCallback):
    """Every step draws from a seed of its own, so that a run that goes on from a checkpoint draws the same."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(seed_of(self.trainer.run.recipe.seed, self.trainer.index, state.global_step, rank()))


class BalanceBias(StageCallback):
    """The bias moves after the optimiser's step, by the load of all forwards and processes that made it up."""

    loads: Tensor | None = None  # since the last log line

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        loads = trainer.take_loads()
        self.loads = loads if self.loads is None else self.loads + loads
        if trainer.stage.bias_rate:
            nudge_bias(trainer.run.model, loads, trainer.stage.bias_rate)

    def take(self) -> Tensor:
        """The loads since the last call, [layers, R, K]."""
        assert self.loads is not None
        loads, self.loads = self.loads, None
        return loads


class MoveCentroids(StageCallback):
    """Where the stage asks for it, centroids move after the optimiser's step, by what all its forwards have shown."""

    def attach(self, trainer: FocusTrainer) -> None:
        super().attach(trainer)
        self.seen = SeenTokens()

    @property
    def due(self) -> bool:
        """In the step that is being made."""
        stage, step = self.trainer.stage, self.trainer.state.global_step + 1
        return stage.centroid_rate > 0 or (stage.recluster_every > 0 and step % stage.recluster_every == 0)

    def looking(self, segments: Tensor | None) -> AbstractContextManager[None]:
        """Around a forward of the step."""
        return self.seen.collecting(self.trainer.run.model, segments) if self.due else nullcontext()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.due:
            return
        trainer = self.trainer
        seen, self.seen = self.seen, SeenTokens()
        if trainer.stage.centroid_rate:
            follow_means(trainer.run.model, seen, trainer.stage.centroid_rate)
        else:
            recluster(trainer.run.model, seen, seed_of(trainer.run.recipe.seed, trainer.index, state.global_step))


class AverageRouters(StageCallback):
    """Where the stage asks for it, it ends with the mean of its last steps' routers, which is then evaluated and saved.
    The last log line is still of the steps themselves."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, left = self.trainer, self.trainer.stage.steps - state.global_step
        if left < trainer.stage.averaged_steps:
            trainer.router_mean.add(trainer.run.model)
            if left == 0:
                trainer.router_mean.put(trainer.run.model)


class Stability(StageCallback):
    """How many tokens of a fixed probe are still in the groups of the last checkpoint."""

    latest: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.groups = self._look()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        before, self.groups = self.groups, self._look()
        self.latest = stability(before, self.groups)

    def _look(self) -> dict[int, Tensor]:
        with self.trainer.run.precision():
            return probe_groups(self.trainer.run.model, self.trainer.probe)


class Bookkeeping(StageCallback):
    """The line, the file and the bar that say how the run is doing."""

    def attach(self, trainer: FocusTrainer) -> None:
        super().attach(trainer)
        self.file = trainer.run.output / LOG_FILE
        self.since, self.logged_at = time.monotonic(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.since, self.logged_at = time.monotonic(), state.global_step
        if self.trainer.run.is_main:
            forget_after(self.file, self.trainer.steps_before + state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run, stage = self.trainer.run, self.trainer.stage
        if run.progress and run.is_main:
            run.progress(f"{self.trainer.index + 1}. {stage.objective}, {stage.trains}", state.global_step, stage.steps)

    def pace(self, step: int) -> dict[str, float]:
        """Tokens a second since the last line, the seconds left at this pace, the most memory that was in use."""
        trainer = self.trainer
        stage, later = trainer.stage, trainer.run.recipe.stages[trainer.index + 1 :]
        now = time.monotonic()
        tokens = (step - self.logged_at) * stage.sequences * stage.length
        speed = tokens / max(now - self.since, 1e-9)
        self.since, self.logged_at = now, step
        left = (stage.steps - step) * stage.sequences * stage.length + sum(one.tokens for one in later)
        pace = {"tokens_per_second": speed, "seconds_left": left / speed}
        if trainer.run.device.type == "cuda":
            pace["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return pace

    def write(self, values: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


class MeasureTheEnd(StageCallback):
    """Whatever the intervals, the end of a stage is logged and evaluated."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.trainer.stage.steps:
            control.should_log = True
            control.should_evaluate = self.trainer.evaluates
        return control


class StopInTime(StageCallback):
    """Stops at the end of a step when the time is up or someone asked for it, with a checkpoint."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        run = self.trainer.run
        if not run.interrupted and time.monotonic() > run.deadline:
            run.interrupted = "the time limit"
        if any_rank(bool(run.interrupted), run.device):
            run.interrupted = run.interrupted or "another process"
            control.should_save = control.should_training_stop = True
        return control


def seed_of(*parts: int) -> int:
    """One number for all of them."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part) % (1 << 62)
    return seed


def forget_after(file: Path, step: int) -> None:
    """Drop the log lines of steps that are run again."""
    if not file.is_file():
        return
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def log_line(step: int, steps: int, values: dict[str, float]) -> str:
    """The measures of a step as one line."""
    parts = [f"step {step:,}/{steps:,}", f"loss {values['loss']:.4f}"]
    parts += [f"{name} {values[name]:.4f}" for name in ("lm", "distill", "answers") if name in values]
    parts += [
        f"pairs {values['pairs_kept']:.1%}",
        f"largest group {values['dominance']:.0%} (worst {values['worst_dominance']:.0%})",
        f"confidence {values['confidence']:.2f}",
    ]
    for name in ("stability", "coverage"):
        if name in values:
            parts.append(f"{name} {values[name]:.2f}")
    if "peak_memory_gib" in values:
        parts.append(f"{values['peak_memory_gib']:.1f} GiB")
    parts += [f"{values['tokens_per_second']:,.0f} tokens/s", f"{duration(values['seconds_left'])} left"]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """As a person would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
