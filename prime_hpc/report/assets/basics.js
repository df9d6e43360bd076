/* Data of the page, elements, numbers, colours. All scripts share the one object `P`. */
"use strict";
var P = { data: JSON.parse(document.getElementById("data").textContent), views: {}, live: [] };

/* A new element: P.el("td", {class: "num"}, "text", child, ...). Text is always text, never markup. */
P.el = function (tag, attributes) {
  const made = tag === "svg" || P.svgTags.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  Object.keys(attributes || {}).forEach(function (key) {
    const value = attributes[key];
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  });
  for (let i = 2; i < arguments.length; i += 1) P.put(made, arguments[i]);
  return made;
};
P.svgTags = new Set(["g", "path", "line", "rect", "text"]);
P.put = function (parent, child) {
  if (Array.isArray(child)) child.forEach(function (one) { P.put(parent, one); });
  else if (child !== null && child !== undefined && child !== false) parent.append(child instanceof Node ? child : String(child));
};

/* Replace all that is in `parent`; replaceChildren is younger than browsers that clusters still have. */
P.fill = function (parent) {
  while (parent.firstChild) parent.removeChild(parent.firstChild);
  for (let i = 1; i < arguments.length; i += 1) P.put(parent, arguments[i]);
};

P.number = function (value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
};
P.percent = function (value) { return value === null || value === undefined ? "–" : (100 * value).toFixed(value < 0.1 ? 1 : 0) + " %"; };
P.span = function (seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.abs(seconds);
  if (s < 1) return (1000 * seconds).toFixed(0) + " ms";
  if (s < 120) return Number(seconds.toPrecision(3)) + " s";
  if (s < 7200) return Number((seconds / 60).toFixed(1)) + " min";
  return s < 172800 ? Number((seconds / 3600).toFixed(2)) + " h" : Number((seconds / 86400).toFixed(1)) + " d";
};
P.hours = function (hours) { return hours === null || hours === undefined ? "–" : hours < 0.1 ? P.number(hours) : hours.toFixed(2); };
P.clock = function (epoch) {
  if (!epoch) return "–";
  const d = new Date(1000 * epoch), two = function (n) { return String(n).padStart(2, "0"); };
  return d.getFullYear() + "-" + two(d.getMonth() + 1) + "-" + two(d.getDate()) + " " + two(d.getHours()) + ":" + two(d.getMinutes()) + ":" + two(d.getSeconds());
};

/* Categorical colours that people with colour blindness tell apart (Okabe and Ito), darker where light ones get lost. */
P.palette = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b0568c", "#8a6d00", "#3aa0d8", "#7a3e00", "#4b4b4b"],
  dark: ["#56b4e9", "#e69f00", "#2fd0a0", "#e08fc0", "#f0e442", "#8ab4ff", "#ff9a66", "#c0c8d0"]
};
P.isDark = function () { return document.documentElement.dataset.theme === "dark"; };
P.color = function (index) { const all = P.palette[P.isDark() ? "dark" : "light"]; return all[index % all.length]; };
P.css = function (name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); };
P.states = {
  train: ["training", "#0072b2"], sample: ["sampling", "#009e73"], wait_rollouts: ["waiting for rollouts (engines sample)", "#009e73"],
  work: ["own work (packing, writing)", "#cc79a7"], publish: ["publishing weights", "#56b4e9"], save: ["saving", "#cc79a7"],
  wait: ["waiting for rollouts", "#f0b400"], idle: ["idle (waiting for weights or servers)", "#f0b400"], tail: ["empty for a batch's last replies", "#d99e73"],
  wait_weights: ["waiting for weights", "#f0b400"], wait_servers: ["waiting for servers", "#d55e00"],
  start: ["starting", "#8fa3b8"], starting: ["starting", "#8fa3b8"], queue: ["in the queue", "#aab4c0"], down: ["down", "#d55e00"],
  lost: ["lost: done again by a later attempt", "#d55e00"], other: ["other", "#9b8ac4"], end: ["ending", "#6b7684"],
  run: ["running", "#0072b2"], ready: ["ready", "#009e73"], running: ["running", "#009e73"], done: ["done", "#6b7684"],
  waiting: ["waiting to start", "#aab4c0"], away: ["away (to come back)", "#d55e00"], failed: ["failed", "#d55e00"], dead: ["dead", "#d55e00"],
  load: ["loading weights", "#56b4e9"], pause: ["paused for new weights", "#0b4f7a"], free: ["without a role", "#c9ced6"]
};
P.stateName = function (state) { return P.states[state] ? P.states[state][0] : state; };
P.stateColor = function (state) { return P.states[state] ? P.states[state][1] : "#888888"; };
P.legend = function (states) {
  return P.el("div", { class: "legend" }, states.map(function (state) {
    return P.el("span", {}, P.el("i", { style: "background:" + P.stateColor(state) }), P.stateName(state));
  }));
};

P.badge = function (status) {
  const state = status.state || "unknown";
  const kind = state === "completed" ? "good" : ["failed", "lost"].indexOf(state) >= 0 ? "bad" : ["running", "saving", "starting"].indexOf(state) >= 0 ? "live" : "";
  return P.el("span", { class: "badge " + kind }, state);
};
P.config = function (run) { return Object.assign({}, P.data.common, run.config); };

/* A table with sortable columns. columns: {name, of: row -> value, show: value -> text or node, num}. */
P.table = function (columns, rows, options) {
  const wanted = options || {};
  let by = -1, sign = 1;
  const body = P.el("tbody");
  const fill = function () {
    const order = rows.slice();
    if (by >= 0) order.sort(function (a, b) {
      const x = columns[by].of(a), y = columns[by].of(b);
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return sign * (x < y ? -1 : x > y ? 1 : 0);
    });
    P.fill(body);
    order.forEach(function (row) {
      const attributes = wanted.pick ? { class: "pick", click: function () { wanted.pick(row); } } : {};
      P.put(body, P.el("tr", attributes, columns.map(function (column) {
        const value = column.of(row);
        const mark = column.mark && column.mark(row) ? " diff" : "";
        return P.el("td", { class: (column.num ? "num" : column.mono ? "mono" : "") + mark }, column.show ? column.show(value, row) : value === null || value === undefined ? "–" : value);
      })));
    });
    (wanted.last || []).forEach(function (row) { P.put(body, row); });
  };
  const head = P.el("tr", {}, columns.map(function (column, index) {
    return P.el("th", { class: "sort" + (column.num ? " num" : ""), title: column.title || "sort", click: function () { sign = by === index ? -sign : 1; by = index; fill(); } }, column.name);
  }));
  fill();
  return P.el("table", {}, P.el("thead", {}, head), body);
};

P.onResize = function (node, act) {
  let width = 0;
  const look = function () { const now = node.clientWidth; if (now && now !== width) { width = now; act(now); } };
  if (window.ResizeObserver) { const watch = new ResizeObserver(look); watch.observe(node); P.live.push(function () { watch.disconnect(); }); }
  else { requestAnimationFrame(look); window.addEventListener("resize", look); P.live.push(function () { window.removeEventListener("resize", look); }); }
};
P.tip = null;
P.showTip = function (text, x, y) {
  if (!P.tip) { P.tip = P.el("div", { class: "tip" }); document.body.append(P.tip); }
  P.tip.hidden = !text;
  if (!text) return;
  P.tip.textContent = text;
  P.tip.style.left = Math.min(x + 14, window.innerWidth - P.tip.offsetWidth - 8) + "px";
  P.tip.style.top = Math.min(y + 14, window.innerHeight - P.tip.offsetHeight - 8) + "px";
};
