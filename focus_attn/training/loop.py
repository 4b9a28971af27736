"""`train`: a recipe carried out on a model and a text, from the start of the routers to the saved adapter."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from focus_attn.adapters import BASE_FOLDER, describe_base
from focus_attn.base_sample import sample_of
from focus_attn.evaluation.perplexity import Perplexity
from focus_attn.model import FocusModel
from focus_attn.progress import Progress
from focus_attn.training.balance import routed_layers
from focus_attn.training.beginning import RECORD, check_positions, check_trainable, find_checkpoint, with_focus
from focus_attn.training.blocks import Blocks, ShuffledBlocks
from focus_attn.training.callbacks import duration
from focus_attn.training.checkpoint import (
    Checkpoint,
    Position,
    base_parameters,
    load_weights,
    persistent_buffers,
    read_optimizer,
)
from focus_attn.training.distributed import (
    copy_routers_from_main,
    from_main,
    join_processes,
    rank,
    shard_base,
    whole,
    world_size,
)
from focus_attn.training.estimate import estimate_memory
from focus_attn.training.reading import blocks_to_start_from, check_answers, cut, open_text
from focus_attn.training.recipe import Recipe, Stage
from focus_attn.training.repeats import strange_words
from focus_attn.training.starts import start_routers
from focus_attn.training.token_store import TokenStore
from focus_attn.training.trainer import FocusTrainer, Run
from focus_attn.zoo import cast_parameters, quiet_transformers


@dataclass(frozen=True)
class TrainedRun:
    """What `train` did."""

    model: FocusModel
    output: Path  # the adapter is here, and the run's record
    finished: bool  # False: interrupted; the same call goes on
    steps: int  # in all, earlier calls included
    seconds: float  # of this call
    measures: dict[str, float]  # of the last log line
    perplexity: Perplexity | None  # of the held-out text, when it was last measured
    base_perplexity: float | None = None  # of the model without Focus on it, where its weights were not trained
    signal: int | None = None  # that interrupted it

    def __repr__(self) -> str:
        state = "finished" if self.finished else "interrupted"
        return f"TrainedRun({state} after {self.steps:,} steps, {self.perplexity}, output={str(self.output)!r})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "steps": self.steps,
            "seconds": self.seconds,
            "measures": self.measures,
            "perplexity": None if self.perplexity is None else dataclasses.asdict(self.perplexity),
            "base_perplexity": self.base_perplexity,
        }


def train(
    model: nn.Module,
    text_or_dataset: Any,
    recipe: Recipe,
    *,
    tokenizer: Any = None,
    output: str | Path = "focus-run",
    resume: bool = True,
    device: str | None = None,
    time_limit: float | None = None,
    callbacks: Sequence[Any] = (),
    log: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> TrainedRun:
    """Train Focus's routers (and the model with them, where the recipe says so).

    Run the same call again after an interruption of any kind and it goes on from the last checkpoint, to the same
    routers as without it.

    Args:
        model: a causal LM, which gets Focus as `recipe.focus` says, or a FocusModel. It is moved to the device and to
            the recipe's precision, and carries Focus afterwards (`result.model`), unless the call fails.
        text_or_dataset: a path (a token file's, too), "hub:owner/name", `Sources` of such names, a list of texts, a
            `datasets.Dataset`, rows of `prompt` and `completion`, or token ids: a tensor, a list, a list of lists, or
            of rows with `input_ids` and `completion_mask`.
        tokenizer: the model's own; not needed for token ids, except by strange passages.
        output: the folder for the adapter, the checkpoints, the log (log.jsonl, TensorBoard) and the record (run.json).
        resume: go on from the last checkpoint in `output`; False removes what is there and starts anew.
        device: by default CUDA where there is one; of several processes each takes its own.
        time_limit: seconds after which to stop at the end of a step, with a checkpoint and the adapter saved.
        callbacks: transformers `TrainerCallback`s to add to every stage.
        log: is given each line of the log.
        progress: is called with what is being done, how much of it is done and how much there is.
    """
    began = time.monotonic()
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError("training needs the package 'accelerate': pip install accelerate")
    if not isinstance(recipe, Recipe):
        raise TypeError(f"`recipe` must be a Recipe, got {recipe!r}: read one with Recipe.from_yaml(path)")
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"`time_limit` must be a positive number of seconds, got {time_limit!r}")
    place = join_processes(device)
    focus = with_focus(model, recipe, Path(output))
    with _given_back_on_failure(model, focus):
        recipe = dataclasses.replace(recipe, focus=focus.focus_config)
        check_positions(recipe, focus)
        check_trainable(recipe, focus)
        shown = progress if rank() == 0 else None
        store, held_out = open_text(text_or_dataset, tokenizer, recipe, focus, shown)
        stages = [cut(store, one.length, recipe, f"stages[{index}]") for index, one in enumerate(recipe.stages)]
        check_answers(recipe, stages)
        base = sample_of(base_parameters(focus).items())
        found = from_main(find_checkpoint(Path(output), recipe, store, base, resume) if rank() == 0 else None)
        _place(focus, recipe, place)
        run = Run(
            model=focus,
            recipe=recipe,
            output=Path(output),
            device=place,
            data_digest=store.digest,
            base_sample=base,
            held_out=held_out,
            log=log,
            progress=shown,
            sharded=recipe.sharding == "fsdp" and world_size() > 1,
            deadline=began + (time_limit or math.inf),
        )
        _introduce(run, store, stages)
        if found is None and recipe.start is None and recipe.adapter is None and focus is not model:
            run.say("the routers begin at random: there is no `start`, and no adapter to go on from")
        position = _begin(run, store, found)
        with _stop_on_signals(run):
            position = _run_stages(run, stages, position, found, tokenizer, callbacks)
        _end_with_mean(run, position)
        if not stages and (measured := _measured(run)):  # the start is all there is to say something of
            run.say(measured)
    return _finish(run, position, time.monotonic() - began)


@contextmanager
def _given_back_on_failure(model: nn.Module, focus: FocusModel) -> Iterator[None]:
    """Take Focus off again where this call put it on, so that the call can be mended and made again."""
    try:
        yield
    except BaseException:
        if focus is not model:
            focus.unload()
        raise


def _begin(run: Run, store: TokenStore, found: Checkpoint | None) -> Position:
    """The weights as the checkpoint has them, or as the recipe starts them."""
    if found is not None:
        load_weights(run.model, found.folder)
        if found.position.total and run.recipe.mean_of_stages > 1:
            run.stage_mean.load_state_dict(read_optimizer(found.folder).get("stage_mean"), run.model)
        run.say(f"going on from step {found.position.total:,} of {run.recipe.steps:,} ({found.folder})")
    if run.sharded:
        shard_base(run.model, run.device)
    if found is None:
        _start(run, store)
        run.save(Position())
    return Position() if found is None else found.position


def _run_stages(
    run: Run,
    stages: list[Blocks],
    position: Position,
    found: Checkpoint | None,
    tokenizer: Any,
    callbacks: Sequence[Any],
) -> Position:
    """From `position` to the end, or to an interruption. -> where that is."""
    for index in range(position.stage, len(stages)):
        stage = run.recipe.stages[index]
        within = found is not None and position.stage == index and position.step > 0
        if within and position.step == stage.steps:
            _count_in(run, index)
            continue
        _freeze(run.model, stage)
        seed, window = run.recipe.seed * 1009 + index, run.model.focus_config.window
        words = strange_words(stages[index].store.ids, tokenizer) if stage.repeats and stage.strange else ()
        data = ShuffledBlocks(
            stages[index],
            seed,
            _sequences(stage),
            repeats=stage.repeats,
            strange=stage.strange,
            words=words,
            window=window,
        )
        trainer = FocusTrainer(run, index, data, [*_tensorboard(run, index), *callbacks])
        trainer.train(resume_from_checkpoint=str(found.folder) if found is not None and within else None)
        position = trainer.position
        if position.step == stage.steps:  # an interruption may come with the last step
            _count_in(run, index)
        if run.interrupted:
            break
    return position


def _count_in(run: Run, index: int) -> None:
    """A stage that has ended, where the recipe asks for the mean of the last ones."""
    recipe = run.recipe
    if recipe.mean_of_stages > 1 and len(recipe.stages) - index <= recipe.mean_of_stages:
        run.stage_mean.add(run.model)


def _end_with_mean(run: Run, position: Position) -> None:
    if run.stage_mean.steps < run.recipe.mean_of_stages or position.total < run.recipe.steps:
        return
    run.stage_mean.put(run.model)
    run.say(", ".join(filter(None, (f"the mean of the last {run.recipe.mean_of_stages} stages", _measured(run)))))


def _measured(run: Run) -> str:
    """What no step measures, on what was held back, in words; nothing where nothing was."""
    return run.measure_held_out() if len(run.held_out) else ""


def _sequences(stage: Stage) -> int:
    return stage.steps * stage.sequences


def _place(model: FocusModel, recipe: Recipe, device: torch.device) -> None:
    """The model where and as it is to be trained. Routers are fp32 whatever the base is."""
    half = recipe.precision == "bf16" and not recipe.trains_base
    base = model.base_model
    if not (getattr(base, "is_quantized", False) or len(getattr(base, "hf_device_map", {})) > 1):
        cast_parameters(base_parameters(model).values(), torch.bfloat16 if half else torch.float32)
        model.to(device)
    copy_routers_from_main(model)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def _freeze(model: FocusModel, stage: Stage) -> None:
    for parameter in base_parameters(model).values():
        parameter.requires_grad_(stage.trains == "everything")
    model.unfreeze_routers()
    if stage.centroid_rate:  # it alone moves them
        for _, router in routed_layers(model):
            router.centroids.requires_grad_(False)


def _introduce(run: Run, store: TokenStore, stages: list[Blocks]) -> None:
    trainable, total = run.model.get_nb_trainable_parameters()
    run.say(f"{run.recipe.name}: {total - trainable:,} parameters of the model, {trainable:,} of its routers")
    run.say(f"text: {store.name}, {store.tokens:,} tokens in {len(store.documents):,} documents")
    for index, (stage, blocks) in enumerate(zip(run.recipe.stages, stages, strict=True)):
        epochs = _sequences(stage) / len(blocks)
        run.say(
            f"stage {index + 1}: {stage.objective}, {stage.trains}: {stage.steps:,} steps of {stage.sequences} x "
            f"{stage.length:,} tokens, {epochs:.2g} times over {len(blocks):,} blocks ({blocks.share:.0%} of the text)"
        )
        if stage.step_options().answer_weight and store.answers is not None:
            run.say(f"  {blocks.answers:,} tokens of answers in them, of {store.answer_tokens:,}")
        run.say(f"  {estimate_memory(run.model, run.recipe, stage, run.device, world_size())}")
    if run.recipe.evaluate_every and not len(run.held_out):
        run.say("the text is too short to hold a block back: nothing is evaluated on the fly")


def _start(run: Run, store: TokenStore) -> None:
    start = run.recipe.start
    if start is None:
        return
    torch.manual_seed(run.recipe.seed)
    began = time.monotonic()
    blocks = blocks_to_start_from(store, run.recipe, start)
    options: dict[str, Any] = {}
    if start.how == "coverage":
        options = {"steps": start.steps, "learning_rate": start.learning_rate, "start": start.first}
        options |= {"output_steps": start.output_steps, "output_learning_rate": start.output_learning_rate}
        asked = {"budget": start.budget, "largest_group": start.largest_group}
        options.update((name, value) for name, value in asked.items() if value is not None)
    fit = start_routers(run.model, blocks, how=start.how, seed=run.recipe.seed, progress=run.progress, **options)
    copy_routers_from_main(run.model)
    found = "" if fit is None else f", {fit.covered:.1%} of the attention kept, largest group {fit.largest_group:.0%}"
    if fit is not None and fit.lost is not None:
        found += f", {fit.lost:.0%} left of what the window and the sinks alone lose"
    run.say(f"start: {start.how}, {duration(time.monotonic() - began)}{found}")


@contextmanager
def _stop_on_signals(run: Run) -> Iterator[None]:
    """Ctrl-C, or the signal by which clusters take a machine back: stop at the end of the step, with a checkpoint.
    A second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "the signal to end"}

    def ask(number: int, frame: Any) -> None:
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted, run.signal = names[signal.Signals(number)], number
        run.say(f"{run.interrupted}: stopping at the end of this step")

    before = {number: signal.signal(number, ask) for number in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tensorboard(run: Run, index: int) -> list[Any]:
    if not run.is_main:
        return []
    try:
        from torch.utils.tensorboard import SummaryWriter
        from transformers.integrations import TensorBoardCallback

        folder = run.output / "tensorboard" / f"stage-{index + 1}"
        return [TensorBoardCallback(SummaryWriter(str(folder)))]
    except (ImportError, RuntimeError):  # not installed
        return []


def _finish(run: Run, position: Position, seconds: float) -> TrainedRun:
    run.model.eval()
    finished = position.total == run.recipe.steps
    base = None
    if run.recipe.trains_base:
        base = whole({**base_parameters(run.model), **persistent_buffers(run.model)})
    result = TrainedRun(
        model=run.model,
        output=run.output,
        finished=finished,
        steps=position.total,
        seconds=seconds,
        measures=run.measures,
        perplexity=run.perplexity,
        base_perplexity=run.base_perplexity,
        signal=run.signal,
    )
    if run.is_main:
        from focus_attn.bench.record import write_json

        run.model.save_pretrained(run.output)
        own = run.output / BASE_FOLDER
        if base is None and Path(describe_base(run.model.base_model).name).resolve() != own.resolve():
            shutil.rmtree(own, ignore_errors=True)  # of a run before this one, whose adapter is gone too
        if base is not None:
            with quiet_transformers():
                run.model.base_model.save_pretrained(own, state_dict=base)  # type: ignore[operator]
        record = run.output / RECORD
        if run.measures or not _is_finished(record):  # else it was finished already, and its record says more
            write_json(record, {"recipe": run.recipe.to_dict(), **result.to_dict()})
    state = "done" if finished else f"stopped by {run.interrupted}; the same command goes on"
    run.say(f"step {position.total:,} of {run.recipe.steps:,}, {duration(seconds)}: {state}. Adapter in {run.output}")
    return result


def _is_finished(record: Path) -> bool:
    try:
        return bool(json.loads(record.read_text(encoding="utf-8"))["finished"])
    except (OSError, ValueError, KeyError):
        return False
