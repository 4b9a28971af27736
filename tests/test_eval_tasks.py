"""Benchmarks through lm-eval: the same prompts, the same tokens, the same scores as its own evaluator gives."""

import json
import lzma
import sys
from dataclasses import replace

import pytest
from eval_data import write_benchmarks, write_text

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from focus_attn import FocusConfig, get_focus_model
from focus_attn.evaluation import tasks
from focus_attn.evaluation.lm_eval_model import as_lm_eval_model
from focus_attn.evaluation.local_data import as_on_hub, find_file
from focus_attn.evaluation.long_form import behind_text, common_preamble, many_shot
from focus_attn.evaluation.metrics import final_number
from focus_attn.evaluation.requests import Item, Requests, merge
from focus_attn.evaluation.score_file import ScoreFile
from focus_attn.evaluation.scoring import score
from focus_attn.evaluation.summary import summarise
from focus_attn.evaluation.tasks import BENCHMARKS, encode_pair, read_questions, read_task_names, short_form
from focus_attn.text import read_text
from focus_attn.zoo import tiny_random_model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_random_model()[1]


def test_scores_are_those_of_lm_eval_on_a_focus_model(tmp_path):
    """lm-eval's HFLM runs a FocusModel, and its evaluator and ours agree on every metric of every benchmark."""
    import lm_eval

    data = write_benchmarks(tmp_path, n=5)
    model, tokenizer = tiny_random_model()
    model = get_focus_model(model, FocusConfig(num_groups=4, window=16))
    names = [name for name in BENCHMARKS if name != "gsm8k"]
    requests = merge([short_form(tokenizer, name, data) for name in names], {})
    scores = ScoreFile(tmp_path / "focus.jsonl", {"requests": requests.digest})
    score(model, requests, scores, tokenizer)
    ours = {
        (row.task, row.metric): row.models["focus"].estimate for row in summarise(requests, {"focus": scores.scores}, 2)
    }

    (tmp_path / "tasks").mkdir()
    with tasks._quiet_lm_eval():
        theirs = lm_eval.simple_evaluate(
            model=as_lm_eval_model(model, tokenizer, batch_size=4, max_length=4096),
            tasks=[tasks.load_task(name, data, tmp_path / "tasks", 0)[0] for name in names],
            task_manager=TaskManager(include_defaults=False),  # indexing all of lm-eval's tasks takes long
            bootstrap_iters=0,
        )["results"]
    assert set(ours) >= {(name, "acc") for name in names}
    for (name, metric), value in ours.items():
        assert value == pytest.approx(theirs[name][f"{metric},none"], rel=1e-3), (name, metric)


def test_numbers_are_read_as_lm_eval_reads_them(data, tmp_path):
    texts = [
        "1+1=2\n#### 2",
        "so it is $2.",
        "#### 1,002",
        "it is 3, or 2",
        "#### 2.",
        "",
        "two",
        "#### -2",
        "2 #### 4",
        "0",
    ]
    with tasks._quiet_lm_eval():
        task, _ = tasks.load_task("gsm8k", data, tmp_path, 0)
        task.build_all_requests(limit=len(texts))
    for instance, text in zip(task.instances, texts, strict=True):
        instance.resps = [text]
    task.apply_filters()
    right = 0
    for question, instance in zip(read_questions("gsm8k", data, 0), task.instances, strict=False):
        item = Item("gsm8k", str(question.number), "generate", [1], answer=question.answer)
        ours = final_number(item, {"text": instance.resps[0]})
        for metric, name in (("strict", "strict-match"), ("flexible", "flexible-extract")):
            theirs = task.process_results(instance.doc, [instance.filtered_resps[name]])["exact_match"]
            assert ours[metric] == theirs, (instance.resps[0], metric)
            right += ours[metric]
    assert right


def test_generated_answers_go_the_same_way_through_hflm(data, tmp_path):
    model, tokenizer = tiny_random_model()
    model = get_focus_model(model, FocusConfig(num_groups=4, window=16))
    requests = short_form(tokenizer, "gsm8k", data, limit=3)
    items = [replace(item, options={**item.options, "max_new_tokens": 6}) for item in requests.items]
    scores = ScoreFile(tmp_path / "focus.jsonl", {})
    score(model, Requests(requests.tasks, items), scores, tokenizer)
    lm = as_lm_eval_model(model, tokenizer, batch_size=3, max_length=4096)
    with tasks._quiet_lm_eval():
        asked = [
            Instance(
                "generate_until", {}, (tokenizer.decode(item.context), {"until": ["Question:"], "max_gen_toks": 6}), n
            )
            for n, item in enumerate(items)
        ]
        theirs = lm.generate_until(asked, disable_tqdm=True)
    assert [scores.scores[item.key]["text"] for item in items] == theirs


def test_short_form_keeps_what_metrics_need(data, tokenizer):
    requests = short_form(tokenizer, "arc_easy", data, limit=4)
    assert [item.item for item in requests.items] == ["0", "3", "6", "9"]
    few = read_questions("arc_easy", data, 0, most=4)
    assert [(q.number, q.context[:21]) for q in few] == [(n, f"Question: What runs {n}") for n in (0, 3, 6, 9)]
    first = requests.items[0]
    assert tokenizer.decode(first.context) == "Question: What runs 0?\nAnswer:"
    assert [tokenizer.decode(tokens) for tokens in first.continuations] == [" a dog", " a big tree"]
    assert first.answer == {"gold": 0, "characters": [5, 10], "metrics": ["acc", "acc_norm"]}
    shots = short_form(tokenizer, "gsm8k", data, limit=1).items[0]
    assert tokenizer.decode(shots.context).count("Question:") == 6
    assert shots.options == {"until": ["Question:", "</s>", "<|im_end|>"], "max_new_tokens": 256}
    mc1 = short_form(tokenizer, "truthfulqa_mc1", data, limit=1).items[0]
    assert tokenizer.decode(mc1.continuations[mc1.answer["gold"]]) == " No, dog 0 is not."


def test_solved_examples_are_the_same_every_time(data, tokenizer):
    first = short_form(tokenizer, "gsm8k", data).digest
    read_questions.cache_clear()
    assert short_form(tokenizer, "gsm8k", data).digest == first


def test_of_several_files_the_one_of_the_split_is_asked(tmp_path):
    for name in ("hellaswag_test", "hellaswag_train", "hellaswag_val", "gsm8k_test", "gsm8k_train", "piqa"):
        (tmp_path / f"{name}.jsonl").touch()
    found = {name: find_file(tmp_path, name, BENCHMARKS[name].split).stem for name in ("hellaswag", "gsm8k", "piqa")}
    assert found == {"hellaswag": "hellaswag_val", "gsm8k": "gsm8k_test", "piqa": "piqa"}


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("piqa.jsonl", b"", "is empty"),
        ("piqa.jsonl", b"[1]\n", "line 1 .* no JSON object"),
        ("piqa.jsonl", b"\xff\n", "cannot be read"),
        ("piqa.jsonl.xz", b"not compressed", "cannot be read"),
        ("piqa.jsonl.gz", b"not compressed", "cannot be read"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        list(as_on_hub(tmp_path / name, "piqa"))


def test_many_shot_shows_solved_examples_that_are_not_asked(data, tokenizer):
    requests = many_shot(tokenizer, "arc_easy", 400, data, prefixes=2)
    (task,) = requests.tasks.values()
    assert task.name == "arc_easy@400 shots" and task.settings["prefixes"] == 2
    asked = {tokenizer.decode(item.context).strip() for item in requests.items}
    for item in requests.items:
        assert requests.length(item) <= 400
        assert tokenizer.decode(item.context).startswith("\n\nQuestion:")
    for prefix in requests.prefixes.values():
        examples = tokenizer.decode(prefix).split("\n\n")
        assert len(examples) == 3 and not any(shown.startswith(question) for shown in examples for question in asked)
        for example in examples:
            number = int(example.split("runs ")[1].split("?")[0])
            assert example.endswith(["a dog", "a big tree"][number % 2])
    one, other = requests.prefixes.values()
    assert one != other


def test_an_item_that_is_there_twice_is_not_given_away(tokenizer, tmp_path):
    lines = [{"goal": f"walk dog {n}", "sol1": "go out", "sol2": "sleep on", "label": 0} for n in range(12)]
    lines[4] = lines[5]  # one in the pool of examples, one that is asked
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = many_shot(tokenizer, "piqa", 600, tmp_path, prefixes=1)
    (prefix,) = requests.prefixes.values()
    assert "walk dog 8" in tokenizer.decode(prefix) and "walk dog 5" not in tokenizer.decode(prefix)
    assert any("walk dog 5" in tokenizer.decode(item.context) for item in requests.items)


def test_a_preamble_stands_once(data, tokenizer):
    requests = many_shot(tokenizer, "truthfulqa_mc1", 1200, data, prefixes=1)
    whole = tokenizer.decode([*next(iter(requests.prefixes.values())), *requests.items[0].context])
    assert whole.count("human life expectancy") == 1 and whole.count("green?") > 2
    assert common_preamble(["a\n\nb\n\nc", "a\n\nb\n\nd"]) == "a\n\nb\n\n" and common_preamble(["ab", "ac"]) == ""


def test_items_behind_other_text(data, tokenizer, tmp_path):
    documents = read_text(write_text(tmp_path / "t.txt"))
    requests = behind_text(tokenizer, "lambada_openai", 700, documents, data, limit=5, prefixes=3)
    assert len(requests.items) == 5 and len(requests.prefixes) == 3
    sizes = [len(tokens) for tokens in requests.prefixes.values()]
    assert min(sizes) > 300 and max(map(requests.length, requests.items)) <= 700
    paragraphs = documents[0].split("\n\n")
    for tokens in requests.prefixes.values():
        assert set(tokenizer.decode(tokens).split("\n\n")) <= set(paragraphs)
    with pytest.raises(ValueError, match="--long must be above"):
        behind_text(tokenizer, "lambada_openai", 20, documents, data)


def test_a_preamble_stands_once_behind_other_text(data, tokenizer, tmp_path):
    documents = read_text(write_text(tmp_path / "t.txt"))
    requests = behind_text(tokenizer, "truthfulqa_mc1", 1200, documents, data, prefixes=1)
    (prefix,) = requests.prefixes.values()
    assert max(map(requests.length, requests.items)) <= 1200
    (short,) = (item for item in short_form(tokenizer, "truthfulqa_mc1", data).items if item.item == "7")
    (item,) = (item for item in requests.items if item.item == "7")
    passage, separator, asked = tokenizer.decode([*prefix, *item.context]).partition("\n\nQ:")
    assert separator + asked == "\n\n" + tokenizer.decode(short.context)
    assert set(passage.split("\n\n")) <= set(documents[0].split("\n\n"))
    assert len(item.context) * 5 < len(short.context)
    assert item.continuations == short.continuations and item.answer == short.answer


def test_compressed_files_and_hub_fields_are_read(data, tokenizer, tmp_path):
    record = {"question": "q", "choices": {"text": ["x", "yy"], "label": ["1", "2"]}, "answerKey": "2"}
    with lzma.open(tmp_path / "arc_easy_validation.jsonl.xz", "wt") as file:
        file.write(json.dumps(record) + "\n")
    (question,) = read_questions("arc_easy", tmp_path, 0)
    assert question.answer["gold"] == 1 and question.shown == " yy"


def test_continuations_are_cut_as_lm_eval_cuts_them(tokenizer):
    context, (continuation,) = encode_pair(tokenizer, "one two ", ["three"])
    assert tokenizer.decode(context) == "one two" and tokenizer.decode(continuation) == " three"


def test_what_a_user_gets_wrong(data, tokenizer, tmp_path, monkeypatch):
    assert read_task_names("lambada, truthfulqa") == ["lambada_openai", "truthfulqa_mc1", "truthfulqa_mc2"]
    assert read_task_names("all") == list(BENCHMARKS)
    with pytest.raises(ValueError, match=r"--tasks must be among all.*got 'mmlu'"):
        read_task_names("mmlu")
    with pytest.raises(ValueError, match="no file piqa"):
        short_form(tokenizer, "piqa", tmp_path)
    (tmp_path / "piqa.jsonl").write_text('{"goal": "x"}\n')
    with pytest.raises(ValueError, match="no field 'sol1'"):
        short_form(tokenizer, "piqa", tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match="lm-eval"):
        read_questions("piqa", data, 1)
