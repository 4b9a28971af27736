"""FocusTrainer: transformers' Trainer with `training_step` for a loss and checkpoints of what was trained alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from focus_attn.base_sample import Sample
from focus_attn.evaluation.perplexity import Perplexity, block_perplexity
from focus_attn.model import FocusModel
from focus_attn.progress import Progress
from focus_attn.training.averaging import RouterMean
from focus_attn.training.blocks import ShuffledBlocks
from focus_attn.training.callbacks import (
    AverageRouters,
    BalanceBias,
    Bookkeeping,
    MeasureTheEnd,
    MoveCentroids,
    SeedEachStep,
    Stability,
    StopInTime,
    log_line,
)
from focus_attn.training.checkpoint import (
    OPTIMIZER,
    Position,
    base_parameters,
    checkpoints,
    load_optimizer,
    save_base,
    write_checkpoint,
)
from focus_attn.training.distributed import (
    average_gradients,
    clip_gradients,
    from_main,
    is_sharded,
    rank,
    sum_over_ranks,
    whole,
    world_size,
)
from focus_attn.training.measures import collapsed_routers, coverage, group_dominance
from focus_attn.training.recipe import Recipe, Stage
from focus_attn.training.step import StepResult, training_step

ADAM_BETAS = (0.9, 0.99)
SCHEDULERS = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


class TrainingStopped(ValueError):
    """Training cannot go on; the sentence says why and where the last good checkpoint is."""


@dataclass
class Run:
    """What all stages of a run share."""

    model: FocusModel
    recipe: Recipe
    output: Path
    device: torch.device
    data_digest: str
    base_sample: Sample
    held_out: Tensor  # [blocks, T] to evaluate on
    log: Callable[[str], None]
    progress: Progress | None = None
    sharded: bool = False
    deadline: float = math.inf  # of time.monotonic()
    interrupted: str = ""  # by what, once it was
    signal: int | None = None  # that interrupted it
    started: float = field(default_factory=time.monotonic)
    measures: dict[str, float] = field(default_factory=dict)  # the latest
    perplexity: Perplexity | None = None  # the latest
    base_perplexity: float | None = None  # of the model without Focus on the same text, where its weights stay
    coverage: float | None = None  # share of the dense model's attention that is kept, the latest
    collapsed: bool = False  # whether routers were, at the last log line
    stage_mean: RouterMean = field(default_factory=RouterMean)  # of what stages ended with

    def precision(self) -> AbstractContextManager[Any]:
        """Inside, the model computes as the recipe says. Weights that are trained stay in fp32, where small steps are
        not rounded away, and compute in bf16; a frozen base is in bf16 itself."""
        half = self.recipe.precision == "bf16" and self.recipe.trains_base
        return torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext()

    @property
    def is_main(self) -> bool:
        return rank() == 0

    def say(self, sentence: str) -> None:
        if self.is_main:
            self.log(sentence)

    def measure_held_out(self) -> str:
        """Perplexity on what was held back, in words, beside that of the model without Focus."""
        with self.precision():
            if self.base_perplexity is None and not self.recipe.trains_base:
                with self.model.disable_focus():
                    self.base_perplexity = block_perplexity(self.model, self.held_out).ppl
            self.perplexity = block_perplexity(self.model, self.held_out)
        words = f"held-out text: {self.perplexity}"
        if self.base_perplexity is not None:
            words += f"; base model {self.base_perplexity:.2f}, x {self.perplexity.ppl / self.base_perplexity:.3f}"
        return words

    def save(self, position: Position, fill: Callable[[Path], None] | None = None) -> None:
        """Write a checkpoint. Every process calls it: weights may be spread over them, and all hear of a failure."""
        base = whole(base_parameters(self.model)) if self.recipe.trains_base else None

        def write(folder: Path) -> None:
            self.model.save_pretrained(folder)
            if base is not None:
                save_base(base, folder)
            if fill is not None:
                fill(folder)

        failure = None
        if self.is_main:
            try:
                write_checkpoint(self.output, position, self.recipe, self.data_digest, write, self.base_sample)
            except OSError as error:
                failure = error
        failure = from_main(failure)
        if failure is not None:
            raise failure

    def last_good(self) -> str:
        found = checkpoints(self.output)
        return f"the last good checkpoint is {str(found[-1].folder)!r}" if found else "there is no checkpoint yet"


class StepModule(nn.Module):
    """The model as a function from a batch to a `StepResult`: what DDP wraps and Trainer calls."""

    accepts_loss_kwargs = False  # our loss is a mean: Trainer is to divide it by the accumulation

    def __init__(self, run: Run, stage: Stage) -> None:
        super().__init__()
        self.model, self.precision = run.model, run.precision
        self.options = stage.step_options()

    def forward(self, input_ids: Tensor, **more: Any) -> StepResult:
        with self.precision():
            return training_step(self.model, input_ids, options=self.options, **more)


class FocusTrainer(Trainer):
    """One stage of a run."""

    def __init__(self, run: Run, index: int, data: ShuffledBlocks, extra: list[Any]) -> None:
        self.run, self.index, self.stage = run, index, run.recipe.stages[index]
        self.steps_before = sum(stage.steps for stage in run.recipe.stages[:index])
        self.loads: Tensor | None = None  # of the optimiser step in the making
        self._measures: list[str] = []  # their names
        self._measured: Tensor | None = None  # their sums since the last log line
        self._forwards = 0
        self._evaluated_at = self._saved_at = -1
        self.probe = data.blocks[0]["input_ids"][None]
        self.balance, self.centroids, self.router_mean = BalanceBias(), MoveCentroids(), RouterMean()
        self.stability, self.bookkeeping = Stability(), Bookkeeping()
        moving = [SeedEachStep(), self.balance, self.centroids, AverageRouters()]
        ours = [*moving, self.stability, self.bookkeeping, MeasureTheEnd(), StopInTime()]
        for callback in ours:
            callback.attach(self)
        module = StepModule(run, self.stage)
        if run.sharded:
            module._is_accelerate_prepared = True  # type: ignore[assignment]  # no DDP around it: gradients are ours to average
        super().__init__(
            model=module,
            args=_arguments(run, self.stage),
            train_dataset=data,
            eval_dataset=data,  # never read: `evaluate` has its own
            callbacks=[*ours, *extra],
        )
        self.remove_callback(PrinterCallback)

    @property
    def position(self) -> Position:
        step = self.state.global_step
        return Position(self.index, step, self.steps_before + step)

    @property
    def evaluates(self) -> bool:
        return self.run.recipe.evaluate_every > 0 and len(self.run.held_out) > 0

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.run.model.parameters() if p.requires_grad]

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        left = 1 - (1 - self.stage.exploration_end) * self.state.global_step / self.stage.steps
        with self.centroids.looking(inputs.get("segments")):
            result: StepResult = model(**inputs, exploration_left=left)
        self.loads = result.loads if self.loads is None else self.loads + result.loads
        self._measures = sorted(result.measures)
        values = torch.stack([result.measures[name].float() for name in self._measures])
        self._measured = values if self._measured is None else self._measured + values
        self._forwards += 1
        return result.loss

    def take_loads(self) -> Tensor:
        """Tokens in each group, summed over what made up the optimiser step, [layers, R, K]."""
        assert self.loads is not None
        loads, self.loads = sum_over_ranks(self.loads), None
        return loads

    def take_measures(self) -> dict[str, float]:
        """Means over the forwards since the last call."""
        assert self._measured is not None
        values = sum_over_ranks(self._measured / self._forwards) / world_size()
        self._measured, self._forwards = None, 0
        return dict(zip(self._measures, values.tolist(), strict=True))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            routers = {id(p) for layer in self.run.model.focus_layers() for p in layer.parameters()}
            base = [p for p in self.trained if id(p) not in routers]
            rates = {"lr": self.stage.base_learning_rate, "weight_decay": self.stage.weight_decay}
            groups: list[dict[str, Any]] = [
                {"params": [p for p in self.trained if id(p) in routers], "lr": self.stage.learning_rate},
                {"params": base, **rates},
            ]
            sharded = any(map(is_sharded, base))  # one kernel call for many parameters cannot mix these with others
            self.optimizer = torch.optim.AdamW(
                [group for group in groups if group["params"]],
                betas=ADAM_BETAS,
                weight_decay=0.0,
                foreach=False if sharded else None,
                fused=True if self.run.device.type == "cuda" and not sharded else None,
            )
        return self.optimizer

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is there already, perhaps in shards that must not be moved."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        assert isinstance(self.train_dataset, ShuffledBlocks)  # the order is its own
        return SequentialSampler(self.train_dataset)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if self.run.sharded:
            average_gradients(self.trained)
        norm = clip_gradients(self.trained, self.args.max_grad_norm)
        if not math.isfinite(norm.item()):
            step = self.steps_before + self.state.global_step + 1
            raise TrainingStopped(
                f"the loss or its gradient is not a number at step {step}; the weights were not changed by it, "
                f"{self.run.last_good()}. Lower `learning_rate`, or look at the text "
                "and the precision"
            )
        return norm

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        run = self.run
        if self._evaluated_at == self.state.global_step:  # Trainer asks again at the end of an epoch
            return {}
        self._evaluated_at = self.state.global_step
        words = run.measure_held_out()
        assert run.perplexity is not None
        with run.precision():
            covered = coverage(run.model, run.held_out[:1], seed=run.recipe.seed)
        metrics = {"eval_perplexity": run.perplexity.ppl, "eval_perplexity_last_half": run.perplexity.ppl_last_half}
        if run.perplexity.pairs_kept is not None:
            metrics["eval_pairs_kept"] = run.perplexity.pairs_kept
        metrics["eval_coverage"] = run.coverage = sum(covered.values()) / len(covered)
        self.log(metrics)
        run.say(f"step {self.steps_before + self.state.global_step:,}, {words}")
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        run, step = self.run, self.state.global_step
        if "loss" in logs:
            logs = {**logs, **self.take_measures(), **self._take_balance(), **self.bookkeeping.pace(step)}
            run.measures = logs
            run.say(log_line(self.steps_before + step, run.recipe.steps, logs))
        super().log(logs, start_time)
        if run.is_main:
            self.bookkeeping.write({"step": self.steps_before + step, "stage": self.index, **logs})

    def _take_balance(self) -> dict[str, float]:
        """How even and how settled the groups are; a collapse is named when it begins."""
        run, loads = self.run, self.balance.take()
        collapsed = collapsed_routers(run.model, loads)
        if collapsed and not run.collapsed:
            named = "; ".join(collapsed[:3]) + ("; ..." if len(collapsed) > 3 else "")
            count = "a router has" if len(collapsed) == 1 else f"{len(collapsed)} routers have"
            run.say(
                f"warning: {count} collapsed ({named}). Raise `bias_rate` or `balance_weight`, or lower `learning_rate`"
            )
        run.collapsed = bool(collapsed)
        mean, worst = group_dominance(loads)
        values = {"dominance": mean, "worst_dominance": worst, "collapsed_routers": float(len(collapsed))}
        if self.stability.latest is not None:
            values["stability"] = self.stability.latest
        return values if run.coverage is None else {**values, "coverage": run.coverage}

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        if self._saved_at == step:
            return
        self._saved_at = step
        optimizer = whole(self.optimizer.state_dict())  # type: ignore[union-attr]
        scheduler = self.lr_scheduler.state_dict()  # type: ignore[union-attr]

        def fill(folder: Path) -> None:
            means = {"router_mean": self.router_mean.state_dict(), "stage_mean": self.run.stage_mean.state_dict()}
            torch.save({"optimizer": optimizer, "scheduler": scheduler, **means}, folder / OPTIMIZER)
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

        self.run.save(self.position, fill)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights are in the model already."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.state.compute_steps(self.args, self.state.max_steps)  # intervals may have changed since
            saved = load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)
            self.router_mean.load_state_dict(saved.get("router_mean"), self.run.model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Every step has its own seed."""


def _arguments(run: Run, stage: Stage) -> TrainingArguments:
    each, left = divmod(stage.sequences, world_size())
    if left:
        raise ValueError(
            f"`sequences` ({stage.sequences}) must be a multiple of the processes ({world_size()}): start as many "
            "processes as divide it, or change it"
        )
    micro_batch = max(size for size in range(1, stage.micro_batch + 1) if each % size == 0)
    recipe = run.recipe
    evaluates = recipe.evaluate_every > 0 and len(run.held_out) > 0
    arguments = TrainingArguments(
        output_dir=str(run.output),
        use_cpu=run.device.type == "cpu",
        seed=recipe.seed,
        max_steps=stage.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=each // micro_batch,
        lr_scheduler_type=SCHEDULERS[stage.schedule],
        learning_rate=stage.learning_rate,
        warmup_steps=min(stage.warmup, stage.steps // 2),
        max_grad_norm=stage.max_grad_norm or math.inf,
        logging_steps=recipe.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.save_every,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=recipe.evaluate_every if evaluates else None,
        remove_unused_columns=False,
        dataloader_pin_memory=run.device.type == "cuda",
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
    )
    assert arguments.device is not None  # settles the devices
    arguments._n_gpu = 1  # one process, one device: never torch's DataParallel
    return arguments
