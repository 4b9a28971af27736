"""The command line: what a user types, and what a user gets wrong."""

import json
import subprocess
import sys

import pytest
from tiny import save_tiny_default
from typer.testing import CliRunner

from focus_attn import FocusConfig, __version__, generation, get_focus_model, pretrained
from focus_attn.cli import app
from focus_attn.zoo import tiny_random_model

run = CliRunner().invoke


@pytest.fixture
def tiny_default(monkeypatch, saved):
    """The embedded default model, tiny."""
    monkeypatch.setattr(pretrained, "default_model_folder", lambda: saved / "model")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model and an adapter for it, as folders."""
    folder = tmp_path_factory.mktemp("saved")
    model = save_tiny_default(folder)
    get_focus_model(model, FocusConfig(num_groups=4, window=8)).save_pretrained(folder / "adapter")
    return folder


def test_version():
    assert run(app, ["--version"]).output.strip() == f"focus-attn {__version__}"


def in_a_new_process(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_does_not_wait_for_torch():
    in_a_new_process(
        "import sys, focus_attn, focus_attn.cli\n"
        "for words in (['--help'], ['eval', '--help'], ['bench', 'attention', '--help'], ['train', '--no-such']):\n"
        "    try: focus_attn.cli.app(words)\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert {'FocusModel', 'load_default_model'} <= set(dir(focus_attn))"
    )


def test_what_the_package_has_is_there_when_it_is_asked_for():
    in_a_new_process(
        "import focus_attn\n"
        "for name in focus_attn.__all__: getattr(focus_attn, name)\n"
        "assert focus_attn.FocusModel is focus_attn.model.FocusModel\n"
        "focus_attn.training.Recipe, focus_attn.evaluation.perplexity, focus_attn.baselines.BASELINES\n"
        "assert not hasattr(focus_attn, 'no_such_thing') and not hasattr(focus_attn, '__wrapped__')"
    )


@pytest.mark.parametrize("command", ["demo", "generate"])
def test_help_fits_a_page(command):
    result = run(app, [command, "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) < 60


def test_demo_writes_what_it_was_asked_to(tmp_path):
    names = {"report": "r.html", "json": "r.json", "save": "adapter"}
    options = [part for option, name in names.items() for part in (f"--{option}", str(tmp_path / name))]
    result = run(app, ["demo", "--fast", *options])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    numbers = json.loads((tmp_path / "r.json").read_text())
    assert numbers["run"]["focus_attn"] == __version__
    assert f"{numbers['perplexity']['full attention']['ppl']:.2f}" in result.output
    assert (tmp_path / "adapter" / "focus_config.json").is_file()


def test_demo_on_the_users_text(tmp_path):
    (tmp_path / "mine.txt").write_text("\n\n".join(f"line {n} of my own text" for n in range(200)), encoding="utf-8")
    report = ["--report", str(tmp_path / "r.html")]
    result = run(app, ["demo", "--fast", "--text", str(tmp_path / "mine.txt"), *report])
    assert result.exit_code == 0, result.output
    assert "mine.txt" in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "absent.txt"], "no such file or folder"),
        (["--report", "absent/r.html"], "does not exist"),
        (["--budget", "2"], "`budget`"),
        (["--steps", "0"], "`steps` must be at least 1"),
        (["--save", __file__], "is a file"),
        (["--length", "20"], "too small to fit on"),
        (["--blocks", "0"], "`max_blocks`"),
    ],
)
def test_demo_refuses_in_one_sentence(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(app, ["demo", "--fast", *options])
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_generate_streams_and_repeats_itself(tiny_default):
    first, second = (run(app, ["generate", "hello", "--max-new-tokens", "8"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.output == second.output and first.output.strip()


def test_generate_samples_by_seed(tiny_default):
    options = ["generate", "hello", "--max-new-tokens", "12", "--temperature", "1.5", "--seed"]
    outputs = [run(app, [*options, seed]).output for seed in ("1", "1", "2")]
    assert outputs[0] == outputs[1] != outputs[2]


def test_generate_with_a_model_and_an_adapter(saved):
    options = ["generate", "hello there, this is a prompt", "--model", str(saved / "model"), "--max-new-tokens", "6"]
    plain, focused = run(app, options), run(app, [*options, "--adapter", str(saved / "adapter")])
    assert plain.exit_code == focused.exit_code == 0, focused.output
    assert focused.output.strip()


def test_chat_template_is_used_where_there_is_one():
    _, tokenizer = tiny_random_model()
    assert tokenizer.decode(generation.encode(tokenizer, "hi", chat=True)["input_ids"][0]) == "hi"
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    assert tokenizer.decode(generation.encode(tokenizer, "hi", chat=True)["input_ids"][0]) == "<user>hi"
    assert tokenizer.decode(generation.encode(tokenizer, "hi", chat=False)["input_ids"][0]) == "hi"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", " "], 1, "prompt is empty"),
        (["generate", "hi", "--adapter", "absent", "--model", "absent"], 1, "no adapter"),
        (["generate", "hi", "--max-new-tokens", "0"], 2, "max-new-tokens"),
        (["generate"], 2, "prompt"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_mistakes_are_answered_plainly(arguments, code, message):
    result = run(app, arguments)
    assert result.exit_code == code
    assert message.lower() in result.output.lower()
    assert "Traceback" not in result.output
