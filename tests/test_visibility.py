"""The predicate against a loop that spells it out, and its counts against the mask."""

import pytest
import torch
from attention_cases import random_case

from focus_attn.visibility import (
    Pattern,
    Tokens,
    count_causal_pairs,
    count_positions,
    count_visible_pairs,
    covered_mass,
    distant_mask,
    visible_mask,
)


@pytest.mark.parametrize("seed", range(30))
def test_mask_is_the_definition(seed: int) -> None:
    call = random_case(seed, largest=30).call()
    tokens, pattern = call.tokens, call.pattern
    mask = visible_mask(call.query_groups, call.key_groups, tokens, pattern)
    for b in range(mask.shape[0]):
        for r in range(mask.shape[1]):
            for i in range(mask.shape[2]):
                for j in range(mask.shape[3]):
                    pos_i, pos_j = int(tokens.query_positions[b, i]), int(tokens.key_positions[b, j])
                    same = tokens.key_segments is None or tokens.query_segments[b, i] == tokens.key_segments[b, j]
                    shared = set(call.query_groups[b, r, i].tolist()) & set(call.key_groups[b, r, j].tolist())
                    reach = pos_i - pos_j <= pattern.window or pos_j < pattern.num_sinks or bool(shared)
                    slides = pattern.sliding_window is None or pos_i - pos_j < pattern.sliding_window
                    want = bool(same) and pos_i >= 0 and 0 <= pos_j <= pos_i and reach and slides
                    assert bool(mask[b, r, i, j]) == want, (b, r, i, j)


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_those_of_the_mask(seed: int) -> None:
    call = random_case(100 + seed).call()
    args = call.query_groups, call.key_groups, call.tokens, call.pattern
    torch.testing.assert_close(count_visible_pairs(*args), visible_mask(*args).sum((-2, -1)))
    everything = Pattern(num_groups=1, window=10**6)
    dense = visible_mask(*(torch.zeros_like(g) for g in args[:2]), call.tokens, everything)
    torch.testing.assert_close(count_causal_pairs(call.tokens), dense[:, 0].sum((-2, -1)))
    near = visible_mask(*(torch.tensor(x).expand_as(g) for x, g in zip((0, 1), args[:2], strict=True)), *args[2:])
    torch.testing.assert_close(distant_mask(*args), visible_mask(*args) & ~near)


def test_counting_works_in_chunks() -> None:
    ids = torch.randint(0, 4, (1, 1, 6000, 1))
    at = torch.arange(6000)[None]
    tokens = Tokens(at, at)
    assert int(count_causal_pairs(tokens)) == 6000 * 6001 // 2
    kept = int(count_visible_pairs(ids, ids, tokens, Pattern(4, 128, 4))) / (6000 * 6001 // 2)
    assert 0.25 < kept < 0.32


def test_positions_count_real_tokens_within_segments() -> None:
    real = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0]], dtype=torch.bool)
    assert count_positions(real).tolist() == [[-1, 0, 1, -1, 2, 3, 4, -1]]
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 0, 1]])
    assert count_positions(real, segments).tolist() == [[-1, 0, 1, -1, 0, 1, 2, -1]]


def test_covered_mass() -> None:
    attention = torch.rand(2, 4, 10, 10).tril()
    visible = torch.ones(2, 2, 10, 10, dtype=torch.bool)
    visible[:, 1, :, 5:] = False
    got = covered_mass(attention, visible)
    torch.testing.assert_close(got[:, :2], torch.ones(2, 2, 10))
    torch.testing.assert_close(got[:, 2:], attention[:, 2:, :, :5].sum(-1) / attention[:, 2:].sum(-1))
    assert (covered_mass(torch.zeros(1, 1, 2, 2), visible[:1, :1, :2, :2]) == 0).all()
    with pytest.raises(ValueError, match="4 heads"):
        covered_mass(attention, visible.repeat(1, 2, 1, 1)[:, :3])
