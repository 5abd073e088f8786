"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const numbers = (text, Kind) => new Kind(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);
  const offset = numbers(data.offset, Uint32Array), what = numbers(data.what, Uint32Array);
  const begin = numbers(data.begin, Float64Array), length = numbers(data.length, Float32Array); // seconds
  const rows = data.rows, keys = data.keys;
  // `what`: bits 0-1 kind, 2-4 outcome, 5-7 lane, 8-31 key
  const KINDS = ["load", "fetch", "wait", "compile"];
  const SAID = ["loaded from the node's disk", "fetched from the store", "waited", "compiled"];
  const ENDED = {
    alone: "nobody coordinated it", private: "for this process alone", failed: "it failed", "given up": "it was given up",
    lost: "its process ended meanwhile", lead: "then this rank compiled it",
  };
  const FAILED = data.outcomes.map(o => o === "failed" || o === "lost");
  const BANDS = [[0.55, 1], [0, 0.45], [0.28, 0.72], [0, 1]]; // of a row's height, by kind: shapes differ, not colours alone
  const AXIS = 26, TALLEST = 640, ROW = 22, LABELLED = 11;

  const canvas = document.getElementById("line"), context = canvas.getContext("2d"), tip = document.getElementById("tip");
  const where = document.getElementById("where"), filter = document.getElementById("filter");
  const shown = new Uint8Array(keys.length).fill(1);
  const whole = { from: 0, to: Math.max(data.seconds, 1e-6), top: 0, bottom: Math.max(rows.length, 1) };
  const view = { ...whole };
  let gutter = 0, width = 0, height = 0, only = -1, drag = null, box = null, waiting = false;

  const seconds = s => {
    if (s < 0.0995) return `${(s * 1e3).toFixed(s < 0.01 ? 2 : 1)} ms`;
    if (s < 120) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
    if (s < 7200) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
    return `${(s / 3600).toFixed(1)} h`;
  };
  const clock = (s, step) => {
    if (whole.to < 300) return `${s.toFixed(Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9))))} s`;
    const sign = s < 0 ? "-" : "", t = Math.abs(s), two = n => String(n).padStart(2, "0");
    const rest = step < 1 ? (Math.floor(t % 60 * 1e3) / 1e3).toFixed(3).padStart(6, "0") : two(Math.floor(t % 60));
    return `${sign}${Math.floor(t / 3600)}:${two(Math.floor(t / 60) % 60)}:${rest}`;
  };
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const pixel = hex => { // little-endian RGBA, as every browser's ImageData has it
    const n = parseInt(hex.slice(1), 16);
    return ((255 << 24) | ((n & 255) << 16) | (((n >> 8) & 255) << 8) | (n >> 16)) >>> 0;
  };

  /* The beginning of a text that fits; empty if almost nothing does. */
  const fitted = (text, room) => {
    if (context.measureText(text).width <= room) return text;
    let end = text.length;
    while (end > 0 && context.measureText(`${text.slice(0, end)}…`).width > room) end--;
    return end > 1 ? `${text.slice(0, end)}…` : "";
  };

  function paint() {
    waiting = false;
    const scale = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    height = Math.max(AXIS + 44, AXIS + Math.min(TALLEST, Math.round((rows.length) * ROW)));
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = '12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    const rowHeight = (height - AXIS) / (view.bottom - view.top);
    const widest = names => names.reduce((most, name) => Math.max(most, context.measureText(name).width), 0);
    gutter = Math.min(width * 0.3, widest(data.nodes.map(n => n.name)) + 16 +
      (rowHeight >= LABELLED ? widest(rows.slice(Math.floor(view.top), Math.ceil(view.bottom)).map(r => r.label)) + 12 : 0));
    const ink = colour("ink"), quiet = colour("quiet"), line = colour("line");
    context.fillStyle = colour("page");
    context.fillRect(0, 0, width, height);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, height - AXIS);
    context.clip();
    paintBands(rowHeight);
    context.restore();
    const painted = paintSpans(scale, rowHeight);
    paintAxis(quiet, line);
    if (rowHeight >= 13) paintNames(rowHeight, ink);
    paintLabels(rowHeight, ink, quiet, line);
    if (box) {
      context.strokeStyle = ink;
      context.strokeRect(box.x + 0.5, box.y + 0.5, box.w, box.h);
    }
    canvas.dataset.painted = String(painted);
  }

  const x = s => gutter + (s - view.from) / (view.to - view.from) * (width - gutter);
  const y = (row, rowHeight) => AXIS + (row - view.top) * rowHeight;

  function paintBands(rowHeight) {
    context.fillStyle = colour("band");
    data.nodes.forEach((node, n) => {
      if (n % 2 === 0) context.fillRect(0, y(node.first, rowHeight), width, node.rows * rowHeight);
    });
    if (rowHeight < 6) return;
    context.fillStyle = colour("row");
    for (let row = Math.floor(view.top); row < view.bottom; row++) {
      context.fillRect(gutter, y(row, rowHeight) + 1, width - gutter, rowHeight - 2);
    }
  }

  /* Pixel by pixel, so that a million spans take a moment. Where several fall on one pixel the most notable one shows. */
  function paintSpans(scale, rowHeight) {
    const left = Math.round(gutter * scale), top = Math.round(AXIS * scale);
    const w = canvas.width - left, h = canvas.height - top;
    if (w <= 0 || h <= 0) return 0;
    const image = context.getImageData(left, top, w, h), pixels = new Uint32Array(image.data.buffer);
    const rank = new Uint8Array(w * h);
    const colours = KINDS.map(k => pixel(colour(k))), failed = pixel(colour("failed")), ground = pixel(colour("page")), faint = pixel(colour("line"));
    const perSecond = w / (view.to - view.from), rowPixels = rowHeight * scale, gap = rowPixels >= 6 ? 1 : 0;
    const first = Math.max(0, Math.floor(view.top)), last = Math.min(rows.length, Math.ceil(view.bottom));
    let painted = 0;
    for (let row = first; row < last; row++) {
      const lanes = rows[row].lanes, rowTop = (row - view.top) * rowPixels + gap, inner = rowPixels - 2 * gap;
      for (let i = offset[row]; i < offset[row + 1]; i++) {
        const from = (begin[i] - view.from) * perSecond, to = from + length[i] * perSecond;
        if (to < 0 || from >= w) continue;
        const code = what[i], kind = code & 3, bad = FAILED[(code >> 2) & 7] && kind === 3;
        const dim = !shown[code >>> 8];
        const notable = dim ? 1 : bad ? 6 : kind + 2;
        const lane = (code >> 5) & 7, band = inner < 5 ? [0, 1] : BANDS[kind];
        const y0 = Math.max(0, Math.round(rowTop + inner * (lane + band[0]) / lanes));
        const y1 = Math.min(h, Math.max(y0 + 1, Math.round(rowTop + inner * (lane + band[1]) / lanes)));
        const x0 = Math.max(0, Math.floor(from)), x1 = Math.min(w, Math.max(Math.round(to), x0 + 1));
        const fill = dim ? faint : bad ? failed : colours[kind];
        const hatched = bad && inner >= 5;
        const seam = kind === 3 && to - from >= 4 ? x1 - 1 : w; // two compiles in a row are two
        for (let py = y0; py < y1; py++) {
          for (let at = py * w + x0, end = py * w + x1, px = x0; at < end; at++, px++) {
            if (rank[at] > notable || px === seam) continue;
            rank[at] = notable;
            pixels[at] = hatched && ((px + py) / scale & 7) < 2 ? ground : fill;
          }
        }
        painted++;
      }
    }
    context.putImageData(image, left, top);
    return painted;
  }

  function paintAxis(quiet, line) {
    const span = view.to - view.from, most = Math.max(2, Math.floor((width - gutter) / 90));
    const raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
    let step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw);
    if (step > 10) step = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400].find(s => s >= raw) || step;
    context.fillStyle = quiet;
    context.strokeStyle = line;
    context.textAlign = "center";
    for (let n = Math.ceil(view.from / step - 1e-9); n * step <= view.to; n++) {
      const at = Math.round(x(n * step)) + 0.5;
      context.beginPath();
      context.moveTo(at, AXIS - 5);
      context.lineTo(at, AXIS);
      context.stroke();
      if (at < width - 12) context.fillText(clock(n * step, step), Math.max(at, gutter + 12), AXIS / 2 - 2);
    }
    context.beginPath();
    context.moveTo(gutter, AXIS - 0.5);
    context.lineTo(width, AXIS - 0.5);
    context.stroke();
  }

  function paintNames(rowHeight, ink) {
    const on = colour("on-compile");
    context.textAlign = "left";
    for (let row = Math.max(0, Math.floor(view.top)); row < Math.min(rows.length, view.bottom); row++) {
      const lanes = rows[row].lanes;
      if (rowHeight / lanes < 13) continue;
      for (let i = offset[row]; i < offset[row + 1]; i++) {
        const x0 = Math.max(gutter, x(begin[i])), x1 = Math.min(width, x(begin[i] + length[i]));
        const code = what[i], kind = code & 3;
        if (x1 - x0 < 40 || kind !== 3 || !shown[code >>> 8]) continue;
        const name = fitted(keys[code >>> 8].name, x1 - x0 - 8);
        if (!name) continue;
        const middle = y(row, rowHeight) + rowHeight * (((code >> 5) & 7) + 0.5) / lanes;
        if (FAILED[(code >> 2) & 7]) { // text on hatching needs a ground
          context.fillStyle = colour("page");
          context.fillRect(x0 + 2, middle - 7, context.measureText(name).width + 4, 14);
          context.fillStyle = ink;
        } else context.fillStyle = on;
        context.fillText(name, x0 + 4, middle + 0.5);
      }
    }
  }

  function paintLabels(rowHeight, ink, quiet, line) {
    let room = gutter - 16;
    context.save();
    context.beginPath();
    context.rect(0, AXIS, gutter - 4, height - AXIS);
    context.clip();
    if (rowHeight >= LABELLED) {
      const seen = rows.slice(Math.floor(view.top), Math.ceil(view.bottom));
      room -= Math.max(...seen.map(row => context.measureText(row.label).width)) + 6;
      context.textAlign = "right";
      context.fillStyle = quiet;
      for (let row = Math.max(0, Math.floor(view.top)); row < Math.min(rows.length, view.bottom); row++) {
        context.fillText(rows[row].label, gutter - 10, y(row, rowHeight) + rowHeight / 2);
      }
    }
    context.textAlign = "left";
    context.fillStyle = ink;
    const nodeHeight = rows.length * rowHeight / Math.max(1, data.nodes.length);
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find(n => n * nodeHeight >= 16) || data.nodes.length;
    data.nodes.forEach((node, n) => {
      const top = Math.max(AXIS, y(node.first, rowHeight)), end = Math.min(height, y(node.first + node.rows, rowHeight));
      if (end <= AXIS || top >= height || n % every) return;
      const at = rowHeight >= LABELLED ? top + Math.min(rowHeight, end - top) / 2 : (top + end) / 2;
      context.fillText(fitted(node.name, room), 6, Math.min(Math.max(at, AXIS + 7), height - 6));
    });
    context.restore();
    context.strokeStyle = line;
    context.beginPath();
    for (const node of data.nodes) {
      const top = Math.round(y(node.first, rowHeight)) + 0.5;
      if (node.rows * rowHeight < 8 || top <= AXIS + 1 || top > height) continue;
      context.moveTo(0, top);
      context.lineTo(width, top);
    }
    context.stroke();
  }

  const soon = () => {
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(paint);
    }
  };

  function look(next) {
    const least = Math.max(whole.to * 1e-7, 1e-6), span = Math.min(Math.max(next.to - next.from, least), whole.to);
    const tall = Math.min(Math.max(next.bottom - next.top, 1), whole.bottom);
    view.from = Math.min(Math.max(next.from, 0), whole.to - span);
    view.to = view.from + span;
    view.top = Math.min(Math.max(next.top, 0), whole.bottom - tall);
    view.bottom = view.top + tall;
    remember();
    soon();
  }

  const zoom = (factor, at = (view.from + view.to) / 2) => look({
    ...view, from: at - (at - view.from) * factor, to: at + (view.to - at) * factor,
  });
  const move = (across, down) => look({
    from: view.from + across * (view.to - view.from), to: view.to + across * (view.to - view.from),
    top: view.top + down * (view.bottom - view.top), bottom: view.bottom + down * (view.bottom - view.top),
  });

  /* The page's address holds the view, so that it can be sent. */
  function remember() {
    const parts = [];
    if (view.from > 0 || view.to < whole.to) parts.push(`t=${view.from.toFixed(6)}-${view.to.toFixed(6)}`);
    if (view.top > 0 || view.bottom < whole.bottom) parts.push(`rows=${view.top.toFixed(2)}-${view.bottom.toFixed(2)}`);
    if (only >= 0) parts.push(`key=${keys[only].key}`);
    else if (filter.value) parts.push(`only=${encodeURIComponent(filter.value)}`);
    try {
      history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : "#");
    } catch (error) { /* a page inside another page may have no address of its own */ }
  }

  function recall() {
    const asked = new Map(location.hash.slice(1).split("&").map(p => p.split("=")));
    const range = name => (/^(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)$/.exec(asked.get(name) || "") || []).slice(1).map(Number);
    const [from, to] = range("t"), [top, bottom] = range("rows");
    if (from < to) Object.assign(view, { from, to: Math.min(to, whole.to) });
    if (top < bottom) Object.assign(view, { top, bottom: Math.min(bottom, whole.bottom) });
    if (view.from >= view.to || view.top >= view.bottom) Object.assign(view, whole);
    const key = keys.findIndex(k => asked.has("key") && k.key === asked.get("key"));
    if (asked.has("only")) {
      try {
        filter.value = decodeURIComponent(asked.get("only"));
      } catch (error) { /* an address that was cut off filters nothing */ }
    }
    choose(key);
  }

  /* Show key number `key` alone; -1: all whose names contain the filter's text. */
  function choose(key) {
    only = key;
    if (key >= 0) filter.value = keys[key].name;
    const text = filter.value.trim().toLowerCase();
    keys.forEach((k, n) => { shown[n] = key >= 0 ? n === key : k.name.toLowerCase().includes(text) ? 1 : 0; });
    soon();
  }

  function under(event) {
    const place = canvas.getBoundingClientRect(), px = event.clientX - place.left, py = event.clientY - place.top;
    const row = Math.floor(view.top + (py - AXIS) / (height - AXIS) * (view.bottom - view.top));
    const perPixel = (view.to - view.from) / (width - gutter), at = view.from + (px - gutter) * perPixel;
    return { px, py, row: px >= gutter && py >= AXIS && row < rows.length ? row : -1, at, perPixel };
  }

  function spanAt({ row, at, perPixel }) {
    let best = -1, score = -1;
    for (let i = offset[row]; i < offset[row + 1]; i++) {
      const from = begin[i], to = from + length[i];
      if (from > at + 2 * perPixel) break;
      if (to < at - 2 * perPixel || !shown[what[i] >>> 8]) continue;
      const inside = from <= at && to >= at, mine = (inside ? 8 : 0) + (what[i] & 3);
      if (mine >= score) [best, score] = [i, mine];
    }
    return best;
  }

  function tell(event) {
    const spot = under(event);
    const i = spot.row < 0 || drag ? -1 : spanAt(spot);
    where.textContent = spot.row < 0 ? "" : `${rows[spot.row].title} · ${clock(spot.at, spot.perPixel)}`;
    tip.hidden = i < 0;
    if (i < 0) return;
    const code = what[i], key = keys[code >>> 8], kind = code & 3, outcome = data.outcomes[(code >> 2) & 7];
    const lines = [
      `${SAID[kind]} in ${seconds(length[i])}${outcome === "ok" ? "" : `: ${ENDED[outcome]}`}`,
      `${rows[spot.row].title}, at ${clock(begin[i], 1e-3)}`,
      `${key.backend}, key ${key.key}`,
    ];
    if (kind !== 3 && key.by) lines.push(`compiled by ${key.by}`);
    if (data.notes[i]) lines.push(data.notes[i]);
    tip.replaceChildren();
    const name = document.createElement("b");
    name.textContent = key.name;
    tip.append(name);
    for (const text of lines) {
      const each = document.createElement("div");
      each.textContent = text;
      tip.append(each);
    }
    tip.style.left = `${Math.max(0, Math.min(spot.px + 14, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${spot.py + 18 + tip.offsetHeight > height + 60 ? spot.py - tip.offsetHeight - 10 : spot.py + 18}px`;
  }

  canvas.addEventListener("mousemove", tell);
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; where.textContent = ""; });
  canvas.addEventListener("mousedown", event => {
    if (event.button !== 0) return;
    const spot = under(event);
    drag = { spot, view: { ...view }, pans: event.shiftKey };
    canvas.focus({ preventScroll: true });
    event.preventDefault();
  });
  window.addEventListener("mousemove", event => {
    if (!drag) return;
    const spot = under(event);
    if (drag.pans) {
      const across = (drag.spot.px - spot.px) * spot.perPixel, down = (drag.spot.py - spot.py) / (height - AXIS) * (view.bottom - view.top);
      look({ from: drag.view.from + across, to: drag.view.to + across, top: drag.view.top + down, bottom: drag.view.bottom + down });
      return;
    }
    const rowsToo = Math.abs(spot.py - drag.spot.py) > 24 && rows.length > 4;
    const left = Math.max(gutter, Math.min(spot.px, drag.spot.px)), right = Math.min(width, Math.max(spot.px, drag.spot.px));
    const high = rowsToo ? Math.max(AXIS, Math.min(spot.py, drag.spot.py)) : AXIS, low = rowsToo ? Math.min(height, Math.max(spot.py, drag.spot.py)) : height;
    box = { x: left, y: high, w: Math.max(0, right - left - 1), h: low - high - 1, rowsToo };
    soon();
  });
  window.addEventListener("mouseup", () => {
    const chosen = box;
    drag = box = null;
    if (!chosen || chosen.w < 5) return soon();
    const time = px => view.from + (px - gutter) / (width - gutter) * (view.to - view.from);
    const row = py => view.top + (py - AXIS) / (height - AXIS) * (view.bottom - view.top);
    look({
      from: time(chosen.x), to: time(chosen.x + chosen.w),
      top: chosen.rowsToo ? Math.floor(row(chosen.y)) : view.top, bottom: chosen.rowsToo ? Math.ceil(row(chosen.y + chosen.h)) : view.bottom,
    });
  });
  const lookAtAll = () => look(whole);
  canvas.addEventListener("dblclick", lookAtAll);
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(Math.exp(event.deltaY / 300), under(event).at);
  }, { passive: false });
  canvas.addEventListener("keydown", event => {
    const act = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: lookAtAll, Escape: lookAtAll,
      ArrowLeft: () => move(-0.2, 0), ArrowRight: () => move(0.2, 0), ArrowUp: () => move(0, -0.2), ArrowDown: () => move(0, 0.2),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  document.getElementById("closer").addEventListener("click", () => zoom(0.5));
  document.getElementById("wider").addEventListener("click", () => zoom(2));
  document.getElementById("all").addEventListener("click", () => { filter.value = ""; choose(-1); lookAtAll(); });
  filter.addEventListener("input", () => { choose(-1); remember(); });
  document.addEventListener("click", event => {
    const button = event.target.closest("button.kernel");
    if (!button) return;
    choose(Number(button.dataset.key));
    remember();
    document.getElementById("time-line").scrollIntoView({ block: "start" });
  });

  document.getElementById("controls").hidden = false;
  recall();
  window.addEventListener("resize", soon);
  window.addEventListener("hashchange", () => { recall(); soon(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  paint();
})();
