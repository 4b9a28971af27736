"""What the README says is so: its support table is measured here, and its Python runs, and that of docs/using.md."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from tiny import ARCHITECTURES, SPARSE, tiny_config, tiny_model, tokens

from focus_attn import FocusConfig, get_focus_model
from focus_attn.compare import Comparison
from focus_attn.training import Recipe

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
SNIPPETS = [("README.md", number) for number in range(4)] + [("docs/using.md", number) for number in range(6)]


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def attention_kind(architecture: str) -> str:
    config = tiny_config(architecture)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", heads)
    kind = "grouped queries" if kv_heads < heads else "multi-head"
    if hasattr(config, "kv_lora_rank"):
        kind = "latent (MLA)"
    extras = {
        "sliding layers": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
        "softcap": getattr(config, "attn_logit_softcapping", None),
        "learned sinks": architecture == "gpt_oss",
        "norm on q and k": architecture in ("qwen3", "olmo2", "gemma3_text"),
        "bias on q, k and v": architecture in ("qwen2", "gpt2", "opt", "gpt_neox"),
    }
    return ", ".join([kind, *(name for name, there in extras.items() if there)])


def is_exact_at_full_size(architecture: str) -> bool:
    model, ids = tiny_model(architecture), tokens()
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        everything = FocusConfig(num_groups=4, query_top_k=4, key_top_k=4, window=3, num_sinks=0)
        return bool((get_focus_model(model, everything)(ids, use_cache=False).logits - base).abs().max() < 1e-5)


def generates_the_same_with_a_cache(architecture: str) -> bool:
    model, ids = get_focus_model(tiny_model(architecture), SPARSE), tokens(length=30)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def trains_its_routers(architecture: str) -> bool:
    model, ids = get_focus_model(tiny_model(architecture), SPARSE).train(), tokens()
    model(ids, labels=ids, use_cache=False).loss.backward()
    routers = [layer.router for layer in model.focus_layers() if layer.router is not None]
    return all(bool(router.projection.grad.abs().sum() > 0) for router in routers)


def support_table() -> str:
    rows = [
        "| architecture | attention | exact at full size | cached generation | router training |",
        "|---|---|---|---|---|",
    ]
    for architecture in sorted(ARCHITECTURES):
        checks = (is_exact_at_full_size, generates_the_same_with_a_cache, trains_its_routers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            marks = ["yes" if check(architecture) else "no" for check in checks]
        rows.append(f"| {architecture} | {attention_kind(architecture)} | {' | '.join(marks)} |")
    return "\n".join(rows)


def test_the_support_table_is_what_the_tests_find() -> None:
    table = support_table()
    assert table in README.read_text(), f"put this table into the README:\n\n{table}"


@pytest.mark.parametrize(("page", "number"), SNIPPETS)
def test_the_python_of_the_pages_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(page, "python")
    assert len(blocks) == sum(page == name for name, _ in SNIPPETS), "tell SNIPPETS how many blocks of Python there are"
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks[number], f"{page}, block {number}", "exec"), {})


@pytest.mark.parametrize(("page", "kind"), [("docs/training.md", Recipe), ("docs/compare.md", Comparison)])
def test_the_yaml_of_the_pages_reads(page: str, kind: type[Recipe] | type[Comparison], tmp_path: Path) -> None:
    blocks = blocks_of(page, "yaml")
    assert blocks
    for block in blocks:
        (tmp_path / "mine.yaml").write_text(block)
        kind.from_yaml(tmp_path / "mine.yaml")
