"""A model and one or more texts -> everything the report says, as plain JSON values.

Measuring needs the model; what is said of the groups needs only the sample of ids that the measurement keeps, and is
worked out again by `describe` when a report is made from a file: a machine without the tagger can measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from focus_attn.evaluation.coverage import coverage_by_layer
from focus_attn.evaluation.perplexity import blocks_of_documents
from focus_attn.model import FocusModel
from focus_attn.progress import Progress
from focus_attn.report.acting_sinks import ActingSinks
from focus_attn.report.attended import attended_keys
from focus_attn.report.domains import compare_domains
from focus_attn.report.group_content import describe_groups
from focus_attn.report.long_pairs import StrongestPairs
from focus_attn.report.sample import RoutingSample, take_sample, token_pieces
from focus_attn.report.word_classes import CLASSES, tagger, word_classes

FORMAT = 1
HALF_WAY = 0.5
MOST_BROWSED = 16384  # a page with more is slow to open


@dataclass(frozen=True)
class Sizes:
    """How much of each text is looked at."""

    length: int = 2048
    blocks: int = 8
    queries: int | None = 128  # of each block; None: all
    sample: int = 8192  # tokens whose groups are kept
    browse: int = 2048  # tokens in the page's browser, no more than a block

    def __post_init__(self) -> None:
        for name in ("length", "blocks", "sample", "browse"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.browse > MOST_BROWSED:
            raise ValueError(f"`browse` must be at most {MOST_BROWSED:,} tokens, got {self.browse:,}")


def measure(
    model: FocusModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[tuple[str, list[str]]],
    sizes: Sizes,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """texts: name and documents of each; not those that the routers were fitted to."""
    blocks = [
        (name, blocks_of_documents(tokenizer, documents, sizes.length, sizes.blocks)) for name, documents in texts
    ]
    measured = [_measure_text(model, tokenizer, name, some, sizes, progress) for name, some in blocks]
    trainable, total = model.get_nb_trainable_parameters()
    config = model.focus_config
    return {
        "format": FORMAT,
        "model": str(getattr(model.base_model.config, "_name_or_path", "") or type(model.base_model).__name__),
        "dtype": str(model.base_model.dtype).removeprefix("torch."),
        "parameters": total - trainable,
        "router_parameters": trainable,
        "config": config.to_dict(),
        "leaking": config.leaks_future(),
        "texts": measured,
    }


def _measure_text(
    model: FocusModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    blocks: tuple[Tensor, list[int]],
    sizes: Sizes,
    progress: Progress | None,
) -> dict[str, Any]:
    ids, documents = blocks
    pieces = [token_pieces(tokenizer, block.tolist()) for block in ids]
    pairs, sinks = StrongestPairs(pieces), ActingSinks(pieces)

    def step(done: int, total: int, what: str = "attention") -> None:
        if progress:
            progress(f"{what} on {name}", done, total)

    coverage = coverage_by_layer(
        model, ids, queries=sizes.queries, documents=documents, watchers=(pairs, sinks), progress=step
    )
    step(0, 2, "groups")
    sample = take_sample(model, tokenizer, ids[: max(1, sizes.sample // sizes.length)])
    step(1, 2, "groups")
    attended = attended_keys(model, ids[0, : sizes.browse])
    step(2, 2, "groups")
    return {
        "name": name,
        "coverage": coverage.to_dict(),
        "acting_sinks": sinks.to_dict(),
        "pairs": pairs.to_dict(),
        "sample": sample.to_dict(),
        "attended": attended,
    }


def short_layers(text: dict[str, Any], gain_name: str) -> list[int]:
    """The layers that come less than half of the way from random groups to the best mask, query by query."""
    gains = {layer["layer_idx"]: layer["mass"][gain_name] for layer in text["coverage"]["layers"]}
    return [layer_idx for layer_idx, gain in gains.items() if gain is not None and gain < HALF_WAY]


def mean_purity(groups: list[dict[str, Any]]) -> dict[str, dict[str, float]] | None:
    """Purity and information of both sides, mean over all routers but dense heads; None without word classes."""
    routers = [router for layer in groups for router in layer["routers"] if not router["dense"]]
    if not all("classes" in router["key"] for router in routers):
        return None
    names = ("purity", "purity_random", "information")
    return {
        side: {name: sum(router[side]["classes"][name] for router in routers) / len(routers) for name in names}
        for side in ("query", "key")
    }


def describe(report: dict[str, Any]) -> dict[str, Any]:
    """The report with what its samples say of the groups; with word classes where the tagger is installed."""
    if report.get("format") != FORMAT or "texts" not in report:
        raise ValueError(
            f"not a report of this version (format {FORMAT}): give a file that `focus report --json FILE` wrote"
        )
    name = tagger()
    samples = [RoutingSample.from_dict(text["sample"]) for text in report["texts"]]
    texts = []
    for text, sample in zip(report["texts"], samples, strict=True):
        classes = word_classes(sample.pieces) if name else None
        groups = describe_groups(sample, classes)
        short = {"short_layers": short_layers(text, "gain"), "short_on_content": short_layers(text, "content_gain")}
        texts.append({**text, **short, "groups": groups, "purity": mean_purity(groups)})
    domains = compare_domains(*samples[:2]) if len(samples) > 1 else None
    return {**report, "texts": texts, "tagger": name, "word_classes": list(CLASSES), "domains": domains}
