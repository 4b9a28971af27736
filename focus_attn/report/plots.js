"use strict";

// Elements, tables and plots. Nothing here knows what is plotted.

const percent = (share, digits = 1) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)}\u00a0%`;

/** An element: make("td", {class: "n"}, "text", child). */
function make(tag, attributes = {}, ...children) {
  const vector = ["svg", "path", "line", "rect", "circle", "text", "title", "g"].includes(tag);
  const element = vector ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter(child => child !== null));
  return element;
}

function fillTable(table, heads, rows) {
  const isNumber = value => typeof value === "number" || (typeof value === "string" && /^[–+\-\d]/.test(value));
  const numeric = heads.map((_, column) => rows.length > 0 && rows.every(row => isNumber(row[column])));
  const cell = tag => (value, column) =>
    make(tag, numeric[column] ? { class: "n" } : {}, value instanceof Node ? value : String(value));
  table.replaceChildren(
    make("thead", {}, make("tr", {}, ...heads.map(cell("th")))),
    make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map(cell("td"))))),
  );
}

const MARKS = {
  circle: (x, y) => `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0`,
  square: (x, y) => `M${x - 3.5},${y - 3.5}h7v7h-7z`,
  triangle: (x, y) => `M${x},${y - 4.5}l4.5,8h-9z`,
  plus: (x, y) => `M${x - 4.5},${y - 1.2}h3.3v-3.3h2.4v3.3h3.3v2.4h-3.3v3.3h-2.4v-3.3h-3.3z`,
  diamond: (x, y) => `M${x},${y - 4.5}l4.5,4.5l-4.5,4.5l-4.5,-4.5z`,
};

function drawMark(series, x, y) {
  return make("path", { d: MARKS[series.mark](x, y), fill: `var(${series.tone})` });
}

/** Shares by layer, one line for each series. Series differ by colour, mark and dash. `click` is told which layer. */
function linePlot(place, { layers, series, label, picked, click }) {
  const width = Math.max(300, place.clientWidth),
    height = 270,
    left = 44,
    right = 12,
    top = 12,
    bottom = 36;
  const step = (width - left - right) / Math.max(1, layers.length - 1);
  const x = index => left + (layers.length > 1 ? index * step : (width - left - right) / 2);
  const y = share => top + (1 - share) * (height - top - bottom);
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(
      make("line", { x1: left, x2: width - right, y1: y(share), y2: y(share), stroke: "var(--line)" }),
      make("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, percent(share, 0)),
    );
  }
  const every = Math.ceil(30 / step);
  layers.forEach(
    (name, index) =>
      index % every || svg.append(make("text", { x: x(index), y: height - 18, "text-anchor": "middle" }, String(name))),
  );
  svg.append(make("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "layer"));
  svg.append(
    make("line", {
      x1: x(picked),
      x2: x(picked),
      y1: top,
      y2: height - bottom,
      stroke: "var(--pick)",
      "stroke-width": 1.5,
      "stroke-dasharray": "2 3",
    }),
  );
  for (const one of series) {
    const points = one.values.map((value, index) => (value === null ? null : [x(index), y(value)])).filter(Boolean);
    svg.append(
      make("path", {
        d: "M" + points.map(point => point.join()).join("L"),
        fill: "none",
        stroke: `var(${one.tone})`,
        "stroke-width": 2,
        "stroke-dasharray": one.dash || "none",
      }),
      ...points.map(point => drawMark(one, ...point)),
    );
  }
  layers.forEach((name, index) => {
    const lines = series.map(one => `${one.name}: ${percent(one.values[index])}`);
    const area = make(
      "rect",
      {
        x: x(index) - Math.max(step, 20) / 2,
        y: top,
        width: Math.max(step, 20),
        height: height - top - bottom,
        fill: "transparent",
        class: "pickable",
      },
      make("title", {}, [`layer ${name}`, ...lines].join("\n")),
    );
    area.addEventListener("click", () => click(index));
    svg.append(area);
  });
  const keys = make(
    "ul",
    { class: "keys" },
    ...series.map(one =>
      make(
        "li",
        {},
        make(
          "svg",
          { width: 28, height: 14, viewBox: "0 0 28 14" },
          make("line", {
            x1: 0,
            x2: 28,
            y1: 7,
            y2: 7,
            stroke: `var(${one.tone})`,
            "stroke-width": 2,
            "stroke-dasharray": one.dash || "none",
          }),
          drawMark(one, 14, 7),
        ),
        one.name,
      ),
    ),
  );
  place.replaceChildren(svg, keys);
}

/** Cells of one hue, full colour for much. cells[row][column] = {value, title, click, picked}. */
function heatMap(place, { rows, columns, cells, highest, rowLabel, columnLabel, widest = 34, digits = null }) {
  const left = 58,
    top = 8,
    bottom = 38;
  const size = Math.min(widest, Math.max(digits === null ? 16 : 30, (place.clientWidth - left - 4) / columns.length));
  const tall = Math.min(size, 28),
    width = left + size * columns.length + 4,
    height = top + tall * rows.length + bottom;
  const svg = make("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `${rowLabel} by ${columnLabel}`,
    style: "max-width: none",
  });
  cells.forEach((row, r) =>
    row.forEach((cell, c) => {
      const strength = cell.value === null ? 0 : Math.max(0, Math.min(1, cell.value / highest));
      const area = make(
        "rect",
        {
          x: left + c * size + 0.5,
          y: top + r * tall + 0.5,
          width: size - 1,
          height: tall - 1,
          style: `fill: color-mix(in srgb, rgb(var(--high)) ${(100 * strength).toFixed(1)}%, rgb(var(--low)))`,
          stroke: cell.picked ? "var(--random)" : "none",
          "stroke-width": 2.5,
          class: cell.click ? "pickable" : "",
        },
        make("title", {}, cell.title),
      );
      if (cell.click) area.addEventListener("click", cell.click);
      svg.append(area);
      if (digits !== null)
        svg.append(
          make(
            "text",
            {
              x: left + (c + 0.5) * size,
              y: top + (r + 0.5) * tall + 4,
              "text-anchor": "middle",
              style: `pointer-events: none; font-size: 11px; fill: ${strength > 0.5 ? "var(--paper)" : "var(--ink)"}`,
            },
            (100 * cell.value).toFixed(digits),
          ),
        );
    }),
  );
  const longest = Math.max(...columns.map(name => String(name).length));
  rows.forEach(
    (name, r) =>
      r % Math.ceil(14 / tall) ||
      svg.append(make("text", { x: left - 6, y: top + (r + 0.5) * tall + 4, "text-anchor": "end" }, name)),
  );
  columns.forEach(
    (name, c) =>
      c % Math.ceil((7 * longest + 4) / size) ||
      svg.append(
        make("text", { x: left + (c + 0.5) * size, y: top + rows.length * tall + 15, "text-anchor": "middle" }, name),
      ),
  );
  svg.append(
    make("text", { x: left + (size * columns.length) / 2, y: height - 5, "text-anchor": "middle" }, columnLabel),
    make(
      "text",
      {
        x: 10,
        y: top + (rows.length * tall) / 2,
        "text-anchor": "middle",
        transform: `rotate(-90 10 ${top + (rows.length * tall) / 2})`,
      },
      rowLabel,
    ),
  );
  place.replaceChildren(svg);
}
