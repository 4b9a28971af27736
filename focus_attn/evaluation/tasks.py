"""Benchmarks as requests, with the prompts of lm-eval's own task definitions.

A definition is lm-eval's YAML file, included by one of ours that says where the data is: in local files, or (without a
folder) on the Hub, as lm-eval has it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from focus_attn.evaluation.local_data import as_on_hub, find_file
from focus_attn.evaluation.requests import Item, Requests, Task

T = TypeVar("T")
MAX_NEW_TOKENS = 256  # lm-eval's, where a task says nothing
SHOTS_SEED = 1234  # lm-eval's evaluator's; a task that is loaded by itself draws other examples every time


@dataclass(frozen=True)
class Benchmark:
    """Where lm-eval defines a task, which split is asked, and how answers are measured."""

    definition: str  # below lm_eval/tasks
    split: str
    file: str  # how the name of its local file begins
    measure: str
    shots: int = 0  # solved examples before an item, in the short form


BENCHMARKS = {
    "hellaswag": Benchmark("hellaswag/hellaswag.yaml", "validation", "hellaswag", "choice"),
    "arc_easy": Benchmark("arc/arc_easy.yaml", "test", "arc_easy", "choice"),
    "piqa": Benchmark("piqa/piqa.yaml", "validation", "piqa", "choice"),
    "lambada_openai": Benchmark("lambada/lambada_openai.yaml", "test", "lambada_openai", "last_word"),
    "truthfulqa_mc1": Benchmark("truthfulqa/truthfulqa_mc1.yaml", "validation", "truthfulqa", "choice"),
    "truthfulqa_mc2": Benchmark("truthfulqa/truthfulqa_mc2.yaml", "validation", "truthfulqa", "probability_of_true"),
    "gsm8k": Benchmark("gsm8k/gsm8k.yaml", "test", "gsm8k", "final_number", shots=5),
}
ALIASES = {"lambada": "lambada_openai", "truthfulqa": "truthfulqa_mc1,truthfulqa_mc2", "arc": "arc_easy"}


@dataclass(frozen=True)
class Question:
    """One item of a benchmark as text."""

    number: int
    context: str
    continuations: list[str]  # none where text is to be generated
    shown: str  # the continuation that a solved example shows
    answer: dict[str, Any]
    options: dict[str, Any]


def read_task_names(names: str) -> list[str]:
    """ "hellaswag,truthfulqa" or "all" -> the names in BENCHMARKS."""
    chosen: list[str] = []
    for name in names.split(","):
        name = name.strip()
        parts = list(BENCHMARKS) if name == "all" else ALIASES.get(name, name).split(",")
        if unknown := [part for part in parts if part not in BENCHMARKS]:
            raise ValueError(f"--tasks must be among all, {', '.join((*BENCHMARKS, *ALIASES))}; got {unknown[0]!r}")
        chosen += [part for part in parts if part not in chosen]
    return chosen


def short_form(
    tokenizer: PreTrainedTokenizerBase, name: str, data: Path | None = None, limit: int | None = None
) -> Requests:
    """A benchmark as lm-eval asks it."""
    questions = evenly(read_questions(name, data, BENCHMARKS[name].shots, enough(limit)), limit)
    task = Task(name, BENCHMARKS[name].measure, "task", {"form": "short"})
    items = []
    for question in questions:
        context, continuations = encode_pair(tokenizer, question.context, question.continuations)
        items.append(as_item(task, question, context, continuations))
    return Requests({name: task}, items)


def as_item(
    task: Task, question: Question, context: list[int], continuations: list[list[int]], prefix: str | None = None
) -> Item:
    kind: Any = "loglikelihood" if continuations else "generate"
    return Item(
        task.name, str(question.number), kind, context, continuations, prefix, question.answer, question.options
    )


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, context: str, continuations: Sequence[str], special: bool = True
) -> tuple[list[int], list[list[int]]]:
    """Token ids as lm-eval cuts them: a continuation is what the whole has beyond the context's own tokens. Spaces at
    the end of the context go to the continuation."""
    stripped = context.rstrip()
    spaces = context[len(stripped) :]
    start: list[int] = tokenizer.encode(stripped if continuations else context, add_special_tokens=special)
    wholes = [tokenizer.encode(stripped + spaces + text, add_special_tokens=special) for text in continuations]
    return start, [whole[len(start) :] for whole in wholes]


def evenly(things: list[T], limit: int | None) -> list[T]:
    """At most `limit` of them, spread over the list."""
    if limit is None or limit >= len(things):
        return things
    return [things[index * len(things) // limit] for index in range(limit)]


def enough(limit: int | None) -> int | None:
    """Items to read from a file where `limit` are asked: some are for solved examples. The same for every form, so that
    a file is read once."""
    return None if limit is None else max(1024, 2 * limit)


@functools.lru_cache(maxsize=4)  # the long form asks what the short one has just read
def read_questions(name: str, data: Path | None, shots: int, most: int | None = None) -> list[Question]:
    """The items of a benchmark, each behind `shots` solved examples; of a local file `most`, spread over it."""
    with tempfile.TemporaryDirectory(prefix="focus-eval-") as folder, _quiet_lm_eval():
        task, numbers = load_task(name, data, Path(folder), shots, most)
        task.set_fewshot_seed(SHOTS_SEED)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bar has no switch
                task.build_all_requests()
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"lm-eval cannot make requests of {name}: {type(error).__name__} {error}") from error
        by_document: dict[int, list[Any]] = {}
        for instance in task.instances:
            by_document.setdefault(instance.doc_id, []).append(instance)
        return [
            _question(name, task, numbers[number], sorted(instances, key=lambda instance: instance.idx))
            for number, instances in by_document.items()
        ]


def _question(name: str, task: Any, number: int, instances: list[Any]) -> Question:
    document, context = instances[0].doc, instances[0].args[0]
    measure = BENCHMARKS[name].measure
    if measure == "final_number":
        generation = instances[0].args[1]
        answer = task.doc_to_target(document)
        options = {
            "until": list(generation["until"]),
            "max_new_tokens": int(generation.get("max_gen_toks", MAX_NEW_TOKENS)),
        }
        return Question(number, context, [], f" {answer}", {"answer": answer}, options)
    continuations = [instance.args[1] for instance in instances]
    if measure == "last_word":
        return Question(number, context, continuations, continuations[0], {}, {})
    if measure == "probability_of_true":
        labels = [int(label) for label in document["mc2_targets"]["labels"]]
        return Question(number, context, continuations, continuations[labels.index(1)], {"labels": labels}, {})
    gold = int(task.doc_to_target(document))
    facts = {
        "gold": gold,
        "characters": [len(text) for text in task.doc_to_choice(document)],
        "metrics": [entry["metric"] for entry in task.config.metric_list],
    }
    return Question(number, context, continuations, continuations[gold], facts, {})


def load_task(
    name: str, data: Path | None, folder: Path, shots: int, most: int | None = None
) -> tuple[Any, Sequence[int]]:
    """lm-eval's task over local files or the Hub, and the place in the file of each of its documents. `folder` is for
    what lm-eval reads."""
    from lm_eval import tasks as lm_eval_tasks

    benchmark = BENCHMARKS[name]
    numbers: Sequence[int] = range(sys.maxsize)
    definition: dict[str, Any] = {
        "include": str(Path(lm_eval_tasks.__file__).parent / benchmark.definition),
        "task": name,
        "num_fewshot": shots,
    }
    if data is not None:
        file = folder / f"{name}.jsonl"
        records = evenly(list(enumerate(as_on_hub(find_file(data, benchmark.file, benchmark.split), name))), most)
        numbers = [number for number, _ in records]
        file.write_text("".join(json.dumps(record) + "\n" for _, record in records), encoding="utf-8")
        definition |= {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {benchmark.split: str(file)}, "cache_dir": str(folder / "cache")},
            "training_split": None,
            "validation_split": benchmark.split if benchmark.split == "validation" else None,
            "fewshot_split": benchmark.split,
        }
    (folder / f"{name}.yaml").write_text(json.dumps(definition), encoding="utf-8")  # JSON is YAML
    manager = lm_eval_tasks.TaskManager(include_path=str(folder), include_defaults=False)
    try:
        return manager.load([name])["tasks"][name], numbers
    except (OSError, ConnectionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise OSError(
            f"cannot load {name} ({reason}): give its file in a folder with --data, or look at the connection to the "
            "Hugging Face Hub"
        ) from error


@contextlib.contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Without lm-eval's notes and the bars of `datasets`: they would tear ours."""
    try:
        import datasets
        import lm_eval  # noqa: F401 (first use: it sets its logger up)
    except ImportError:
        raise ImportError("benchmark tasks need lm-eval: pip install 'lm-eval[hf]' datasets") from None
    logger = logging.getLogger("lm_eval")
    level = logger.level
    bars = datasets.utils.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
