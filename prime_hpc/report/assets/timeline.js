/* The timeline: lanes on a canvas that zooms from the whole run to one step. Where spans are narrower than a pixel, a
   column is filled by the share of each state, so that no state disappears. */
"use strict";
P.lanesOf = function (run) {
  const lanes = run.lanes, found = [];
  found.push({ name: "job", spans: lanes.job.map(function (s) { return [s.state, s.start, s.end, "attempt " + s.of]; }) });
  const block = function (name, table, also) {
    if (!table.start.length) return;
    found.push({ name: name, table: table });
    also.forEach(function (row) {
      if (table.spans[row[1]] && table.spans[row[1]].length) found.push({ name: row[0], spans: table.spans[row[1]].map(function (s) { return [row[1], s[0], s[1], ""]; }).sort(function (a, b) { return a[1] - b[1]; }) });
    });
  };
  block("trainer", lanes.trainer, []);
  const table = lanes.orchestrator;
  if (table.start.length && table.placed) {
    const spans = [];
    table.phases.forEach(function (phase) { (table.spans[phase] || []).forEach(function (s) { spans.push([phase, s[0], s[1], ""]); }); });
    spans.sort(function (a, b) { return a[1] - b[1]; });
    const under = [];  /* own work is what lies between the waits of neighbouring steps */
    table.start.forEach(function (start, i) {
      const before = under[under.length - 1];
      if (before && start - before[2] < 0.5) before[2] = table.end[i]; else under.push(["work", start, table.end[i], ""]);
    });
    found.push({ name: "orchestrator", spans: spans, under: under });
  } else block("orchestrator", table, []);
  const engines = P.engineSpans(run);
  if (engines.length) found.push({ name: "engines", spans: engines });
  Object.keys(lanes.roles).sort().forEach(function (label) {
    found.push({ name: label.replace("inference", "engine") + " state", spans: lanes.roles[label].map(function (s) { return [s[0], s[1], s[2], ""]; }) });
  });
  return found;
};
/* Engines: starting, sampling, and above that the recorded loads of weights and the orchestrator's idle waits. */
P.engineSpans = function (run) {
  const table = run.lanes.orchestrator, spans = [];
  if (!table.start.length) return spans;
  run.accounting.rows.forEach(function (row) {
    const began = row.began - run.origin;
    spans.push(["start", began, began + row.engines.start, "attempt " + row.attempt]);
    spans.push(["sample", began + row.engines.start, began + row.wall - row.engines.end, "attempt " + row.attempt]);
  });
  const over = [];
  ["load", "pause"].forEach(function (state) { (table.spans[state] || []).forEach(function (s) { over.push([state, s[0], s[1], ""]); }); });
  ["wait_weights", "wait_servers"].forEach(function (state) { (table.spans[state] || []).forEach(function (s) { over.push(["idle", s[0], s[1], P.stateName(state)]); }); });
  over.sort(function (a, b) { return a[1] - b[1]; });
  return spans.concat(over);
};

P.timeline = function (run, canvas, tell) {
  const lanes = P.lanesOf(run), LEFT = 146, TOP = 26, HIGH = 26, GAP = 8;
  const last = Math.max.apply(null, [1].concat(lanes.map(function (lane) {
    return lane.table ? lane.table.end[lane.table.end.length - 1] : lane.spans.reduce(function (most, s) { return Math.max(most, s[2]); }, 0);
  })));
  let from = 0, to = last, width = 0, asked = false, drag = null;
  const height = TOP + lanes.length * (HIGH + GAP) + 6;
  const ctx = canvas.getContext("2d");
  const xOf = function (t) { return LEFT + (t - from) / (to - from) * (width - LEFT - 8); };
  const tOf = function (x) { return from + (x - LEFT) / (width - LEFT - 8) * (to - from); };
  const firstAfter = function (ends, t) { let low = 0, high = ends.length; while (low < high) { const mid = (low + high) >> 1; if (ends[mid] < t) low = mid + 1; else high = mid; } return low; };

  const drawSpans = function (y, visit) {
    const bins = new Map();
    visit(function (state, start, end) {
      const a = Math.max(LEFT, xOf(start)), b = Math.min(width - 8, xOf(end));
      if (b < LEFT || a > width - 8 || b <= a) return;
      if (b - a >= 1.5) { ctx.fillStyle = P.stateColor(state); ctx.fillRect(a, y, b - a, HIGH); return; }
      const column = Math.floor((a + b) / 2), cell = bins.get(column) || {};
      cell[state] = (cell[state] || 0) + (b - a);
      bins.set(column, cell);
    });
    bins.forEach(function (cell, column) {
      const states = Object.keys(cell).sort(), sum = states.reduce(function (s, k) { return s + cell[k]; }, 0);
      let top = y;
      states.forEach(function (state) { const part = HIGH * cell[state] / Math.max(sum, 1); ctx.fillStyle = P.stateColor(state); ctx.fillRect(column, top, 1, part); top += part; });
    });
  };
  /* A block's phases one after another, or, where their places are not recorded, as shares of its height. */
  const drawTable = function (table, y) {
    const begin = firstAfter(table.end, from);
    if (table.placed) {
      drawSpans(y, function (put) {
        for (let i = begin; i < table.start.length && table.start[i] <= to; i += 1) {
          let t = table.start[i];
          for (let p = 0; p < table.phases.length; p += 1) { const s = table.parts[p][i]; if (s > 0) put(table.phases[p], t, t + s); t += s; }
        }
      });
      return;
    }
    for (let i = begin; i < table.start.length && table.start[i] <= to; i += 1) {
      const a = Math.max(LEFT, xOf(table.start[i])), b = Math.min(width - 8, xOf(table.end[i]));
      let sum = 0, top = y;
      for (let p = 0; p < table.phases.length; p += 1) sum += table.parts[p][i];
      for (let p = 0; p < table.phases.length && sum > 0; p += 1) {
        const part = HIGH * table.parts[p][i] / sum;
        ctx.fillStyle = P.stateColor(table.phases[p]); ctx.fillRect(a, top, Math.max(b - a, 0.6), part); top += part;
      }
    }
  };
  const axis = function () {
    const ink = P.css("--soft"), line = P.css("--grid"), steps = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
    const wanted = (to - from) / Math.max(2, (width - LEFT) / 110);
    const step = steps.find(function (s) { return s >= wanted; }) || steps[steps.length - 1];
    ctx.font = "11px system-ui, sans-serif"; ctx.textBaseline = "middle"; ctx.textAlign = "center";
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const x = Math.round(xOf(t)) + 0.5;
      ctx.strokeStyle = line; ctx.beginPath(); ctx.moveTo(x, TOP - 6); ctx.lineTo(x, height); ctx.stroke();
      ctx.fillStyle = ink; ctx.textAlign = x > width - 24 ? "right" : "center"; ctx.fillText(t === 0 ? "0" : P.span(Number(t.toFixed(4))), x, 10);
    }
  };
  const draw = function () {
    asked = false;
    const dpr = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) { canvas.width = Math.round(width * dpr); canvas.height = Math.round(height * dpr); canvas.style.height = height + "px"; }
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.clearRect(0, 0, width, height);
    axis();
    lanes.forEach(function (lane, index) {
      const y = TOP + index * (HIGH + GAP);
      ctx.fillStyle = P.css("--grid"); ctx.fillRect(LEFT, y, width - LEFT - 8, HIGH);
      if (lane.table) drawTable(lane.table, y);
      else {
        if (lane.under) drawSpans(y, function (put) { lane.under.forEach(function (s) { put(s[0], s[1], s[2]); }); });
        drawSpans(y, function (put) { lane.spans.forEach(function (s) { if (s[2] >= from && s[1] <= to) put(s[0], s[1], s[2]); }); });
      }
      ctx.fillStyle = P.css("--ink"); ctx.textAlign = "right"; ctx.textBaseline = "middle"; ctx.font = "12px system-ui, sans-serif";
      ctx.fillText(lane.name.length > 20 ? lane.name.slice(0, 19) + "…" : lane.name, LEFT - 8, y + HIGH / 2);
    });
    run.accounting.rows.forEach(function (row) {
      const x = Math.round(xOf(row.began - run.origin)) + 0.5;
      if (x < LEFT || x > width - 8) return;
      ctx.strokeStyle = P.css("--ink"); ctx.setLineDash([3, 3]); ctx.beginPath(); ctx.moveTo(x, TOP - 4); ctx.lineTo(x, height); ctx.stroke(); ctx.setLineDash([]);
    });
    if (tell) tell(from, to, last);
  };
  const again = function () { if (!asked) { asked = true; window.requestAnimationFrame(draw); } };
  const set = function (a, b) {
    const least = 0.02, length = Math.min(last, Math.max(least, b - a));
    from = Math.max(0, Math.min(a, last - length)); to = from + length; again();
  };
  const zoom = function (factor, x) { const t = tOf(x === undefined ? (LEFT + width) / 2 : Math.max(LEFT, x)); set(t - (t - from) * factor, t + (to - t) * factor); };
  const what = function (x, y) {
    const lane = lanes[Math.floor((y - TOP) / (HIGH + GAP))];
    if (!lane || x < LEFT) return "";
    const t = tOf(x);
    let hit = null;
    if (lane.table) {
      const i = firstAfter(lane.table.end, t);
      if (i < lane.table.start.length && lane.table.start[i] <= t) {
        let at = lane.table.start[i], now = "";
        const rows = lane.table.phases.map(function (phase, p) { const s = lane.table.parts[p][i]; if (lane.table.placed && t >= at && t < at + s) now = phase; at += s; return s > 0 ? P.stateName(phase) + " " + P.span(s) : ""; }).filter(Boolean);
        const many = lane.table.merged > 1 ? " (about " + lane.table.merged + " steps together)" : "";
        hit = lane.name + ", step " + lane.table.steps[i] + many + (now ? ": " + P.stateName(now) : "") + "\n" + rows.join("\n") + (lane.table.placed ? "" : "\n(shares of the step; their order is not recorded)");
      }
    } else {
      for (let i = lane.spans.length - 1; i >= 0 && !hit; i -= 1) { const s = lane.spans[i]; if (s[1] <= t && t < s[2]) hit = lane.name + ": " + P.stateName(s[0]) + " " + P.span(s[2] - s[1]) + (s[3] ? "\n" + s[3] : ""); }
      if (!hit && lane.under && lane.under.some(function (s) { return t >= s[1] && t < s[2]; })) hit = lane.name + ": " + P.stateName("work");
    }
    return hit ? hit + "\nat " + P.span(t) + ", " + P.clock(run.origin + t) : "";
  };
  const place = function (event) { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("wheel", function (event) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event)[0]); }, { passive: false });
  canvas.addEventListener("pointerdown", function (event) { drag = [event.clientX, from, to]; if (canvas.setPointerCapture) canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", function () { drag = null; });
  canvas.addEventListener("pointermove", function (event) {
    const at = place(event);
    if (drag) { const shift = (event.clientX - drag[0]) / (width - LEFT - 8) * (drag[2] - drag[1]); set(drag[1] - shift, drag[2] - shift); P.showTip(""); }
    else P.showTip(what(at[0], at[1]), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", function () { P.showTip(""); });
  canvas.addEventListener("dblclick", function () { set(0, last); });
  canvas.addEventListener("keydown", function (event) {
    const shift = 0.2 * (to - from), keys = { ArrowLeft: function () { set(from - shift, to - shift); }, ArrowRight: function () { set(from + shift, to + shift); }, "+": function () { zoom(0.6); }, "-": function () { zoom(1.6); }, "0": function () { set(0, last); } };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  P.onResize(canvas.parentNode, function () { width = canvas.clientWidth; draw(); });
  P.live.push(function () { P.showTip(""); });
  return { set: set, zoom: zoom, all: function () { set(0, last); }, range: function () { return [from, to, last]; }, what: what, lanes: lanes };
};
