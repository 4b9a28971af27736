"""`focus bench attention` at tiny sizes: what is measured, what is refused, what is written."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from focus_attn.attention import backends
from focus_attn.bench import attention, peers
from focus_attn.bench.attention import Row, Sweep
from focus_attn.bench.explain import explain_choices
from focus_attn.bench.flex import focus_mask
from focus_attn.bench.groups import Ids, drawing
from focus_attn.bench.options import AttentionOptions, read_numbers, read_options
from focus_attn.bench.parity import Verdict, check_against_oracle, check_rows
from focus_attn.bench.setting import Groups, causal_pairs
from focus_attn.bench.terminal import make_console, print_trace
from focus_attn.bench.timing import Measured
from focus_attn.bench.trace import Kernel, Trace, is_attention, trace_call
from focus_attn.cli import app
from focus_attn.report.bench_plots import plot_attention, weighted_ratios
from focus_attn.visibility import Pattern, Tokens, count_visible_pairs, visible_mask

run = CliRunner().invoke
TINY = {"heads": 2, "kv_heads": 1, "width": 16, "dtype": "fp32", "window": 16, "device": "cpu", "repeats": 2}
TINY_ARGUMENTS = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def tiny(**changes: object) -> AttentionOptions:
    return read_options(**{**TINY, "lengths": "64,128", **changes})


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(Sweep(tiny(passes="both", groups="4,8")).rows())


def test_every_length_groups_and_pass_has_a_row(rows):
    found = [(row.length, row.setting.ids.num_groups, row.backward) for row in rows]
    assert found == [(length, k, backward) for length in (64, 128) for backward in (False, True) for k in (4, 8)]
    assert all(row.parity and row.timing is not None and row.backend == "stock" for row in rows)


def test_the_baseline_is_the_fastest_dense_one(rows):
    for row in rows:
        assert set(row.peers) == {"Flash", "Flash, k and v repeated"}
        assert row.timing.dense_seconds == min(one.seconds for one in row.peers.values())
        low, high = row.speedup_spread
        assert low <= row.timing.speedup <= high


def test_ids_are_redrawn_before_every_call(monkeypatch):
    seen = []
    stock = backends.BACKENDS["stock"]
    monkeypatch.setitem(backends.BACKENDS, "stock", lambda call: seen.append(call.key_groups.clone()) or stock(call))
    list(Sweep(tiny(lengths="128", repeats=4)).rows())
    at_length = [ids for ids in seen if ids.shape[2] == 128]
    assert len(at_length) == 6  # the check of sampled queries, one to warm up, four timed
    assert all(not torch.equal(a, b) for i, a in enumerate(at_length) for b in at_length[:i])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_wrong_backend_gets_no_speedup(monkeypatch, backward):
    stock = backends.BACKENDS["stock"]

    def wrong(call):
        out, lse = stock(call)
        return (
            out + (out - out.detach()) if backward else out * 1.001
        ), lse  # gradients twice as large, or outputs off

    monkeypatch.setitem(backends.BACKENDS, "stock", wrong)
    passes = "forward+backward" if backward else "forward"
    (row,) = Sweep(tiny(lengths="64", passes=passes)).rows()
    assert not row.parity and row.timing is None and row.focus.times == []
    assert row.to_dict()["speedup"] is None and row.to_dict()["focus"] is None
    result = run(app, ["bench", "attention", *TINY_ARGUMENTS, "--lengths", "64", "--pass", passes])
    assert result.exit_code == 1
    assert "parity FAILED" in result.output


def test_an_error_that_shows_at_the_timed_length_alone_is_found(monkeypatch):
    stock = backends.BACKENDS["stock"]

    def wrong_when_long(call):
        out, lse = stock(call)
        return (out * 1.001 if out.shape[2] == 2048 else out), lse

    monkeypatch.setitem(backends.BACKENDS, "stock", wrong_when_long)
    (row,) = Sweep(tiny(lengths="2048")).rows()
    assert [verdict.ok for verdict in row.verdicts] == [True, False]
    assert row.timing is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shared", [False, True], ids=["asymmetric", "shared"])
def test_a_right_backend_passes_both_checks(dtype, shared):
    setting = tiny(dtype=dtype, shared=shared, heads=4, kv_heads=2, query_k=2, key_k=2, groups="4").settings[0]
    make = generator()
    assert check_against_oracle(setting, True, make).ok
    inputs = setting.shape.draw(301, True, make)
    assert check_rows(setting, inputs, setting.draw_groups(301, make), make).ok


def test_nan_is_never_right():
    assert not Verdict("output", 8, float("nan"), 1.0).ok


def test_pairs_are_those_of_the_predicate():
    setting = tiny(groups="4", query_k=2).settings[0]
    groups = setting.draw_groups(200, generator())
    at = torch.arange(200)[None]
    assert setting.count_pairs(groups) == count_visible_pairs(*groups, Tokens(at, at), setting.pattern).item()


def test_flex_sees_the_same_pairs():
    draw = drawing("uniform", Ids(num_groups=6, query_k=2, key_k=2, routers=2))
    groups, pattern = Groups(*draw(70, generator())), Pattern(6, 9, 3)
    at = torch.arange(70)
    visible = focus_mask(groups, pattern, heads=4)
    seen = torch.stack([visible(at[0], torch.tensor(h), at[:, None], at[None, :]) for h in range(4)])
    want = visible_mask(*groups, Tokens(at[None], at[None]), pattern)[0].repeat_interleave(2, 0)
    assert torch.equal(seen, want)


def measured_row(length: int, dense: float, focus: float, options: AttentionOptions) -> Row:
    peers = {"Flash": Measured([dense, dense * 1.1, dense * 0.9])}
    pairs = causal_pairs(length) / 4
    return Row(length, options.settings[0], "stock", False, peers, "Flash", Measured([focus]), pairs, [])


def test_the_weighted_line_is_the_pairs_ratio_at_the_best_dense_rate():
    options = tiny()
    # Twice the length and four times the pairs in twice the time: the dense rate has doubled.
    line = [measured_row(1000, 1.0, 1.0, options), measured_row(2000, 2.0, 1.0, options)]
    assert weighted_ratios(line) == pytest.approx([8.0, 4.0], rel=1e-3)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_are_written(rows, suffix, tmp_path):
    file = tmp_path / f"speed{suffix}"
    plot_attention(rows, "a title", file)
    content = file.read_bytes()
    assert content[:4] == b"\x89PNG" if suffix == ".png" else b"pairs ratio" in content


def test_a_long_first_length_is_scouted_at_a_short_one(monkeypatch):
    monkeypatch.setattr(attention, "SCOUT", 40)
    sweep = Sweep(tiny(lengths="100", passes="both"))
    measured = []
    measure = sweep._measure
    monkeypatch.setattr(sweep, "_measure", lambda *a, **k: measured.append(a) or measure(*a, **k))
    assert [(row.length, row.focus.warmed_up) for row in sweep.rows()] == [(100, True)] * 2
    assert [length for length, *_ in measured] == [40, 40, 100, 100]


def test_a_length_that_does_not_fit_into_the_time_is_not_begun():
    sweep = Sweep(tiny(lengths="64,1M", seconds=1.0))
    assert [row.length for row in sweep.rows()] == [64]
    assert "1,048,576 tokens, forward, would take about" in sweep.stopped and "--seconds" in sweep.stopped


def test_a_backend_that_cannot_serve_the_shape_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = run(app, ["bench", "attention", *TINY_ARGUMENTS, "--lengths", "64", "--backend", "triton"])
    assert result.exit_code == 1 and "backend 'triton'" in result.output and "Traceback" not in result.output


def test_a_peer_that_fails_is_left_out_with_its_reason(monkeypatch):
    def broken(q, k, v, is_causal, enable_gqa=False):
        if enable_gqa:
            raise RuntimeError("no kernel for groups")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    monkeypatch.setattr(peers, "scaled_dot_product_attention", broken)
    first, second = Sweep(tiny()).rows()
    for row in (first, second):
        assert row.left_out == {"Flash": "no kernel for groups"}
        assert row.baseline == "Flash, k and v repeated" and row.timing is not None


def test_on_cuda_every_dense_kernel_is_a_peer(monkeypatch):
    asked = []

    def flash_attn_func(q, k, v, causal):
        asked.append((q.shape, k.shape, causal))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), "logsumexp"

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace())  # too old to have the function
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    found, left_out = peers.dense_peers(peers.NAMES, torch.device("cuda"), grouped=True)
    sdpa = ["cuDNN", "Flash", "efficient"]
    assert {peer.name for peer in found} == {*sdpa, *(f"{name}, k and v repeated" for name in sdpa), "FlashAttention-2"}
    assert "cannot be imported" in left_out["FlashAttention-3"] and "not installed" in left_out["FlashAttention-4"]

    inputs = tiny(heads=4, kv_heads=2).shape.draw(24, True, generator())
    theirs = [peer for peer in found if peer.name in ("FlashAttention-2", "Flash, k and v repeated")]
    repeated, flash_attn = (contender.run() for contender in peers.contenders(theirs, inputs))
    assert asked == [((1, 24, 4, 16), (1, 24, 2, 16), True)]
    torch.testing.assert_close(flash_attn[0].transpose(1, 2), repeated[0])  # the gradient of q
    assert repeated[1].shape == (1, 4, 24, 16) and flash_attn[1].shape == (1, 24, 2, 16)


def test_slow_peers_are_left_out_of_long_calls_and_the_reason_is_kept():
    sweep = Sweep(tiny())
    slow = sweep._left_out(64, {"Flash": 3.0, "Flash, k and v repeated": 4.5}, False)
    assert slow == {"Flash, k and v repeated": "1.5 times the time of Flash at a shorter length"}
    assert sweep._left_out(64, {"Flash": 0.3, "Flash, k and v repeated": 0.45}, False) == {}


def test_the_command_prints_and_writes_everything(tmp_path):
    json_file, plot = tmp_path / "b.json", tmp_path / "b.svg"
    arguments = ["--lengths", "64,1K", "--groups", "4", "--shared", "--sinks", "0", "--skew", "largest:0.5"]
    arguments += ["--json", str(json_file), "--plot", str(plot)]
    result = run(app, ["bench", "attention", *TINY_ARGUMENTS, *arguments])
    assert result.exit_code == 0, result.output
    assert "K = 4, forward, backend auto: Focus" in result.output  # the crossover
    assert plot.stat().st_size > 0
    results = json.loads(json_file.read_text())
    assert results["run"]["torch"] == torch.__version__ and results["stopped"] is None
    assert results["setting"]["shared_ids"] and results["setting"]["routers"] == 1
    row = results["rows"][-1]
    assert row["length"] == 1024 and row["K"] == 4 and row["query_k"] == row["key_k"] == 1
    assert row["pass"] == "forward" and row["backend"] == "stock" and row["parity"]["ok"]
    assert row["pairs_kept_share"] == pytest.approx(1 / row["pairs_ratio"], rel=1e-2)
    assert row["speedup"] == pytest.approx(row["peers"][row["baseline"]]["ms"] / row["focus"]["ms"], rel=1e-2)
    focus = row["focus"]
    assert focus["min_ms"] <= focus["ms"] <= focus["max_ms"] and focus["repeats"] == 2 and focus["tflops"] > 0


@pytest.mark.parametrize("command", ["attention", "prefill"])
def test_help_fits_a_page(command):
    result = run(app, ["bench", command, "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) < 60


def test_explain_says_what_auto_takes_and_why_not_the_others():
    (choice,) = explain_choices(tiny(lengths="64", backend="auto,stock"))
    assert choice["chosen"] == "stock"
    assert "triton" in choice["reasons"]
    result = run(app, ["bench", "attention", *TINY_ARGUMENTS, "--lengths", "1M", "--explain"])
    assert result.exit_code == 0 and "auto takes stock" in result.output


def test_trace_is_for_cuda():
    with pytest.raises(ValueError, match="--trace"):
        trace_call(tiny().settings[0], 64, False, generator())
    attention = ["_near", "_far_kernel", "void flash_fwd_kernel<...>", "cudnn_generated_fort_native_sdpa_sm90_flash"]
    assert all(map(is_attention, attention))
    other = ["_copy_keys", "_plan_far", "linear_kernel", "vectorized_elementwise_kernel", "radixSortKVInPlace"]
    assert not any(map(is_attention, other))


def test_the_overhead_is_the_call_less_its_attention_kernels():
    kernels = [Kernel("_far", 2, 0.3, True), Kernel("_copy_keys", 1, 0.05, False), Kernel("_near", 1, 0.1, True)]
    trace = Trace(4096, False, call_ms=0.5, host_ms=0.2, kernels=kernels, router_ms=0.07)
    assert trace.to_dict()["overhead_ms"] == pytest.approx(0.1)
    assert trace.to_dict()["attention_kernels_ms"] == pytest.approx(0.4)
    with (console := make_console()).capture() as printed:
        print_trace(console, trace)
    shown = printed.get()
    assert "0.1000" in shown and "0.0700" in shown and shown.count("attention \u2502") == 2


@pytest.mark.parametrize("skew", ["uniform", "largest:0.6"])
def test_drawn_ids_have_the_skew_asked_for(skew):
    query, key = drawing(skew, Ids(num_groups=4, routers=2))(4000, generator())
    shares = torch.bincount(key[0, 0, :, 0], minlength=4) / 4000
    want = 0.6 if skew != "uniform" else 0.25
    assert shares[0].item() == pytest.approx(want, abs=0.05)
    assert shares[1].item() == pytest.approx((1 - want) / 3, abs=0.05)
    assert query.shape == key.shape == (1, 2, 4000, 1) and not torch.equal(query, key)


def test_shared_ids_are_one_object():
    query, key = drawing("uniform", Ids(num_groups=4, query_k=2, key_k=2, shared=True))(50, generator())
    assert query is key  # backends know shared ids by identity
    assert (query[..., 0] != query[..., 1]).all()


def test_ids_of_a_text_are_laid_end_to_end_from_another_start_each_time(tmp_path):
    file = tmp_path / "ids.json"
    ids = [[[n % 4] for n in range(7)], [[n % 3] for n in range(7)]]
    file.write_text(json.dumps({"query_groups": ids, "key_groups": ids}))
    draw = drawing(str(file), Ids(num_groups=4, routers=3))
    make = generator()
    drawn = [draw(14, make)[0][0, :, :, 0] for _ in range(20)]
    assert all(torch.equal(one[:, :7], one[:, 7:]) and torch.equal(one[0], one[2]) for one in drawn)
    assert len({tuple(one[0].tolist()) for one in drawn}) == 7
    assert all(sorted(one[1, :7].tolist()) == [0, 0, 0, 1, 1, 2, 2] for one in drawn)


def test_shares_of_a_file(tmp_path):
    file = tmp_path / "shares.json"
    file.write_text(json.dumps({"query_shares": [1, 0, 0], "key_shares": [[0, 1, 0], [0, 0, 1]]}))
    query, key = drawing(str(file), Ids(num_groups=3, routers=2))(500, generator())
    assert (query == 0).float().mean() > 0.99
    assert (key[0, 0] == 1).float().mean() > 0.99 and (key[0, 1] == 2).float().mean() > 0.99


def test_numbers_may_be_written_short():
    assert read_numbers("lengths", "4096, 8K,1m,8192") == (4096, 8192, 1 << 20)


def test_defaults_are_one_layer_of_the_embedded_model():
    options = read_options(device="cpu", dtype="fp32")
    assert (options.shape.heads, options.shape.kv_heads, options.shape.width) == (9, 3, 64)
    assert options.settings[0].ids.routers == 3
    assert read_options(device="cpu", dtype="fp32", heads=4).shape.kv_heads == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "many"], "--lengths takes whole numbers above 0"),
        (["--groups", "0"], "--groups takes whole numbers above 0"),
        (["--query-k", "9"], "--query-k must lie between 1 and the 8 groups"),
        (["--shared", "--query-k", "2"], "--shared gives queries and keys the same ids"),
        (["--heads", "3", "--kv-heads", "2"], "must be a multiple of --kv-heads"),
        (["--heads", "0"], "--heads must be at least 1"),
        (["--dtype", "int8"], "--dtype must be one of auto, bf16, fp16, fp32"),
        (["--window", "-1"], "--window must be at least 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--seconds", "0"], "--seconds must be positive"),
        (["--routers", "head"], "--routers must be one of"),
        (["--skew", "some"], "--skew must be uniform"),
        (["--skew", "largest:2"], "between 0.125 (even groups) and 1"),
        (["--skew", "absent.json"], "there is no file 'absent.json'"),
        (["--pass", "backward"], "--pass must be one of"),
        (["--backend", "fast"], "--backend must be one of"),
        (["--peers", "flex"], "--peers needs a dense one"),
        (["--peers", "cudnn"], "no dense attention to compare with here (cuDNN: runs on CUDA devices)"),
        (["--device", "mps"], "--device must be cpu or cuda"),
        (["--trace"], "--trace reads the kernels of a CUDA device"),
        (["--plot", "speed.jpg"], "--plot must end in .png or .svg"),
        (["--plot", "absent/speed.png"], "does not exist"),
        (["--json", "absent/b.json"], "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_answered_in_a_sentence(options, message):
    arguments = [part for name in ("dtype", "device") for part in (f"--{name}", str(TINY[name]))]
    result = run(app, ["bench", "attention", *arguments, "--lengths", "64", *options])
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold `query_shares` and `key_shares`"),
        ('{"query_shares": [1], "key_shares": [1]}', "must be 8 numbers"),
        ('{"query_groups": [[[9]]], "key_groups": [[[0]]]}', "they must lie in 0..7"),
        ('{"query_groups": [[[0]]], "key_groups": [[[0, 1]]]}', "`key_groups`"),
    ],
)
def test_files_that_cannot_be_used_are_answered_in_a_sentence(content, message, tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="--skew") as error:
        drawing(str(file), Ids())
    assert message in str(error.value)
