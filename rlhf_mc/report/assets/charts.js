"use strict";
// Charts as SVG in the width of their place. Colours are classes and variables of report.css, so that a change of the
// theme draws nothing anew. Nothing here knows the data of a run.

const SVG = "http://www.w3.org/2000/svg";
const PLOT = { height: 200, left: 56, right: 12, top: 10, bottom: 24 };

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function color(i) {
  return `var(--c${i % 12})`;
}

// A number with the digits that a reader needs.
function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

// About `count` round numbers from low to high.
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return { found, step };
}

// Text of a tick: as many decimals as the distance of two ticks needs.
function tickText(value, step) {
  const size = Math.max(Math.abs(value), step);
  if (size >= 1e5 || step < 1e-4) return value === 0 ? "0" : value.toExponential(1).replace("e+", "e");
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

// The mean of the values around each.
function smoothed(values) {
  const half = Math.max(2, Math.floor(values.length / 40));
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - half), i + half + 1);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

// The frame of a plot: the two axes with their ticks and grid. Returns the functions from data to pixels.
function frame(svg, width, x, y, height = PLOT.height) {
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const toX = (step) => PLOT.left + ((step - x.low) / (x.high - x.low || 1)) * (width - PLOT.left - PLOT.right);
  const toY = (value) => height - PLOT.bottom - ((value - y.low) / (y.high - y.low || 1)) * (height - PLOT.top - PLOT.bottom);
  const rows = ticks(y.low, y.high, 5, y.whole);
  for (const value of rows.found) {
    svg.append(shape("line", { class: "grid", x1: PLOT.left, x2: width - PLOT.right, y1: toY(value), y2: toY(value) }));
    svg.append(shape("text", { x: PLOT.left - 6, y: toY(value) + 4, "text-anchor": "end" }, tickText(value, rows.step)));
  }
  const columns = ticks(x.low, x.high, Math.max(2, Math.floor(width / 90)), true);
  for (const step of columns.found) {
    const side = toX(step) > width - 24 ? "end" : "middle";
    svg.append(shape("text", { x: toX(step), y: height - 6, "text-anchor": side }, String(step)));
  }
  return { toX, toY };
}

// The range of values with a margin; a constant has room on both sides.
function range(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const margin = (high - low) * 0.05;
  return { low: low === 0 ? 0 : low - margin, high: high + margin };
}

// The path of a curve. A single point becomes a dot.
function path(points) {
  const out = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  return `M${out}${points.length === 1 ? "h.01" : ""}`;
}

function line(svg, points, stroke, dash, extra = "") {
  svg.append(shape("path", { class: `curve ${extra}`, d: path(points), style: `stroke: ${stroke}`, "stroke-dasharray": dash, "stroke-linecap": "round" }));
}

// The line of a curve, for its legend.
function stroke(entry) {
  const svg = shape("svg", { class: "stroke", viewBox: "0 0 26 10", "aria-hidden": "true" });
  line(svg, [[1, 5], [25, 5]], entry.color, entry.dash);
  return svg;
}

// A legend of buttons that hide and show their entry; one entry needs no button.
function legend(entries, toggle) {
  const list = element("div", { class: "legend" });
  for (const entry of entries) {
    const box = entry.dash === undefined ? element("span", { class: "swatch", style: `background: ${entry.color}` }) : stroke(entry);
    if (entries.length === 1) {
      list.append(element("span", { class: "entry" }, box, entry.name));
      continue;
    }
    const button = element("button", { type: "button", "aria-pressed": "true" }, box, entry.name);
    button.addEventListener("click", () => {
      entry.hidden = !entry.hidden;
      button.setAttribute("aria-pressed", String(!entry.hidden));
      toggle();
    });
    list.append(button);
  }
  return list;
}

// Calls draw(width) now and whenever the width of `place` changes. Returns a function that draws again.
function drawn(place, draw) {
  let width = 0;
  const again = () => {
    const now = Math.floor(place.clientWidth);
    if (now > 0) draw(now);
    width = now;
  };
  new ResizeObserver(() => {
    if (Math.floor(place.clientWidth) !== width) again();
  }).observe(place);
  return again;
}
