/* Several runs side by side: a table, one metric of all, parallel coordinates, differences of config. */
"use strict";
P.differingKeys = function () {
  const keys = new Map();
  P.data.runs.forEach(function (run) { Object.keys(run.config).forEach(function (key) { keys.set(key, true); }); });
  return Array.from(keys.keys()).filter(function (key) { return key !== "name" && key !== "output_dir"; });
};
P.valueText = function (value) { return value === undefined || value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value); };
P.figureNames = function () {
  const names = new Set();
  P.data.runs.forEach(function (run) { Object.keys(run.figures).forEach(function (name) { names.add(name); }); });
  return Array.from(names);
};
P.axes = function () {
  const runs = P.data.runs;
  const make = function (name, of) {
    const values = runs.map(of), known = values.filter(function (v) { return v !== undefined && v !== null; });
    if (new Set(known.map(P.valueText)).size < 2) return null;
    const numeric = known.every(function (v) { return typeof v === "number"; });
    const list = numeric ? null : Array.from(new Set(known.map(P.valueText))).sort();
    const least = numeric ? Math.min.apply(null, known) : 0, most = numeric ? Math.max.apply(null, known) : list.length - 1;
    const log = numeric && least > 0 && most / least > 50;
    const at = function (v) { if (v === undefined || v === null) return null; const x = numeric ? v : list.indexOf(P.valueText(v)); return most === least ? 0.5 : log ? Math.log(x / least) / Math.log(most / least) : (x - least) / (most - least); };
    const ticks = numeric ? [0, 0.5, 1].map(function (s) { return [s, P.number(log ? least * Math.pow(most / least, s) : least + s * (most - least))]; }) : list.slice(0, 12).map(function (v, i) { return [list.length > 1 ? i / (list.length - 1) : 0.5, v]; });
    return { name: name, at: values.map(at), ticks: ticks };
  };
  const config = P.differingKeys().slice(0, 8).map(function (key) { return make(key, function (run) { return P.config(run)[key]; }); });
  const figures = P.figureNames().filter(function (name) { return !/^(hours in|attempts|steps)/.test(name); }).map(function (name) { return make(name, function (run) { return run.figures[name]; }); });
  return config.filter(Boolean).concat(figures.filter(Boolean).slice(0, 7));
};
/* From the least to the greatest value of one axis: blue to orange, told apart by everybody. */
P.ramp = function (s) { const a = [0, 90, 180], b = [240, 140, 0]; return "rgb(" + a.map(function (v, i) { return Math.round(v + (b[i] - v) * s); }).join(",") + ")"; };
P.parallel = function (axes, onPick) {
  const W = Math.max(760, 150 * axes.length), H = 320, TOP = 44, BOTTOM = 24, runs = P.data.runs;
  const x = function (i) { return 70 + i * (W - 140) / Math.max(1, axes.length - 1); }, y = function (s) { return TOP + (1 - s) * (H - TOP - BOTTOM); };
  const svg = P.el("svg", { viewBox: "0 0 " + W + " " + H, style: "width:100%;min-width:" + Math.min(W, 760) + "px", role: "img", "aria-label": "parallel coordinates" });
  const limits = axes.map(function () { return null; });
  let tint = axes.findIndex(function (axis) { return /^(held-out|reward|loss)/.test(axis.name); });
  if (tint < 0) tint = axes.length - 1;
  const lines = runs.map(function (run, r) {
    let path = "", pen = "M";
    axes.forEach(function (axis, i) { if (axis.at[r] === null) { pen = "M"; return; } path += pen + x(i).toFixed(1) + " " + y(axis.at[r]).toFixed(1); pen = "L"; });
    const line = P.el("path", { class: "line", d: path, stroke: P.ramp(axes[tint].at[r] === null ? 0 : axes[tint].at[r]), "data-run": run.name, mouseenter: function (event) { line.classList.add("hot"); P.showTip(run.name + "\n" + axes[tint].name + " " + P.number(run.figures[axes[tint].name]), event.clientX, event.clientY); }, mouseleave: function () { line.classList.remove("hot"); P.showTip(""); }, click: function () { onPick(r); } });
    svg.append(line);
    return line;
  });
  const apply = function () {
    lines.forEach(function (line, r) {
      const off = limits.some(function (limit, i) { const s = axes[i].at[r]; return limit && (s === null || s < limit[0] || s > limit[1]); });
      line.classList.toggle("off", off);
    });
  };
  axes.forEach(function (axis, i) {
    svg.append(P.el("line", { class: "axis", x1: x(i), x2: x(i), y1: y(0), y2: y(1) }));
    const shown = axis.name.length > 24 ? "…" + axis.name.slice(-23) : axis.name;
    const label = P.el("text", { x: x(i), y: i % 2 ? 14 : 28, "text-anchor": "middle", style: i === tint ? "font-weight:700" : "" }, shown);
    svg.append(label);
    axis.ticks.forEach(function (tick) { svg.append(P.el("text", { x: x(i) + 5, y: y(tick[0]) + 4 }, tick[1].slice(0, 18))); });
    const brush = P.el("rect", { class: "brush", x: x(i) - 8, width: 16, y: 0, height: 0 });
    const hit = P.el("rect", { class: "hit", x: x(i) - 12, width: 24, y: y(1), height: y(0) - y(1) });
    let start = null;
    const share = function (event) { const box = svg.getBoundingClientRect(); const s = 1 - ((event.clientY - box.top) * H / box.height - TOP) / (H - TOP - BOTTOM); return s < 0.03 ? 0 : s > 0.97 ? 1 : s; };
    hit.addEventListener("pointerdown", function (event) { start = share(event); hit.setPointerCapture(event.pointerId); });
    hit.addEventListener("pointermove", function (event) {
      if (start === null) return;
      const now = share(event), low = Math.min(start, now), high = Math.max(start, now);
      limits[i] = [low, high]; brush.setAttribute("y", y(high)); brush.setAttribute("height", y(low) - y(high)); apply();
    });
    hit.addEventListener("pointerup", function () { if (limits[i] && limits[i][1] - limits[i][0] < 0.01) { limits[i] = null; brush.setAttribute("height", 0); apply(); } start = null; });
    svg.append(brush, hit);
  });
  return svg;
};
/* The sum over all runs: hours and attempts are added; the effective share is that of all their time together. Runs that
   share the trainer of another one are part of that one's; a copy of a run is that run, and of one that went on what is
   new counts (`sums`). */
P.totalOf = function (name) {
  const runs = P.data.runs.filter(function (run) { return !run.parent && !run.copy_of; }), sum = function (of) { return runs.reduce(function (all, run) { return all + (of(run) || 0); }, 0); };
  if (/^hours|-hours( |$)|^attempts$/.test(name)) return sum(function (run) { return (run.sums || run).figures[name]; });
  if (name !== "effective training time") return null;
  const total = function (of) { return sum(function (run) { return of((run.sums || run.accounting).total); }); };
  const all = total(function (t) { return t.wall + t.waited; });
  return all > 0 ? total(function (t) { return t.trainer.train; }) / all : null;
};
P.views.Compare = function (_, open) {
  const runs = P.data.runs, keys = P.differingKeys();
  const columns = [{ name: "run", of: function (r) { return r.name; }, show: function (v) { return P.el("span", { class: "name" }, v); } }, { name: "state", of: function (r) { return r.status.state; }, show: function (v, r) { return P.badge(r.status); } }];
  keys.slice(0, 12).forEach(function (key) { columns.push({ name: key, of: function (r) { return P.config(r)[key]; }, show: P.valueText, mono: true }); });
  P.figureNames().forEach(function (name) { columns.push({ name: name, num: true, of: function (r) { return r.figures[name]; }, show: function (v) { return name === "effective training time" ? P.percent(v) : P.number(v); } }); });
  const sums = P.el("tr", { class: "total" }, columns.map(function (column, index) {
    const value = index === 0 ? "all" : column.num ? P.totalOf(column.name) : null;
    return P.el("td", { class: column.num ? "num" : "" }, value === null ? "" : index === 0 ? value : column.show(value));
  }));
  const metrics = new Set();
  runs.forEach(function (run) { ["orchestrator", "trainer"].forEach(function (role) { Object.keys(run.curves[role].mean).forEach(function (key) { metrics.add(role + ": " + key); }); }); });
  const held = runs.some(function (run) { return P.heldOut(run).length; });
  const names = (held ? ["held-out reward"] : []).concat(Array.from(metrics).sort());
  let metric = names.indexOf("orchestrator: reward/mean") >= 0 ? "orchestrator: reward/mean" : names.indexOf("trainer: loss") >= 0 ? "trainer: loss" : names[0];
  const place = P.el("div");
  const draw = function () {
    const list = [];
    runs.forEach(function (run, index) {
      const color = runs.length <= 8 ? P.color(index) : P.ramp(index / (runs.length - 1));
      if (metric === "held-out reward") { P.heldOut(run, color).forEach(function (one) { one.label = run.name + " " + one.label; list.push(one); }); return; }
      const parts = (metric || "").split(": "), one = P.curve(run, parts[0], parts[1], run.name, color.indexOf("rgb") === 0 ? color : color);
      if (one) { if (runs.length > 4 || color.indexOf("rgb") === 0) { delete one.low; delete one.high; } list.push(one); }
    });
    list.forEach(function (one) { if (one.color.indexOf("rgb") === 0) { delete one.low; delete one.high; } });
    P.fill(place, list.length ? P.chart(metric, list, { height: 340 }) : P.el("p", { class: "soft" }, "no values"));
  };
  const select = P.el("select", { "aria-label": "metric", change: function (event) { metric = event.target.value; draw(); } }, names.map(function (n) { return P.el("option", { value: n, selected: n === metric }, n); }));
  const axes = P.axes();
  if (metric) draw();
  return [P.el("h2", {}, runs.length + " runs"), P.el("div", { class: "card wide" }, P.table(columns, runs, { pick: function (run) { open(runs.indexOf(run)); }, last: [sums] })),
    axes.length > 1 ? [P.el("h2", {}, "Parallel coordinates"), P.el("p", { class: "soft small" }, "Drag along an axis to keep the runs within it, click it to let go; a line opens its run. Colour: the axis in bold."), P.el("div", { class: "card wide" }, P.parallel(axes, open))] : null,
    P.el("h2", {}, "One metric of all"), P.el("div", { class: "bar" }, P.el("label", {}, "metric ", select)), place];
};
