/* Curves by uPlot: mean lines, bands of least and greatest where a point stands for several steps, held-out points. */
"use strict";
P.smooth = 1;
P.logScale = false;

/* Aligns curves that have their own steps: undefined is "not here", null a gap. */
P.align = function (curves) {
  const all = new Set();
  curves.forEach(function (curve) { curve.x.forEach(function (x) { all.add(x); }); });
  const x = Array.from(all).sort(function (a, b) { return a - b; });
  const place = new Map();
  x.forEach(function (value, index) { place.set(value, index); });
  return [x].concat(curves.map(function (curve) {
    if (curve.x.length === x.length) return curve.y;
    const y = new Array(x.length);
    curve.x.forEach(function (value, index) { y[place.get(value)] = curve.y[index]; });
    return y;
  }));
};
P.smoothed = function (values, window) {
  if (window <= 1) return values;
  const keep = 1 - 1 / window;
  let mean = 0, weight = 0;
  return values.map(function (value) {
    if (value === null || value === undefined) return value;
    mean = keep * mean + (1 - keep) * value; weight = keep * weight + (1 - keep);
    return mean / weight;
  });
};

/* list: {label, x, y, low, high, color, points, width}. Returns the card. */
P.chart = function (title, list, options) {
  const wanted = options || {};
  const holder = P.el("div", { class: "chart" });
  const card = P.el("div", { class: "card", "data-chart": title }, P.el("h3", {}, title), wanted.hint ? P.el("div", { class: "soft small" }, wanted.hint) : null, holder);
  if (typeof uPlot === "undefined") { P.put(holder, P.el("p", { class: "soft small" }, "curves need a browser of 2020 or later")); return card; }
  let plot = null;
  const draw = function (width) {
    const curves = [], series = [{ label: wanted.x || "step" }], bands = [];
    list.forEach(function (one, index) {
      const color = one.color || P.color(index);
      const y = one.points ? one.y : P.smoothed(one.y, P.smooth);
      curves.push({ x: one.x, y: y });
      series.push({ label: one.label, stroke: color, width: one.width || (one.points ? 2 : 1.5), spanGaps: Boolean(one.points),
        points: { show: one.points ? one.y.length < 150 : one.y.length < 3, size: 6, fill: color }, value: function (u, v) { return v === null || v === undefined ? "–" : P.number(v); } });
      if (one.low && one.high) {
        const at = series.length;
        [one.high, one.low].forEach(function (edge) {
          curves.push({ x: one.x, y: edge });
          series.push({ show: true, stroke: "transparent", width: 0, points: { show: false }, spanGaps: Boolean(one.points), label: "", class: "edge" });
        });
        bands.push({ series: [at, at + 1], fill: color + "2e" });
      }
    });
    const soft = P.css("--soft"), grid = { stroke: P.css("--grid"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: soft, grid: grid, ticks: grid, font: font };
    if (plot) plot.destroy();
    plot = new uPlot({
      width: width, height: wanted.height || 230, series: series, bands: bands,
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, focus: { prox: 16 } }, focus: { alpha: 0.35 },
      scales: { x: { time: false }, y: { distr: P.logScale && !wanted.linear ? 3 : 1 } },
      axes: [axis, Object.assign({ size: 62, values: function (u, ticks) { return ticks.map(function (v) { return v === null ? "" : P.number(v); }); } }, axis)],
      legend: { live: true }
    }, P.align(curves.map(function (curve) { return P.logScale && !wanted.linear ? { x: curve.x, y: curve.y.map(function (v) { return v > 0 ? v : v === undefined ? undefined : null; }) } : curve; })), holder);
    holder.querySelectorAll(".u-legend .edge").forEach(function (row) { row.style.display = "none"; });
  };
  P.onResize(holder, draw);
  P.live.push(function () { if (plot) plot.destroy(); });
  return card;
};

/* A metric of a run as a curve; null where it has none. */
P.curve = function (run, role, key, label, color) {
  const table = run.curves[role];
  const y = table && table.mean[key];
  if (!y || !y.some(function (v) { return v !== null; })) return null;
  return { label: label || key, x: table.steps, y: y, low: table.low[key], high: table.high[key], color: color };
};
/* Held-out means with 95 % intervals where the run recorded their standard error over tasks: mean +- 1.96 SE. */
P.heldOut = function (run, color) {
  return Object.keys(run.points).filter(function (key) { return /^eval\/.+\/mean_reward$/.test(key); }).map(function (key, index) {
    const env = key.split("/").slice(1, -1).join("/"), points = run.points[key];
    const error = new Map(run.points["eval/" + env + "/mean_reward_se"] || []);
    const half = points.map(function (p) { return error.has(p[0]) ? 1.96 * error.get(p[0]) : null; });
    const has = half.some(function (v) { return v !== null; });
    const edge = function (sign) { return has ? points.map(function (p, i) { return half[i] === null ? null : p[1] + sign * half[i]; }) : undefined; };
    return { label: "held-out: " + env, x: points.map(function (p) { return p[0]; }), y: points.map(function (p) { return p[1]; }),
      low: edge(-1), high: edge(1), points: true, color: color || P.color(index + 1), hasInterval: has };
  });
};

P.groups = [
  ["Loss", [["trainer", "loss", "training loss"], ["trainer", "echo_loss", "echo loss"]]],
  ["KL and mismatch to the engine (nats a token)", [["trainer", "kl", "KL to the engine"], ["trainer", "kl_penalty", "KL of the penalty (its reference model)"], ["trainer", "logprob_diff", "mean log-probability difference"], ["orchestrator", "teacher/reverse_kl", "reverse KL to the teacher"], ["trainer", "teacher_divergence", "divergence to the teacher's distribution"]]],
  ["Entropy (nats a token)", [["trainer", "entropy", "entropy"]]],
  ["Lengths (tokens of a completion)", [["orchestrator", "completion/tokens_mean", "mean"], ["orchestrator", "completion/tokens_max", "longest"], ["orchestrator", "completion/tokens_mean_above", "above their group's mean reward"], ["orchestrator", "completion/tokens_mean_below", "below it"]]],
  ["Importance ratio", [["trainer", "ratio", "mean ratio"], ["trainer", "clipped", "share clipped"], ["trainer", "clipped_high", "ratio above the bounds"], ["trainer", "clipped_low", "below"], ["trainer", "corrected", "corrected"], ["trainer", "off_policy_masked", "off-policy, left out"], ["trainer", "second_moment_masked", "too far, left out"], ["trainer", "high_covariance", "high covariance"]]],
  ["Staleness (versions)", [["orchestrator", "lag/mean", "mean lag"], ["orchestrator", "lag/max", "largest lag"]]],
  ["Gradient norm", [["trainer", "grad_norm", "gradient norm"]]],
  ["Learning rate", [["trainer", "lr", "learning rate"]]],
  ["Spread of rewards", [["orchestrator", "reward/std", "of rollouts"], ["orchestrator", "groups/reward_spread", "within groups"]]],
  ["Groups of a batch", [["orchestrator", "groups/in_batch", "in the batch"], ["orchestrator", "groups/trained", "trained"], ["orchestrator", "groups/with_signal", "with a signal"], ["orchestrator", "groups/zero_signal", "with none"], ["orchestrator", "groups/solved_all", "solved by all rollouts"], ["orchestrator", "groups/solved_none", "by none"], ["orchestrator", "groups/stale", "stale"]]],
  ["Episodes of a step", [["orchestrator", "episodes/completed", "completed"], ["orchestrator", "episodes/truncated", "truncated"], ["orchestrator", "episodes/failed", "failed"], ["orchestrator", "episodes/timeout", "timed out"]]]
];
P.speed = [
  ["Tokens per second", [["trainer", "tokens_per_s", "trainer, while it trains"], ["trainer", "tokens_per_s_overall", "trainer, with its waits"], ["orchestrator", "tokens/sampled_per_second", "engines"]]],
  ["Model FLOPs utilization (share of the devices' peak)", [["trainer", "mfu", "MFU while training"]]],
  ["Seconds of a trainer's step", [["trainer", "time/step", "whole step"], ["trainer", "time/forward_backward", "forward and backward"], ["trainer", "time/wait", "waiting for rollouts"], ["trainer", "time/optim", "optimizer"], ["trainer", "time/publish", "publishing"], ["trainer", "time/checkpoint", "saving"]]],
  ["Seconds of an orchestrator's step", [["orchestrator", "time/step", "whole step"], ["orchestrator", "time/wait_rollouts", "waiting for rollouts"], ["orchestrator", "time/wait_weights", "waiting for weights"], ["orchestrator", "time/weight_update", "weight update"], ["orchestrator", "time/weight_pause", "engines paused"]]],
  ["Episodes per second", [["orchestrator", "episodes/per_second", "episodes"]]],
  ["Seconds of an episode (mean)", [["orchestrator", "episode_time/engine_mean", "waiting for the engines"], ["orchestrator", "episode_time/environment_mean", "environment: its code, tools, sandboxes"], ["orchestrator", "episode_time/reward_mean", "reward"]]],
  ["In flight", [["orchestrator", "queue/in_flight", "episodes"], ["orchestrator", "queue/complete_groups", "complete groups"]]]
];
P.used = new Set(["trainer:reward", "orchestrator:reward/mean"]);
P.groups.concat(P.speed).forEach(function (group) { group[1].forEach(function (row) { P.used.add(row[0] + ":" + row[1]); }); });

P.rewardChart = function (run, height) {
  const reward = P.curve(run, "orchestrator", "reward/mean", "training reward (batch mean)", P.color(0)) || P.curve(run, "trainer", "reward", "training reward (batch mean)", P.color(0));
  const held = P.heldOut(run);
  const losses = Object.keys(run.points).filter(function (key) { return /^eval\/(.+\/)?loss$/.test(key); });
  const list = (reward ? [reward] : []).concat(held);
  if (list.length) {
    const hint = held.length ? held.some(function (h) { return h.hasInterval; }) ? "held-out: mean with its 95 % interval" : "held-out: means (this run recorded no standard error, so no interval)" : "";
    return P.chart("Reward", list, { height: height, hint: hint, linear: true });
  }
  const train = P.curve(run, "trainer", "loss", "training loss", P.color(0));
  if (!train) return null;
  const points = losses.map(function (key, index) {
    const of = key.split("/").slice(1, -1).join("/"), loss = run.points[key];
    return { label: "held-out loss" + (of ? ": " + of : ""), x: loss.map(function (p) { return p[0]; }), y: loss.map(function (p) { return p[1]; }), points: true, color: P.color(index + 1) };
  });
  return P.chart("Loss", [train].concat(points), { height: height });
};
P.groupChart = function (run, group) {
  const list = group[1].map(function (row, index) { return P.curve(run, row[0], row[1], row[2], P.color(index)); }).filter(Boolean);
  return list.length ? P.chart(group[0], list) : null;
};
P.widthHint = function (run) {
  const width = Math.max(run.curves.trainer.width, run.curves.orchestrator.width);
  return width > 1 ? "A point stands for " + width + " steps: the line is their mean, the band reaches from the least to the greatest." : "Every step is drawn.";
};
