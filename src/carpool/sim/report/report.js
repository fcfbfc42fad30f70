/* The page: theme, table, legend, charts, timelines, saving and copying. */

const app = {
  data: JSON.parse(document.getElementById("data").textContent),
  theme: THEMES.light, hidden: new Set(), lines: [], paint: "job", chosen: null, base: 0, waiting: false,
};
const by = (id) => document.getElementById(id);

function showError(message) {
  document.body.dataset.error = message;
  if (!document.querySelector(".fault")) {
    document.querySelector("main").prepend(make("p", { className: "fault", role: "alert" }, "Error on this page: " + message));
  }
}
window.addEventListener("error", (event) => showError(event.message));
window.addEventListener("unhandledrejection", (event) => showError(String(event.reason)));

/* ---- theme ---- */
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const themes = ["auto", "light", "dark"];
let chosenTheme = "auto";
try { chosenTheme = themes.includes(localStorage.getItem("carpool-theme")) ? localStorage.getItem("carpool-theme") : "auto"; } catch { /* not available for file:// in some browsers */ }
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  app.theme = THEMES[name];
  document.querySelectorAll("[data-swatch]").forEach((node) => { node.style.background = colourOf(app.theme, Number(node.dataset.swatch)); });
}
function applyWish() {
  setTheme(chosenTheme === "auto" ? (dark.matches ? "dark" : "light") : chosenTheme);
  by("theme").textContent = "Theme: " + chosenTheme;
}
by("theme").addEventListener("click", () => {
  chosenTheme = themes[(themes.indexOf(chosenTheme) + 1) % themes.length];
  try { localStorage.setItem("carpool-theme", chosenTheme); } catch { /* not kept, still applied */ }
  applyWish();
  drawAll();
});
dark.addEventListener("change", () => { applyWish(); drawAll(); });
window.addEventListener("beforeprint", () => { app.hush(); setTheme("light"); drawAll(660); });
window.addEventListener("afterprint", () => { applyWish(); drawAll(); });
by("print").addEventListener("click", () => window.print());

/* ---- read-out ---- */
app.say = (words) => { by("said").textContent = words; };
app.hush = () => {
  by("tip").hidden = true;
  if (app.chosen !== null && !app.kept) { app.chosen = null; app.redraw(); }
};
function tip(x, y, ...inside) {
  const box = by("tip");
  box.replaceChildren(...inside);
  box.hidden = false;
  const w = box.offsetWidth, h = box.offsetHeight;
  box.style.left = Math.max(6, x + 16 + w > window.innerWidth ? x - w - 14 : x + 16) + "px";
  box.style.top = Math.max(6, Math.min(window.innerHeight - h - 6, y + 14)) + "px";
}
function pairsOf(pairs) {
  return make("div", { className: "pairs" }, ...pairs.flatMap(([name, value]) => [make("span", {}, name), make("span", {}, value)]));
}

/* ---- table ---- */
function deltas() {
  const rows = [...document.querySelectorAll("#comparison tbody tr")];
  const base = rows.find((row) => Number(row.dataset.run) === app.base);
  for (const row of rows) {
    row.classList.toggle("is-base", row === base && rows.length > 1);
    for (const cell of row.querySelectorAll("td[data-key]")) {
      const out = cell.querySelector(".delta");
      if (!out) continue;
      const from = base.querySelector(`td[data-key="${cell.dataset.key}"]`).dataset.value;
      out.className = "delta";
      out.textContent = "";
      if (row === base || from === undefined || cell.dataset.value === undefined) continue;
      const was = Number(from), is = Number(cell.dataset.value);
      if (was === is || (was && Math.abs(is - was) < 0.0005 * Math.abs(was))) { out.textContent = "="; continue; }
      const change = was ? (is - was) / Math.abs(was) : null;
      const sense = document.querySelector(`th[data-sort="${cell.dataset.key}"]`).dataset.sense;
      const shown = change === null ? (is > 0 ? "+" : "−") + count(Math.abs(is)) : Math.abs(change) >= 9.995 ? "×" + digits(is / was) : (change > 0 ? "+" : "−") + (100 * Math.abs(change)).toFixed(Math.abs(change) < 0.0995 ? 1 : 0) + " %";
      out.textContent = shown;
      out.classList.add((is < was) === (sense === "min") ? "good" : "bad");
    }
  }
}
function sortable() {
  document.querySelectorAll("#comparison th[data-sort]").forEach((head) => {
    const button = make("button", { type: "button" }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending", key = head.dataset.sort;
      document.querySelectorAll("#comparison th[aria-sort]").forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => (key === "policy" ? row.querySelector("th").textContent : Number(row.querySelector(`td[data-key="${key}"]`).dataset.value ?? NaN));
      const rows = [...document.querySelectorAll("#comparison tbody tr")].sort((one, two) => {
        const a = value(one), b = value(two);
        if (key === "policy") return (up ? 1 : -1) * a.localeCompare(b);
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
        return (up ? 1 : -1) * (a - b);
      });
      document.querySelector("#comparison tbody").append(...rows);
    });
  });
}
function tableText(kind) {
  const heads = [...document.querySelectorAll("#comparison thead th")].map((head) => {
    const unit = head.querySelector(".unit")?.textContent, name = (head.querySelector("button") || head).firstChild.textContent.trim();
    return unit ? `${name} (${unit})` : name;
  });
  const rows = [...document.querySelectorAll("#comparison tbody tr")].map((row) => [
    { text: app.data.runs[Number(row.dataset.run)].policy },
    ...[...row.querySelectorAll("td")].map((cell) => ({ text: cell.querySelector(".v").textContent, exact: cell.dataset.value ?? "", best: cell.classList.contains("best") })),
  ]);
  if (kind === "csv") {
    const keys = ["policy", ...[...document.querySelectorAll("#comparison thead th")].slice(1).map((head) => head.dataset.sort)];
    const cell = (words) => (/[",\n\r]/.test(words) ? '"' + words.replaceAll('"', '""') + '"' : words);
    return [keys.join(","), ...rows.map((row) => row.map((one, at) => cell(at ? one.exact : one.text)).join(","))].join("\n") + "\n";
  }
  if (kind === "md") {
    const cell = (one) => { const words = one.text.replaceAll("|", "\\|").replaceAll("\n", " "); return one.best ? `**${words}**` : words; };
    return [`| ${heads.join(" | ")} |`, `|---|${"---:|".repeat(heads.length - 1)}`, ...rows.map((row) => `| ${row.map(cell).join(" | ")} |`)].join("\n") + "\n";
  }
  const safe = (words) => words.replace(/[\\{}$&#%_^~]/g, (one) => ({ "\\": "\\textbackslash{}", "^": "\\^{}", "~": "\\~{}" }[one] || "\\" + one)).replaceAll("–", "--");
  const cell = (one) => (one.best ? `\\textbf{${safe(one.text)}}` : safe(one.text));
  return [`\\begin{tabular}{l${"r".repeat(heads.length - 1)}}`, "\\toprule", heads.map(safe).join(" & ") + " \\\\", "\\midrule",
    ...rows.map((row) => row.map(cell).join(" & ") + " \\\\"), "\\bottomrule", "\\end{tabular}"].join("\n") + "\n";
}
async function copy(words) {
  try { await navigator.clipboard.writeText(words); return true; } catch {
    const area = make("textarea", { value: words });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/* ---- charts ---- */
const CHARTS = {
  cdf: (spec) => cdfChart({ ...spec, of: by("cdf-of").value, height: 350 }),
  sizes: (spec) => sizesChart({ ...spec, height: 350 }),
  queue: (spec) => stepChart({ ...spec, of: "queue", height: 230 }),
  busy: (spec) => stepChart({ ...spec, of: "busy", height: 210 }),
};
const EMPTY = {
  cdf: "No job finished in these runs.",
  sizes: "No job finished in these runs.", queue: "These runs have no samples.", busy: "These runs have no samples.",
};
const shown = () => app.data.runs.map((run, place) => ({ run, place })).filter((entry) => !app.hidden.has(entry.place));
function specFor(theme, width, backdrop) {
  return { theme, width, runs: shown(), span: app.data.span_s, total: app.data.devices, backdrop };
}
function drawChart(id, paper) {
  const host = by(id), wide = host.closest(".pair") ? 0.48 : 1;
  const width = paper ? paper * wide : Math.max(300, host.clientWidth);
  const none = app.hidden.size === app.data.runs.length && app.data.runs.length;
  const made = CHARTS[id](specFor(app.theme, width, false));
  document.querySelector(`[data-save="${id}"]`).disabled = !made;
  if (!made) {
    host.replaceChildren(make("p", { className: "empty" }, none ? "All policies are hidden: choose one in the legend." : EMPTY[id]));
    return;
  }
  host.replaceChildren(made.svg);
  if (made.read) readOut(host, made); else titled(made);
}
function titled(made) {
  made.svg.addEventListener("pointermove", (event) => {
    const group = event.target.closest("[data-words]");
    if (group) tip(event.clientX, event.clientY, group.dataset.words); else app.hush();
  });
  made.svg.addEventListener("pointerleave", app.hush);
}
function readOut(host, made) {
  const { svg, inner, px, py, read } = made, theme = app.theme;
  const cross = draw("g", { visibility: "hidden" }, draw("line", { y1: inner.top, y2: inner.bottom, stroke: theme.soft, "stroke-dasharray": "3 3" }));
  svg.append(cross);
  svg.setAttribute("tabindex", "0");
  let at = (inner.left + inner.right) / 2;
  const show = (pixel, x, y) => {
    at = Math.min(inner.right, Math.max(inner.left, pixel));
    const found = read(px.back(at));
    cross.setAttribute("visibility", "visible");
    cross.firstChild.setAttribute("x1", at);
    cross.firstChild.setAttribute("x2", at);
    cross.replaceChildren(cross.firstChild, ...found.rows.map((row) => draw("circle", { cx: at, cy: py(row[3]), r: 3.5, fill: colourOf(theme, row[0]), stroke: theme.paper })));
    const rows = found.rows.map(([place, name, value]) => {
      const dot = make("span", { className: "dot" });
      dot.style.background = colourOf(theme, place);
      return [make("span", {}, dot, name), value];
    });
    tip(x, y, make("b", {}, found.head), pairsOf(rows));
  };
  const hide = () => { cross.setAttribute("visibility", "hidden"); app.hush(); };
  const ratio = () => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width || 1;
  svg.addEventListener("pointermove", (event) => show((event.clientX - svg.getBoundingClientRect().left) / ratio(), event.clientX, event.clientY));
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
    if (!step) return;
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    show(at + step, box.left + (at + step) * ratio(), box.top + 20);
  });
}
function saveBlob(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function svgText(id) {
  const made = CHARTS[id](specFor(THEMES.light, id === "cdf" || id === "sizes" ? 620 : 900, true));
  return made && '<?xml version="1.0" encoding="UTF-8"?>\n' + new XMLSerializer().serializeToString(made.svg);
}
function sizesTable() {
  const runs = app.data.runs, labels = runs.length ? runs[0].sizes.map((group) => group.label) : [];
  const head = make("tr", {}, make("th", { scope: "col" }, "devices"), ...["policy", "finished", "mean", "median", "p99"].map((name) => make("th", { scope: "col" }, name)));
  const rows = labels.flatMap((label, row) => runs.map((run) => {
    const group = run.sizes[row];
    const cells = [run.policy, `${count(group.finished)} of ${count(group.jobs)}`, human(group.avg), human(group.p50), human(group.p99)];
    return make("tr", {}, make("th", { scope: "row" }, label), ...cells.map((words) => make("td", {}, words)));
  }));
  by("sizes-table").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

/* ---- legend ---- */
function legend() {
  by("legend").replaceChildren(...app.data.runs.map((run, place) => {
    const line = draw("svg", { width: 26, height: 10, "aria-hidden": "true" },
      draw("line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: colourOf(app.theme, place), "stroke-width": 3, "stroke-dasharray": dashOf(place) }));
    const button = make("button", { type: "button", title: "Show or hide " + run.policy }, line, make("span", {}, run.policy));
    button.setAttribute("aria-pressed", String(!app.hidden.has(place)));
    button.addEventListener("click", () => {
      if (app.hidden.has(place)) app.hidden.delete(place); else app.hidden.add(place);
      drawAll();
      by("legend").children[place].focus();
    });
    return button;
  }));
}

/* ---- timelines ---- */
app.redraw = () => {
  if (app.waiting) return;
  app.waiting = true;
  requestAnimationFrame(() => { app.waiting = false; app.lines.forEach((line) => line.render(app.theme)); });
};
app.look = (line, view) => {
  const now = line.clamp(view);
  (by("linked").checked ? app.lines : [line]).forEach((one) => { one.view = { ...now }; });
  app.redraw();
};
app.point = (line, found, x, y) => {
  const told = found && line.tell(found), job = told && told.job !== undefined ? told.job : null;
  if (job !== app.chosen && !app.kept) { app.chosen = job; app.redraw(); }
  if (told) tip(x, y, make("b", {}, told.head), pairsOf(told.pairs)); else by("tip").hidden = true;
};
function lineBlock(run, place) {
  const title = make("h3", {}, make("span", { className: "swatch" }), run.policy);
  title.firstChild.dataset.swatch = place;
  const canvas = make("canvas", { tabIndex: 0 }, "The comparison table has the numbers of this timeline.");
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `Device timeline of ${run.policy}: jobs on each device over time. Arrow keys pan, plus and minus zoom time, brackets zoom devices, zero fits all.`);
  const line = new Timeline(app, run, place, canvas);
  const button = (words, about, act) => {
    const made = make("button", { type: "button", title: about }, words);
    made.setAttribute("aria-label", `${about} (${run.policy})`);
    made.addEventListener("click", act);
    return made;
  };
  const tools = make("div", { className: "tools" },
    make("span", {}, "time"), button("−", "Zoom out in time", () => line.zoom(2, 1)), button("+", "Zoom in on time", () => line.zoom(0.5, 1)),
    make("span", {}, "devices"), button("−", "Show more devices", () => line.zoom(1, 2)), button("+", "Show fewer devices", () => line.zoom(1, 0.5)),
    button("Fit", "Fit the whole run", () => app.look(line, line.whole)),
    button("Save PNG", "Save this timeline as an image", () => canvas.toBlob((blob) => saveBlob(blob, `timeline-${place + 1}.png`))));
  const block = make("div", { className: "line" }, make("div", { className: "head" }, title, tools), canvas);
  block.dataset.place = place;
  return { line, block, tools, canvas };
}
async function timelines() {
  const host = by("lines");
  if (typeof DecompressionStream === "undefined") {
    host.replaceChildren(make("p", { className: "empty" }, "This browser cannot decompress the timelines: it lacks DecompressionStream. The rest of the page works."));
    return;
  }
  const packed = await unpackAll(app.data.table);
  const jobs = { ids: JSON.parse(new TextDecoder().decode(packed.ids)), submit: packed.submit, devices: packed.devices };
  app.jobs = jobs;
  for (const [place, run] of app.data.runs.entries()) {
    const { line, block, tools, canvas } = lineBlock(run, place);
    host.append(block);
    if (!run.holdings.start.count && !run.haze) {
      tools.remove();
      canvas.replaceWith(make("p", { className: "empty" }, "No device was allocated in this run."));
      continue;
    }
    await line.load(jobs);
    app.lines.push(line);
  }
  document.querySelectorAll(".for-lines").forEach((node) => { node.hidden = !app.lines.length; });
  if (!app.data.runs.length) host.replaceChildren(make("p", { className: "empty" }, "The report has no recorded runs."));
}
function paintKey() {
  const theme = app.theme, boxes = (colours) => draw("svg", { width: colours.length * 16, height: 12, "aria-hidden": "true" },
    ...colours.map((colour, at) => draw("rect", { x: at * 16, width: 16, height: 12, fill: colour })));
  const parts = [make("span", {}, "zoomed out, devices allocated: 0"), boxes(theme.ramp), make("span", {}, "100 %")];
  if (app.paint === "size") parts.push(make("span", { className: "apart" }, "zoomed in, requested devices: 1"), boxes(theme.sizes), make("span", {}, "more than 64"));
  else parts.push(make("span", { className: "apart" }, "zoomed in: one colour per job" + (app.data.runs.some((run) => run.haze) ? ", grey for allocations too short to draw" : "")));
  by("paint-key").replaceChildren(...(app.lines.length ? parts : []));
}
function find(wanted) {
  app.kept = false;
  app.chosen = null;
  const job = app.jobs ? app.jobs.ids.indexOf(wanted) : -1;
  if (!wanted) { app.say(""); return app.redraw(); }
  if (job < 0) { app.say("no job with this name in the timelines"); return app.redraw(); }
  app.kept = true;
  app.chosen = job;
  const spans = app.lines.map((line) => {
    const { held } = line, tick = app.data.tick_s;
    let low = Infinity, high = -Infinity, first = Infinity, stop = -Infinity;
    held.job.forEach((one, i) => {
      if (one !== job) return;
      low = Math.min(low, held.start[i] * tick); high = Math.max(high, (held.start[i] + held.length[i]) * tick);
      first = Math.min(first, held.first[i]); stop = Math.max(stop, held.first[i] + held.width[i]);
    });
    return { line, low, high, first, stop };
  }).filter((one) => one.low < Infinity);
  by("linked").checked = false;
  for (const { line, low, high, first, stop } of spans) {
    const wide = Math.max(high - low, line.whole.t1 / 2000), middle = (first + stop) / 2, tall = Math.max(stop - first, 24);
    app.look(line, { t0: low - wide, t1: high + wide, d0: middle - tall * 0.7, d1: middle + tall * 0.7 });
  }
  app.say(`found in ${spans.length} of ${app.lines.length} timelines`);
}

/* ---- start ---- */
function drawAll(paper) {
  legend();
  Object.keys(CHARTS).forEach((id) => drawChart(id, paper));
  document.querySelectorAll(".line").forEach((block) => { block.hidden = app.hidden.has(Number(block.dataset.place)); });
  paintKey();
  app.lines.forEach((line) => line.render(app.theme));
}
function wire() {
  const base = by("baseline");
  base.append(...app.data.runs.map((run, place) => make("option", { value: place }, run.policy)));
  base.addEventListener("change", () => { app.base = Number(base.value); deltas(); });
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", async () => {
    const done = await copy(tableText(button.dataset.copy));
    by("copied").textContent = done ? "copied" : "the browser denied access to the clipboard";
    setTimeout(() => { by("copied").textContent = ""; }, 2500);
  }));
  document.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => {
    const words = svgText(button.dataset.save);
    if (words) saveBlob(new Blob([words], { type: "image/svg+xml" }), button.dataset.save + ".svg");
  }));
  by("cdf-of").addEventListener("change", () => drawChart("cdf"));
  by("paint").addEventListener("change", () => { app.paint = by("paint").value; paintKey(); app.redraw(); });
  by("fit").addEventListener("click", () => { app.lines.forEach((line) => { line.view = { ...line.whole }; }); app.redraw(); });
  by("find").addEventListener("change", () => find(by("find").value.trim()));
  let pause = 0;
  window.addEventListener("resize", () => { clearTimeout(pause); pause = setTimeout(drawAll, 120); });
}
async function start() {
  applyWish();
  sortable();
  wire();
  deltas();
  sizesTable();
  drawAll();
  await timelines();
  applyWish();
  drawAll();
  document.body.dataset.ready = "1";
}
start().catch((error) => showError(String(error && error.stack || error)));
