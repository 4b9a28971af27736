"use strict";

// How much of the distant attention is kept, beside what could be. page.js says what is chosen.

const KEEPERS = [
  { name: "Focus", part: "distant_kept", tone: "--focus", mark: "circle" },
  { name: "best, query by query", part: "distant_best", tone: "--best", mark: "square", dash: "6 3" },
  { name: "best, shared by heads", part: "distant_best_shared", tone: "--shared", mark: "plus", dash: "10 3" },
  { name: "best in all", part: "distant_best_total", tone: "--total", mark: "diamond", dash: "2 3" },
  { name: "random groups", part: "distant_random", tone: "--random", mark: "triangle", dash: "8 3 2 3" },
];
const CONTENT_KEEPERS = [
  { ...KEEPERS[0], part: "content_kept_share" },
  { ...KEEPERS[1], part: "content_best_share" },
  { ...KEEPERS[4], part: "content_random_share" },
];

function drawDistant() {
  const { mass, short_layers, short_on_content } = text();
  const routed = routedAlone();
  at("where").textContent =
    `Of all attention of these queries ${percent(mass.window)} falls into the window, ${percent(mass.sinks)} on ` +
    `sinks beyond it, ${percent(mass.distant)} is distant. Focus leaves ${percent(mass.visible)} visible; ` +
    `${percent(mass.lost)} crosses a group's boundary and is lost.`;
  at("dense").hidden = !routed;
  if (routed)
    at("dense").textContent =
      `${text().routers - routed.routers} of ${text().routers} KV heads are dense: they keep everything and are in all ` +
      `figures, but for those of routed heads, which are of the other ${routed.routers} alone.`;
  drawTiles("tiles", KEEPERS, [
    tile("distant pairs kept", percent(text().distant_pairs_kept), [
      `${percent(text().pairs_kept)} of all pairs`,
      ...(routed ? [`routed heads ${percent(routed.distant_pairs_kept)}`] : []),
    ]),
  ]);
  drawKept("by-layer", "Share of the distant attention kept, by layer", KEEPERS);
  at("short").textContent = describeShort(short_layers);
  at("sinks").replaceChildren(...describeSinks());
  drawTiles("content-tiles", CONTENT_KEEPERS, [
    tile("on keys that act as sinks", percent(mass.acting), [
      `of all attention; ${percent(actingKept())} of it visible`,
    ]),
  ]);
  drawKept("content-by-layer", "Share of the content kept, by layer", CONTENT_KEEPERS);
  at("content-short").textContent = describeShort(short_on_content);
  at("about-text").textContent =
    `${data.model}, ${text().name}: ${text().blocks} blocks of ${text().length.toLocaleString("en")} tokens` +
    (text().documents ? ` from ${new Set(text().documents).size} document(s), ` : ", ") +
    `${text().queries.toLocaleString("en")} queries of each, evenly spread over those that have distant keys` +
    (data.commit ? `; commit ${data.commit}.` : ".");
}

function tile(name, figure, below, tone = "--line") {
  const parts = [make("span", {}, name), make("b", {}, figure), ...below.map(line => make("span", {}, line))];
  return make("div", { class: "tile", style: `--tone: var(${tone})` }, ...parts);
}

function drawTiles(place, keepers, more) {
  const range = drawn =>
    drawn && drawn.n > 1 ? `[${(100 * drawn.low).toFixed(1)}, ${(100 * drawn.high).toFixed(1)}]` : "no interval";
  const routed = routedAlone();
  const tiles = keepers.map(({ name, part, tone }) => {
    const alone = routed ? [`routed heads ${percent(routed.mass[part])} ${range(routed.intervals[part])}`] : [];
    return tile(name, percent(text().mass[part]), [range(text().intervals[part]), ...alone], tone);
  });
  at(place).replaceChildren(...tiles, ...more);
}

/** The figures without dense heads, null where there are none. */
function routedAlone() {
  const { routed, routers } = text();
  return routed && routed.routers < routers ? routed : null;
}

function drawKept(place, label, keepers) {
  const values = part => text().layers.map(one => one.mass[part]);
  plotByLayer(
    place,
    label,
    keepers.map(keeper => ({ ...keeper, values: values(keeper.part) })),
  );
}

function describeShort(layers) {
  const way = "half of the way from random groups to the best mask, query by query";
  return layers.length
    ? `Layers that come less than ${way}: ${layers.join(", ")}.`
    : `Every layer comes at least ${way}.`;
}

const actingKept = () => (text().mass.acting > 0 ? text().mass.acting_kept / text().mass.acting : null);

function describeSinks() {
  const { share, layers } = text().acting_sinks;
  const counts = new Map();
  for (const [token, count] of layers.flatMap(one => one.tokens)) counts.set(token, (counts.get(token) || 0) + count);
  if (!counts.size) return [`No distant key gets ${percent(share, 0)} of the attention of those that see it.`];
  const total = [...counts.values()].reduce((sum, count) => sum + count, 0);
  const common = [...counts].filter(([, count]) => count >= total / 20).sort((a, b) => b[1] - a[1]);
  const where = layers.filter(one => one.keys >= 0.5).map(one => one.layer_idx);
  return [
    `Some distant keys act as sinks: those that see one give it ${percent(share, 0)} or more of their attention on average. Most common: `,
    ...common.flatMap(([token, count]) => [make("code", {}, shown(token)), ` ${percent(count / total, 0)} of them, `]),
    where.length
      ? `at least one for every second head and block in layers ${where.join(", ")}. `
      : "nowhere one for every second head. ",
    "Whatever shows these few keys keeps much attention. Below they are left out; what remains is content.",
  ];
}
