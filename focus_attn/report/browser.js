"use strict";

// What a token sees: the text, its groups, and the base model's own attention. page.js says what is chosen.

const unpacked = new Map();

/** One array of the chosen layer. */
function unpack(place, field, wide) {
  const name = [state.text, state.layer, field].join();
  if (!unpacked.has(name)) {
    const bytes = Uint8Array.from(atob(place.layers[layer().layer_idx][field]), letter => letter.charCodeAt(0));
    unpacked.set(name, wide ? new Uint16Array(bytes.buffer) : bytes);
  }
  return unpacked.get(name);
}

/** Group ids of one side of the chosen layer and router, [tokens * k]. */
function idsOf(side) {
  const all = unpack(text().browse, side, data.config.num_groups > 256),
    size = all.length / layer().routers.length;
  return all.subarray(state.router * size, (state.router + 1) * size);
}

/** The distant keys that the base model attends to from token i, with their attention in percent: [[key, percent], ...]. */
function attendedFrom(i) {
  const { attended } = text(),
    counts = unpack(attended, "counts", false),
    place = state.router * attended.tokens + i;
  const first = counts.subarray(0, place).reduce((sum, count) => sum + count, 0);
  const keys = unpack(attended, "keys", true),
    percents = unpack(attended, "percent", false);
  return Array.from({ length: counts[place] }, (_, n) => [keys[first + n], percents[first + n]]).sort(
    (a, b) => b[1] - a[1],
  );
}

/** The predicate of focus_attn/visibility.py, by its parts: why query i sees key j, or null. */
function why(i, j, query, key) {
  const { window, num_sinks, query_top_k, key_top_k } = data.config,
    sliding = layer().sliding_window;
  if (j > i || (sliding !== null && i - j >= sliding)) return null;
  if (i - j <= window) return "window";
  if (j < num_sinks) return "sink";
  const wanted = query.subarray(i * query_top_k, (i + 1) * query_top_k);
  return key.subarray(j * key_top_k, (j + 1) * key_top_k).some(id => wanted.includes(id)) ? "group" : null;
}

function writeText() {
  at("text").replaceChildren(
    ...text().browse.pieces.map((piece, index) => {
      const token = make("span", { class: "t" }, piece);
      token.dataset.i = index;
      return token;
    }),
  );
  at("text-line").textContent =
    `${text().name}, the first ${text().browse.pieces.length.toLocaleString("en")} tokens of the sample. Groups as the served model has them.`;
}

function markText() {
  const spans = at("text").children,
    i = state.token,
    query = idsOf("query"),
    key = idsOf("key"),
    { key_top_k, query_top_k } = data.config;
  const counted = { window: 0, sink: 0, group: 0 },
    attended = new Map(i === null ? [] : attendedFrom(i));
  for (let j = 0; j < spans.length; j++) {
    let kind = "";
    if (i !== null) {
      const reason = why(i, j, query, key);
      if (reason) counted[reason]++;
      kind = j === i ? "query" : j > i ? "later" : reason || "";
    } else if (state.group !== null && key.subarray(j * key_top_k, (j + 1) * key_top_k).includes(state.group)) {
      kind = "group";
      counted.group++;
    }
    const name = ["t", kind, attended.has(j) ? "attended" : ""].filter(Boolean).join(" ");
    if (spans[j].className !== name) spans[j].className = name;
  }
  const list = (ids, k, j) => [...ids.subarray(j * k, (j + 1) * k)].join(", ");
  const total = counted.window + counted.sink + counted.group;
  at("sees").replaceChildren(
    ...(i === null
      ? [
          state.group === null
            ? "Nothing is chosen yet."
            : `Group ${state.group}: ${counted.group} of these tokens belong to it as keys.`,
        ]
      : [
          make("code", {}, shown(spans[i].textContent)),
          ` at ${i} looks into group ${list(query, query_top_k, i)} and belongs to group ${list(key, key_top_k, i)}. ` +
            `It sees ${total} of ${i + 1} tokens (${percent(total / (i + 1), 0)}): ${counted.window} in the window, itself among them, ${counted.sink} sinks, ${counted.group} of its group.`,
          make("br"),
          ...describeAttended(attended, j => why(i, j, query, key)),
        ]),
  );
}

function describeAttended(attended, reason) {
  const least = percent(text().attended.least, 0);
  if (!attended.size)
    return [`To no distant token do this router's heads of the base model give ${least} of their attention.`];
  return [
    `Distant tokens that this router's heads of the base model give ${least} or more: `,
    ...[...attended].flatMap(([j, share], number) => [
      number ? ", " : "",
      make("code", {}, shown(at("text").children[j].textContent)),
      ` at ${j} (${percent(share / 100, 0)}, ${reason(j) ? "visible" : "lost"})`,
    ]),
    ".",
  ];
}

function watchText() {
  at("text").addEventListener("click", event => {
    if (event.target.dataset.i !== undefined) pick({ token: Number(event.target.dataset.i), group: null });
  });
  at("text").addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || state.token === null) return;
    event.preventDefault();
    pick({ token: Math.max(0, Math.min(text().browse.pieces.length - 1, state.token + step)) });
  });
}
