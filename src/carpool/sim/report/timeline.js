/* Device timelines: unpacking the columns and drawing them on a canvas at two levels of detail. */

const GUTTER = 78, HEAD = 8, FOOT = 24, HEAT_COLUMN = 2, MOST_RECTANGLES = 6000, STATES = [
  "blocked", "waiting", "running", "paused", "finished", "failed", "cancelled"];

async function unpack(packed) {
  const text = atob(packed.data), squeezed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) squeezed[i] = text.charCodeAt(i);
  const stream = new Blob([squeezed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  if (packed.bytes === 1) return planes;
  const n = packed.count, out = new Int32Array(n);
  for (let i = 0; i < n; i++) out[i] = planes[i] | planes[n + i] << 8 | planes[2 * n + i] << 16 | planes[3 * n + i] << 24;
  if (packed.delta) for (let i = 1; i < n; i++) out[i] += out[i - 1];
  return out;
}
async function unpackAll(columns) {
  const names = Object.keys(columns), parts = await Promise.all(names.map((name) => unpack(columns[name])));
  return Object.fromEntries(names.map((name, place) => [name, parts[place]]));
}

/* Jobs that share a device get lanes inside its row: the lowest offset that is free on all their devices. */
function shareLanes(held, devices) {
  const offset = new Float32Array(held.start.length), open = new Map();
  for (let i = 0; i < offset.length; i++) {
    if (held.permille[i] >= 1000) continue;
    const from = held.start[i], size = held.permille[i] / 1000, taken = [];
    for (let d = held.first[i]; d < Math.min(devices, held.first[i] + held.width[i]); d++) {
      const still = (open.get(d) || []).filter((one) => one[0] > from);
      open.set(d, still);
      for (const one of still) taken.push([one[1], one[2]]);
    }
    taken.sort((a, b) => a[0] - b[0]);
    let low = 0;
    for (const [start, stop] of taken) { if (start - low >= size - 1e-6) break; low = Math.max(low, stop); }
    if (low + size > 1.001) low = Math.max(0, 1 - size);
    offset[i] = low;
    for (let d = held.first[i]; d < held.first[i] + held.width[i]; d++) {
      open.get(d)?.push([from + held.length[i], low, low + size]);
    }
  }
  return offset;
}

function rampTable(stops) {
  const rgb = stops.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: 65 }, (_, i) => {
    const at = i / 64 * (rgb.length - 1), low = Math.min(rgb.length - 2, Math.floor(at)), part = at - low;
    return rgb[low].map((value, k) => Math.round(value + (rgb[low + 1][k] - value) * part));
  });
}

class Timeline {
  constructor(app, run, place, canvas) {
    Object.assign(this, { app, run, place, canvas, held: null, haze: null, hover: null });
    this.whole = { t0: 0, t1: Math.max(app.data.span_s, 1e-3), d0: 0, d1: Math.max(1, app.data.devices) };
    this.view = { ...this.whole };
    const rows = app.data.devices;
    this.height = HEAD + FOOT + (rows <= 24 ? Math.max(84, rows * (rows <= 8 ? 30 : 20)) : Math.min(340, Math.max(300, rows * 3)));
    this.listen();
  }

  async load(jobs) {
    this.jobs = jobs;
    this.held = await unpackAll(this.run.holdings);
    this.ends = new Map(Array.from(this.held.jobs, (job, at) => [job, at]));
    this.offset = shareLanes(this.held, this.app.data.devices);
    if (this.run.haze) this.haze = { ...this.run.haze, grid: await unpack(this.run.haze.grid) };
  }

  get plot() { return { left: GUTTER, right: this.width - 10, top: HEAD, bottom: this.height - FOOT }; }
  x(t) { const p = this.plot; return p.left + (t - this.view.t0) / (this.view.t1 - this.view.t0) * (p.right - p.left); }
  y(d) { const p = this.plot; return p.top + (d - this.view.d0) / (this.view.d1 - this.view.d0) * (p.bottom - p.top); }
  time(x) { const p = this.plot; return this.view.t0 + (x - p.left) / (p.right - p.left) * (this.view.t1 - this.view.t0); }
  device(y) { const p = this.plot; return this.view.d0 + (y - p.top) / (p.bottom - p.top) * (this.view.d1 - this.view.d0); }

  visible() {
    const { held, view } = this, tick = this.app.data.tick_s, found = [];
    const from = view.t0 / tick, to = view.t1 / tick;
    for (let i = 0; i < held.start.length; i++) {
      if (held.start[i] > to) break;
      if (held.start[i] + held.length[i] < from || held.first[i] >= view.d1 || held.first[i] + held.width[i] <= view.d0) continue;
      found.push(i);
    }
    return found;
  }

  render(theme) {
    if (!this.held) return;
    this.width = Math.max(320, this.canvas.clientWidth || this.canvas.parentNode.clientWidth || 900);
    const ratio = Math.max(1.5, window.devicePixelRatio || 1), ctx = this.ctx = this.canvas.getContext("2d");
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = this.height + "px";
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.fillStyle = theme.paper;
    ctx.fillRect(0, 0, this.width, this.height);
    ctx.font = "11px " + FONT;
    const seen = this.visible(), p = this.plot;
    this.rowHeight = (p.bottom - p.top) / (this.view.d1 - this.view.d0);
    this.detail = this.rowHeight >= 3 && seen.length <= MOST_RECTANGLES;
    ctx.save();
    ctx.beginPath(); ctx.rect(p.left, p.top, p.right - p.left, p.bottom - p.top); ctx.clip();
    if (this.detail) this.rectangles(theme, seen); else this.heat(theme, seen);
    this.nodeLines(theme);
    this.outline(theme, seen);
    ctx.restore();
    this.axes(theme);
    this.marks(theme);
    if (this.box) {
      ctx.strokeStyle = theme.ink; ctx.setLineDash([4, 3]); ctx.strokeRect(...this.box); ctx.setLineDash([]);
    }
  }

  /* Rows of the heat strip: devices, nodes, groups of small nodes, or slices of very large ones; at least 3 px each. */
  rows() {
    const least = Math.max(1, Math.ceil(3 / this.rowHeight)), rows = [];
    const nodes = this.app.data.nodes.length ? this.app.data.nodes : [["", 0, this.app.data.devices, ""]];
    for (const [, first, stop] of nodes) {
      if (stop <= this.view.d0 || first >= this.view.d1) continue;
      if (stop - first >= 3 * least || least === 1) {
        for (let d = first; d < stop; d += least) rows.push([d, Math.min(stop, d + least)]);
      } else if (rows.length && rows[rows.length - 1][1] === first && first - rows[rows.length - 1][0] < least) {
        rows[rows.length - 1][1] = stop;
      } else rows.push([first, stop]);
    }
    return rows;
  }

  heat(theme, seen) {
    const { held, view, app, plot: p, ctx } = this, tick = app.data.tick_s, rows = this.rows();
    if (!rows.length) return;
    const columns = Math.ceil((p.right - p.left) / HEAT_COLUMN), stride = columns + 3;
    const grid = new Float32Array(rows.length * stride), rowOf = new Int32Array(app.data.devices).fill(-1);
    rows.forEach(([first, stop], row) => rowOf.fill(row, Math.max(0, first), stop));
    const perSecond = columns / (view.t1 - view.t0);
    const add = (first, stop, from, to, amount) => {
      const a = Math.max(0, (from - view.t0) * perSecond), b = Math.min(columns, (to - view.t0) * perSecond);
      if (b <= a) return;
      const ca = Math.floor(a), cb = Math.floor(b), fa = a - ca, fb = b - cb;
      const last = rows[rows.length - 1][1];
      for (let d = Math.max(first, rows[0][0]); d < Math.min(stop, last);) {
        const row = rowOf[d], until = Math.min(stop, rows[row][1]), weight = (until - d) * amount, at = row * stride;
        grid[at + ca] += weight * (1 - fa); grid[at + ca + 1] += weight * fa;
        grid[at + cb] -= weight * (1 - fb); grid[at + cb + 1] -= weight * fb;
        d = until;
      }
    };
    for (const i of seen) {
      add(held.first[i], held.first[i] + held.width[i], held.start[i] * tick, (held.start[i] + held.length[i]) * tick, held.permille[i] / 1000);
    }
    this.eachHaze((first, stop, from, to, share) => add(first, stop, from, to, share));
    rows.forEach(([first, stop], row) => {
      let sum = 0;
      for (let c = 0; c < columns; c++) {
        sum += grid[row * stride + c];
        grid[row * stride + c] = sum / (stop - first);
      }
      for (let c = columns; c < stride; c++) grid[row * stride + c] = 0;
    });
    this.strip = { rows, columns, stride, grid };
    this.paintStrip(theme, ctx, p);
  }

  paintStrip(theme, ctx, p) {
    const { rows, columns, stride, grid } = this.strip, table = rampTable(theme.ramp);
    const image = new ImageData(columns, rows.length);
    for (let row = 0; row < rows.length; row++) {
      for (let c = 0; c < columns; c++) {
        const value = Math.min(1, Math.max(0, grid[row * stride + c])), at = 4 * (row * columns + c);
        const colour = table[value < 0.004 ? 0 : Math.max(4, Math.round(64 * value))];
        image.data[at] = colour[0]; image.data[at + 1] = colour[1]; image.data[at + 2] = colour[2]; image.data[at + 3] = 255;
      }
    }
    const scratch = document.createElement("canvas");
    scratch.width = columns; scratch.height = rows.length;
    scratch.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = false;
    rows.forEach(([first, stop], row) => {
      const top = this.y(first), tall = this.y(stop) - top, gap = tall > 4 ? 0.6 : 0;
      ctx.drawImage(scratch, 0, row, columns, 1, p.left, top, columns * HEAT_COLUMN, tall - gap);
    });
  }

  eachHaze(visit) {
    const { haze, view } = this;
    if (!haze) return;
    const bins = haze.grid.length / haze.blocks;
    const low = Math.max(0, Math.floor((view.t0 - haze.start_s) / haze.width_s));
    const high = Math.min(bins, Math.ceil((view.t1 - haze.start_s) / haze.width_s));
    for (let bin = low; bin < high; bin++) {
      const from = haze.start_s + bin * haze.width_s;
      for (let block = 0; block < haze.blocks; block++) {
        const value = haze.grid[bin * haze.blocks + block];
        const first = block * haze.block, stop = Math.min(this.app.data.devices, first + haze.block);
        if (value && stop > view.d0 && first < view.d1) visit(first, stop, from, from + haze.width_s, value * haze.scale);
      }
    }
  }

  fill(theme, i) {
    const job = this.held.job[i];
    if (this.app.paint === "size") return theme.sizes[sizeClass(this.jobs.devices[job])];
    return theme.jobs[job % theme.jobs.length];
  }

  spot(i) {
    const tick = this.app.data.tick_s, { held } = this, from = held.start[i] * tick;
    const left = this.x(from), right = this.x(from + held.length[i] * tick);
    return { left, width: Math.max(0.8, right - left) };
  }

  rectangles(theme, seen) {
    const { ctx, held, plot: p } = this, tall = this.rowHeight, gap = tall > 6 ? 1 : 0.4;
    ctx.fillStyle = theme.ramp[0];
    ctx.fillRect(p.left, p.top, p.right - p.left, p.bottom - p.top);
    this.eachHaze((first, stop, from, to, share) => {
      ctx.fillStyle = `rgba(${theme.haze},${Math.min(0.75, 0.12 + 0.6 * share)})`;
      ctx.fillRect(this.x(from), this.y(first), this.x(to) - this.x(from), this.y(stop) - this.y(first));
    });
    for (const i of seen) {
      const { left, width } = this.spot(i), share = held.permille[i] / 1000, first = held.first[i];
      ctx.fillStyle = this.fill(theme, i);
      const seam = width > 3 ? 0.7 : 0;
      if (share >= 1) ctx.fillRect(left, this.y(first), width - seam, held.width[i] * tall - gap);
      else for (let d = first; d < first + held.width[i]; d++) {
        ctx.fillRect(left, this.y(d) + this.offset[i] * (tall - gap), width - seam, Math.max(0.8, share * (tall - gap) - 0.4));
      }
      this.label(theme, i, left, width, first, share);
    }
  }

  /* The job's name, where the part of its rectangle that can be seen has room for it. */
  label(theme, i, left, width, first, share) {
    const p = this.plot, low = Math.max(left, p.left), room = Math.min(left + width, p.right) - low - 8;
    const start = this.y(first) + (share < 1 ? this.offset[i] * this.rowHeight : 0);
    const top = Math.max(p.top, start), bottom = Math.min(p.bottom, start + (share < 1 ? share : this.held.width[i]) * this.rowHeight);
    if (room < 26 || bottom - top < 12) return;
    const name = this.jobs.ids[this.held.job[i]], fits = Math.floor(room / 6.1);
    const words = name.length <= fits ? name : fits >= 4 ? name.slice(0, fits - 1) + "…" : "";
    if (!words) return;
    const ctx = this.ctx;
    ctx.fillStyle = this.app.paint === "size" ? inkOn(this.fill(theme, i)) : theme.label;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillText(words, low + 4, (top + bottom) / 2);
  }

  nodeLines(theme) {
    const { ctx, plot: p } = this, nodes = this.app.data.nodes;
    ctx.strokeStyle = theme.faint;
    nodes.forEach(([, first, stop, kind], at) => {
      if (first <= this.view.d0 || first >= this.view.d1) return;
      const border = nodes[at - 1] && nodes[at - 1][3] !== kind, tall = (stop - first) * this.rowHeight;
      if (!border && tall < 14) return;
      ctx.globalAlpha = border ? 1 : 0.5;
      ctx.lineWidth = border ? 1.4 : 0.7;
      ctx.beginPath(); ctx.moveTo(p.left, this.y(first)); ctx.lineTo(p.right, this.y(first)); ctx.stroke();
    });
    ctx.globalAlpha = 1;
  }

  outline(theme, seen) {
    const { ctx, held, app } = this;
    if (app.chosen === null) return;
    ctx.strokeStyle = theme.ink; ctx.lineWidth = 2;
    for (const i of seen) {
      if (held.job[i] !== app.chosen) continue;
      const { left, width } = this.spot(i), top = this.y(held.first[i]), tall = held.width[i] * this.rowHeight;
      if (!this.detail) { ctx.fillStyle = theme.hot; ctx.fillRect(left, top, Math.max(2, width), Math.max(2, tall)); }
      ctx.strokeRect(left - 0.5, top - 0.5, Math.max(3, width), Math.max(3, tall));
    }
  }

  axes(theme) {
    const { ctx, plot: p, view } = this;
    ctx.fillStyle = theme.soft; ctx.strokeStyle = theme.faint; ctx.lineWidth = 1;
    ctx.textAlign = "center"; ctx.textBaseline = "alphabetic";
    for (const [at, words] of timeTicks(view.t0, view.t1, this.width / 110)) {
      const x = this.x(at);
      if (x < p.left - 1 || x > p.right + 1) continue;
      ctx.beginPath(); ctx.moveTo(x, p.bottom); ctx.lineTo(x, p.bottom + 4); ctx.stroke();
      ctx.fillText(words, Math.min(x, this.width - 22), p.bottom + 16);
    }
    ctx.strokeRect(p.left - 0.5, p.top - 0.5, p.right - p.left + 1, p.bottom - p.top + 1);
    this.nodeNames(theme);
  }

  nodeNames(theme) {
    const { ctx, plot: p, view } = this, nodes = this.app.data.nodes, kinds = new Set(nodes.map((node) => node[3])).size > 1;
    ctx.textAlign = "right"; ctx.textBaseline = "middle";
    let free = p.top - 2;
    nodes.forEach(([name, first, stop, kind], at) => {
      const top = Math.max(p.top, this.y(first)), bottom = Math.min(p.bottom, this.y(stop));
      if (bottom <= p.top || top >= p.bottom) return;
      const each = this.rowHeight >= 13 && stop - first > 1 && nodes.length < 200 + at;
      const middle = Math.max(p.top + 6, Math.min(p.bottom - 6, each && this.rowHeight >= 20 ? top + this.rowHeight / 2 : (top + bottom) / 2));
      if (middle - 7 < free) return;
      ctx.fillStyle = theme.soft;
      const newKind = kinds && (at === 0 || nodes[at - 1][3] !== kind || top <= p.top), words = newKind ? `${name} ${kind}` : name;
      ctx.fillText(words.length > 11 ? words.slice(0, 10) + "…" : words, p.left - (each ? 22 : 6), middle);
      free = middle + 7;
      if (!each) return;
      ctx.fillStyle = theme.faint;
      for (let d = first; d < stop; d++) {
        const row = this.y(d + 0.5);
        if (row > p.top && row < p.bottom) ctx.fillText(String(d - first), p.left - 6, row);
      }
    });
  }

  marks(theme) {
    const { ctx, plot: p } = this;
    ctx.textAlign = "left"; ctx.textBaseline = "top";
    let free = -Infinity;
    for (const [at, words] of this.run.marks) {
      const x = this.x(at);
      if (x < p.left || x > p.right) continue;
      ctx.strokeStyle = theme.hot; ctx.lineWidth = 1.2; ctx.setLineDash([4, 3]);
      ctx.beginPath(); ctx.moveTo(x, p.top); ctx.lineTo(x, p.bottom); ctx.stroke(); ctx.setLineDash([]);
      if (x < free) continue;
      const wide = ctx.measureText(words).width + 8, left = Math.min(x + 2, p.right - wide);
      ctx.globalAlpha = 0.9; ctx.fillStyle = theme.paper; ctx.fillRect(left, p.top + 2, wide, 15); ctx.globalAlpha = 1;
      ctx.fillStyle = theme.hot; ctx.fillText(words, left + 4, p.top + 4);
      free = left + wide;
    }
  }

  /* What lies under a point: a job's holding, or how full that part of the cluster is. */
  under(x, y) {
    const p = this.plot, { held, app } = this, tick = app.data.tick_s;
    if (!held || x < p.left || x > p.right || y < p.top || y > p.bottom) return null;
    const t = this.time(x), d = this.device(y), slack = (this.view.t1 - this.view.t0) / (p.right - p.left);
    if (!this.detail) {
      const row = this.strip.rows.findIndex(([first, stop]) => d >= first && d < stop);
      if (row < 0) return null;
      const column = Math.min(this.strip.columns - 1, Math.floor((x - p.left) / HEAT_COLUMN));
      return { t, rows: this.strip.rows[row], share: Math.max(0, this.strip.grid[row * this.strip.stride + column]) };
    }
    for (let i = held.start.length - 1; i >= 0; i--) {
      const from = held.start[i] * tick, to = from + held.length[i] * tick;
      if (t < from - slack / 2 || t > to + slack / 2 || d < held.first[i] || d >= held.first[i] + held.width[i]) continue;
      const part = d - Math.floor(d), share = held.permille[i] / 1000;
      if (share < 1 && (part < this.offset[i] || part > this.offset[i] + share)) continue;
      return { t, holding: i };
    }
    return { t };
  }

  name(first, stop) {
    const node = (d) => this.app.data.nodes.find((one) => d >= one[1] && d < one[2]);
    const a = node(first), b = node(stop - 1);
    if (!a || !b) return stop - first === 1 ? `device ${first}` : `devices ${first}–${stop - 1}`;
    const kind = a[3] === b[3] && a[3] ? ` (${a[3]})` : "";
    if (a === b && first === a[1] && stop === a[2]) return `${a[0]}, all ${stop - first}${kind}`;
    if (a === b) return `${a[0]}:${first - a[1]}${stop - first > 1 ? "–" + (stop - 1 - a[1]) : ""}${kind}`;
    return `${a[0]}:${first - a[1]} to ${b[0]}:${stop - 1 - b[1]}${kind}`;
  }

  tell(found) {
    const { held, jobs } = this, tick = this.app.data.tick_s;
    if (found.rows) {
      return { head: this.name(found.rows[0], found.rows[1]), pairs: [["time", clock(found.t)], ["allocated", percent(found.share)], ["", "zoom in to see jobs"]] };
    }
    if (found.holding === undefined) return null;
    const i = found.holding, job = held.job[i], from = held.start[i] * tick, to = from + held.length[i] * tick;
    const at = this.ends.get(job), end = held.ends[at] * tick, submit = jobs.submit[job] * tick;
    const pairs = [["devices", this.name(held.first[i], held.first[i] + held.width[i])],
      ["from", clock(from)], ["until", clock(to)], ["for", human(to - from)], ["fraction", percent(held.permille[i] / 1000)],
      ["requested", jobs.devices[job] + (jobs.devices[job] === 1 ? " device" : " devices")], ["submitted", clock(submit)]];
    if (held.ends[at] >= 0) pairs.push([STATES[held.states[at]] + " after", human(end - submit)]);
    else pairs.push(["state", STATES[held.states[at]]]);
    return { head: jobs.ids[job], pairs, job };
  }

  zoom(ratio, rows, x, y) {
    const v = this.view, p = this.plot, t = this.time(x ?? (p.left + p.right) / 2), d = this.device(y ?? (p.top + p.bottom) / 2);
    this.app.look(this, { t0: t - (t - v.t0) * ratio, t1: t + (v.t1 - t) * ratio, d0: d - (d - v.d0) * rows, d1: d + (v.d1 - d) * rows });
  }
  pan(right, down) {
    const v = this.view, wide = v.t1 - v.t0, tall = v.d1 - v.d0;
    this.app.look(this, { t0: v.t0 + right * wide, t1: v.t1 + right * wide, d0: v.d0 + down * tall, d1: v.d1 + down * tall });
  }
  /* Both axes in one go, to a few nodes' worth of rows, so that jobs appear. */
  dive(x, y) {
    const rows = Math.min(1, 32 / (this.view.d1 - this.view.d0));
    this.zoom(this.rowHeight < 3 ? 0.25 : 0.5, this.rowHeight < 3 ? Math.max(rows, 0.125) : 1, x, y);
  }

  clamp(view) {
    const fit = (low, high, least, most) => {
      const wide = Math.min(most, Math.max(least, high - low)), middle = (low + high) / 2;
      const start = Math.min(Math.max(0, high - low === wide ? low : middle - wide / 2), most - wide);
      return [start, start + wide];
    };
    const [t0, t1] = fit(view.t0, view.t1, Math.min(this.whole.t1, Math.max(20 * this.app.data.tick_s, this.whole.t1 / 1e6)), this.whole.t1);
    const [d0, d1] = fit(view.d0, view.d1, Math.min(4, this.whole.d1), this.whole.d1);
    return { t0, t1, d0, d1 };
  }

  listen() {
    const c = this.canvas;
    let grip = null;
    const point = (event) => { const box = c.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    c.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      grip = { at: point(event), view: { ...this.view }, box: event.shiftKey };
      c.setPointerCapture(event.pointerId);
      c.classList.add(event.shiftKey ? "box" : "drag");
      c.focus({ preventScroll: true });
      if (event.shiftKey) event.preventDefault();
    });
    c.addEventListener("pointermove", (event) => {
      const [x, y] = point(event);
      if (!grip) return this.app.point(this, this.under(x, y), event.clientX, event.clientY);
      const [x0, y0] = grip.at, p = this.plot;
      this.app.hush();
      if (grip.box) {
        this.box = [Math.min(x, x0), Math.min(y, y0), Math.abs(x - x0), Math.abs(y - y0)];
        return this.app.redraw();
      }
      const g = grip.view, dt = (x0 - x) / (p.right - p.left) * (g.t1 - g.t0), dd = (y0 - y) / (p.bottom - p.top) * (g.d1 - g.d0);
      this.app.look(this, { t0: g.t0 + dt, t1: g.t1 + dt, d0: g.d0 + dd, d1: g.d1 + dd });
    });
    const drop = (event) => {
      if (grip && grip.box && this.box && event.type === "pointerup") {
        const [x, y, w, h] = this.box;
        if (w > 4 && h > 4) this.app.look(this, { t0: this.time(x), t1: this.time(x + w), d0: this.device(y), d1: this.device(y + h) });
      }
      if (this.box) { this.box = null; this.app.redraw(); }
      grip = null;
      c.classList.remove("drag", "box");
    };
    c.addEventListener("pointerup", drop);
    c.addEventListener("pointercancel", drop);
    c.addEventListener("pointerleave", () => { if (!grip) this.app.hush(); });
    c.addEventListener("dblclick", (event) => { const [x, y] = point(event); this.dive(x, y); });
    c.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey || document.activeElement === c)) return;
      event.preventDefault();
      const [x, y] = point(event), turn = Math.exp(Math.max(-0.5, Math.min(0.5, (event.deltaY || event.deltaX) * 0.0018)));
      if (event.shiftKey) this.zoom(1, turn, x, y); else this.zoom(turn, 1, x, y);
    }, { passive: false });
    c.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const acts = {
      ArrowLeft: () => this.pan(-0.15, 0), ArrowRight: () => this.pan(0.15, 0), ArrowUp: () => this.pan(0, -0.15), ArrowDown: () => this.pan(0, 0.15),
      "+": () => this.zoom(0.7, 1), "=": () => this.zoom(0.7, 1), "-": () => this.zoom(1 / 0.7, 1), "[": () => this.zoom(1, 1 / 0.7),
      "]": () => this.zoom(1, 0.7), 0: () => this.app.look(this, this.whole), Home: () => this.app.look(this, this.whole), Enter: () => this.dive(),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
    this.app.say(`${clock(this.view.t0)} to ${clock(this.view.t1)}, ${Math.round(this.view.d1 - this.view.d0)} devices`);
  }
}

const sizeClass = (devices) => Math.min(7, Math.max(0, Math.ceil(Math.log2(Math.max(1, devices)))));
function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#16191d" : "#ffffff";
}
