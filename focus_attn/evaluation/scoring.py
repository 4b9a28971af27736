"""Scoring requests: batches of like length, the head on the asked positions alone, shared prefixes run once.

Sequences are padded on the right and carry no mask: what comes later is never seen, so padding changes nothing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from focus_attn.evaluation.head import predict
from focus_attn.evaluation.requests import Item, Requests
from focus_attn.evaluation.score_file import Key, Score, ScoreFile
from focus_attn.model import FocusModel
from focus_attn.progress import Count
from focus_attn.stats import Stats
from focus_attn.zoo import quiet_transformers

Scored = list[tuple[Key, Score]]

BATCH_TOKENS = {"cuda": 1 << 16, "cpu": 1 << 12}
CACHED_PER_COMPUTED = 8  # how many times BATCH_TOKENS a batch may have in its cache
MORE_TO_GENERATE = 4  # times BATCH_TOKENS: a step takes about as long for few rows as for many
LENGTH_STEP = {"cuda": 64, "cpu": 1}  # lengths are rounded up to it: GPU kernels are set up for each new shape
LONGEST_STOP = 24  # tokens of the end in which a stop string is looked for


def score(
    model: nn.Module,
    requests: Requests,
    scores: ScoreFile,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_tokens: int | None = None,
    share_prefixes: bool = True,
    progress: Count | None = None,
) -> None:
    """Score what is not in the file yet.

    Args:
        tokenizer: needed where something is generated.
        batch_tokens: how many at once; by default what suits the device.
        share_prefixes: run a prefix once and go on from its cache; False for a model that has no cache.
    """
    scorer = Scorer(model, requests, tokenizer, batch_tokens, share_prefixes)
    scorer.check()
    scorer.score(scores, progress)


class Scorer:
    """One model on one file of requests."""

    def __init__(
        self,
        model: nn.Module,
        requests: Requests,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_tokens: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        self.model, self.requests, self.tokenizer = model, requests, tokenizer
        self.share_prefixes = share_prefixes
        self.focus = model if isinstance(model, FocusModel) else None
        self.lm: Any = self.focus.base_model if self.focus else model
        self.device = next(model.parameters()).device
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"])

    @torch.no_grad()
    def score(self, scores: ScoreFile, progress: Count | None = None) -> None:
        """What is not in the file yet, once it was checked."""
        left = [item for item in self.requests.items if item.key not in scores.scores]
        total, was_training = len(self.requests.items), self.model.training
        done = total - len(left)
        self.model.eval()
        if progress:
            progress(done, total)
        try:
            for batch in self.run(left):
                scores.append(batch)
                done += len(batch)
                if progress:
                    progress(done, total)
        finally:
            self.model.train(was_training)

    def check(self) -> None:
        """Before anything runs: causal routing, ids that the model has, lengths that it reaches, a tokenizer where one
        is needed."""
        if self.focus is not None and self.focus.focus_config.leaks_future():
            raise ValueError(
                "the routing of this adapter sees later tokens (`paper_leaky`): its scores would mean nothing"
            )
        items = self.requests.items
        if missing := [item for item in items if not item.context]:
            one = missing[0]
            raise ValueError(f"item {one.item!r} of {one.task!r} has no tokens: this file is for the metrics")
        if not items:
            return
        longest = max(items, key=self.requests.length)
        if self.requests.length(longest) > self._positions():
            raise ValueError(
                f"item {longest.item!r} of {longest.task!r} takes {self.requests.length(longest):,} tokens, the model "
                f"has {self._positions():,} positions: ask for shorter ones"
            )
        vocabulary = self.lm.get_input_embeddings().weight.shape[0]
        parts: Iterable[Sequence[int]] = (
            *self.requests.prefixes.values(),
            *(tokens for item in items for tokens in (item.context, *item.continuations)),
        )
        if (largest := max(max(part) for part in parts if part)) >= vocabulary:
            raise ValueError(
                f"the requests have the token id {largest:,}, the model knows {vocabulary:,} tokens: they were written "
                "for another model's tokenizer"
            )
        if self.tokenizer is None and any(item.kind == "generate" for item in items):
            raise ValueError("some requests ask for text: give the model's tokenizer")

    def _positions(self) -> int:
        """How many the model has."""
        return getattr(self.lm.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def run(self, items: Sequence[Item]) -> Iterator[Scored]:
        """Batches of scores, the longest sequences first: what does not fit in memory fails early."""
        for kind, work in (("losses", self._losses), ("loglikelihood", self._likelihoods), ("generate", self._texts)):
            of_kind = [item for item in items if item.kind == kind]
            # A prefix is run once, for all that begin with it; texts are few, and are generated from the whole.
            sharing = self.share_prefixes and kind == "loglikelihood"
            for prefix in dict.fromkeys(item.prefix if sharing else None for item in of_kind):
                cache = self._prefix_cache(prefix) if prefix else None
                group = [item for item in of_kind if not sharing or item.prefix == prefix]
                for batch in self._batches(group, cached=len(self.requests.prefixes[prefix]) if prefix else 0):
                    yield from self._halving(work, batch, cache)

    def _batches(self, items: list[Item], cached: int) -> Iterator[list[Item]]:
        """Whole items of like length, as many as the budgets allow."""
        items = sorted(items, key=self.requests.length, reverse=True)
        most = self.batch_tokens * (MORE_TO_GENERATE if items[0].kind == "generate" else 1)
        batch: list[Item] = []
        rows, width = 0, 0
        for item in items:
            more = max(1, len(item.continuations))
            width = width if batch else self.requests.length(item)
            full = (
                (rows + more) * (width - cached) > most
                or (rows + more) * width > self.batch_tokens * CACHED_PER_COMPUTED
                or (item.kind == "losses" and width != self.requests.length(item))  # no padding among counted pairs
            )
            if batch and full:
                yield batch
                batch, rows, width = [], 0, self.requests.length(item)
            batch.append(item)
            rows += more
        if batch:
            yield batch

    def _halving(self, work: Callable[[list[Item], Any], Scored], batch: list[Item], cache: Any) -> Iterator[Scored]:
        """Half the batch at a time where the device has no room for the whole."""
        scored: Scored | None = None
        try:
            scored = work(batch, cache)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        if scored is not None:
            yield scored
            return
        torch.cuda.empty_cache()  # not above: while it is handled, the error keeps the failed tensors alive
        for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
            yield from self._halving(work, half, cache)

    def _prefix_cache(self, name: str) -> Any:
        ids = torch.tensor([self.requests.prefixes[name]], device=self.device)
        return self.lm.get_decoder()(input_ids=ids, use_cache=True).past_key_values

    def _likelihoods(self, items: list[Item], cache: Any) -> Scored:
        """Sum of log p and whether every token is the likeliest, for each continuation."""
        starts = [item.context if cache is not None else self.requests.whole_context(item) for item in items]
        rows = [(*start, *n) for start, item in zip(starts, items, strict=True) for n in item.continuations]
        lengths = [len(tokens) for item in items for tokens in item.continuations]
        cached = 0 if cache is None else cache.get_seq_length()
        step = LENGTH_STEP.get(self.device.type, 1)
        ids = _pad_right(rows, step, self._positions() - cached).to(self.device)
        if cache is not None:
            cache = copy.deepcopy(cache)
            cache.batch_repeat_interleave(len(rows))
        answer = self.lm.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=cache is not None)
        row = torch.tensor([index for index, length in enumerate(lengths) for _ in range(length)], device=self.device)
        place = torch.tensor(
            [
                position
                for whole, n in zip(rows, lengths, strict=True)
                for position in range(len(whole) - n, len(whole))
            ],
            device=self.device,
        )
        found = predict(self.lm, answer, answer.last_hidden_state[row, place - 1], ids[row, place])
        sums = [part.sum().item() for part in found.log_probs.cpu().split(lengths)]
        greedy = [bool(part.all()) for part in found.greedy.cpu().split(lengths)]
        pairs = iter(zip(sums, greedy, strict=True))
        return [(item.key, {"scores": [list(next(pairs)) for _ in item.continuations]}) for item in items]

    def _losses(self, items: list[Item], cache: Any) -> Scored:
        """-log p of the context's tokens, summed from each edge to the next. Contexts of one length."""
        recording: AbstractContextManager[Stats | None] = self.focus.record_stats() if self.focus else nullcontext()
        scored: Scored = []
        ids = torch.tensor([list(item.context) for item in items], device=self.device)
        with recording as stats:
            answer = self.lm.get_decoder()(input_ids=ids, use_cache=False)
        kept = {"pairs_kept": stats.pairs_kept} if stats is not None and stats.per_layer else {}
        for row, item in enumerate(items):
            edges = [*item.options["edges"], len(item.context)]
            hidden, targets = answer.last_hidden_state[row, edges[0] - 1 : -1], ids[row, edges[0] :]
            losses = -predict(self.lm, answer, hidden, targets).log_probs.cpu()
            parts = losses.split([last - first for first, last in pairwise(edges)])
            scored.append((item.key, {"losses": [part.sum().item() for part in parts], **kept}))
        return scored

    def _texts(self, items: list[Item], cache: Any) -> Scored:
        """Greedy continuations up to a stop string. Padded on the left, with a mask, as `generate` wants it."""
        assert self.tokenizer is not None
        rows = [self.requests.whole_context(item) for item in items]
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        ids = torch.tensor([[pad or 0] * (width - len(row)) + list(row) for row in rows], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        stops = [item.options.get("until", []) for item in items]
        criterion = _StopStrings(self.tokenizer, stops, width)
        limits = [item.options["max_new_tokens"] for item in items]
        with quiet_transformers():
            written = self.model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,  # some models' own settings have one, and answers repeat the prompt
                no_repeat_ngram_size=0,
                use_cache=self.share_prefixes,
                max_new_tokens=max(limits),
                pad_token_id=pad or 0,
                stopping_criteria=StoppingCriteriaList([criterion]),
            )[:, width:]
        texts = [
            str(self.tokenizer.decode(row[:limit], skip_special_tokens=True))
            for row, limit in zip(written, limits, strict=True)
        ]
        return [
            (item.key, {"text": cut_at(text, until)}) for item, text, until in zip(items, texts, stops, strict=True)
        ]


class _StopStrings(StoppingCriteria):
    """Row by row: its own strings, looked for in the end of what it has written."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[list[str]], start: int) -> None:
        self.tokenizer, self.stops, self.start = tokenizer, stops, start

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        ends = self.tokenizer.batch_decode(input_ids[:, max(self.start, input_ids.shape[1] - LONGEST_STOP) :])
        found = [any(stop in end for stop in stops) for end, stops in zip(ends, self.stops, strict=True)]
        return torch.tensor(found, device=input_ids.device)


def cut_at(text: str, until: Sequence[str]) -> str:
    """What stands before the first of the stop strings."""
    return text[: min((place for place in (text.find(stop) for stop in until) if place >= 0), default=len(text))]


def _pad_right(rows: Sequence[Sequence[int]], step: int, most: int) -> Tensor:
    """[rows, width]: the longest row rounded up to a multiple of `step`, `most` at most."""
    width = min(-(-max(map(len, rows)) // step) * step, most)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
