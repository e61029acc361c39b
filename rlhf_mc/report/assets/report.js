// The report's own part: which charts there are, and what they show.

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const DASHES = ["", "6 4", "2 4", "10 4 2 4"];
const view = { low: 0, high: 1, smooth: false };
const redraws = new Map();

function stepsOf(run) {
  return [...run.curves.steps, ...run.marks.map((mark) => mark.step)];
}

function wholeRange() {
  const steps = DATA.runs.flatMap(stepsOf);
  const low = steps.reduce((a, b) => Math.min(a, b), Infinity);
  const high = steps.reduce((a, b) => Math.max(a, b), -Infinity);
  return steps.length ? { low, high: Math.max(high, low + 1) } : { low: 0, high: 1 };
}

function redrawAll() {
  for (const redraw of redraws.values()) redraw();
}

function setRange(low, high) {
  const whole = wholeRange();
  view.low = Math.max(whole.low, Math.min(low, high));
  view.high = Math.min(whole.high, Math.max(low, high));
  if (view.high <= view.low) Object.assign(view, whole);
  byId("from").value = view.low;
  byId("to").value = view.high;
  redrawAll();
}

// ------------------------------------------------------------ curves

// The curves of a chart: one for each run and key. Runs have colours and keys dashes; of one run keys have colours.
function seriesOf(chart) {
  const found = [];
  for (const [r, run] of DATA.runs.entries()) {
    for (const [k, key] of chart.keys.entries()) {
      const values = run.curves.metrics[key];
      if (!values) continue;
      const single = DATA.runs.length === 1;
      const points = run.curves.steps.map((step, i) => [step, values[i]]).filter(([, value]) => value !== null);
      found.push({
        name: single ? key : chart.keys.length === 1 ? run.name : `${run.name}: ${key}`,
        key, run, points,
        color: color(single ? k : r),
        dash: single ? "" : DASHES[k % DASHES.length],
        hidden: false,
      });
    }
  }
  return found;
}

function addMarks(svg, to, series) {
  for (const run of DATA.runs) {
    for (const mark of run.marks) {
      if (mark.step < view.low || mark.step > view.high) continue;
      const x = to.toX(mark.step);
      const made = shape("line", { class: `mark ${mark.kind}`, x1: x, x2: x, y1: PLOT.top, y2: PLOT.height - PLOT.bottom });
      made.append(shape("title", {}, `${run.name}: ${mark.text}`));
      svg.append(made);
    }
    for (const event of run.health) {
      const curve = series.find((one) => one.run === run && one.key === event.metric && !one.hidden);
      if (!curve || event.step < view.low || event.step > view.high) continue;
      const point = nearest(curve.points, event.step);
      if (!point) continue;
      const [x, y] = [to.toX(event.step), to.toY(point[1])];
      const made = shape("path", { class: "event", d: `M${x} ${y - 6}L${x + 6} ${y + 5}H${x - 6}Z` });
      made.append(shape("title", {}, `step ${event.step}, ${event.rule}: ${event.text}`));
      svg.append(made);
    }
  }
}

function nearest(points, step) {
  let best = null;
  for (const point of points) if (!best || Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
  return best;
}

// What a chart says at a step: the value of each visible curve, and the marks and events of that step.
function reading(series, step) {
  const parts = series.filter((one) => !one.hidden).map((one) => {
    const point = nearest(one.points, step);
    const name = series.length === 1 ? "" : `${one.name} `;
    return point ? `${name}${shown(point[1])}${point[0] === step ? "" : ` (step ${point[0]})`}` : "";
  });
  const notes = DATA.runs.flatMap((run) => [
    ...run.marks.filter((mark) => mark.step === step).map((mark) => mark.text),
    ...run.health.filter((event) => event.step === step && series.some((one) => one.run === run && one.key === event.metric))
      .map((event) => `${event.rule}: ${event.text}`),
  ]);
  return `Step ${step}: ${[...parts, ...notes].filter(Boolean).join(" · ")}`;
}

function drawCurves(svg, width, series, at) {
  const visible = series.filter((one) => !one.hidden);
  const inside = visible.map((one) => one.points.filter(([step]) => step >= view.low && step <= view.high));
  const values = inside.flat().map(([, value]) => value);
  const to = frame(svg, width, view, values.length ? range(values) : { low: 0, high: 1 });
  for (const [i, one] of visible.entries()) {
    const pixels = (found) => inside[i].map(([step], j) => [to.toX(step), to.toY(found[j])]);
    const raw = inside[i].map(([, value]) => value);
    const smooth = view.smooth && raw.length > 10;
    if (!raw.length) continue;
    line(svg, pixels(raw), one.color, one.dash, smooth ? "pale" : "");
    if (smooth) line(svg, pixels(smoothed(raw)), one.color, one.dash);
    if (raw.length <= 30) for (const [x, y] of pixels(raw)) svg.append(shape("circle", { cx: x, cy: y, r: 2.5, style: `fill: ${one.color}` }));
  }
  addMarks(svg, to, series);
  if (at !== null) svg.append(shape("line", { class: "at", x1: to.toX(at), x2: to.toX(at), y1: PLOT.top, y2: PLOT.height - PLOT.bottom }));
  return to;
}

// Reading values by pointer and keyboard, and choosing steps by dragging.
function listen(svg, series, values, draw) {
  const all = [...new Set(series.flatMap((one) => one.points.map(([step]) => step)))].sort((a, b) => a - b);
  let at = null;
  let start = null;
  const visible = () => all.filter((step) => step >= view.low && step <= view.high);
  const show = (step) => {
    at = step;
    values.textContent = step === null ? "" : reading(series, step);
    draw(at);
  };
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect();
    const share = (event.clientX - box.left - PLOT.left) / (box.width - PLOT.left - PLOT.right);
    const wanted = view.low + share * (view.high - view.low);
    return visible().reduce((best, step) => (best === null || Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), null);
  };
  svg.addEventListener("pointermove", (event) => show(stepAt(event)));
  svg.addEventListener("pointerleave", () => { start = null; show(null); });
  svg.addEventListener("pointerdown", (event) => { start = event.pointerType === "mouse" ? stepAt(event) : null; });
  svg.addEventListener("pointerup", (event) => {
    const end = stepAt(event);
    if (start !== null && end !== null && Math.abs(end - start) > (view.high - view.low) * 0.02) setRange(start, end);
    start = null;
  });
  svg.addEventListener("blur", () => show(null));
  svg.addEventListener("keydown", (event) => {
    const steps = visible();
    const i = at === null ? steps.length - 1 : steps.indexOf(at);
    const next = { ArrowLeft: i - (at === null ? 0 : 1), ArrowRight: i + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (next === undefined || !steps.length) return;
    event.preventDefault();
    show(steps[Math.max(0, Math.min(next, steps.length - 1))]);
  });
}

function aboutMetrics(keys) {
  const box = element("div", { class: "about", hidden: "" });
  for (const key of keys) {
    const found = DATA.metrics[key] || {};
    const text = [found.meaning || "no declared meaning", found.unit && `unit: ${found.unit}`, found.reduction, found.watch && `watch for: ${found.watch}`];
    box.append(element("p", {}, element("span", { class: "key" }, key), ` – ${text.filter(Boolean).join("; ")}`));
  }
  return box;
}

function addChart(chart, removable) {
  if (byId(`chart-${chart.id}`)) return byId(`chart-${chart.id}`);
  const series = seriesOf(chart);
  if (!series.some((one) => one.points.length)) return null;
  const svg = shape("svg", { tabindex: "0", role: "img", "aria-label": `${chart.title}: chart; arrow keys read its values` });
  const values = element("div", { class: "values", "aria-live": "polite" });
  const about = aboutMetrics(chart.keys);
  const help = element("button", { type: "button", "aria-expanded": "false", "aria-label": `What ${chart.title} means` }, "?");
  help.addEventListener("click", () => {
    about.hidden = !about.hidden;
    help.setAttribute("aria-expanded", String(!about.hidden));
  });
  const caption = element("figcaption", {}, element("strong", {}, chart.title), help);
  const figure = element("figure", { class: "card", id: `chart-${chart.id}` }, caption, about, svg, values);
  let at = null;
  const redraw = drawn(figure, () => drawCurves(svg, svg.clientWidth || 300, series, at));
  figure.append(legend(series, redraw));
  listen(svg, series, values, (step) => { at = step; redraw(); });
  if (removable) {
    const remove = element("button", { type: "button", "aria-label": `Remove ${chart.title}` }, "×");
    remove.addEventListener("click", () => { redraws.delete(chart.id); figure.remove(); byId("metric").focus(); });
    caption.append(remove);
  }
  byId("charts").append(figure);
  redraws.set(chart.id, redraw);
  return figure;
}

function addMetric(key) {
  return addChart({ id: `metric-${Object.keys(DATA.metrics).indexOf(key)}`, title: key, keys: [key] }, true);
}

function fillMetrics() {
  const groups = new Map();
  for (const key of Object.keys(DATA.metrics)) {
    const name = key.split("/")[0];
    if (!groups.has(name)) groups.set(name, element("optgroup", { label: name }));
    groups.get(name).append(element("option", { value: key }, key));
  }
  byId("metric").append(...groups.values());
}

// ------------------------------------------------------------ time and lengths

function wideChart(place, title, note) {
  const svg = shape("svg", { role: "img", "aria-label": `${title}. ${note}` });
  const figure = element("figure", { class: "card" }, element("figcaption", {}, element("strong", {}, title)), svg);
  place.append(figure);
  return { svg, figure };
}

// The phases of all runs: one has the same colour in each chart.
const PHASES = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.phases.phases)))];

function addPhases(run) {
  const names = Object.keys(run.phases.phases);
  if (!names.length) return;
  const total = names.map((name) => run.phases.phases[name].reduce((a, b) => a + b, 0));
  const sum = total.reduce((a, b) => a + b, 0);
  const most = names.map((name, i) => `${name} ${Math.round((100 * total[i]) / sum)} %`).join(", ");
  const { svg, figure } = wideChart(byId("phases"), `${run.name}: seconds of a step`, most);
  const entries = names.map((name, i) => ({ name: `${name} ${Math.round((100 * total[i]) / sum)} %`, key: name, color: color(PHASES.indexOf(name)), hidden: false }));
  const bars = run.phases.steps;
  const redraw = drawn(figure, () => {
    const width = svg.clientWidth || 300;
    const visible = entries.filter((entry) => !entry.hidden);
    const heights = bars.map((_, i) => visible.reduce((sum, entry) => sum + run.phases.phases[entry.key][i], 0));
    const x = { low: bars[0][0] - 0.5, high: bars[bars.length - 1][1] + 0.5 };
    const to = frame(svg, width, x, { low: 0, high: Math.max(...heights, 1e-9) * 1.05 });
    for (const [i, [first, last]] of bars.entries()) {
      let below = 0;
      const left = to.toX(first - 0.4);
      for (const entry of visible) {
        const seconds = run.phases.phases[entry.key][i];
        const top = to.toY(below + seconds);
        const bar = shape("rect", { x: left, width: Math.max(0.5, to.toX(last + 0.4) - left), y: top, height: Math.max(0, to.toY(below) - top), style: `fill: ${entry.color}` });
        bar.append(shape("title", {}, `step ${first === last ? first : `${first} to ${last}, mean`}: ${entry.key} ${shown(seconds)} s of ${shown(heights[i])} s`));
        svg.append(bar);
        below += seconds;
      }
    }
  });
  figure.append(legend(entries, redraw));
  redraw();
}

function addLengths(run) {
  const { steps, edges, shares } = run.lengths;
  if (!steps.length) return;
  const note = "Columns are steps, rows lengths in tokens; the darker a cell, the more of the responses.";
  const { svg, figure } = wideChart(byId("histograms"), `${run.name}: share of responses by length in tokens`, note);
  figure.append(element("p", { class: "note" }, note));
  drawn(figure, () => {
    const x = { low: steps[0][0] - 0.5, high: steps[steps.length - 1][1] + 0.5 };
    const to = frame(svg, svg.clientWidth || 300, x, { low: edges[0], high: edges[edges.length - 1], whole: true });
    for (const [i, [first, last]] of steps.entries()) {
      const [left, right] = [to.toX(first - 0.5), to.toX(last + 0.5)];
      for (const [j, share] of shares[i].entries()) {
        if (!share) continue;
        const cell = shape("rect", { x: left, width: right - left, y: to.toY(edges[j + 1]), height: to.toY(edges[j]) - to.toY(edges[j + 1]), style: "fill: var(--c0)", "fill-opacity": Math.sqrt(share).toFixed(2) });
        cell.append(shape("title", {}, `step ${first === last ? first : `${first} to ${last}`}: ${edges[j] + 1} to ${edges[j + 1]} tokens, ${(100 * share).toFixed(1)} %`));
        svg.append(cell);
      }
    }
  })();
}

// ------------------------------------------------------------ generations

const FEW = 6; // rows that are shown at first
const KINDS = { validation: "Validation", training: "Training" };

function columnsOf(kind) {
  return DATA.runs.flatMap((run, r) => Object.keys(run.samples[kind]).map((step) => ({ id: `${r}:${step}`, run, step, name: `${run.name}, step ${step}`, samples: run.samples[kind][step] })));
}

// At first: of one run the first and the last step, or those with tokens; the last step of each of several runs.
function firstColumns(columns) {
  if (DATA.runs.length > 1) return DATA.runs.map((run) => columns.filter((column) => column.run === run).pop()).filter(Boolean).slice(0, 4);
  const detailed = columns.filter((column) => column.samples.some((sample) => sample.tokens.text));
  if (detailed.length > 1) return detailed;
  return columns.length > 1 ? [columns[0], columns[columns.length - 1]] : columns;
}

function addSamples() {
  const kinds = Object.keys(KINDS).filter((kind) => columnsOf(kind).length);
  if (!kinds.length) {
    byId("sample-table").append(element("p", { class: "note" }, "The run has written no generations."));
    return;
  }
  let kind = kinds[0];
  const tools = byId("sample-tools");
  const choose = () => {
    const columns = columnsOf(kind);
    const selects = firstColumns(columns).map((chosen, i) => {
      const select = element("select", { "aria-label": `Column ${i + 1}` }, ...columns.map((column) => element("option", { value: column.id }, column.name)));
      select.value = chosen.id;
      select.addEventListener("change", () => show());
      return select;
    });
    const show = () => showSamples(selects.map((select) => columns.find((column) => column.id === select.value)));
    tools.replaceChildren(...buttons, ...selects, ...(kind === "training" && DATA.tokens.length ? tokenTools(show) : []));
    show();
  };
  const buttons = kinds.map((one) => {
    const button = element("button", { type: "button", "aria-pressed": String(one === kind) }, KINDS[one]);
    button.addEventListener("click", () => {
      kind = one;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      choose();
      button.focus();
    });
    return button;
  });
  choose();
}

// The value that colours tokens, with its scale; undefined: the responses are plain text.
let coloured = DATA.tokens[0];
const LEVELS = ["low3", "low2", "low1", "card", "high1", "high2", "high3"].map((name) => `background: var(--${name})`);

function tokenTools(show) {
  const select = element("select", { id: "colour" }, ...DATA.tokens.map((value) => element("option", { value: value.name }, value.title)), element("option", { value: "" }, "plain text"));
  const scale = element("span", { class: "scale" });
  const choose = () => {
    coloured = DATA.tokens.find((value) => value.name === select.value);
    const ends = coloured?.name === "loss" ? ["left out", "environment's", "in the loss"] : coloured ? [`≤ ${shown(-coloured.scale)}`, "0", `≥ ${shown(coloured.scale)}`] : [];
    scale.replaceChildren(...ends.map((text, i) => element("span", { style: LEVELS[3 * i] }, text)));
  };
  select.value = coloured ? coloured.name : "";
  select.addEventListener("change", () => { choose(); show(); });
  choose();
  const note = "First, middle and last step. The pointer reads a token's numbers; italic: an environment's; struck out: not in the loss.";
  return [element("span", { class: "tool" }, element("label", { for: "colour" }, "Colour tokens by"), " ", select), scale, element("p", { class: "note" }, note)];
}

function tokenSpans({ tokens, length }) {
  const spans = tokens.text.map((text, i) => {
    const read = DATA.tokens.filter((value) => tokens.values[value.name]).map((value) => `${value.title}: ${shown(tokens.values[value.name][i])}`);
    const value = (tokens.values[coloured.name] || [])[i];
    const level = typeof value === "number" ? 3 + Math.sign(value) * Math.round(3 * Math.min(1, Math.abs(value) / coloured.scale)) : 3;
    const kind = tokens.values.loss[i] === null ? "outside" : tokens.values.loss[i] < 0 ? "left-out" : "drawn";
    return element("span", { class: kind, style: LEVELS[level], title: [`token ${i + 1}`, ...read].join("\n") }, text.replaceAll("\n", "↵\n") || "·");
  });
  return length > spans.length ? [...spans, ` … (${length} tokens)`] : spans;
}

function responseParts(sample) {
  const parts = sample.tokens.text && coloured
    ? [element("div", { class: "generation tokens" }, ...tokenSpans(sample))]
    : sample.turns.map(([kind, text]) => element("div", { class: `generation ${kind}`, title: kind }, text || "(empty)"));
  return [...parts, element("div", { class: "label" }, `score ${shown(sample.score)}`)];
}

// A prompt that several columns have, in a row with their responses below it. Each column's other prompts, each with
// its responses, are below one another.
function showSamples(columns) {
  const prompts = columns.map((column) => [...new Set(column.samples.map((sample) => sample.prompt))]);
  const shared = (prompt) => prompts.filter((some) => some.includes(prompt)).length;
  const common = [...new Set(prompts.flat())].filter((prompt) => columns.length === 1 || shared(prompt) > 1).sort((a, b) => shared(b) - shared(a));
  const head = (prompt) => {
    const truth = columns.flatMap((column) => column.samples).find((sample) => sample.prompt === prompt).truth;
    return element("div", {}, element("div", { class: "label" }, `Prompt${truth ? `; ground truth ${truth}` : ""}`), element("div", { class: "generation" }, prompt));
  };
  const cell = (column, prompt, ...above) => {
    const found = column.samples.filter((sample) => sample.prompt === prompt);
    const parts = found.length ? found.flatMap(responseParts) : [element("div", { class: "label" }, "not written at this step")];
    return element("div", {}, element("div", { class: "label" }, column.name), ...above, ...parts);
  };
  const rowOf = (above, cells) => element("div", { class: "pair" }, ...above, element("div", { class: "columns" }, ...cells));
  const rows = common.map((prompt) => rowOf([head(prompt)], columns.map((column) => cell(column, prompt))));
  const others = prompts.map((some) => some.filter((prompt) => !common.includes(prompt)));
  for (let i = 0; others.some((some) => i < some.length); i++) {
    rows.push(rowOf([], columns.map((column, k) => (others[k][i] === undefined ? element("div") : cell(column, others[k][i], head(others[k][i]))))));
  }
  const more = element("button", { type: "button" }, `Show all ${rows.length} rows`);
  more.addEventListener("click", () => {
    more.remove();
    byId("sample-table").append(...rows.slice(FEW));
    rows[FEW].tabIndex = -1;
    rows[FEW].focus();
  });
  byId("sample-table").replaceChildren(...rows.slice(0, FEW), ...(rows.length > FEW ? [more] : []));
}

// ------------------------------------------------------------ the page

function listMarks() {
  for (const run of DATA.runs) {
    for (const mark of run.marks) {
      const name = DATA.runs.length > 1 ? `${run.name}, ` : "";
      byId("marks").append(element("li", { class: mark.kind }, `${name}step ${mark.step}, ${mark.kind}: ${mark.text}`));
    }
  }
}

function listenToTools() {
  const themes = ["system", "light", "dark"];
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "system";
    const next = themes[(themes.indexOf(now) + 1) % themes.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    byId("theme").textContent = `Theme: ${next}`;
  });
  byId("smooth").addEventListener("click", () => {
    view.smooth = !view.smooth;
    byId("smooth").setAttribute("aria-pressed", String(view.smooth));
    redrawAll();
  });
  byId("whole").addEventListener("click", () => setRange(wholeRange().low, wholeRange().high));
  for (const id of ["from", "to"]) byId(id).addEventListener("change", () => setRange(Number(byId("from").value), Number(byId("to").value)));
  byId("add").addEventListener("click", () => {
    const figure = byId("metric").value && addMetric(byId("metric").value);
    if (!figure) return;
    redrawAll();
    figure.scrollIntoView({ block: "nearest" });
    figure.querySelector("svg").focus();
  });
}

function start() {
  for (const swatch of document.querySelectorAll(".swatch[data-run]")) {
    if (DATA.runs.length > 1) swatch.style.background = color(Number(swatch.dataset.run));
    else swatch.remove();
  }
  const group = Math.max(...DATA.runs.map((run) => run.curves.group));
  if (group > 1) byId("thinned").textContent = `Curves show the smallest and the largest value of each ${group} steps.`;
  fillMetrics();
  listMarks();
  for (const chart of DATA.charts) addChart(chart, false);
  const charted = new Set(DATA.charts.flatMap((chart) => chart.keys));
  for (const event of DATA.runs.flatMap((run) => run.health)) if (DATA.metrics[event.metric] && !charted.has(event.metric)) addMetric(event.metric);
  if (!byId("charts").children.length) byId("charts").append(element("p", { class: "note" }, "No step is logged yet."));
  for (const run of DATA.runs) {
    addPhases(run);
    addLengths(run);
  }
  if (!byId("phases").children.length) byId("phases").append(element("p", { class: "note" }, "No times are logged yet."));
  if (!byId("histograms").children.length) byId("histograms").append(element("p", { class: "note" }, "No histograms are logged: there are none before the first step, and in runs of earlier versions."));
  addSamples();
  listenToTools();
  setRange(wholeRange().low, wholeRange().high);
}

start();
