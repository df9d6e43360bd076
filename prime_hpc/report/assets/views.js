/* The views and the frame around them. */
"use strict";
P.tile = function (name, value, more) { return P.el("div", { class: "tile" }, P.el("div", { class: "name" }, name), P.el("div", { class: "value" }, value), more ? P.el("div", { class: "more" }, more) : null); };
P.notes = function (run) { return run.notes.length ? P.el("div", { class: "note" }, P.el("b", {}, "Read with care"), P.el("ul", {}, run.notes.map(function (note) { return P.el("li", {}, note); }))) : null; };

P.views.Overview = function (run) {
  const status = run.status, spent = run.accounting, total = spent.total, tiles = [];
  const steps = status.step === null ? run.figures.steps : status.step;
  tiles.push(P.tile("step", P.number(steps) + (status.max_steps ? " / " + P.number(status.max_steps) : ""), status.note || status.cause));
  P.heldOut(run).forEach(function (held) {
    const first = held.y[0], last = held.y[held.y.length - 1];
    tiles.push(P.tile(held.label, P.number(last), "from " + P.number(first) + " (" + (last >= first ? "+" : "") + P.number(last - first) + ")"));
  });
  if (run.figures["reward (last step)"] !== undefined) tiles.push(P.tile("training reward", P.number(run.figures["reward (last step)"]), "last step"));
  else if (run.figures["loss (last step)"] !== undefined) tiles.push(P.tile("loss", P.number(run.figures["loss (last step)"]), "last step"));
  tiles.push(P.tile("time running", P.span(total.wall), total.waited > 1 ? P.span(total.waited) + " in the queue or down" : ""));
  tiles.push(run.parent ? P.tile(spent.unit + "-hours", "shared", "trainer and engines are those of " + run.parent) : P.tile(spent.unit + "-hours", P.hours(total.device_hours), spent.trainer_devices + " training, " + spent.engine_devices + " sampling" + (total.held_hours !== null ? "; held " + P.hours(total.held_hours) : "")));
  tiles.push(P.tile("effective training time", P.percent(total.effective), "of the time since the submission"));
  tiles.push(P.tile("attempts", P.number(spent.rows.length), total.lost_steps ? total.lost_steps + " steps done again (" + P.span(total.lost_s) + ")" : "no step done again"));
  return [P.notes(run), P.el("div", { class: "tiles" }, tiles), run.results ? P.el("div", { class: "card" }, P.el("pre", {}, run.results)) : null,
    P.el("div", { class: "charts" }, P.rewardChart(run), P.groups.slice(1, 4).map(function (g) { return P.groupChart(run, g); })),
    spent.rows.length ? [P.el("h2", {}, "Where the time went"), P.el("div", { class: "card" }, P.stacks(spent))] : null,
    P.el("p", { class: "soft small" }, P.widthHint(run))];
};
P.stacks = function (spent) {
  const bar = function (parts, names) {
    const sum = names.reduce(function (s, n) { return s + parts[n]; }, 0) || 1;
    return P.el("div", { class: "stack" }, names.map(function (n) { return parts[n] > 0 ? P.el("span", { style: "width:" + (100 * parts[n] / sum) + "%;background:" + P.stateColor(n), title: P.stateName(n) + ": " + P.span(parts[n]) + ", " + P.percent(parts[n] / sum) }) : null; }));
  };
  const rows = [];
  if (spent.trainer_devices) rows.push(P.el("h3", {}, "trainer"), bar(spent.total.trainer, spent.trainer_parts), P.legend(spent.trainer_parts.filter(function (n) { return spent.total.trainer[n] > 0; })));
  if (spent.engine_devices) rows.push(P.el("h3", {}, "engines"), bar(spent.total.engines, spent.engine_parts), P.legend(spent.engine_parts.filter(function (n) { return spent.total.engines[n] > 0; })));
  return rows.length ? rows : P.el("p", { class: "soft" }, "nothing recorded");
};

P.curveControls = function (redraw) {
  const smooth = P.el("select", { "aria-label": "smoothing", change: function (event) { P.smooth = Number(event.target.value); redraw(); } }, [[1, "not smoothed"], [5, "smoothed over 5"], [20, "smoothed over 20"], [100, "smoothed over 100"]].map(function (o) { return P.el("option", { value: o[0], selected: P.smooth === o[0] }, o[1]); }));
  const log = P.el("input", { type: "checkbox", checked: P.logScale, change: function (event) { P.logScale = event.target.checked; redraw(); } });
  return P.el("div", { class: "bar" }, smooth, P.el("label", {}, log, "logarithmic"), P.el("span", { class: "soft small" }, "drag to zoom, double-click for all"));
};
P.views.Curves = function (run, open, redraw) {
  const others = [];
  ["trainer", "orchestrator"].forEach(function (role) { Object.keys(run.curves[role].mean).forEach(function (key) { if (!P.used.has(role + ":" + key)) others.push([role, key]); }); });
  const place = P.el("div", { class: "charts" });
  let shown = 0, word = "";
  const more = P.el("button", { click: function () { add(12); } }, "show more");
  const match = function () { return others.filter(function (o) { return !word || (o[0] + " " + o[1]).indexOf(word) >= 0; }); };
  const add = function (count) { match().slice(shown, shown + count).forEach(function (o) { const c = P.curve(run, o[0], o[1], o[1]); if (c) place.append(P.chart(o[0] + ": " + o[1], [c], { height: 150 })); }); shown += count; more.hidden = shown >= match().length; };
  const search = P.el("input", { type: "search", placeholder: "find a metric", "aria-label": "find a metric", input: function (event) { word = event.target.value; shown = 0; P.fill(place); add(12); } });
  add(6);
  return [P.curveControls(redraw), P.el("p", { class: "soft small" }, P.widthHint(run)), P.el("div", { class: "charts" }, P.rewardChart(run), P.groups.map(function (g) { return P.groupChart(run, g); })),
    others.length ? [P.el("h2", {}, "Other metrics (" + others.length + ")"), P.el("div", { class: "bar" }, search), place, P.el("div", { class: "bar" }, more)] : null];
};
P.views.Throughput = function (run, open, redraw) {
  const total = run.accounting.total, wall = total.wall || 1, waits = total.trainer.wait / wall, idle = total.engines.idle / wall;
  const bound = run.kind !== "rl" || !run.accounting.engine_devices || !total.steps ? null : waits > 0.05 && idle > 0.05 && Math.abs(waits - idle) < 0.05 ? "Each side waits for the other: the trainer " + P.percent(waits) + ", the engines " + P.percent(idle) + " of the running time." : waits > 0.05 || idle > 0.05 ? waits >= idle ? "Sampling is the bound: the trainer waited for rollouts " + P.percent(waits) + " of the running time, the engines idled " + P.percent(idle) + "." : "Training is the bound: the engines idled " + P.percent(idle) + " of the running time, the trainer waited " + P.percent(waits) + "." : "Neither side waits much: trainer " + P.percent(waits) + ", engines " + P.percent(idle) + " of the running time.";
  const tail = (total.engines.tail || 0) / wall, behind = tail > 0.05 ? " For " + P.percent(tail) + " of it their seats were empty while a batch waited for its last replies: a larger async_level fills them, no other split does." : "";
  return [P.curveControls(redraw), bound ? P.el("p", { "data-bound": true }, bound + behind) : null, P.split(run), P.el("div", { class: "charts" }, P.speed.map(function (g) { return P.groupChart(run, g); }))];
};
P.split = function (run) {
  const split = run.split;
  if (!split) return null;
  const col = function (name, key, show) { return { name: name, num: true, of: function (row) { return row[key]; }, show: show }; };
  const rows = [{ of: "trainer", now: split.trainer, idle: split.trainer_idle, better: split.suggested_trainer }, { of: "engines", now: split.engines, idle: split.engines_idle, better: split.suggested_engines }];
  const unit = split.unit === "GPU" ? "GPUs" : "processes";
  const said = split.step_gain > 0 ? "A step would be about " + P.percent(split.step_gain) + " shorter, if the work of each side is shared out evenly." : "No other split of these " + unit + " promises a shorter step.";
  return P.el("div", { class: "card", "data-split": true }, P.el("h3", {}, "Split of the " + unit), P.table([{ name: "", of: function (row) { return row.of; } }, col(unit, "now", P.number), col("idle", "idle", P.percent), col("suggested", "better", P.number)], rows), P.el("p", { class: "soft small" }, said + " Other shapes: prime-hpc simulate."));
};
P.views.Timeline = function (run) {
  const canvas = P.el("canvas", { class: "timeline", tabindex: 0, role: "img", "aria-label": "timeline of every role" }), range = P.el("span", { class: "soft", "data-range": true });
  const holder = P.el("div", {}, canvas);
  const line = P.timeline(run, canvas, function (from, to, last) { range.textContent = P.span(from) + " to " + P.span(to) + " of " + P.span(last); });
  P.lastTimeline = line;
  const states = new Set();
  line.lanes.forEach(function (lane) { (lane.table ? lane.table.phases : lane.spans.map(function (s) { return s[0]; }).concat(lane.under ? ["work"] : [])).forEach(function (s) { states.add(s); }); });
  const named = new Map();
  states.forEach(function (s) { named.set(P.stateName(s) + P.stateColor(s), s); });
  const jump = P.el("select", { "aria-label": "attempt", change: function (event) { const row = run.accounting.rows[Number(event.target.value)]; if (row) line.set(row.began - run.origin - 0.02 * row.wall, row.began - run.origin + 1.02 * row.wall); else line.all(); } },
    P.el("option", { value: "-1" }, "whole run"), run.accounting.rows.map(function (row, i) { return P.el("option", { value: i }, "attempt " + row.attempt + ": " + (row.outcome || "")); }));
  return [P.el("div", { class: "bar" }, P.el("button", { click: function () { line.zoom(0.5); }, "aria-label": "zoom in" }, "+"), P.el("button", { click: function () { line.zoom(2); }, "aria-label": "zoom out" }, "−"), P.el("button", { click: line.all }, "all"), jump, range, P.el("span", { class: "soft small" }, "wheel zooms, drag moves; broken lines: an attempt begins")),
    P.el("div", { class: "card" }, holder), P.legend(Array.from(named.values())),
    run.lanes.orchestrator.start.length && !run.lanes.orchestrator.placed ? P.el("p", { class: "soft small" }, "This run did not record when in a step the orchestrator waited: its lane shows each step's shares.") : null];
};
P.bySlurm = function (spent) {
  const slurm = spent.slurm;
  if (!slurm) return "whole allocation; Slurm's accounting did not say";
  const idle = slurm.without_attempt ? ", " + P.hours(slurm.without_attempt) + " of it before an attempt began" : "";
  const unknown = slurm.unknown_attempts ? "; " + slurm.unknown_attempts + " attempt" + (slurm.unknown_attempts > 1 ? "s" : "") + " it does not know" : "";
  return "Slurm charged " + P.hours(slurm.hours) + idle + unknown;
};
P.views.Accounting = function (run) {
  const spent = run.accounting, rows = spent.rows;
  if (!rows.length) return [P.el("p", { class: "soft" }, "No attempt has been recorded.")];
  const seconds = function (of) { return { num: true, of: of, show: P.span }; };
  const col = function (name, extra) { return Object.assign({ name: name }, extra); };
  const columns = [col("attempt", { of: function (r) { return r.attempt; }, num: true }), col("began", { of: function (r) { return r.began; }, show: P.clock }), col("why it began", { of: function (r) { return r.why; } }), col("queue or down", seconds(function (r) { return r.waited; })), col("ran", seconds(function (r) { return r.wall; })),
    col("steps", { num: true, of: function (r) { return r.steps; } }), col("lost steps", { num: true, of: function (r) { return r.lost_steps; } }), col("ended", { of: function (r) { return r.outcome; } }), col("cause", { of: function (r) { return r.cause; } }), col("from step", { num: true, of: function (r) { return r.resume_step; } }), col("saved step", { num: true, of: function (r) { return r.saved_step; } }), col("job", { of: function (r) { return r.job; } }), col("nodes", { of: function (r) { return r.nodes.length > 3 ? r.nodes.length + " nodes" : r.nodes.join(", "); } })];
  const table = function (title, names, key, devices) {
    if (!devices) return null;
    const hours = function (s) { return s * devices / 3600; };
    const list = [col("attempt", { of: function (r) { return r.attempt; }, num: true })].concat(names.map(function (n) { return col(P.stateName(n), { num: true, of: function (r) { return hours(r[key][n]); }, show: P.hours }); }));
    list.push(col("sum", { num: true, of: function (r) { return hours(r.wall); }, show: P.hours }));
    const total = P.el("tr", { class: "total" }, P.el("td", { class: "num" }, "all"), names.map(function (n) { return P.el("td", { class: "num" }, P.hours(hours(spent.total[key][n]))); }), P.el("td", { class: "num" }, P.hours(hours(spent.total.wall))));
    return [P.el("h2", {}, title + ": " + spent.unit + "-hours (" + devices + " " + (spent.unit === "GPU" ? "GPUs" : "processes") + ")"), P.el("div", { class: "card wide" }, P.table(list, rows, { last: [total] }))];
  };
  const held = spent.total.held_hours, kind = spent.unit === "GPU" ? "GPU" : "CPU";
  const tiles = [run.parent ? P.tile(spent.unit + "-hours", "shared", "accounted for by " + run.parent) : P.tile(spent.unit + "-hours", P.hours(spent.total.device_hours), "of the roles"), held !== null ? P.tile(kind + "-hours held", P.hours(held), P.bySlurm(spent)) : null, P.tile("effective training time", P.percent(spent.total.effective), P.percent(spent.total.effective_running) + " of the time running"), P.tile("work lost", P.span(spent.total.lost_s), spent.total.lost_steps + " steps done again"), P.tile("queue or down", P.span(spent.total.waited), "before and between attempts")];
  return [P.el("div", { class: "tiles" }, tiles), P.el("div", { class: "card" }, P.stacks(spent)), P.el("h2", {}, "Attempts"), P.el("div", { class: "card wide" }, P.table(columns, rows)),
    run.parent ? null : [table("Trainer", spent.trainer_parts, "trainer", spent.trainer_devices), table("Engines", spent.engine_parts, "engines", spent.engine_devices)]];
};
P.views.Config = function (run) {
  const runs = P.data.runs, mine = P.config(run), place = P.el("div", { class: "card" });
  let other = null, only = false, word = "";
  const draw = function () {
    const theirs = other ? P.config(other) : {};
    const keys = Array.from(new Set(Object.keys(mine).concat(Object.keys(theirs)))).sort();
    const differs = function (key) { return other !== null && P.valueText(mine[key]) !== P.valueText(theirs[key]); };
    const rows = keys.filter(function (key) { return (!only || differs(key)) && (!word || key.indexOf(word) >= 0 || P.valueText(mine[key]).indexOf(word) >= 0); });
    const columns = [{ name: "key", of: function (k) { return k; }, mono: true }, { name: run.name, of: function (k) { return P.valueText(mine[k]); }, mono: true, mark: differs }];
    if (other) columns.push({ name: other.name, of: function (k) { return P.valueText(theirs[k]); }, mono: true, mark: differs });
    P.fill(place, P.el("div", { class: "soft small" }, rows.length + " keys"), P.table(columns, rows));
  };
  const pick = runs.length > 1 ? P.el("select", { "aria-label": "compare with", change: function (event) { other = runs[Number(event.target.value)] || null; only = other !== null; box.checked = only; draw(); } }, P.el("option", { value: "-1" }, "alone"), runs.map(function (r, i) { return r === run ? null : P.el("option", { value: i }, "beside " + r.name); })) : null;
  const box = P.el("input", { type: "checkbox", change: function (event) { only = event.target.checked; draw(); } });
  const search = P.el("input", { type: "search", placeholder: "find a key", "aria-label": "find a key", input: function (event) { word = event.target.value; draw(); } });
  const made = run.made, facts = [["directory", run.path], ["command", made.command], ["code", made.sha ? made.sha + (made.changed ? ", " + made.changed + " files changed" : "") : null], ["Python", made.python], ["submitted from", made.host]].filter(function (f) { return f[1]; });
  draw();
  return [P.el("div", { class: "card" }, P.el("table", {}, P.el("tbody", {}, facts.map(function (f) { return P.el("tr", {}, P.el("td", { class: "soft" }, f[0]), P.el("td", { class: "mono" }, f[1])); })))),
    P.el("div", { class: "bar" }, search, pick, pick ? P.el("label", {}, box, "differences only") : null), place];
};

P.frame = function () {
  const runs = P.data.runs, tabs = (runs.length > 1 ? ["Compare"] : []).concat(["Overview", "Curves", "Throughput", "Timeline", "Accounting", "Rollouts", "Config"]);
  let at = 0, tab = tabs[0];
  const main = document.getElementById("main"), head = document.getElementById("head");
  const show = function () {
    P.live.splice(0).forEach(function (end) { end(); });
    const run = runs[at];
    P.fill(main);
    P.fill(head);
    const choose = runs.length > 1 ? P.el("select", { "aria-label": "run", change: function (event) { at = Number(event.target.value); if (tab === "Compare") tab = "Overview"; show(); } }, runs.map(function (r, i) { return P.el("option", { value: i, selected: i === at }, r.name); })) : null;
    const theme = P.el("button", { title: "light or dark", "aria-label": "light or dark", click: function () { document.documentElement.dataset.theme = P.isDark() ? "light" : "dark"; show(); } }, P.isDark() ? "☀" : "☾");
    P.put(head, [P.el("div", { class: "headline" }, P.el("h1", {}, runs.length > 1 ? P.data.title : run.name), choose, tab !== "Compare" ? [P.badge(run.status), P.el("span", { class: "soft" }, run.kind || "")] : null, P.el("span", { class: "spring" }), theme),
      P.el("nav", { role: "tablist" }, tabs.map(function (name) { return P.el("button", { role: "tab", "aria-selected": name === tab ? "true" : "false", click: function () { tab = name; location.hash = name; show(); } }, name); }))]);
    const open = function (index) { at = index; tab = "Overview"; show(); };
    P.put(main, P.views[tab](run, open, show));
    document.body.dataset.view = tab;
  };
  document.documentElement.dataset.theme = window.matchMedia && window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const named = tabs.find(function (name) { return "#" + name === location.hash; });
  if (named) tab = named;
  P.open = function (name, index) { tab = name; if (index !== undefined) at = index; show(); };
  document.getElementById("foot").textContent = "Made " + P.data.made + " by prime-hpc report. Curves: uPlot (MIT).";
  show();
};
P.frame();
