"""`focus report` as a user runs it, and its page in a real browser where there is one."""

import copy
import dataclasses
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from focus_attn import FocusConfig, get_focus_model
from focus_attn.adapters import adapter_digest
from focus_attn.cli import app
from focus_attn.report.measure import describe
from focus_attn.report.page import render_page
from focus_attn.report.sample import RoutingSample
from focus_attn.visibility import Pattern, Tokens, visible_mask
from focus_attn.zoo import tiny_random_model

run = CliRunner().invoke
CONFIG = FocusConfig(num_groups=6, query_top_k=2, window=8, num_sinks=2, router_dim=4)
SIZES = "--length 96 --blocks 2 --queries 12 --sample 192 --browse 80 --device cpu".split()
PROSE = 'Henry waited by the door </script><!-- until the old clock struck & "nobody" came. $model 50% {x} '


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    model, tokenizer = tiny_random_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    get_focus_model(model, CONFIG).save_pretrained(folder / "adapter")
    (folder / "prose.txt").write_text(PROSE * 6, encoding="utf-8")
    (folder / "code.txt").write_text("def f(x):\n    return [y ** 2 for y in x]\n\n" * 12, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(folder):
    """The command's output, and the folder it wrote into."""
    options = ["report", "--adapter", folder / "adapter", "--model", folder / "model", *SIZES]
    files = ["--text", folder / "prose.txt", "--text", folder / "code.txt"]
    result = run(
        app, [*map(str, [*options, *files]), "--out", str(folder / "r.html"), "--json", str(folder / "r.json")]
    )
    assert result.exit_code == 0, result.output
    return result.output, folder


@pytest.fixture(scope="module")
def numbers(made):
    return json.loads((made[1] / "r.json").read_text())


@pytest.fixture(scope="module")
def with_dense_head(folder):
    """Of an adapter with one: the command's output, its numbers, its page."""
    dense = dataclasses.replace(CONFIG, dense_heads=((1, 0),))
    get_focus_model(tiny_random_model()[0], dense).save_pretrained(folder / "dense")
    options = ["report", "--adapter", folder / "dense", "--model", folder / "model", "--text", folder / "prose.txt"]
    files = ["--out", folder / "d.html", "--json", folder / "d.json"]
    result = run(app, [*map(str, [*options, *files]), *SIZES])
    assert result.exit_code == 0, result.output
    return result.output, json.loads((folder / "d.json").read_text()), (folder / "d.html").read_text()


def test_numbers_are_written_and_printed(made, numbers):
    output, _ = made
    assert [text["name"] for text in numbers["texts"]] == ["prose.txt", "code.txt"]
    for text in numbers["texts"]:
        assert f"{text['coverage']['mass']['distant_kept']:.1%}" in output
        assert len(text["coverage"]["layers"]) == len(text["groups"]) == 2
        assert len(text["coverage"]["by_block"]) == text["coverage"]["blocks"] == 2
    assert numbers["run"]["command"] and numbers["config"]["num_groups"] == 6
    assert numbers["adapter_digest"] == adapter_digest(made[1] / "adapter")
    assert [layer["layer_idx"] for layer in numbers["domains"]] == [0, 1]


def test_heads_that_are_routed_are_told_apart_where_some_are_dense(made, with_dense_head):
    output, report, page = with_dense_head
    routed = report["texts"][0]["coverage"]["routed"]
    assert (report["texts"][0]["coverage"]["routers"], routed["routers"]) == (4, 3)
    assert f"{routed['mass']['distant_kept']:.1%}" in output
    sentence = f"3 routed ones alone keep {100 * routed['mass']['distant_kept']:.1f} %"
    assert sentence in " ".join(output.split()) and sentence in page
    assert "routed" not in made[0]


def test_a_page_from_the_numbers_is_the_same(made, numbers):
    _, folder = made
    result = run(app, ["report", "--from", str(folder / "r.json"), "--out", str(folder / "again.html")])
    assert result.exit_code == 0, result.output
    assert (folder / "again.html").read_text() == (folder / "r.html").read_text()
    assert "--from" not in (folder / "again.html").read_text()  # the run it names is the one that measured


def test_without_the_tagger_only_word_classes_are_missing(numbers, monkeypatch):
    monkeypatch.setattr("focus_attn.report.measure.tagger", lambda: None)
    described = describe(numbers)
    assert described["tagger"] is None and described["texts"][0]["purity"] is None
    groups = described["texts"][0]["groups"][0]["routers"][0]["key"]
    assert (
        "classes" not in groups and groups["tokens"] == numbers["texts"][0]["groups"][0]["routers"][0]["key"]["tokens"]
    )
    assert "<section" in render_page(described)


class Outline(HTMLParser):
    """Tags that are open, and whatever a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.count = [], [], Counter()

    def handle_starttag(self, tag, attributes):
        self.count[tag] += 1
        if tag not in ("meta", "link", "br", "img", "input", "hr"):
            self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(made):
    page = (made[1] / "r.html").read_text()
    outline = Outline()
    outline.feed(page)
    assert outline.open == [] and outline.fetched == [] and outline.count["script"] == 2
    assert "default-src 'none'" in page and "@import" not in page
    assert not re.search(r"\$(css|data|script|headline|setting|warning|run_rows)\b", page)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--adapter"),
        (["--adapter", "absent"], "no adapter"),
        (["--adapter", "{folder}/adapter", "--text", "absent.txt"], "no such file"),
        (["--adapter", "{folder}/adapter", "--out", "absent/r.html"], "does not exist"),
        (["--adapter", "{folder}/adapter", "--from", "r.json"], "leave out --adapter"),
        (["--from", "{folder}/prose.txt"], "cannot be read"),
        (["--from", "{folder}/model/config.json"], "not a report"),
        (["--adapter", "{folder}/adapter", "--browse", "99999"], "`browse`"),
        (["--adapter", "{folder}/adapter", "--text", "{folder}/prose.txt", "--length", "9"], "nothing beyond a window"),
        (["--adapter", "{folder}/adapter", "--text", "{folder}/prose.txt", "--length", "9999"], "no document reaches"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(folder, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = [] if "--from" in options else ["--model", str(folder / "model")]
    result = run(app, ["report", *(option.format(folder=folder) for option in options), *model])
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.output.split()) and "Traceback" not in result.output


# In a browser


class Page(HTMLParser):
    """What a browser made of the page: the tokens' classes, and text by the id of the element around it."""

    def __init__(self, source):
        super().__init__()
        self.tokens, self.text, self.inside, self.marks = [], {}, [], Counter()
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "data-i" in attributes:
            self.tokens.append(set(attributes["class"].split()) - {"t"})
        if tag not in ("meta", "link", "br", "img", "input", "hr"):
            self.inside.append(attributes.get("id"))
        for name in filter(None, self.inside):
            self.marks[name, tag] += 1

    def handle_endtag(self, tag):
        self.inside.pop()

    def handle_data(self, data):
        for name in filter(None, self.inside):
            self.text[name] = self.text.get(name, "") + data.replace("\u00a0", " ")


@pytest.fixture
def browse(made, tmp_path):
    """Open the page, with a choice in its address and a script that acts as a reader would."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "microsoft-edge")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium here")

    def open_page(address="", act="", source=None):
        page = tmp_path / "page.html"
        source = source or (made[1] / "r.html").read_text()
        report = "addEventListener('error', event => document.title = 'error: ' + event.message)"
        source = source.replace("<script", f"<script>{report}</script><script", 1)
        page.write_text(source.replace("</body>", f"<script>{act}</script></body>"), encoding="utf-8")
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=2000 --dump-dom"
        offline = "--no-first-run --disable-background-networking --disable-component-update --disable-sync"
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [browser, *options.split(), *offline.split(), profile, f"{page.as_uri()}{address}"]
        dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        assert "error: " not in re.search(r"<title>.*?</title>", dumped).group()
        return Page(dumped)

    return open_page


def expected_view(numbers, text, layer_idx, router, token):
    """Classes of the tokens up to `token`, by the library's own predicate."""
    sample = RoutingSample.from_dict(numbers["texts"][text]["sample"])
    layer, size = sample.layers[layer_idx], numbers["texts"][text]["attended"]["tokens"]
    query, key = (
        torch.from_numpy(ids[router : router + 1, :size].astype(np.int64))[None] for ids in (layer.query, layer.key)
    )
    positions = torch.arange(size)[None]
    at = Tokens(positions, positions)
    visible = visible_mask(query, key, at, Pattern(CONFIG.num_groups, CONFIG.window, CONFIG.num_sinks))[0, 0, token]
    names = []
    for j in range(size):
        if j >= token:
            names.append("query" if j == token else "later")
        elif not visible[j]:
            names.append("")
        else:
            names.append("window" if token - j <= CONFIG.window else "sink" if j < CONFIG.num_sinks else "group")
    return names


def seen(page):
    return ["".join(classes - {"attended"}) for classes in page.tokens]


def test_a_click_shows_what_the_predicate_says(numbers, browse):
    page = browse("#text=0&layer=1&router=1&token=5", "document.querySelector('[data-i=\"70\"]').click()")
    expected = expected_view(numbers, 0, 1, 1, 70)
    assert seen(page) == expected and "group" in expected and "" in expected
    counts = Counter(expected)
    assert f"{counts['group']} of its group" in page.text["sees"] and f"{counts['sink']} sinks" in page.text["sees"]
    assert page.marks["tiles", "b"] == 6 and page.marks["by-layer", "path"] > 8
    assert page.marks["heads", "rect"] == 2 * 4 and page.marks["flow", "rect"] == 36
    assert page.marks["groups", "tr"] == 1 + 6 and "layer 1, router 1" in page.text["groups-title"]


def test_tiles_say_what_routed_heads_keep(with_dense_head, browse):
    _, report, source = with_dense_head
    page, plain = browse(source=source), browse()
    routed = report["texts"][0]["coverage"]["routed"]["mass"]
    assert "1 of 4 KV heads are dense" in page.text["dense"] and "dense" not in plain.text
    for place, name in (("tiles", "distant_kept"), ("content-tiles", "content_kept_share")):
        assert f"routed heads {100 * routed[name]:.1f} %" in page.text[place]
        assert "routed" not in plain.text[place]


def test_the_address_chooses_and_other_texts_can_be_chosen(numbers, browse):
    act = "const s = document.getElementById('pick-text'); s.value = 1; s.dispatchEvent(new Event('change'))"
    page = browse("#layer=0&router=0&token=60", act)
    assert seen(page) == expected_view(numbers, 1, 0, 0, 60)
    assert "".join(numbers["texts"][1]["sample"]["pieces"][:80]) == page.text["text"]
    kept = numbers["texts"][1]["coverage"]["mass"]["distant_kept"]
    assert f"{100 * kept:.1f} %" in page.text["tiles"]


def test_a_group_marks_its_keys(numbers, browse):
    page = browse("#layer=1&router=0", "document.querySelectorAll('#groups button')[2].click()")
    ids = RoutingSample.from_dict(numbers["texts"][0]["sample"]).layers[1].key[0, :80, 0]
    assert seen(page) == ["group" if group == 2 else "" for group in ids]


def test_an_address_beyond_the_page_and_one_text_without_classes(numbers, browse):
    plain = {**numbers, "texts": copy.deepcopy(numbers["texts"][:1]), "domains": None, "tagger": None}
    plain["texts"][0]["purity"] = None
    for layer in plain["texts"][0]["groups"]:
        for router in layer["routers"]:
            for side in ("query", "key"):
                router[side].pop("classes", None)
    page = browse("#text=9&layer=99&router=99&token=9999&group=x", source=render_page(plain))
    assert seen(page) == expected_view(numbers, 0, 1, 1, 79)
