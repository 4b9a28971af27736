"""docs/reproduction.md is what results/ says, and the estimates are what their assumptions say."""

import dataclasses
import json

import pytest
from test_compare_table import FULL, RUN, above, cell

from focus_attn.compare import Comparison, Dataset, Method
from focus_attn.compare.cost import estimate
from focus_attn.compare.recipe import find_recipe, plain
from focus_attn.compare.reproduction import PAGE, RESULTS, benched, make_page, read_results, speedups
from focus_attn.compare.table import place_of
from focus_attn.compare.together import is_of_row


def write(folder, name, cells, *, file=None, tasks=(), **changes):
    comparison = Comparison.from_yaml(find_recipe(name)).to_dict() | changes
    (folder / "compare").mkdir(exist_ok=True)
    content = {"comparison": comparison, "tasks": list(tasks), "cells": cells}
    (folder / "compare" / f"{file or name}.json").write_text(json.dumps(content))


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run: python -m focus_attn.compare.reproduction"


def test_without_results_nothing_is_claimed(tmp_path):
    page = make_page(tmp_path)
    assert "## Table 9, ablation" in page
    assert "| Longformer | 38.9 | not run |" in page
    assert "focus compare table2 --model meta-llama/Llama-2-70b-hf --device cuda" in page


def test_what_was_measured_is_what_the_recipe_says():
    """A row whose settings were changed later must not keep the figures of the earlier ones under its name."""
    for file in sorted((RESULTS / "compare").glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        recipe = Comparison.from_yaml(find_recipe(content["comparison"]["name"]))
        for part in ("training", "tuning", "train_on", "window"):
            assert plain(getattr(recipe, part)) == content["comparison"][part], f"{file.name}: {part}"
        rows = {one.name: one for one in recipe.methods}
        figures = {(one["row"], place_of(one)): one.get("figures") for one in content["cells"] if one["seed"] == 0}
        for stored in content["cells"]:
            row = rows[stored["row"]]
            assert is_of_row(row, stored), f"{file.name}: {row.name}"
            if isinstance(row.budget, str):  # the cost of the row above
                assert stored["budget"] == figures[row.budget, place_of(stored)]["full_layers"]
            else:
                assert stored.get("budget") == row.budget


def test_results_stand_beside_the_published_figures(tmp_path):
    base = {**FULL, "row": "full attention"}
    seeds = [cell("Focus", above(0.01 * seed), focus=True, seed=seed) for seed in range(3)]
    write(tmp_path, "table3", [base, *seeds, cell("LoRA, r=4", above(-0.1), kind="dense", tune={"how": "lora"})])
    write(tmp_path, "table8", [base, cell("Sinkhorn assignments", focus=True, dominance=0.159)])
    page = make_page(tmp_path)
    assert "| centroids (148K) | 34.2 | 20.80 (20.59 to 21.01, 3 seeds), +1.0% [+1.0%, +1.0%] |" in page
    assert "| LoRA, r = 16 | 31.2 | not run |" in page
    assert "| Sinkhorn after full fine-tuning | 15.9 % | largest group 15.9% |" in page
    assert "NVIDIA H200, torch 2.11, 2026-01-01, commit abc" in page


def test_files_of_one_table_are_put_together(tmp_path):
    """Full attention stands in both, and is no second seed; benchmarks are of one model each."""
    base = {**FULL, "row": "full attention"}
    score = {"models": {"base": {"estimate": 0.3}}, "against_base": {}, "is_ratio": False, "at_floor": False}
    task = {"task": "piqa", "metric": "acc", "n": 7, **score}
    write(tmp_path, "table3", [base, cell("Focus", focus=True)], tasks=[task], models=["default"])
    write(tmp_path, "table3", [base, cell("LoRA, r=4")], file="table3_gemma", tasks=[task], models=["gemma3-270m"])
    assert [one["row"] for one in read_results(tmp_path)["table3"]["cells"]] == ["full attention", "Focus", "LoRA, r=4"]
    page = make_page(tmp_path)
    assert "2 seeds" not in page
    assert page.index("SmolLM2-135M-Instruct, benchmarks") < page.index("Gemma-3-270M, benchmarks")


def test_what_a_recipe_asks_for_and_nobody_measured_is_named(tmp_path):
    base = {**FULL, "row": "full attention"}
    write(tmp_path, "collapse", [base, cell("Sinkhorn", focus=True)])
    write(tmp_path, "table3", [base, *(cell("Focus", focus=True, seed=seed) for seed in range(3)), cell("LoRA, r=4")])
    page = make_page(tmp_path)
    collapse, table3 = page.split("## Collapse")[1], page.split("## Table 3")[1].split("## Table 4")[0]
    assert "- Not run: softmax; softmax, bias and cap.\n- 1 of 3 seeds: every row that is trained.\n" in collapse
    assert "- Not run: LoRA, r=16; DoRA, r=16.\n- 1 of 3 seeds: LoRA, r=4.\n" in table3


def test_benchmarks_of_fewer_seeds_than_asked_for_are_named(tmp_path):
    score = {"models": {name: {"estimate": 0.3} for name in ("base", "Focus", "LoRA, r=4", "LoRA, r=16")}}
    task = {"task": "piqa", "metric": "acc", "n": 7, "against_base": {}, "is_ratio": False, "at_floor": False, **score}
    task["seeds"] = {"Focus": 3, "LoRA, r=16": 2}
    write(tmp_path, "table3", [{**FULL, "row": "full attention"}], tasks=[task], models=["default"])
    benchmarks = make_page(tmp_path).split("## Table 3")[1].split("benchmarks, and the difference")[1]
    assert "\n\n- 1 of 3 seeds: LoRA, r=4.\n- 2 of 3 seeds: LoRA, r=16.\n" in benchmarks.split("## Table 4")[0]


def test_one_seed_of_everything_is_said(tmp_path):
    write(tmp_path, "starts", [{**FULL, "row": "full attention"}, cell("coverage", focus=True)])
    assert "- One seed of each row that is trained.\n" in make_page(tmp_path).split("## Starts")[1]


def test_confidence_is_of_all_seeds(tmp_path):
    described = [
        {"groups": {"confidence": value, "groups": [{"key_share": 0.4}, {"key_share": 0.6}]}} for value in (0.8, 0.9)
    ]
    cells = [cell("as published, K=8", focus=True, seed=seed) | one for seed, one in enumerate(described)]
    write(tmp_path, "groups", [{**FULL, "row": "full attention"}, *cells])
    page = make_page(tmp_path)
    assert "| confidence | 0.89 | 0.85 (0.80 to 0.90, 2 seeds) |" in page and "| 40% to 60% |" in page


def test_benchmarks_are_asked_for_as_the_recipe_asks(tmp_path):
    table4 = make_page(tmp_path).split("## Table 4")[1].split("## Table 5")[0]
    asked = (
        "--no-perplexity --window 128 --tasks truthfulqa_mc1,hellaswag --limit 817 --long 1024 --write-requests items"
    )
    assert asked in table4


def test_plots_stand_below_their_table(tmp_path):
    write(tmp_path, "table1", [{**FULL, "row": "full attention"}])
    for name in ("table1.png", "table1-2.png", "table10.png"):
        (tmp_path / "compare" / name).write_bytes(b"")
    table1 = make_page(tmp_path).split("## Table 1,")[1].split("## Table 2")[0]
    assert table1.count("![Table 1, retrofit]") == 2 and "table10.png" not in table1


def test_costs_of_other_runs(tmp_path):
    page = make_page(tmp_path)
    gsm8k = next(line for line in page.splitlines() if line.startswith("| mistralai/Mistral-7B-v0.3, GSM8K"))
    assert gsm8k.endswith("decoding one token at a time at 3.35 TB/s) |")
    whole = Comparison.from_yaml(find_recipe("table5"))
    command = "focus compare table5 --model openai-community/gpt2 --device cuda --longest 1024"
    assert f"| `{command}` | {estimate(whole, 124e6)} |" in page


def test_a_quick_form_is_no_result(tmp_path):
    write(tmp_path, "table3", [{**FULL, "row": "full attention"}], note="QUICK FORM")
    assert read_results(tmp_path) == {}


def speed_row(length, dense_ms, spread, repeats):
    dense = {"baseline": "cuDNN", "peers": {"cuDNN": {"ms": dense_ms, "repeats": repeats}}}
    speedup = round(dense_ms / 2, 3)
    return {"K": 8, "length": length, "speedup": speedup, "speedup_spread": spread, "focus": {"ms": 2.0}, **dense}


def test_speed_comes_from_the_benchmark_where_the_table_was_not_run(tmp_path):
    (tmp_path / "attention_h200").mkdir()
    rows = [speed_row(1 << 20, 18.1, [9.05, 9.06], repeats=1), speed_row(4096, 1.2898, [0.6, 0.7], repeats=15)]
    (tmp_path / "attention_h200" / "published.json").write_text(json.dumps({"run": RUN, "rows": rows}))
    assert speedups(benched(tmp_path)["cells"]) == {"K = 8": "0.64x (0.60 to 0.70) at 4K, 9.05x (one dense call) at 1M"}
    page = make_page(tmp_path)
    assert "(NVIDIA H200, torch 2.11, 2026-01-01, commit abc: [published.json](../results/attention_h200/" in page


def test_estimates_follow_from_the_assumptions():
    training = {"start": {"how": "random"}, "stages": [{"steps": 10, "length": 512, "sequences": 4}]}
    comparison = Comparison(
        training=training,
        tuning={"steps": 5, "length": 512, "sequences": 2, "lr": 1e-4},
        seeds=(0, 1),
        data={"books": Dataset(lengths=(512,), blocks=10)},
        methods=(
            Method(name="Focus", focus={}),
            Method(name="the same, served otherwise", focus={}, serve={"window": 64}),
            Method(name="tuned", tune={"how": "full"}),
        ),
    )
    found = estimate(comparison, 7e9)
    assert found.tokens_trained == 2 * 10 * 4 * 512 + 2 * 5 * 2 * 512
    assert found.tokens_measured == (1 + 2 + 2 + 2) * 512 * 10
    flop = 7e9 * (2 * 10 * 4 * 512 * 6 + 2 * 5 * 2 * 512 * 8 + found.tokens_measured * 2)
    assert found.gpu_hours == pytest.approx(flop / (989e12 * 0.4) / 3600)
    assert found.gpus == 3  # 16 bytes of each weight that is trained, 2 of the model it is a copy of
    frozen = dataclasses.replace(comparison, methods=comparison.methods[:-1])
    assert estimate(frozen, 7e9).gpus == 1
    assert estimate(frozen, 70e9).gpus == 5
    whole = estimate(comparison, 7e9, tokens=2e9)  # by `focus train`, which makes no copy
    assert (whole.tokens_trained, whole.gpus) == (2e9, 2)
