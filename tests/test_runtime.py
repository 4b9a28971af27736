"""Where it runs: dtypes, torch.compile, device maps, quantised models, pipelines, copies."""

from __future__ import annotations

import copy
import platform
import subprocess
import sys

import pytest
import torch
from tiny import EXACT, SPARSE, VOCAB, focus, logits, tiny_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM, StaticCache, pipeline

from focus_attn import FocusConfig, focus_attention, get_focus_model

pytestmark = pytest.mark.filterwarnings("ignore:this input of")


def test_routers_stay_fp32_whatever_the_base_model_becomes():
    model, ids = focus(), tokens()
    for change in (lambda: model.to(torch.bfloat16), lambda: model.half(), lambda: model.base_model.bfloat16()):
        change()
        routers = [p for layer in model.focus_layers() for p in layer.router.state_dict().values()]
        assert {p.dtype for p in routers} == {torch.float32}
    assert next(model.base_model.parameters()).dtype == torch.bfloat16
    assert logits(model, ids).dtype == torch.bfloat16
    assert {p.device.type for p in model.to("meta").parameters()} == {"meta"}
    assert get_focus_model(tiny_model().bfloat16(), SPARSE).focus_layers()[0].router.projection.dtype == torch.float32


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "falcon", "gpt_oss"])
def test_compiles_as_one_graph(architecture):
    model, ids = focus(architecture), tokens(length=40)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), logits(model, ids), **EXACT)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    padded = logits(compiled, ids, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(padded, logits(model, ids, attention_mask=mask), **EXACT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("length", [200, 1500])
def test_a_cuda_graph_holds_whole_decoder_layers(length):
    """Router, plan and attention without asking the device anything: new tokens make new groups in the same graph."""
    config = FocusConfig(num_groups=4, window=32, num_sinks=2, backend="triton")
    model = focus(config=config, hidden_size=128, max_position_embeddings=2048).to("cuda", torch.bfloat16)
    first, second = (tokens(1, length, seed=seed).cuda() for seed in (0, 1))
    ids = first.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):  # kernels compile before the capture
            model(ids, use_cache=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = model(ids, use_cache=False).logits
    for wanted in (second, first):
        ids.copy_(wanted)
        graph.replay()
        close = torch.isclose(captured, logits(model, wanted, use_cache=False), atol=5e-2, rtol=5e-2)
        assert close.all(-1).float().mean() > 0.98  # the last bit of a hidden state may send a token elsewhere


def test_compiles_for_training():
    model, ids = focus(), tokens(length=40)
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids, use_cache=False).loss.backward()
    actual = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_compiles_with_inductor():
    model, ids = focus(num_hidden_layers=1), tokens(length=40)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), logits(model, ids), **EXACT)


@pytest.mark.parametrize("window", [3, 100], ids=["sparse", "everything"])
def test_the_operator_is_laid_out_as_it_tells_a_compiler(window):
    """On queries and keys as models have them, token by token; inductor holds operators to it."""

    def loss(x, ids):
        q, k, v = (part.transpose(1, 2) for part in x.unflatten(-1, (3, 2, 16)).unbind(2))
        out = focus_attention(q, k, v, ids, ids, num_groups=2, window=window, backend="stock")
        return out.square().sum()

    torch.manual_seed(0)
    x, ids = torch.randn(1, 64, 96, requires_grad=True), torch.randint(0, 2, (1, 2, 64, 1))
    torch._dynamo.reset()
    found = [torch.autograd.grad(run(x, ids), x)[0] for run in (torch.compile(loss, fullgraph=True), loss)]
    torch.testing.assert_close(*found, **EXACT)


def test_decoding_on_a_static_cache_compiles():
    model, ids = focus(), tokens(length=40)
    expected = logits(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=48)
    logits(model, ids[:, :30], past_key_values=cache)  # the prefill makes the cache, uncompiled as in transformers
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for t in range(30, 40):
        step = logits(compiled, ids[:, t : t + 1], past_key_values=cache)
        torch.testing.assert_close(step, expected[:, t : t + 1], **EXACT)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "falcon"])
@pytest.mark.parametrize("where", ["cpu", "offload", "disk"])
def test_device_map(architecture, where, tmp_path):
    ids = tokens(length=40)
    base = tiny_model(architecture)
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    whole = get_focus_model(base, SPARSE)
    whole.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", device_map={"": "cpu"}, attn_implementation="eager", dtype=torch.float32
    )
    if where != "cpu":
        from accelerate import cpu_offload, disk_offload

        device = torch.device("cpu")
        loaded = (
            cpu_offload(loaded, device) if where == "offload" else disk_offload(loaded, str(tmp_path / "off"), device)
        )
        assert next(loaded.parameters()).device.type == "meta"
    model = type(whole).from_pretrained(loaded, tmp_path / "adapter")
    torch.testing.assert_close(logits(model, ids), logits(whole, ids), **EXACT)
    with whole.disable_focus(), model.disable_focus():
        torch.testing.assert_close(logits(model, ids), logits(whole, ids), **EXACT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantised_base_model(monkeypatch):
    """int8 linear layers, which have no parameters to look a device or dtype up from."""
    if torch.backends.quantized.engine == "x86" and platform.machine() not in ("x86_64", "AMD64"):
        monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")  # PyTorch takes the other for granted
    base, ids = tiny_model(), tokens(length=40)
    quantised = torch.ao.quantization.quantize_dynamic(base, {nn.Linear}, dtype=torch.qint8)
    dense = logits(quantised, ids)
    model = get_focus_model(quantised, SPARSE)
    assert model.focus_layers()[0].router.projection.dtype == torch.float32
    assert (logits(model, ids) - dense).abs().max() > 0.1
    assert model.generate(ids, max_new_tokens=5, min_new_tokens=5, pad_token_id=0).shape == (2, 45)
    model.add_adapter("all", FocusConfig(num_groups=2, query_top_k=2))
    model.set_adapter("all")
    assert (logits(model, ids) - dense).abs().mean() < 0.01  # a rounding here and there, from another summation order
    assert torch.equal(logits(model.unload(), ids), dense)


def test_pipeline(caplog):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "<eos>": 2}
    words = Tokenizer(WordLevel({**{f"w{i}": i for i in (1, *range(3, VOCAB))}, **special}, unk_token="w3"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    model, ids = focus(), tokens(batch=1, length=30)
    prompt = " ".join(f"w{i}" for i in ids[0].tolist())
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = write(prompt, max_new_tokens=6, do_sample=False, return_full_text=False)[0]["generated_text"]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert "not supported" not in caplog.text
    assert text.split() == tokenizer.convert_ids_to_tokens(expected[0, 30:], skip_special_tokens=True)


def test_a_copy_is_independent():
    model, ids = focus("falcon"), tokens(length=40)
    sparse = logits(model, ids)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, ids), sparse)
    with twin.disable_focus():
        assert not torch.equal(logits(twin, ids), sparse)
        assert torch.equal(logits(model, ids), sparse)
    twin.unload()
    assert torch.equal(logits(model, ids), sparse)


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_a_model_from_a_file_runs_in_another_process(architecture, tmp_path):
    model, ids = focus(architecture), tokens()
    torch.save((model, ids, logits(model, ids)), tmp_path / "model.pt")
    program = (
        "import sys, torch; model, ids, wanted = torch.load(sys.argv[1], weights_only=False); "
        "torch.testing.assert_close(model(ids).logits, wanted)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "model.pt"], check=True, timeout=300)


def test_unloading_inside_disable_focus():
    model, ids = focus(), tokens()
    with model.disable_focus():
        base = model.unload()
    assert base.config._attn_implementation == "eager"
    assert torch.equal(logits(base, ids), logits(tiny_model(), ids))


def test_trainers_can_read_the_signature():
    import inspect

    assert {"input_ids", "attention_mask", "labels"} <= set(inspect.signature(focus().forward).parameters)


def test_after_unload_the_shell_says_so():
    model = focus()
    model.unload()
    with pytest.raises(ValueError, match="unloaded"):
        model.add_adapter("a", SPARSE)
    with pytest.raises(ValueError, match="unloaded"), model.disable_focus():
        pass


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_accelerate_may_come_after_focus(architecture):
    import accelerate

    model, ids = focus(architecture), tokens(length=40)
    sparse, dense = logits(model, ids), logits(tiny_model(architecture), ids)
    accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    assert torch.equal(logits(model, ids), sparse)
    with model.disable_focus():
        assert torch.equal(logits(model, ids), dense)
    assert torch.equal(logits(model, ids), sparse)
    assert torch.equal(logits(model.unload(), ids), dense)


def test_transformers_trainer_trains_saves_and_resumes(tmp_path):
    """With tied embeddings, which have two names in the base model's state dict."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 40)]
    options = {"use_cpu": True, "report_to": [], "save_steps": 2, "per_device_train_batch_size": 2, "seed": 0}
    arguments = TrainingArguments(str(tmp_path), max_steps=4, learning_rate=0.01, **options)

    def trained(**how):
        model = focus(tie_word_embeddings=True)
        before = {name: p.clone() for name, p in model.named_parameters()}
        Trainer(model=model, args=arguments, train_dataset=rows).train(**how)
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert changed and all(".focus." in name for name in changed)
        return model.state_dict()

    whole = trained()
    again = trained(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_state_dict_names_a_tied_tensor_once():
    model, other = focus(tie_word_embeddings=True), focus(tie_word_embeddings=True)
    names = {"base_model.model.embed_tokens.weight", "base_model.lm_head.weight"}
    assert len(names & set(model.state_dict())) == 1
    with torch.no_grad():
        model.base_model.lm_head.weight.add_(1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.base_model.lm_head.weight, model.base_model.lm_head.weight)
    assert other.base_model.lm_head.weight is other.base_model.model.embed_tokens.weight
