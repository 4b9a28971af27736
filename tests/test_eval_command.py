"""`focus eval` as a user types it, and what it concludes."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from eval_data import write_benchmarks, write_text
from tiny import save_tiny_default
from typer.testing import CliRunner

from focus_attn import FocusConfig, get_focus_model
from focus_attn.adapters import adapter_digest
from focus_attn.cli import app
from focus_attn.evaluation.models import load_compared, short_names
from focus_attn.evaluation.requests import Item, Requests, Task
from focus_attn.evaluation.run import score_model, sum_up
from focus_attn.evaluation.summary import Cell, by_position, kept_of_base, summarise
from focus_attn.text import default_text
from focus_attn.zoo import tiny_random_model

LM_EVAL = importlib.util.find_spec("lm_eval") is not None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model, two adapters for it, and a text."""
    folder = tmp_path_factory.mktemp("saved")
    model = save_tiny_default(folder)
    for name, groups in (("k4", 4), ("k2", 2)):
        focus = get_focus_model(model, FocusConfig(num_groups=groups, window=16))
        focus.save_pretrained(folder / name)
        model = focus.unload()
    write_text(folder / "text.txt")
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def common(saved):
    return ["--model", saved / "model", "--dtype", "fp32", "--device", "cpu"]


def asked(saved, retrieval="needle"):
    """Perplexity in blocks and a small grid."""
    grid = "--lengths 900 --depths 0,100 --per-cell 2".split()
    return ["--text", saved / "text.txt", "--length", 128, "--blocks", 4, "--retrieval", retrieval, *grid]


def test_base_and_adapters_beside_each_other(saved, tmp_path):
    numbers, plot = tmp_path / "e.json", tmp_path / "grid.png"
    adapters = ["--adapter", saved / "k4", "--adapter", saved / "k2"]
    arguments = [*common(saved), *adapters, *asked(saved), "--stride", 64, "--output", tmp_path / "run"]
    result = run(*arguments, "--json", numbers, "--plot", plot)
    assert result.exit_code == 0, result.output
    for words in (
        "perplexity@128",
        "bits_per_byte",
        "k4 against base",
        "by position",
        "needle: recall",
        "floor: the base",
    ):
        assert words in result.output
    assert plot.read_bytes()[:4] == b"\x89PNG"
    written = json.loads(numbers.read_text())
    assert list(written["models"]) == ["base", "k4", "k2"] and written["run"]["command"]  # in the order given
    assert written["models"]["k4"]["adapter"] != written["models"]["k2"]["adapter"]
    shutil.copytree(saved / "k4", tmp_path / "copy")
    (tmp_path / "copy" / "run.json").write_text("{}")  # what a run leaves beside an adapter does not make it another
    assert written["models"]["k4"]["adapter"] == adapter_digest(tmp_path / "copy")
    row = written["rows"][0]
    assert (row["task"], row["metric"], row["n"]) == ("perplexity@128", "perplexity", 4)
    ratio = row["against_base"]["k4"]
    assert ratio["estimate"] == pytest.approx(row["models"]["k4"]["estimate"] / row["models"]["base"]["estimate"])
    assert ratio["low"] <= ratio["estimate"] <= ratio["high"] and ratio["resamples"] == 1000
    assert 0 < row["pairs_kept"]["k4"] < row["pairs_kept"]["k2"] < 1 and "base" not in row["pairs_kept"]
    first = next(row for row in written["positions"] if row["metric"] == "1-16")
    assert first["against_base"]["k4"]["estimate"] == pytest.approx(1, abs=1e-5)  # inside the window
    assert {(cell["length"], cell["depth"]) for cell in written["cells"]} == {(900, 0.0), (900, 1.0)}
    assert set(written["retrieval_kept"]["needle"]) == {"k4", "k2"}


@pytest.fixture
def line_of_the_readme(tmp_path, monkeypatch):
    """The embedded model, a shipped adapter, a text file: the words of such a line, with that file in place."""
    monkeypatch.chdir(tmp_path)  # where the scores go, too
    Path("book.txt").write_text("\n\n".join(default_text().held_out)[:12_000], encoding="utf-8")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    lines = [line for line in readme.splitlines() if line.startswith("focus eval --adapter k8 --text book.txt")]
    return [line.partition("#")[0].split()[2:] for line in lines]


def test_perplexity_as_a_newcomer_asks_for_it(line_of_the_readme, tmp_path):
    """With shorter blocks."""
    numbers = tmp_path / "e.json"
    result = run(*line_of_the_readme[0], "--length", 512, "--blocks", 2, "--json", numbers)
    assert result.exit_code == 0, result.output
    assert "k8 against base" in result.output and "scores: runs/" in result.output
    written = json.loads(numbers.read_text())
    assert list(written["models"]) == ["base", "k8"]
    row = next(row for row in written["rows"] if row["metric"] == "perplexity")
    assert row["models"]["base"]["estimate"] < 40 and row["verdict"]["k8"] == "too few items to tell"
    assert 0.9 < row["against_base"]["k8"]["estimate"] < 1.2
    assert 0.4 < row["pairs_kept"]["k8"] < 0.8  # at so few tokens the window alone is nearly half


def test_facts_as_a_newcomer_asks_for_them(line_of_the_readme, tmp_path):
    """With fewer questions."""
    numbers = tmp_path / "e.json"
    result = run(*line_of_the_readme[1], "--depths", "0,60", "--per-cell", 1, "--json", numbers)
    assert result.exit_code == 0, result.output
    cells = json.loads(numbers.read_text())["cells"]
    assert [(cell["length"], cell["depth"], cell["n"]) for cell in cells] == [(1024, 0.0, 1), (1024, 0.6, 1)]
    assert all(cell["recall"] == {"base": 1.0, "k8": 1.0} for cell in cells)


def test_requests_written_here_are_scored_there_and_summed_up_anywhere(saved, tmp_path, monkeypatch):
    file, folder = tmp_path / "requests.jsonl.xz", tmp_path / "scores"
    data = write_benchmarks(tmp_path)
    tasks = ["--tasks", "piqa,lambada", "--data", data, "--limit", 2, "--long", 700] if LM_EVAL else []
    wanted = [*asked(saved, "needle,variables"), *tasks]
    written = run("--model", saved / "model", *wanted, "--window", 16, "--write-requests", file)
    assert written.exit_code == 0, written.output
    requests = Requests.load(file)
    assert {item.kind for item in requests.items} == {"losses", "loglikelihood", "generate"}
    assert bool(tasks) == ("piqa@700 shots" in requests.tasks) == any(item.prefix for item in requests.items)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # the machine with the GPU has neither
    monkeypatch.setitem(sys.modules, "datasets", None)
    arguments = [*common(saved), "--adapter", saved / "k4", "--score-requests", file, "--output", folder]
    scored = run(*arguments)
    assert scored.exit_code == 0, scored.output
    assert {path.name for path in folder.iterdir()} == {"items.jsonl", "base.jsonl", "k4.jsonl"}
    before = (folder / "k4.jsonl").read_text()
    again = run(*arguments)  # nothing is left to do
    assert again.exit_code == 0 and (folder / "k4.jsonl").read_text() == before
    summed = run("--from-scores", folder, "--json", tmp_path / "all.json")
    assert summed.exit_code == 0, summed.output
    settings = json.loads((tmp_path / "all.json").read_text())["tasks"]
    assert set(settings) == set(requests.tasks) and settings["perplexity@128"]["length"] == 128
    if tasks:  # how long the prefixes came out
        shortest, longest = settings["piqa@700 shots"]["prefix_tokens"]
        assert 0 < shortest <= longest < 700
    table = summed.output[summed.output.index("Perplexity") :]
    assert table.splitlines()[:8] == scored.output[scored.output.index("Perplexity") :].splitlines()[:8]
    assert {row.task for row in sum_up(folder).rows} == set(Requests.load(file).tasks)


def test_an_unfinished_folder_is_not_summed_up(saved, tmp_path):
    arguments = [*common(saved), "--text", saved / "text.txt", "--length", 128, "--blocks", 3, "--window", 16]
    assert run(*arguments, "--output", tmp_path / "run").exit_code == 0
    file = tmp_path / "run" / "base.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    result = run("--from-scores", tmp_path / "run")
    assert result.exit_code == 1 and "lack 1 of 3 items" in " ".join(result.output.split())


def test_a_folder_of_other_requests_is_left_as_it_is(saved, tmp_path):
    arguments = [*common(saved), "--text", saved / "text.txt", "--window", 16, "--output", tmp_path / "run"]
    assert run(*arguments, "--length", 128, "--blocks", 1).exit_code == 0
    before = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    result = run(*arguments, "--length", 256)
    assert result.exit_code == 1 and "scores of other requests" in " ".join(result.output.split())
    assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir()} == before


def test_what_is_refused_leaves_no_trace(saved, tmp_path):
    arguments = [*common(saved), "--text", saved / "text.txt", "--window", 16, "--output", tmp_path / "run"]
    result = run(*arguments, "--length", 1 << 20, "--blocks", 1)
    assert result.exit_code == 1 and not (tmp_path / "run").exists()
    model, tokenizer = tiny_random_model()
    answer = {"strings": ["x"], "length": 5, "depth": None}
    items = [Item("t", "0", "generate", [1, 2, 3], options={"max_new_tokens": 2}, answer=answer)]
    requests = Requests({"t": Task("t", "found_strings", "retrieval")}, items)
    score_model(model, tokenizer, requests, tmp_path / "out", "base")
    with pytest.raises(ValueError, match="tokenizer"):
        score_model(model, None, requests, tmp_path / "out", "other")
    assert list(sum_up(tmp_path / "out").runs) == ["base"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--blocks", "0"], "--blocks must be at least 1"),
        (["--depths", "0,120"], "between 0 and 100"),
        (["--forms", "longer"], "--forms must be among all, short"),
        (["--retrieval", "noodle"], "--retrieval must be among all, needle"),
        (["--tasks", "mmlu"], "--tasks must be among all, hellaswag"),
        (["--no-perplexity"], "nothing is asked for"),
        (["--plot", "x.pdf"], "--plot must end in"),
        (["--write-requests", "a", "--from-scores", "b"], "three steps"),
        (["--from-scores", "nowhere"], "not a folder that"),
        (["--from-scores", "nowhere", "--adapter", "k8"], "sums up what is in its folder"),
        (["--score-requests", "nowhere", "--tasks", "piqa"], "go to --write-requests"),
        (["--tasks", "piqa", "--forms", "shots"], "--forms shots need a length: give --long"),
        (["--long", "1024"], "--long is the length of the long forms of --tasks"),
        (["--json", "."], "is a folder: name a file"),
        (["--output", __file__], "--output is a folder"),
        (["--score-requests", "nowhere.jsonl"], "no such file"),
        (["--adapter", "nowhere"], "no adapter 'nowhere'"),
    ],
)
def test_what_a_user_gets_wrong(saved, arguments, words):
    result = run("--model", saved / "model", "--dtype", "fp32", *arguments)
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())


def test_help_fits_a_page():
    assert len(run("--help").output.splitlines()) < 60


def answers(right):
    return {("t", str(n)): {"scores": [[0.0, False], [float(1 if hit else -1), False]]} for n, hit in enumerate(right)}


def test_an_adapters_folder_may_be_called_anything():
    assert short_names([Path("a/train"), Path("b/train"), Path("a/base"), Path("k8.v2"), Path("items")]) == [
        "train",
        "train+",
        "focus",
        "k8_v2",
        "items+",
    ]


def test_an_adapter_that_was_trained_with_its_model_is_not_asked_on_another(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved / "k4", folder)
    (folder / "base_model").mkdir()
    for arguments in ([], ["--model", saved / "model"]):
        result = run(*arguments, "--adapter", folder, "--text", saved / "text.txt")
        assert result.exit_code == 1 and "trained together with its model" in " ".join(result.output.split())
    shutil.rmtree(folder / "base_model")
    shutil.copytree(saved / "model", folder / "base_model")
    for model in (saved / "model", folder / "base_model"):  # a copy of it, and itself
        load_compared(str(model), [str(folder)], torch.float32, torch.device("cpu"))


def test_verdicts_and_floors():
    """Two choices, gold the second: a model that guesses is at the floor, a difference beyond the interval is named."""
    items = [
        Item(
            "t", str(n), "loglikelihood", [1], [[1], [2]], answer={"gold": 1, "characters": [1, 1], "metrics": ["acc"]}
        )
        for n in range(200)
    ]
    requests = Requests({"t": Task("t", "choice", "task")}, items)
    good, half, worse = (
        [n % 10 != 0 for n in range(200)],
        [n % 2 == 0 for n in range(200)],
        [n % 5 != 0 for n in range(200)],
    )
    (row,) = summarise(requests, {"base": answers(good), "same": answers(good), "worse": answers(worse)})
    assert row.chance == 0.5 and not row.at_floor
    assert (row.verdict("same"), row.verdict("worse")) == ("within the interval", "worse")
    assert row.against_base["worse"].estimate == pytest.approx(-0.1)
    (row,) = summarise(requests, {"base": answers(half), "worse": answers(worse)})
    assert row.at_floor and row.verdict("worse") == "base at the floor, not counted"
    assert row.to_dict()["at_floor"]


def test_items_behind_one_prefix_are_drawn_together():
    def asked(prefix_of):
        answer = {"gold": 1, "characters": [1, 1], "metrics": ["acc"]}
        items = [Item("t", str(n), "loglikelihood", [1], [[1], [2]], prefix_of(n), answer=answer) for n in range(80)]
        prefixes = {item.prefix: [1, 2] for item in items if item.prefix}
        return Requests({"t": Task("t", "choice", "task")}, items, prefixes)

    scores = {"base": answers([True] * 80), "k4": answers([n % 8 > 0 for n in range(80)])}  # one prefix's luck
    (row,) = summarise(asked(lambda n: f"p{n % 8}"), scores)
    assert row.models["base"].drawn_together == row.against_base["k4"].drawn_together == 8
    (alone,) = summarise(asked(lambda n: f"p{n % 8}" if n else None), scores)
    assert alone.against_base["k4"].drawn_together is None
    assert (alone.verdict("k4"), row.verdict("k4")) == ("worse", "within the interval")


def test_few_items_give_no_verdict():
    (row,) = summarise(choices(5), {"base": answers([True] * 5), "k4": answers([False] * 5)})
    assert row.verdict("k4") == "too few items to tell"
    (row,) = summarise(choices(6), {"base": answers([True] * 6), "k4": answers([False] * 6)})
    assert row.verdict("k4") == "worse"
    item = Item("t", "0", "losses", [1, 2], options={"edges": [1]}, answer={"first": 1, "length": 2, "bytes": 3})
    requests = Requests({"t": Task("t", "text_losses", "perplexity")}, [item])
    rows = summarise(requests, {"base": {("t", "0"): {"losses": [1.0]}}, "k4": {("t", "0"): {"losses": [2.0]}}})
    assert [row.verdict("k4") for row in rows] == ["too few items to tell"] * 2
    (row,) = summarise(choices(1), {"base": answers([True]), "k4": answers([False])})
    assert row.verdict("k4") == "too few items to tell" and not row.at_floor


def choices(count):
    answer = {"gold": 1, "characters": [1, 1], "metrics": ["acc"]}
    items = [Item("t", str(n), "loglikelihood", [1], [[1], [2]], answer=answer) for n in range(count)]
    return Requests({"t": Task("t", "choice", "task")}, items)


def test_blocks_of_a_document_are_drawn_together():
    answer, edges = {"first": 1, "length": 4, "bytes": 3}, {"edges": [1, 2]}
    items = [Item("t", f"{n % 9}:{n}", "losses", [1, 2, 3, 4], options=edges, answer=answer) for n in range(36)]
    requests = Requests({"t": Task("t", "text_losses", "perplexity")}, items)
    by_luck = {item.key: {"losses": [1.0 + (item.item[0] == "0"), 1.0]} for item in items}
    scores = {"base": {item.key: {"losses": [1.0, 1.0]} for item in items}, "k4": by_luck}
    for row in [*summarise(requests, scores), *by_position(requests, scores)]:
        assert row.against_base["k4"].drawn_together == 9
    assert summarise(requests, scores)[0].verdict("k4") == "within the interval"  # one of nine documents is worse


def test_what_is_kept_of_the_base_models_recall():
    cells = [
        Cell("needle", 1, 0.0, {"base": [1.0] * 10, "k4": [1.0] * 9 + [0.0]}),
        Cell("needle", 1, 1.0, {"base": [0.0] * 6 + [1.0] * 4, "k4": [0.0] * 10}),
    ]
    kept = kept_of_base(cells, "k4")
    assert kept.ratio.estimate == pytest.approx(0.9) and kept.ratio.low < 0.9 < kept.ratio.high
    assert (kept.counted, kept.cells) == (1, 2)
    assert kept_of_base(cells[1:], "k4").ratio is None


def test_half_precision_is_for_weights_not_for_positions(saved):
    """Rotary frequencies rounded to bf16 put token 8,000 some ten tokens away from where it stands."""
    compared = load_compared(str(saved / "model"), [str(saved / "k4")], torch.bfloat16, torch.device("cpu"))
    buffers = [x for name, x in compared.model.base_model.named_buffers() if name.endswith("inv_freq")]
    assert buffers and all(x.dtype == torch.float32 for x in buffers)
    assert next(compared.model.base_model.parameters()).dtype == torch.bfloat16
