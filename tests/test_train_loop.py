"""The training loop: what it trains, what it keeps, and what interruptions cost."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_config, tiny_model, tokenizer_with_bos, tokens
from training_runs import CONFIG, STAGE, TWO_STAGES, AtStep, assert_same, recipe, routers, rows_with_answers, run, stage
from transformers import AutoModelForCausalLM, TrainerCallback

from focus_attn import FocusModel, get_focus_model
from focus_attn.training import Data, Recipe, Start, loop
from focus_attn.training.blocks import cut_blocks
from focus_attn.training.checkpoint import FOLDER, checkpoints
from focus_attn.training.data import open_tokens
from focus_attn.training.step import training_step
from focus_attn.training.trainer import TrainingStopped
from focus_attn.zoo import tiny_random_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The two-stage run, uninterrupted."""
    output = tmp_path_factory.mktemp("whole")
    lines = []
    result = run(output, TWO_STAGES, log=lines.append)
    return result, routers(result), lines


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One stage of routers alone, uninterrupted."""
    output = tmp_path_factory.mktemp("plain")
    result = run(output)
    return result, routers(result)


def base_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if "focus" not in name}


def test_routers_learn_and_the_base_stays(tmp_path):
    model = tiny_model()
    before = base_of(model)
    focus = get_focus_model(model, CONFIG)
    start = {name: tensor.clone() for name, tensor in focus.state_dict().items() if "focus" in name}
    result = run(tmp_path, model=focus)
    assert result.finished and result.steps == 6 and result.model is focus
    after = {name: tensor for name, tensor in focus.state_dict().items() if "focus" in name}
    assert all(not torch.equal(start[name], after[name]) for name in start)  # projections, centroids and biases
    assert_same(before, base_of(model))
    assert result.perplexity is not None and result.perplexity.blocks == 2
    assert not focus.training


def test_checkpoints_hold_what_was_trained_and_the_adapter_loads(plain):
    result, _ = plain
    folders = sorted((result.output / FOLDER).iterdir())
    assert [folder.name for folder in folders] == ["step-0000004", "step-0000006"]  # the newest two
    files = {file.name for file in folders[-1].iterdir()}
    adapter = {"focus_config.json", "focus_model.safetensors"}
    assert files == adapter | {"optimizer.pt", "trainer_state.json", "progress.json"}
    for folder in (result.output, folders[-1]):
        loaded = FocusModel.from_pretrained(tiny_model(), folder)
        ids = tokens(1, 64)
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, result.model(ids).logits)


def test_the_log_says_how_it_goes(whole):
    result, _, lines = whole
    line = next(line for line in lines if line.startswith("step 4/7"))
    for word in ("loss", "pairs", "largest group", "worst", "confidence", "stability", "coverage", "tokens/s", "left"):
        assert word in line
    assert any("memory, estimated" in line for line in lines)
    assert any("held-out text: perplexity" in line for line in lines)
    logged = [json.loads(line) for line in (result.output / "log.jsonl").read_text().splitlines()]
    steps = [one["step"] for one in logged if "loss" in one]
    assert steps == [1, 2, 4, 5, 6, 7]  # the first of each stage, then every second of it, then its last
    record = json.loads((result.output / "run.json").read_text())
    assert record["finished"] and record["recipe"]["stages"][0]["steps"] == 4 and record["run"]["torch"]


def test_kill_9_in_the_middle_of_a_step_changes_nothing(whole, tmp_path):
    _, uninterrupted, _ = whole
    program = [sys.executable, str(Path(__file__).with_name("training_runs.py")), str(tmp_path), "kill"]
    killed = subprocess.run(program, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert checkpoints(tmp_path)[-1].position.total == 6 and not (tmp_path / "run.json").exists()
    (tmp_path / FOLDER / ".writing-step-0000007").mkdir()  # and killed while it wrote
    assert_same(routers(run(tmp_path, TWO_STAGES)), uninterrupted)


def test_ctrl_c_saves_and_the_same_call_goes_on(whole, tmp_path):
    _, uninterrupted, _ = whole
    before = signal.getsignal(signal.SIGINT)
    stopped = run(tmp_path, TWO_STAGES, callbacks=[AtStep(3, lambda: signal.raise_signal(signal.SIGINT))])
    assert not stopped.finished and stopped.steps == 3
    assert checkpoints(tmp_path)[-1].position.total == 3
    assert (tmp_path / "focus_model.safetensors").is_file()
    assert signal.getsignal(signal.SIGINT) is before
    resumed = run(tmp_path, TWO_STAGES)
    assert resumed.finished
    assert_same(routers(resumed), uninterrupted)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_time_limit_stops_with_a_checkpoint(whole, tmp_path):
    _, uninterrupted, _ = whole
    for calls in (1, 2):
        stopped = run(tmp_path, TWO_STAGES, time_limit=0.001)
        assert not stopped.finished and stopped.steps == calls  # one step a call
    assert_same(routers(run(tmp_path, TWO_STAGES)), uninterrupted)


def test_a_finished_run_is_not_trained_again(plain):
    first, trained = plain
    again = run(first.output, callbacks=[AtStep(1, lambda: pytest.fail("trained again"))])
    assert again.finished and again.steps == 6
    assert_same(routers(again), trained)


def test_without_resume_it_starts_anew(tmp_path):
    short = recipe(stage(steps=1), evaluate_every=0)
    run(tmp_path, short)
    seen = []
    assert run(tmp_path, short, resume=False, callbacks=[AtStep(1, lambda: seen.append("trained"))]).steps == 1
    assert seen == ["trained"]


def test_another_recipe_or_text_in_the_same_folder_is_refused(plain):
    folder = plain[0].output
    other = recipe(stage(learning_rate=5e-3))
    with pytest.raises(ValueError, match=r"another recipe.*`stages\[0\].learning_rate`: 0.005, 0.01.*--no-resume"):
        run(folder, other)
    with pytest.raises(ValueError, match="the text"):
        run(folder, text=tokens(12, 200, seed=1))
    assert run(folder, recipe(stage(micro_batch=2), log_every=1, save_every=5)).finished  # harmless


def test_nan_stops_with_a_sentence_and_keeps_the_last_good_checkpoint(tmp_path):
    model = tiny_model()

    def poison():
        with torch.no_grad():
            model.lm_head.weight.fill_(float("inf"))

    with pytest.raises(TrainingStopped, match=r"not a number at step 4.*step-0000002") as stopped:
        run(tmp_path, model=model, callbacks=[AtStep(3, poison)])
    assert isinstance(stopped.value, ValueError)
    assert [one.position.total for one in checkpoints(tmp_path)] == [0, 2]
    for tensor in load_file(tmp_path / FOLDER / "step-0000002" / "focus_model.safetensors").values():
        assert tensor.isfinite().all()


def test_a_full_disk_stops_with_a_sentence_and_keeps_the_last_good_checkpoint(plain, tmp_path, monkeypatch):
    torch_save = torch.save

    def full(value, path):
        if len(checkpoints(tmp_path)) > 1:
            raise OSError(28, "No space left on device")
        torch_save(value, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match=r"step 4 .*No space left on device.*last good one is .*step-0000002"):
            run(tmp_path)
    assert {folder.name for folder in (tmp_path / FOLDER).iterdir()} == {"step-0000000", "step-0000002"}
    assert_same(routers(run(tmp_path)), plain[1])


def test_a_damaged_checkpoint_is_a_sentence(plain, tmp_path):
    shutil.copytree(plain[0].output, tmp_path, dirs_exist_ok=True)
    (tmp_path / FOLDER / "step-0000006" / "progress.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read.*remove it to go on from an older one"):
        run(tmp_path)


def test_accumulation_and_checkpointing_do_not_change_what_is_learned(tmp_path):
    """Two sequences in one forward or one after the other, activations kept or made again: the same routers, and the
    same bias, which moves by the load of both."""
    quiet = {"options": {"probes": 0, "budget_weight": 0.0, "balance_weight": 0.0, "dominance_weight": 0.0}}
    results = {
        name: routers(run(tmp_path / name, recipe(stage(micro_batch=micro, **quiet), gradient_checkpointing=again)))
        for name, micro, again in (("one by one", 1, False), ("together", 3, False), ("made again", 1, True))
    }  # 3: at most, and two divide the two
    assert_same(results["one by one"], results["together"], atol=2e-5)
    assert_same(results["one by one"], results["made again"], atol=2e-5)
    assert all(results["together"][name].abs().max() > 0 for name in results["together"] if "bias" in name)


def test_two_phases_train_routers_then_everything(whole):
    result, _, _ = whole
    before = base_of(tiny_model())
    first, second = (
        load_file(result.output / FOLDER / f"step-000000{step}" / "base_model.safetensors") for step in (6, 7)
    )
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert all(not torch.equal(before[name], value) for name, value in base_of(result.model.base_model).items())
    reloaded = AutoModelForCausalLM.from_pretrained(result.output / "base_model")
    loaded = FocusModel.from_pretrained(reloaded, result.output)
    ids = tokens(1, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, result.model(ids).logits)


class EachStep(TrainerCallback):
    """Keeps the routers as every optimiser step leaves them."""

    def __init__(self):
        self.seen = []

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        self.seen.append([x.clone() for layer in model.model.focus_layers() for x in layer.state_dict().values()])


def test_a_stage_may_end_with_the_mean_of_its_last_routers(plain, tmp_path):
    watch, averaged = EachStep(), recipe(stage(average=0.5))
    result = run(tmp_path / "a", averaged, callbacks=[watch])
    means = [torch.stack(steps).mean(0) for steps in zip(*watch.seen[3:], strict=True)]
    now = [tensor for layer in result.model.focus_layers() for tensor in layer.state_dict().values()]
    assert all(torch.allclose(mean, tensor, atol=1e-6) for mean, tensor in zip(means, now, strict=True))
    assert not all(torch.equal(last, tensor) for last, tensor in zip(watch.seen[-1], now, strict=True))
    assert result.perplexity.ppl != plain[0].perplexity.ppl, "what is measured at the end is the mean"
    saved = load_file(tmp_path / "a" / FOLDER / "step-0000006" / "focus_model.safetensors")
    assert_same(saved, load_file(tmp_path / "a" / "focus_model.safetensors"))

    stop = AtStep(5, lambda: signal.raise_signal(signal.SIGINT))  # when some of the steps have been counted
    assert run(tmp_path / "b", averaged, callbacks=[stop]).steps == 5
    assert_same(routers(run(tmp_path / "b", averaged)), routers(result))


def test_a_stage_goes_on_from_the_mean_of_the_one_before(tmp_path):
    still = stage(steps=8, average=0.5, learning_rate=1e-12, bias_rate=0.0)  # so that it ends where it began
    watch, two = EachStep(), recipe(stage(average=0.5), still)
    result = run(tmp_path / "a", two, callbacks=[watch])
    means = [torch.stack(steps).mean(0) for steps in zip(*watch.seen[3:6], strict=True)]
    now = [tensor for layer in result.model.focus_layers() for tensor in layer.state_dict().values()]
    assert all(torch.allclose(mean, tensor, atol=1e-6) for mean, tensor in zip(means, now, strict=True))

    stop = AtStep(7, lambda: signal.raise_signal(signal.SIGINT))  # of the second stage: the first has six
    assert run(tmp_path / "b", two, callbacks=[stop]).steps == 13
    assert_same(routers(run(tmp_path / "b", two)), routers(result))


def test_a_run_may_end_with_the_mean_of_its_last_stages(tmp_path):
    stages = stage(steps=3), stage(average=0.5), stage(steps=4)
    last = run(tmp_path / "last", recipe(*stages))
    second = routers(run(tmp_path / "second", recipe(*stages[:2])))
    asked, lines = dataclasses.replace(recipe(*stages), mean_of_stages=2), []
    result = run(tmp_path / "a", asked, log=lines.append)
    means = {name: (tensor + second[name]) / 2 for name, tensor in routers(last).items()}
    assert all(torch.allclose(means[name], tensor, atol=1e-6) for name, tensor in routers(result).items())
    assert result.perplexity.ppl != last.perplexity.ppl and "the mean of the last 2 stages" in lines[-2]
    saved = load_file(tmp_path / "a" / FOLDER / "step-0000013" / "focus_model.safetensors")
    assert_same(saved, load_file(tmp_path / "last" / "focus_model.safetensors"))
    assert_same(routers(run(tmp_path / "a", asked)), routers(result))  # finished already: the mean once more

    for number, step in enumerate((2, 6, 1)):  # inside the stage before those, at the end of one, inside the last
        stop = AtStep(step, lambda: signal.raise_signal(signal.SIGINT))
        assert run(tmp_path / "b", asked, callbacks=[stop]).steps == (2, 9, 10)[number]
    assert_same(routers(run(tmp_path / "b", asked)), routers(result))

    stop = AtStep(4, lambda: signal.raise_signal(signal.SIGINT))  # of the second and of the last: it is done then
    assert run(tmp_path / "c", asked, callbacks=[stop]).steps == 7
    at_last = run(tmp_path / "c", asked, callbacks=[stop])
    assert at_last.finished and at_last.perplexity.ppl == result.perplexity.ppl
    assert_same(routers(at_last), routers(result))


def test_routers_of_another_model_are_not_gone_on_with(plain, tmp_path):
    shutil.copytree(plain[0].output, tmp_path / "run")
    other = tiny_model()
    for parameter in other.parameters():
        parameter.data += 0.1
    with pytest.raises(ValueError, match="the model's weights"):
        run(tmp_path / "run", model=other)
    for half in (tiny_model().bfloat16(), tiny_model().half()):  # the same one
        assert run(tmp_path / "run", model=half).steps == 6


def test_intervals_may_change_and_what_is_held_out_may_not(tmp_path):
    stop = AtStep(3, lambda: signal.raise_signal(signal.SIGINT))
    seldom = dataclasses.replace(recipe(), log_every=5, save_every=5, evaluate_every=5)
    assert run(tmp_path, seldom, callbacks=[stop]).steps == 3
    with pytest.raises(ValueError, match="`evaluate_every` is 0 or not"):
        run(tmp_path, dataclasses.replace(seldom, evaluate_every=0))
    run(tmp_path, dataclasses.replace(seldom, log_every=1, save_every=1, evaluate_every=2))
    assert [one.position.total for one in checkpoints(tmp_path)] == [5, 6]
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [one["step"] for one in logged if "loss" in one and one["step"] > 3] == [4, 5, 6]
    assert [one["step"] for one in logged if "eval_perplexity" in one and one["step"] > 3] == [4, 6]


def test_a_start_alone_may_be_random_and_the_record_is_of_this_run(tmp_path):
    start = recipe(start=Start(how="random", length=64), evaluate_every=1, stages=())
    first = run(tmp_path, start)
    second = run(tmp_path, dataclasses.replace(start, seed=7), resume=False)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["recipe"]["seed"] == 7
    assert record["perplexity"]["ppl"] == second.perplexity.ppl != first.perplexity.ppl


def test_starting_anew_leaves_no_base_of_before(tmp_path):
    run(tmp_path, TWO_STAGES)
    assert (tmp_path / "base_model").is_dir()
    run(tmp_path, resume=False)
    assert not (tmp_path / "base_model").exists()


def test_a_base_is_saved_with_its_buffers(tmp_path):
    model = tiny_model("deepseek_v3")
    buffers = [buffer.normal_() for name, buffer in model.named_buffers() if "e_score" in name]
    run(tmp_path, recipe(stage(steps=1, trains="everything")), model=model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base_model")
    saved = [buffer for name, buffer in again.named_buffers() if "e_score" in name]
    assert buffers and all(torch.equal(*pair) for pair in zip(saved, buffers, strict=True))


def test_weights_that_cannot_be_trained_or_saved_are_refused_before_anything_runs(tmp_path):
    from peft import LoraConfig, get_peft_model

    everything = recipe(stage(trains="everything"))
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        run(tmp_path, everything, model=adapted)
    offloaded = tiny_model()
    offloaded.model.layers[0].mlp.to("meta")
    with pytest.raises(ValueError, match="offloaded"):
        run(tmp_path, everything, model=offloaded)
    quantised = tiny_model()
    quantised.is_quantized = True
    with pytest.raises(ValueError, match="quantised"):
        run(tmp_path, everything, model=quantised)


def test_the_warm_up_leaves_half_of_a_short_stage(tmp_path):
    run(tmp_path, recipe(stage(warmup=50, schedule="constant"), log_every=1))
    rates = [json.loads(line).get("learning_rate") for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [rate for rate in rates if rate is not None][-3:] == [STAGE.learning_rate] * 3


def test_the_first_phase_leaves_the_base_alone(tmp_path):
    run(tmp_path, dataclasses.replace(TWO_STAGES, save_every=4))
    first = checkpoints(tmp_path)[0]
    assert first.position.total == 4
    assert_same(load_file(first.folder / "base_model.safetensors"), base_of(tiny_model()))


def test_from_scratch_learns_with_focus_from_the_first_step(tmp_path):
    """A text of one repeated sentence: random weights must come to expect it."""
    text = tokens(1, 32).repeat(12, 8)
    chosen = recipe(
        stage(trains="everything", steps=24, base_learning_rate=2e-2, budget=None),
        start=Start(how="random"),
        log_every=1,
        save_every=100,
        evaluate_every=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    result = run(tmp_path, chosen, model=model, text=text)
    losses = [json.loads(line).get("lm") for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[0] > 4.0 and losses[-1] < losses[0] / 2
    assert result.measures["pairs_kept"] < 1


def test_the_start_sees_repeated_passages_and_begins_where_it_is_told(tmp_path, monkeypatch):
    seen, real = [], loop.start_routers

    def note(model, blocks, **options):
        seen.append((blocks, options))
        return real(model, blocks, **options)

    monkeypatch.setattr(loop, "start_routers", note)
    plain = Start(how="coverage", blocks=2, length=128, steps=1, budget=0.5)
    for number, start in enumerate((plain, dataclasses.replace(plain, first="heads", repeats=0.4))):
        run(tmp_path / str(number), recipe(stage(steps=1), start=start, evaluate_every=0))
    (blocks, options), (again, others) = seen
    assert options["start"] == "random" and others["start"] == "heads"
    assert 0.05 < (blocks != again).float().mean() < 0.6


def test_the_start_runs_once_and_is_kept(tmp_path):
    start = Start(how="coverage", blocks=2, length=64, steps=3, budget=0.5)
    chosen = recipe(start=start)
    seen = []
    uninterrupted = routers(run(tmp_path / "a", chosen, progress=lambda what, done, of: seen.append(what)))
    assert "fitting the routers" in seen
    run(tmp_path / "b", chosen, callbacks=[AtStep(1, lambda: signal.raise_signal(signal.SIGINT))])
    seen.clear()
    resumed = run(tmp_path / "b", chosen, progress=lambda what, done, of: seen.append(what))
    assert "fitting the routers" not in seen
    assert_same(routers(resumed), uninterrupted)


def test_half_precision_is_the_bases_alone(tmp_path):
    result = run(tmp_path, recipe(precision="bf16"))
    dtypes = {name.split(".")[-1]: p.dtype for name, p in result.model.named_parameters()}
    assert dtypes["projection"] == dtypes["centroids"] == torch.float32
    assert {p.dtype for name, p in result.model.named_parameters() if "focus" not in name} == {torch.bfloat16}
    # Rotary frequencies in bf16 would move every position.
    assert {b.dtype for name, b in result.model.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_trained_weights_stay_fp32_and_compute_in_half(tmp_path):
    seen = set()
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    result = run(tmp_path, recipe(stage(trains="everything", steps=2), precision="bf16", evaluate_every=0), model=model)
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert seen == {torch.bfloat16}


def test_a_run_counts_answers(tmp_path):
    rows = rows_with_answers()
    quiet = {"probes": 0, "budget_weight": 0.0, "dominance_weight": 0.0}
    weighted = stage(objective="lm+distill", options={**quiet, "answer_weight": 20.0})
    lines: list[str] = []
    result = run(tmp_path / "run", recipe(weighted), text=rows, log=lines.append)
    assert "  205 tokens of answers in them, of 261" in lines  # 27 more are in what is held out
    plain = run(tmp_path / "plain", recipe(dataclasses.replace(weighted, options=quiet)), text=rows)
    assert any(not torch.equal(one, routers(plain)[name]) for name, one in routers(result).items())
    # however a step is cut into forwards, some of which have no answer
    apart = run(tmp_path / "apart", recipe(dataclasses.replace(weighted, micro_batch=1)), text=rows)
    together = run(tmp_path / "together", recipe(dataclasses.replace(weighted, micro_batch=2)), text=rows)
    assert_same(routers(apart), routers(together), atol=2e-5)
    logged = [
        [json.loads(line)["answers"] for line in (folder / "log.jsonl").read_text().splitlines() if '"lm"' in line]
        for folder in (tmp_path / "apart", tmp_path / "together")
    ]
    assert logged[0] == pytest.approx(logged[1], rel=1e-3) and all(value > 0 for value in logged[0])


AT_THE_END = [{"input_ids": ids, "completion_mask": torch.arange(100) > 90} for ids in tokens(9, 100)]


@pytest.mark.parametrize(
    ("text", "message"),
    [(tokens(9, 100), "marks none"), (AT_THE_END, r"none of those that .* is in a block of 64 tokens")],
)
def test_answers_that_no_block_has_are_missed(text, message, tmp_path):
    weighted = recipe(stage(options={"answer_weight": 20.0}), data=Data(held_out=0))
    short = [{"input_ids": ids, "completion_mask": torch.arange(9) > 7} for ids in tokens(9, 9)]
    packed = dataclasses.replace(weighted, data=Data(held_out=0, packing=True))
    with pytest.raises(ValueError, match=rf"leave out rows of fewer than {CONFIG.window + 2} tokens"):
        run(tmp_path / "packed", packed, text=[*short, *({"input_ids": ids} for ids in tokens(9, 100))])
    with pytest.raises(ValueError, match=rf"`stages\[0\].options.answer_weight` counts answers.*{message}"):
        run(tmp_path / "run", weighted, text=text)


def test_packed_documents_do_not_see_each_other():
    """A packed block's loss is that of its documents by themselves, token for token."""
    model = get_focus_model(tiny_model(), CONFIG).train()
    options = stage(budget=None, options={"probes": 0, "balance_weight": 0.0, "dominance_weight": 0.0}).step_options()
    store = open_tokens([tokens(1, 40)[0].tolist(), tokens(1, 30, seed=1)[0].tolist()], None, Data())
    block = cut_blocks(store, 76, packing=True, shortest=10)[0]  # 6 tokens of padding
    packed = training_step(model, block["input_ids"][None], segments=block["segments"][None], options=options)
    alone, counts = [], []
    for first, last in store.documents:
        document = torch.from_numpy(store.ids[first:last])[None]
        alone.append(training_step(model, document, options=options).measures["lm"])
        counts.append(last - first - CONFIG.window - 1)
    expected = (torch.stack(alone) * torch.tensor(counts)).sum() / sum(counts)
    torch.testing.assert_close(packed.measures["lm"], expected)


def test_text_is_packed_and_trained_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    model, tokenizer = tiny_random_model()
    texts = [f"document {number}: " + "words and words " * (number % 5 + 1) for number in range(60)]
    chosen = recipe(stage(length=128, steps=2), data=Data(packing=True, held_out=1))
    result = run(tmp_path / "run", chosen, model=model, text=texts, tokenizer=tokenizer)
    assert result.finished and result.perplexity is None  # no document fills a block to hold back


def test_a_run_on_text_begins_every_sequence_as_the_tokenizer_does(tmp_path, monkeypatch):
    """The start, the steps and the evaluation on the fly."""
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    model, _ = tiny_random_model()
    tokenizer, first = tokenizer_with_bos()
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.extend(args[0].tolist()))
    start = Start(blocks=2, length=64, steps=2, budget=0.5)
    chosen = recipe(stage(steps=2), start=start, evaluate_every=1, data=Data(held_out=1, packing=True))
    run(tmp_path / "run", chosen, model=model, text=["a text of many words, " * 40, "a short one"], tokenizer=tokenizer)
    real = [row for row in seen if len(row) > 1]  # the head alone is run on any id
    assert {len(row) for row in real} == {64} and {row[0] for row in real} == {first}
    assert all(row.count(first) == 1 for row in real)


def test_single_lines_are_trained_on_when_they_are_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "lines.jsonl").write_text('{"text": "a line"}\n{"text": ""}\n' * 200)
    model, tokenizer = tiny_random_model()

    def attempt(**data):
        chosen = recipe(stage(length=128, steps=1), data=Data(held_out=1, **data))
        return run(tmp_path / "run", chosen, model=model, text=str(tmp_path / "lines.jsonl"), tokenizer=tokenizer)

    for packing in (False, True):
        with pytest.raises(ValueError, match=r"the longest of 200 has 6: .*`join: true` where these are the lines"):
            attempt(packing=packing)
    result = attempt(join=True)
    assert result.finished and result.perplexity.blocks == 1


def shrunk(chosen):
    """A shipped recipe at the size of the tiny model: one step of each stage, routers that are there gone on with."""
    small = {"steps": 1, "length": 64, "sequences": 2, "micro_batch": 1, "warmup": 0}
    stages = tuple(
        dataclasses.replace(one, **small, budget=None if one.budget is None else 0.5) for one in chosen.stages
    )
    start = chosen.start
    if start is not None:
        small = {"blocks": 1, "length": 64, "steps": 1, "output_steps": min(1, start.output_steps)}
        start = dataclasses.replace(start, **small, budget=None if start.budget is None else 0.5)
    dense = {
        "dense_layers": (0,) if chosen.focus.dense_layers else (),
        "dense_heads": ((1, 0),) if chosen.focus.dense_heads else (),
    }
    focus = dataclasses.replace(chosen.focus, window=8, **dense)
    changes = {"adapter": None, "precision": "fp32", "data": Data(held_out=1), "evaluate_every": 1}
    return dataclasses.replace(chosen, stages=stages, start=start, focus=focus, **changes)


@pytest.mark.filterwarnings("ignore:a soft gate from Sinkhorn")  # what the published setting does
@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_run(path, tmp_path):
    chosen = shrunk(Recipe.from_yaml(path))
    weighs_answers = any(one.step_options().answer_weight for one in chosen.stages)
    result = run(tmp_path, chosen, text=rows_with_answers() if weighs_answers else None)
    assert result.finished and result.steps == len(chosen.stages)
    assert all(torch.isfinite(tensor).all() for tensor in routers(result).values())
    assert result.perplexity.blocks == 1


def test_a_start_may_be_all(tmp_path):
    start = Start(blocks=4, length=64, steps=8, output_steps=8, budget=0.6)
    chosen = dataclasses.replace(recipe(start=start, evaluate_every=1), stages=())
    lines = []
    result = run(tmp_path, chosen, log=lines.append)
    assert result.finished and result.steps == 0 and result.perplexity.blocks == 2
    assert any("left of what the window and the sinks alone lose" in line for line in lines)
    again = run(tmp_path, chosen)
    assert again.finished
    assert_same(routers(again), routers(result))


def test_a_collapse_is_named_while_it_happens(tmp_path):
    model = get_focus_model(tiny_model(), CONFIG)
    with torch.no_grad():
        model.focus_layers()[1].router.bias[-1, 0, 2] = 100.0
    lines = []
    run(tmp_path, recipe(stage(steps=3), log_every=1), model=model, log=lines.append)
    named = [line for line in lines if "collapsed" in line]
    assert len(named) == 1  # said once, not at every line
    assert "layer 1, key/value head 0: group 2 holds 100% of the keys" in named[0]


def test_a_failed_call_gives_the_model_back_and_a_finished_one_says_where_it_is(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="no such file"):
        run(tmp_path, model=model, text="absent.txt")
    short = recipe(stage(steps=1), evaluate_every=0)
    result = run(tmp_path, short, model=model)
    with pytest.raises(ValueError, match=r"carries Focus already.*`result.model`"):
        run(tmp_path, short, model=model)
    assert run(tmp_path, short, model=result.model).finished


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"stages": (stage(length=1000),)}, {}, r"`stages\[0\].length` is 1,000, the model has 512 positions"),
        ({"stages": (stage(length=300),)}, {}, r"`stages\[0\]`: .*no document reaches one block of 300 tokens"),
        ({"start": Start(how="coverage", length=400)}, {}, "`start`: .*no document reaches"),
        ({"focus": dataclasses.replace(CONFIG, num_groups=8)}, {"focused": True}, r"`num_groups`: 8, 4"),
        ({}, {"time_limit": 0}, "`time_limit`"),
        ({}, {"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({}, {"recipe": "k8.yaml"}, "Recipe.from_yaml"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, options, message, tmp_path):
    chosen = options.pop("recipe", None) or recipe(**changes)
    model = get_focus_model(tiny_model(), CONFIG) if options.pop("focused", False) else tiny_model()
    with pytest.raises((ValueError, TypeError), match=message):
        run(tmp_path, chosen, model=model, **options)
