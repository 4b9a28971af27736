"use strict";

// What the page shows of its data, and what a reader can choose. plots.js draws, distant.js and
// browser.js have a section each.

const data = JSON.parse(document.getElementById("data").textContent);
const state = { text: 0, layer: 0, router: 0, token: null, group: null, measure: "distant_kept", side: "key" };

// Small things

const at = id => document.getElementById(id);
const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
const text = () => data.texts[state.text];
const layer = () => text().layers[state.layer];
const router = () => layer().routers[state.router];
const shown = piece => piece.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");

function plotByLayer(place, label, series) {
  const layers = text().layers.map(one => one.layer_idx);
  linePlot(at(place), { layers, series, label, picked: state.layer, click: index => pick({ layer: index }) });
}

// Every head

const MEASURES = {
  distant_kept: "distant attention kept",
  gain: "from random groups (0) to the best mask (100 %)",
  distant_best: "distant attention kept by the best mask, query by query",
  distant_best_shared: "distant attention kept by the best mask that a router's heads share",
  distant_best_total: "distant attention kept by the best mask, in all",
  distant_random: "distant attention kept by random groups",
  content_kept_share: "distant attention kept, without keys that act as sinks",
  content_gain: "the same, from random groups (0) to the best mask (100 %)",
  acting: "attention on distant keys that act as sinks",
  visible: "attention visible",
  distant: "attention that is distant",
  lost: "attention lost",
  apart: "attention between tokens that share no group",
};

function drawHeads() {
  const { layers } = text(),
    heads = layers[0].heads.length;
  const values = layers.flatMap(one => one.heads.map(head => head[state.measure]));
  const highest = ["distant", "acting", "lost", "apart"].includes(state.measure) ? Math.max(...values, 1e-9) : 1;
  const cells = Array.from({ length: heads }, (_, head) =>
    layers.map((one, index) => {
      const of = Math.floor((head * one.routers.length) / heads),
        mass = one.heads[head];
      return {
        value: mass[state.measure],
        picked: index === state.layer && of === state.router,
        title: `layer ${one.layer_idx}, head ${head}, router ${of}: ${percent(mass[state.measure])}`,
        click: () => {
          pick({ layer: index, router: of });
          describeHead(index, head);
        },
      };
    }),
  );
  heatMap(at("heads"), {
    rows: Array.from({ length: heads }, (_, head) => head),
    columns: layers.map(one => one.layer_idx),
    cells,
    highest,
    rowLabel: "head",
    columnLabel: `layer (full colour: ${percent(highest, 0)})`,
  });
  at("head-line").textContent =
    "Point at a head for its figure, click it for all of them. Framed: the heads of the chosen router.";
}

function describeHead(index, head) {
  const mass = text().layers[index].heads[head];
  at("head-line").textContent =
    `Layer ${text().layers[index].layer_idx}, head ${head}: ` +
    Object.entries(MEASURES)
      .map(([name, label]) => `${label} ${percent(mass[name])}`)
      .join("; ") +
    ".";
}

// Groups

function drawGroups() {
  const { query, key, dense } = text().groups[state.layer].routers[state.router],
    one = router();
  at("groups-title").textContent = `Groups of layer ${layer().layer_idx}, router ${state.router}`;
  at("groups-line").textContent =
    (dense ? "A dense head: every token is in its first group. " : "") +
    `${percent(one.pairs_kept)} of all pairs and ${percent(one.distant_pairs_kept)} of the distant ones kept; confidence ` +
    `${one.key_confidence.toFixed(2)} as keys, ${one.query_confidence.toFixed(2)} as queries. Listed are the tokens that a group has most more of than the text has.`;
  const bar = share =>
    make(
      "span",
      { style: "white-space: nowrap" },
      make("span", { class: "share", style: `width: ${Math.round(90 * share)}px` }),
      percent(share, 0),
    );
  const tokens = list =>
    list.length ? make("span", {}, ...list.flatMap(token => [make("code", {}, shown(token)), " "])) : "none stand out";
  const kind = (side, group) =>
    side.classes?.largest[group]
      ? make(
          "div",
          { class: "soft" },
          `${side.classes.largest[group]} ${percent(side.classes.largest_share[group], 0)}`,
        )
      : null;
  const rows = key.tokens.map((_, group) => {
    const show = make(
      "button",
      { "aria-pressed": state.group === group, title: "mark its keys in the text below" },
      String(group),
    );
    show.addEventListener("click", () => pick({ group: state.group === group ? null : group, token: null }));
    return [
      show,
      make("span", {}, bar(key.shares[group]), kind(key, group)),
      tokens(key.tokens[group]),
      make("span", {}, bar(query.shares[group]), kind(query, group)),
      tokens(query.tokens[group]),
    ];
  });
  fillTable(
    at("groups"),
    ["group", "of keys", "keys that belong to it", "of queries", "queries that look into it"],
    rows,
  );
  const groups = one.flow.map((_, group) => group),
    highest = Math.max(...one.flow.flat(), 1e-9);
  heatMap(at("flow"), {
    rows: groups,
    columns: groups,
    highest,
    rowLabel: "queries look into",
    columnLabel: "keys belong to",
    widest: 40,
    digits: groups.length > 12 ? null : 0,
    cells: one.flow.map((row, from) =>
      row.map((value, to) => ({ value, picked: from === to, title: `from ${from} to ${to}: ${percent(value)}` })),
    ),
  });
  drawClasses(key);
}

function drawClasses(key) {
  at("classes").hidden = !key.classes;
  if (!key.classes) return;
  const { counts, purity, purity_random, information } = key.classes,
    whole = text().purity;
  const shares = counts.map(row =>
    row.map(
      count =>
        count /
        Math.max(
          1,
          row.reduce((a, b) => a + b, 0),
        ),
    ),
  );
  heatMap(at("class-map"), {
    rows: counts.map((_, group) => group),
    columns: data.word_classes.map(name => name.slice(0, 3)),
    highest: 1,
    rowLabel: "group",
    columnLabel: "share of the group's tokens (full colour: 100 %)",
    widest: 40,
    digits: counts.length > 12 ? null : 0,
    cells: shares.map((row, group) =>
      row.map((value, index) => ({
        value,
        title: `group ${group}, ${data.word_classes[index]}: ${counts[group][index]} tokens, ${percent(value)}`,
      })),
    ),
  });
  at("class-line").textContent =
    `Purity ${purity.toFixed(2)}: the share of tokens that are of their group's most common word class; ` +
    `${purity_random.toFixed(2)} when classes are dealt out at random. The group takes away ${percent(information, 0)} of the uncertainty about a token's class. ` +
    `Tagger: ${data.tagger}. Over all routers: purity ${whole.key.purity.toFixed(2)} as keys, ` +
    `${whole.query.purity.toFixed(2)} as queries (random ${whole.key.purity_random.toFixed(2)}).`;
}

// Long-range pairs

function drawPairs() {
  const here = at("pairs-here").checked;
  const words = ([before, token, after]) =>
    make("span", {}, before, token.startsWith(" ") ? " " : "", make("mark", {}, token.trim()), after);
  for (const kind of ["kept", "dropped"]) {
    const pairs = text().pairs[kind].filter(pair => !here || pair.layer_idx === layer().layer_idx);
    const taken = {}; // two of a layer at most, so that one layer does not fill the table
    const few = pair => (taken[pair.layer_idx] = (taken[pair.layer_idx] || 0) + 1) <= 2;
    const varied = here ? pairs : pairs.filter(few).slice(0, 20);
    fillTable(
      at(`pairs-${kind}`),
      ["query", "key", "attention", "tokens apart", "affinity", "layer", "head"],
      varied.map(pair => [
        words(pair.query_text),
        words(pair.key_text),
        pair.weight.toFixed(2),
        pair.distance.toLocaleString("en"),
        pair.affinity.toFixed(2),
        pair.layer_idx,
        pair.head,
      ]),
    );
  }
}

// Two texts

function drawDomains() {
  at("domains").hidden = !data.domains;
  if (!data.domains) return;
  const side = state.side,
    values = name => data.domains.map(one => one[side][name]);
  at("domains-line").textContent =
    `A kind of token is in its usual group ${percent(mean(values("agreement_within")))} of the time in ${data.texts[0].name}, ` +
    `${percent(mean(values("agreement_across")))} in ${data.texts[1].name}, ${percent(mean(values("agreement_chance")))} by chance. ` +
    `${percent(mean(values("shift")))} of the tokens would have to change groups for the groups to be of the same sizes in both. Mean over layers and routers.`;
  plotByLayer("domains-plot", "Share of tokens in their usual group, by layer", [
    { name: data.texts[0].name, values: values("agreement_within"), tone: "--focus", mark: "circle" },
    { name: data.texts[1].name, values: values("agreement_across"), tone: "--best", mark: "square", dash: "6 3" },
    { name: "by chance", values: values("agreement_chance"), tone: "--random", mark: "triangle", dash: "8 3 2 3" },
  ]);
}

// Numbers

const COLUMNS = {
  window: "window",
  sinks: "sinks",
  distant: "distant",
  visible: "visible",
  lost: "lost",
  apart: "apart",
  distant_kept: "distant kept",
  distant_best: "best, query by query",
  distant_best_shared: "best, shared by heads",
  distant_best_total: "best in all",
  distant_random: "random",
  gain: "random (0) to best (100 %)",
  acting: "on keys that act as sinks",
  content_kept_share: "content kept",
  content_best_share: "content, best",
  content_random_share: "content, random",
  content_gain: "content, random (0) to best (100 %)",
};

function drawNumbers() {
  const over = (routers, field) => mean(routers.map(each => each[field]));
  const row = (one, index) => {
    const choosing = one.routers.filter((_, router) => !text().groups[index].routers[router].dense);
    return [
      one.layer_idx,
      ...Object.keys(COLUMNS).map(name => percent(one.mass[name])),
      percent(over(one.routers, "pairs_kept")),
      percent(over(one.routers, "distant_pairs_kept")),
      over(choosing, "key_confidence").toFixed(2),
      over(choosing, "query_confidence").toFixed(2),
      percent(Math.max(...choosing.flatMap(each => each.key_shares)), 0),
      percent(Math.max(...choosing.flatMap(each => each.query_shares)), 0),
    ];
  };
  const sizes = ["pairs kept", "distant pairs kept", "confidence, keys", "confidence, queries"];
  const heads = ["layer", ...Object.values(COLUMNS), ...sizes, "largest key group", "largest query group"];
  fillTable(at("layers"), heads, text().layers.map(row));
  at("layers").tBodies[0].rows[state.layer].classList.add("picked");
}

// Choosing. The address keeps the choice, so that a link can point at what it shows.

function fillPicks() {
  const options = (place, names, chosen) =>
    place.replaceChildren(
      ...names.map((name, index) => {
        const option = make("option", { value: index }, String(name));
        option.selected = index === chosen;
        return option;
      }),
    );
  options(
    at("pick-text"),
    data.texts.map(one => one.name),
    state.text,
  );
  options(
    at("pick-layer"),
    text().layers.map(one => one.layer_idx),
    state.layer,
  );
  options(
    at("pick-router"),
    layer().routers.map((_, index) => index),
    state.router,
  );
  const per = layer().heads.length / layer().routers.length;
  at("pick-heads").textContent =
    per === 1 ? `head ${state.router}` : `heads ${state.router * per} to ${(state.router + 1) * per - 1}`;
}

/** Whatever an address or another text asks for, what is chosen is there. */
function keepInside() {
  const limit = (value, count) => Math.max(0, Math.min(count - 1, value));
  state.text = limit(state.text, data.texts.length);
  state.layer = limit(state.layer, text().layers.length);
  state.router = limit(state.router, layer().routers.length);
  if (state.token !== null) state.token = limit(state.token, text().browse.pieces.length);
  if (state.group !== null) state.group = limit(state.group, data.config.num_groups);
}

function pick(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  keepInside();
  const moved = ["text", "layer", "router"].some(name => before[name] !== state[name]);
  if (before.text !== state.text) writeText();
  if (moved || before.group !== state.group) draw();
  else markText();
  history.replaceState(
    null,
    "",
    "#" +
      ["text", "layer", "router", "token", "group"]
        .filter(name => state[name] !== null)
        .map(name => `${name}=${state[name]}`)
        .join("&"),
  );
}

function draw() {
  fillPicks();
  drawDistant();
  drawHeads();
  drawGroups();
  markText();
  drawPairs();
  drawDomains();
  drawNumbers();
}

function start() {
  const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const [name, value] of Object.entries(asked))
    if (name in state && /^\d+$/.test(value)) state[name] = Number(value);
  for (const name of ["text", "layer", "router"])
    at(`pick-${name}`).addEventListener("change", event => pick({ [name]: Number(event.target.value) }));
  for (const [name, label] of Object.entries(MEASURES))
    at("pick-measure").append(make("option", { value: name }, label));
  at("pick-measure").addEventListener("change", event => {
    state.measure = event.target.value;
    drawHeads();
  });
  at("pick-side").addEventListener("change", event => {
    state.side = event.target.value;
    drawDomains();
  });
  at("pairs-here").addEventListener("change", drawPairs);
  watchText();
  keepInside();
  writeText();
  draw();
  if (state.token !== null) at("text").children[state.token].scrollIntoView({ block: "nearest" });
  addEventListener("resize", draw);
}

start();
