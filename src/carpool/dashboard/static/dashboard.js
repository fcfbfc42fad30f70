// Refreshes the panels of a page on events, and adds keyboard navigation. Pages work without it, but do not update.
"use strict";

const root = document.documentElement;
const THEMES = ["auto", "dark", "light"];

function setTheme(name) {
  if (name === "auto") delete root.dataset.theme;
  else root.dataset.theme = name;
  const button = document.getElementById("theme");
  if (button) button.setAttribute("aria-label", `Theme: ${name === "auto" ? "automatic" : name}`);
}

function theme() {
  try { return localStorage.getItem("carpool-theme") || "auto"; } catch { return "auto"; }
}

setTheme(theme()); // before the first paint

document.addEventListener("DOMContentLoaded", () => {
  setTheme(theme());
  listen();
  watchKeys();
  watchFilter();
  watchPointer();
  watchUpload();
  document.querySelectorAll("pre.log").forEach(toEnd);
});

// ------------------------------------------------------------------------------------------------------------- panels
const panels = () => [...document.querySelectorAll("[data-panel]")];
const waiting = new Map(); // panel -> timer
const fetched = new Map(); // panel -> time of its last request

function setLive(state, label) {
  const live = document.getElementById("live");
  live.dataset.state = state;
  live.lastElementChild.textContent = label;
}

function listen() {
  if (!panels().some((panel) => panel.dataset.on)) return;
  const source = new EventSource("/dashboard/events");
  setLive("off", "connecting");
  source.onopen = () => {
    if (document.getElementById("live").dataset.state === "lost") panels().forEach((panel) => refresh(panel));
    setLive("live", "live");
  };
  source.onerror = () => setLive("lost", "connection lost");
  source.onmessage = (message) => {
    const event = JSON.parse(message.data);
    for (const panel of panels()) {
      const kinds = (panel.dataset.on || "").split(" ");
      const isMine = !panel.dataset.job || event.jobs === null || event.jobs.includes(panel.dataset.job);
      if (event.kinds.includes("missed") || (isMine && event.kinds.some((kind) => kinds.includes(kind)))) refresh(panel);
    }
  };
  addEventListener("pagehide", () => source.close());
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) panels().filter((panel) => panel.dataset.on).forEach((panel) => refresh(panel));
  });
  setInterval(() => {
    for (const panel of panels()) {
      const every = Number(panel.dataset.every || 0);
      if (every && Date.now() - (fetched.get(panel) || loaded) > 1000 * every) refresh(panel);
    }
  }, 500);
}

const loaded = Date.now();

function refresh(panel) {
  if (document.hidden || waiting.has(panel)) return;
  const rest = Number(panel.dataset.rest || 800);
  const wait = Math.max(50, (fetched.get(panel) || 0) + rest - Date.now());
  waiting.set(panel, setTimeout(() => {
    waiting.delete(panel);
    fetched.set(panel, Date.now());
    fetchPanel(panel);
  }, wait));
}

async function fetchPanel(panel) {
  const address = new URL(location.href);
  address.hash = "";
  address.searchParams.set("panel", panel.dataset.panel);
  const slow = setTimeout(() => panel.setAttribute("aria-busy", "true"), 600);
  try {
    const response = await fetch(address, { headers: { Accept: "text/html" } });
    if (response.redirected || response.status === 401) return location.reload(); // the session has ended
    const text = await response.text();
    panel.classList.toggle("stale", !response.ok);
    if (response.ok && !isInUse(panel)) swap(panel, text);
  } catch {
    panel.classList.add("stale");
    setLive("lost", "connection lost");
  } finally {
    clearTimeout(slow);
    panel.removeAttribute("aria-busy");
  }
}

function isInUse(panel) {
  if (panel.querySelector("details.confirm[open]") || panel.querySelector(".zoom")) return true;
  const selected = getSelection();
  return !selected.isCollapsed && panel.contains(selected.anchorNode);
}

function swap(panel, html) {
  const focused = panel.contains(document.activeElement) ? document.activeElement.closest("[data-id]") : null;
  const scrolls = [...panel.querySelectorAll(".scroll, .log, .story")].map((each) => [
    each.scrollLeft, each.scrollTop, each.scrollTop + each.clientHeight >= each.scrollHeight - 8,
  ]);
  panel.innerHTML = html;
  [...panel.querySelectorAll(".scroll, .log, .story")].forEach((each, place) => {
    if (!scrolls[place]) return toEnd(each);
    [each.scrollLeft, each.scrollTop] = scrolls[place];
    if (scrolls[place][2]) toEnd(each);
  });
  if (focused) panel.querySelector(`[data-id="${CSS.escape(focused.dataset.id)}"]`)?.focus({ preventScroll: true });
}

function toEnd(element) {
  if (element.matches(".log")) element.scrollTop = element.scrollHeight;
}

// -------------------------------------------------------------------------------------------------------------- keys
function watchKeys() {
  const help = document.getElementById("help");
  const turnTheme = () => {
    const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
    try { localStorage.setItem("carpool-theme", next); } catch { /* not stored: applies to this page only */ }
    setTheme(next);
  };
  document.getElementById("theme").addEventListener("click", turnTheme);
  document.getElementById("keys").addEventListener("click", () => help.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const isTyping = event.target.matches("input, textarea, select");
    if (event.key === "Escape") {
      if (isTyping) event.target.blur();
      document.querySelectorAll("details.confirm[open]").forEach((each) => { each.open = false; });
      return;
    }
    if (isTyping) return;
    const filter = document.getElementById("filter");
    const act = {
      "?": () => help.showModal(),
      "/": () => filter ? filter.select() : location.assign("/jobs"),
      "t": turnTheme,
      "j": () => step(1),
      "k": () => step(-1),
      "Enter": () => event.target.dataset.href && follow(event.target.dataset.href),
    }[event.key];
    const page = { 1: "/cluster", 2: "/jobs", 3: "/results", 4: "/decisions", 5: "/compare", 6: "/federations" }[event.key];
    const link = document.querySelector(`a[data-key="${CSS.escape(event.key === "=" ? "+" : event.key)}"]`);
    if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
    if (!act && !page && !link) return;
    if (link && event.target.closest("pre, .scroll") && event.key.startsWith("Arrow")) return;
    event.preventDefault();
    if (act) act();
    else location.assign(page || link.href);
  });
}

function step(by) {
  const rows = [...document.querySelectorAll("main [data-id]")];
  const at = rows.indexOf(document.activeElement.closest("[data-id]"));
  const next = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by))];
  next?.focus({ preventScroll: true });
  next?.scrollIntoView({ block: "nearest" });
}

function follow(address) {
  location.assign(address);
}

function watchFilter() {
  const field = document.getElementById("filter");
  if (!field) return;
  let timer = 0;
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const address = new URL(location.href);
      if (field.value) address.searchParams.set("q", field.value);
      else address.searchParams.delete("q");
      address.searchParams.delete("page");
      history.replaceState(null, "", address);
      fetchPanel(document.querySelector('[data-panel="jobs"]'));
    }, 180);
  });
  if (field.value && matchMedia("(pointer: fine)").matches) field.setSelectionRange(field.value.length, field.value.length);
}

// ----------------------------------------------------------------------------------------------------------- pointer
function watchPointer() {
  const tip = document.getElementById("tip");
  const show = (event, text) => {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  };
  let drag = null;
  document.addEventListener("pointermove", (event) => {
    if (drag) return drag.move(event);
    const block = event.target.closest?.("[data-tip]");
    highlight(block);
    show(event, block ? block.dataset.tip : reading(event));
  });
  document.addEventListener("pointerleave", () => show(null, ""));
  document.addEventListener("click", (event) => {
    for (const open of document.querySelectorAll("details.confirm[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
    const row = event.target.closest("tr[data-href]");
    if (row && !event.target.closest("a, button") && getSelection().isCollapsed) follow(row.dataset.href);
  });
  document.addEventListener("pointerdown", (event) => {
    const lane = event.target.closest?.(".lane, .use td");
    const table = event.target.closest?.(".lanes[data-since]");
    if (!lane || !table || event.button !== 0 || event.pointerType === "touch") return;
    drag = dragging(table, lane, event.clientX, () => { drag = null; });
  });
  document.addEventListener("dragstart", (event) => event.target.closest(".lanes") && event.preventDefault());
}

function highlight(block) {
  const table = document.querySelector(".lanes.condensed");
  if (!table) return;
  table.querySelectorAll(".lit").forEach((each) => each.classList.remove("lit"));
  table.classList.toggle("dim", Boolean(block));
  if (!block) return;
  const link = block.closest("a");
  if (link) table.querySelectorAll(`a[href="${CSS.escape(link.getAttribute("href"))}"]`).forEach((each) => each.classList.add("lit"));
}

function dragging(table, lane, from, done) {
  const box = lane.getBoundingClientRect();
  const whole = table.getBoundingClientRect();
  const [since, until] = [Number(table.dataset.since), Number(table.dataset.until)];
  const at = (x) => since + (until - since) * Math.min(1, Math.max(0, (x - box.left) / box.width));
  let zoom = null;
  const move = (event) => {
    if (!zoom && Math.abs(event.clientX - from) > 6) {
      zoom = document.createElement("div");
      zoom.className = "zoom";
      table.parentElement.append(zoom);
      zoom.style.top = `${whole.top + scrollY}px`;
      zoom.style.height = `${whole.height}px`;
    }
    if (!zoom) return;
    const [left, right] = [Math.max(box.left, Math.min(from, event.clientX)), Math.min(box.right, Math.max(from, event.clientX))];
    zoom.style.left = `${left + scrollX}px`;
    zoom.style.width = `${right - left}px`;
  };
  const end = (event) => {
    removeEventListener("pointerup", end);
    done();
    if (!zoom) return;
    zoom.remove();
    addEventListener("click", (click) => { click.preventDefault(); click.stopPropagation(); }, { capture: true, once: true });
    const address = new URL(location.href);
    address.searchParams.delete("last");
    address.searchParams.set("from", Math.min(at(from), at(event.clientX)).toFixed(0));
    address.searchParams.set("to", Math.max(at(from), at(event.clientX)).toFixed(0));
    setTimeout(() => location.assign(address), 0);
  };
  addEventListener("pointerup", end);
  return { move };
}

// Values of a chart's curves at the pointer.
function reading(event) {
  document.querySelectorAll(".cross").forEach((each) => each.remove());
  const plot = event.target.closest?.(".plot");
  const curves = plot ? [...plot.querySelectorAll(".curve")] : [];
  if (!curves.length) return "";
  const box = plot.getBoundingClientRect();
  const figure = plot.closest("figure");
  const all = curves.map((curve) => ({
    name: curve.dataset.name, xs: curve.dataset.xs.split(" ").map(Number), ys: curve.dataset.ys.split(" ").map(Number),
  }));
  const low = Math.min(...all.map((each) => each.xs[0]));
  const high = Math.max(...all.map((each) => each.xs.at(-1)));
  const x = low + (high - low) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  const cross = document.createElement("i");
  cross.className = "cross";
  figure.append(cross);
  cross.style.left = `${event.clientX - figure.getBoundingClientRect().left}px`;
  cross.style.top = `${box.top - figure.getBoundingClientRect().top}px`;
  cross.style.height = `${box.height}px`;
  return all.map(({ name, xs, ys }) => {
    const next = xs.findIndex((each) => each > x);
    const place = next < 0 ? xs.length - 1 : Math.max(0, next - 1);
    return `${name} ${ys[place]}`;
  }).join("\n");
}

// ----------------------------------------------------------------------------------------------------------- reports
function watchUpload() {
  const field = document.querySelector("input[data-into]");
  field?.addEventListener("change", async () => {
    const file = field.files[0];
    if (!file) return;
    const form = field.form;
    form.elements.report.value = await file.text();
    form.elements.name.value = file.name;
    form.requestSubmit();
  });
}
