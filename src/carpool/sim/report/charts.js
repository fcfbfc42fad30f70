"use strict";
/* Scales, words for numbers, and the four SVG charts. Every chart is drawn from a theme object, never from the page's
   style, so that "Save SVG" can draw the same chart on white for a paper. Text enters the page as text only. */

const THEMES = {
  light: {
    paper: "#ffffff", ink: "#16191d", soft: "#5b6470", faint: "#8a929c", line: "#e2e5e9", grid: "#eceef1", hot: "#d55e00",
    series: ["#0072b2", "#d55e00", "#009e73", "#b4578f", "#e69f00", "#56b4e9", "#4a4f55"],
    ramp: ["#f4f6f8", "#cfe1f0", "#8fbcdd", "#4a90c4", "#1f6fae", "#0d4a80"], haze: "120,126,134",
    jobs: ["#7fb2d9", "#f0a878", "#7fcbb0", "#d3a0c0", "#f0cd7a", "#a9d7f2", "#c5b3e6", "#5f94bd", "#d98f63", "#a8c48a"],
    sizes: ["#f3e4a5", "#b9d48b", "#74bfa0", "#419fa8", "#3b79a3", "#41528f", "#47307a", "#3b1550"], label: "#16191d",
  },
  dark: {
    paper: "#181b1f", ink: "#e8eaed", soft: "#a7afb9", faint: "#7d8691", line: "#2b3037", grid: "#24282e", hot: "#ff9d66",
    series: ["#4da3e0", "#ff8a4c", "#2fc79a", "#e39ac6", "#f5c04a", "#9bd8ff", "#c6cbd2"],
    ramp: ["#1c2025", "#1b3048", "#1d4a74", "#256aa5", "#3c8bcd", "#74b6ed"], haze: "160,168,178",
    jobs: ["#3d79a6", "#a8643a", "#3a8a70", "#8f5f7e", "#9c7a2e", "#5b93b3", "#6f5f9c", "#2d5f88", "#8a5230", "#66804c"],
    sizes: ["#4a2a6a", "#474f96", "#3f74a8", "#3f97a8", "#58b597", "#93c97c", "#d0d878", "#f5e9a0"], label: "#f4f5f7",
  },
};
const DASHES = ["", "7 3", "2 2.5", "9 3 2 3", "4 2", "1 2", "12 3"];
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif";
const UNITS = [["d", 86400, 172800], ["h", 3600, 5400], ["min", 60, 120], ["s", 1, 0]];

const colourOf = (theme, place) => theme.series[place % theme.series.length];
const dashOf = (place) => DASHES[(place + Math.floor(place / THEMES.light.series.length)) % DASHES.length];

function digits(value) {
  if (value === 0) return "0";
  const places = Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}
function human(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  const unit = UNITS.find((one) => Math.abs(seconds) >= one[2]);
  return digits(seconds / unit[1]) + " " + unit[0];
}
/* A point in time, precise enough to tell neighbours apart: 3 d 04:05:06. */
function clock(seconds) {
  const sign = seconds < 0 ? "−" : "", all = Math.abs(seconds), whole = Math.floor(all + 1e-9);
  const two = (value) => String(value).padStart(2, "0");
  if (all < 120) return sign + digits(all) + " s";
  const days = Math.floor(whole / 86400);
  const rest = two(Math.floor(whole / 3600) % 24) + ":" + two(Math.floor(whole / 60) % 60) + ":" + two(whole % 60);
  return sign + (days ? days + " d " : "") + rest;
}
const percent = (share) => (100 * share).toFixed(1) + " %";
const count = (value) => (value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en-US") : digits(value));
const plain = (value) => String(Number(value.toPrecision(6)));

function make(tag, props, ...inside) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (key in node && key !== "list") node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...inside);
  return node;
}
function draw(tag, attributes, ...inside) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...inside);
  return node;
}
const r1 = (value) => Math.round(value * 10) / 10;

function niceStep(span, wanted) {
  const raw = span / wanted, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((one) => one * power).find((step) => step >= raw - 1e-12);
}
function timeStep(span, wanted) {
  const raw = span / wanted;
  if (raw < 1) return niceStep(span, wanted);
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  return steps.find((step) => step >= raw) || 86400 * niceStep(span / 86400, wanted);
}
function timeTicks(low, high, wanted) {
  const step = timeStep(high - low, wanted), ticks = [];
  const unit = step >= 86400 ? UNITS[0] : step >= 3600 ? UNITS[1] : step >= 60 ? UNITS[2] : UNITS[3];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) {
    const value = at / unit[1];
    ticks.push([at, Math.abs(value) < 1e-9 ? "0" : plain(value) + " " + unit[0]]);
  }
  return ticks;
}
function countTicks(high, wanted) {
  const step = Math.max(high <= 1 ? 1 : 0, niceStep(high, wanted)), ticks = [];
  for (let at = 0; at <= high * 1.0001; at += step) ticks.push([at, count(at)]);
  return ticks;
}
const LOG_STOPS = [1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 21600, 86400, 864000, 8640000, 86400000];
const FINE_STOPS = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600,
  7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000];
function logTicks(low, high) {
  const inside = (stop) => stop >= low * 0.999 && stop <= high * 1.001, coarse = LOG_STOPS.filter(inside);
  const stops = coarse.length >= 4 ? coarse : FINE_STOPS.filter(inside);
  const name = (stop) => (stop < 1 ? plain(stop * 1000) + " ms" : stop < 60 ? stop + " s" : stop < 3600 ? stop / 60 + " min"
    : stop < 86400 ? stop / 3600 + " h" : (stop / 86400).toLocaleString("en-US") + " d");
  return stops.map((stop) => [stop, name(stop)]);
}

/* A frame: margins, axes and grid; returns the svg and the two scales. */
function frame(spec) {
  const { theme, width, height, x, y, title, about } = spec;
  const left = spec.left || 52, right = 14, top = 10, bottom = 40;
  const svg = draw("svg", {
    xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "font-family": FONT, "font-size": 12, "aria-label": title + ". " + about,
  }, draw("title", {}, title), draw("desc", {}, about));
  if (spec.backdrop) svg.append(draw("rect", { width, height, fill: theme.paper }));
  const inner = { left, right: width - right, top, bottom: height - bottom };
  const scale = (axis, from, to) => {
    const turn = axis.log ? Math.log10 : (value) => value;
    const a = turn(axis.low), b = turn(axis.high) === a ? a + 1 : turn(axis.high);
    const place = (value) => from + (turn(Math.max(value, axis.log ? axis.low : -Infinity)) - a) / (b - a) * (to - from);
    place.back = (pixel) => { const v = a + (pixel - from) / (to - from) * (b - a); return axis.log ? 10 ** v : v; };
    return place;
  };
  const px = scale(x, inner.left, inner.right), py = scale(y, inner.bottom, inner.top);
  for (const [at, words] of y.ticks) {
    const row = r1(py(at));
    svg.append(draw("line", { x1: inner.left, x2: inner.right, y1: row, y2: row, stroke: theme.grid }));
    svg.append(draw("text", { x: inner.left - 8, y: row + 4, "text-anchor": "end", fill: theme.soft }, words));
  }
  let free = -Infinity;
  for (const [at, words] of x.ticks) {
    const place = r1(px(at)), half = words.length * 3.4;
    const fits = place - half > free + 6 && place + half < width;
    if (fits) free = place + half;
    svg.append(draw("line", { x1: place, x2: place, y1: inner.bottom, y2: inner.bottom + 4, stroke: theme.faint }));
    if (x.grid) svg.append(draw("line", { x1: place, x2: place, y1: inner.top, y2: inner.bottom, stroke: theme.grid }));
    svg.append(draw("text", { x: place, y: inner.bottom + 17, "text-anchor": "middle", fill: theme.soft }, fits ? words : ""));
  }
  svg.append(draw("line", { x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom, stroke: theme.faint }));
  svg.append(draw("text", { x: inner.right, y: height - 5, "text-anchor": "end", fill: theme.soft }, x.name));
  if (y.name) svg.append(draw("text", { x: 4, y: height - 5, fill: theme.soft }, y.name));
  return { svg, inner, px, py };
}

/* For saved figures: the legend that the page shows only once. */
function stampLegend(svg, spec) {
  if (!spec.backdrop) return;
  const rows = spec.runs.map((entry, row) => {
    const y = 22 + row * 17, x = spec.legendLeft ? 66 : spec.width - 30;
    const anchor = spec.legendLeft ? "start" : "end", side = spec.legendLeft ? 1 : -1;
    return draw("g", {},
      draw("line", { x1: x, x2: x + side * 24, y1: y - 4, y2: y - 4, stroke: colourOf(spec.theme, entry.place),
        "stroke-width": 2.2, "stroke-dasharray": spec.dashed ? dashOf(entry.place) : "" }),
      draw("text", { x: x + side * 31, y, "text-anchor": anchor, fill: spec.theme.ink }, entry.run.policy));
  });
  svg.append(draw("g", {}, ...rows));
}

function cdfChart(spec) {
  const { theme, runs, width, of } = spec, name = of === "jct" ? "completion time" : "waiting time";
  const filled = runs.filter((entry) => entry.run[of].x.length);
  if (!filled.length) return null;
  let low = Infinity, high = 0;
  for (const { run } of filled) {
    for (const value of run[of].x) if (value > 0) { low = Math.min(low, value); break; }
    high = Math.max(high, run[of].x[run[of].x.length - 1]);
  }
  if (!Number.isFinite(low)) { low = 0.1; high = 1; }
  low = Math.max(low, high / 1e6);
  if (of === "wait") low = Math.max(low, Math.min(1, high / 100));
  const x = { log: true, low: low / 1.15, high: Math.max(high * 1.15, low * 2), name: name + ", log scale", grid: true };
  x.ticks = logTicks(x.low, x.high);
  const y = { low: 0, high: 1, ticks: [0, 0.25, 0.5, 0.75, 1].map((v) => [v, 100 * v + " %"]), name: "share of jobs" };
  const about = filled.map(({ run }) => `${run.policy}: median ${human(quantile(run[of], 0.5))}`).join("; ");
  const made = frame({ ...spec, x, y, title: "Distribution of " + name, about });
  for (const { run, place } of filled) {
    const curve = run[of];
    let row = made.inner.bottom, path = `M${r1(made.px(x.low))} ${row}`;
    curve.x.forEach((value, at) => {
      path += `H${r1(made.px(value))}V${row = r1(made.py(curve.y[at]))}`;
    });
    path += `H${made.inner.right}`;
    made.svg.append(draw("path", { d: path, fill: "none", stroke: colourOf(theme, place), "stroke-width": 2,
      "stroke-linejoin": "round", "stroke-dasharray": dashOf(place) }));
  }
  stampLegend(made.svg, { ...spec, runs: filled, legendLeft: true, dashed: true });
  made.read = (value) => ({
    head: (of === "jct" ? "finished within " : "waited at most ") + human(value),
    rows: filled.map(({ run, place }) => {
      const share = shareAt(run[of], value);
      return [place, run.policy, percent(share), share];
    }),
  });
  return made;
}
function lastAtMost(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) { const mid = (low + high) >> 1; if (values[mid] <= wanted) low = mid + 1; else high = mid; }
  return low - 1;
}
const shareAt = (curve, value) => { const at = lastAtMost(curve.x, value); return at < 0 ? 0 : curve.y[at]; };
const quantile = (curve, share) => { const at = curve.y.findIndex((y) => y >= share); return at < 0 ? null : curve.x[at]; };

function stepChart(spec) {
  const { theme, runs, width, of, total } = spec, share = of === "busy";
  const filled = runs.filter((entry) => entry.run[of].at.length);
  if (!filled.length || spec.span <= 0) return null;
  const factor = share ? 1 / Math.max(1, total) : 1;
  let peak = share ? 1 : 1;
  for (const { run } of filled) for (const value of run[of].peak) peak = Math.max(peak, value * factor);
  const x = { low: 0, high: spec.span, ticks: timeTicks(0, spec.span, width / 95), name: "time since the first submission" };
  const y = share
    ? { low: 0, high: Math.max(1, peak), ticks: [0, 0.25, 0.5, 0.75, 1].map((v) => [v, 100 * v + " %"]), name: "share of devices" }
    : { low: 0, high: peak * 1.04, ticks: countTicks(peak, 5), name: "jobs waiting" };
  const about = filled.map(({ run }) => `${run.policy}: at most ${share ? percent(Math.max(...run[of].peak) * factor)
    : count(Math.max(...run[of].peak))}`).join("; ");
  const made = frame({ ...spec, x, y, title: share ? "Devices in use over time" : "Jobs waiting over time", about });
  for (const { run, place } of filled) {
    const { at, mean, peak: top } = run[of], colour = colourOf(theme, place);
    const trace = (values) => {
      let path = `M${r1(made.px(at[0]))} ${r1(made.py(values[0] * factor))}`;
      for (let i = 1; i < at.length; i++) path += `H${r1(made.px(at[i]))}V${r1(made.py(values[i] * factor))}`;
      return path;
    };
    if (!share && top.some((value, i) => value > mean[i] * 1.02 + 0.5)) {
      made.svg.append(draw("path", { d: trace(top), fill: "none", stroke: colour, "stroke-width": 0.8, opacity: 0.4 }));
    }
    const line = trace(mean);
    const shade = line + `V${made.inner.bottom}H${r1(made.px(at[0]))}Z`;
    if (!share) made.svg.append(draw("path", { d: shade, fill: colour, opacity: 0.07 }));
    made.svg.append(draw("path", { d: line, fill: "none", stroke: colour, "stroke-width": 1.5, "stroke-linejoin": "round" }));
  }
  stampLegend(made.svg, { ...spec, runs: filled });
  made.read = (value) => ({
    head: clock(value),
    rows: filled.map(({ run, place }) => {
      const at = lastAtMost(run[of].at, value), now = at < 0 ? 0 : run[of].mean[at] * factor;
      return [place, run.policy, share ? percent(now) : count(now) + " waiting", now];
    }),
  });
  return made;
}

/* One band for each size; in it, for every policy, p50 to p99 as a line and the mean as a dot. */
function sizesChart(spec) {
  const { theme, runs, width } = spec;
  const labels = runs.length ? runs[0].run.sizes.map((group) => group.label) : [];
  const values = runs.flatMap(({ run }) => run.sizes.flatMap((g) => [g.avg, g.p50, g.p99])).filter((v) => v > 0);
  if (!values.length) return null;
  const band = Math.max(26, runs.length * 10 + 14), height = Math.max(spec.height, labels.length * band + 50);
  let low = Infinity, high = 0;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  const x = { log: true, low: low / 1.3, high: high * 1.3, name: "completion time, log scale", grid: true };
  x.ticks = logTicks(x.low, x.high);
  const about = "line: median to 99th percentile; dot: mean. The table below has the numbers";
  const made = frame({ ...spec, height, x, y: { low: 0, high: 1, ticks: [], name: "devices" }, title: "Completion time by job size", about });
  const { inner, px, svg } = made, tall = (inner.bottom - inner.top) / labels.length;
  labels.forEach((label, row) => {
    const top = inner.top + row * tall;
    if (row) svg.append(draw("line", { x1: inner.left - 44, x2: inner.right, y1: r1(top), y2: r1(top), stroke: theme.line }));
    svg.append(draw("text", { x: inner.left - 8, y: r1(top + tall / 2 + 4), "text-anchor": "end", fill: theme.ink, "font-weight": 600 }, label));
    const gap = Math.min(15, (tall - 8) / runs.length);
    runs.forEach(({ run, place }, at) => {
      const group = run.sizes[row], y = r1(top + tall / 2 + (at - (runs.length - 1) / 2) * gap), colour = colourOf(theme, place);
      if (group.avg === null) return;
      const words = `${run.policy}, devices ${label}: mean ${human(group.avg)}, median ${human(group.p50)}, 99th percentile ${human(group.p99)}, ${count(group.finished)} of ${count(group.jobs)} jobs finished`;
      svg.append(draw("g", { "data-words": words },
        draw("title", {}, words),
        draw("rect", { x: inner.left, width: inner.right - inner.left, y: y - gap / 2, height: gap, fill: "transparent" }),
        draw("line", { x1: r1(px(group.p50)), x2: r1(px(group.p99)), y1: y, y2: y, stroke: colour, "stroke-width": 2.4, opacity: 0.55, "stroke-linecap": "round" }),
        draw("line", { x1: r1(px(group.p50)), x2: r1(px(group.p50)), y1: y - 3.5, y2: y + 3.5, stroke: colour, "stroke-width": 2 }),
        draw("circle", { cx: r1(px(group.avg)), cy: y, r: 4, fill: colour, stroke: theme.paper, "stroke-width": 1.2 })));
    });
  });
  if (spec.backdrop) stampLegend(svg, { ...spec, runs });
  return made;
}
