/* Rollouts to read: a filtered, paged list and one rollout as text, its tokens coloured by what is known of each. */
"use strict";
P.PAGE = 40;
P.expand = function (runs) { const found = []; (runs || []).forEach(function (pair) { for (let i = 0; i < pair[1]; i += 1) found.push(pair[0]); }); return found; };
P.firstLine = function (row) {
  const text = row.completion !== undefined ? row.completion : row.text.filter(function (t, i) { return row.logprobs[i] !== null; }).join("");
  return text.replace(/\s+/g, " ").slice(0, 110) || "(token ids)";
};
P.fullText = function (row) { return row.completion !== undefined ? row.prompt + " " + row.completion : row.text.join(""); };
/* From little (warm) to much (none): probability p of the sampled token. */
P.heat = function (share) { const alpha = Math.max(0, Math.min(1, share)); return (P.isDark() ? "rgba(230,120,20," : "rgba(213,94,0,") + (0.6 * alpha).toFixed(3) + ")"; };
P.tokenColor = function (row, index, mode, facts) {
  const logprob = row.logprobs[index];
  if (logprob === null || mode === "none") return "";
  if (mode === "engine") return P.heat(Math.min(1, -logprob / 4));
  if (mode === "trainer") return row.trainer && row.trainer[index] !== null ? P.heat(Math.min(1, -row.trainer[index] / 4)) : "";
  if (mode === "gap") return row.trainer && row.trainer[index] !== null ? P.heat(Math.min(1, Math.abs(row.trainer[index] - logprob) / 0.5)) : "";
  const rank = facts.kinds.indexOf(facts.versions[index]);
  return P.color(rank) + "40";
};
P.tokenView = function (row, mode) {
  const facts = { versions: P.expand(row.versions), trained: P.expand(row.trained) };
  facts.kinds = Array.from(new Set(facts.versions.filter(function (v) { return v >= 0; }))).sort(function (a, b) { return a - b; });
  const many = row.logprobs.length, texts = row.text.length ? row.text : row.ids.map(function (id) { return " " + id; });
  const parts = P.el("div");
  let turn = null, sampled = null;
  for (let i = 0; i < many; i += 1) {
    const isSampled = row.logprobs[i] !== null;
    if (isSampled !== sampled) {
      sampled = isSampled;
      turn = P.el("div", { class: "tokens" });
      P.put(parts, P.el("div", { class: "turn" + (isSampled ? " policy" : "") }, P.el("div", { class: "who" }, isSampled ? "policy" : i === 0 ? "prompt" : "environment (user, tool)"), turn));
    }
    if (!isSampled) { turn.append(P.el("span", { class: "given" }, texts[i])); continue; }
    const p = Math.exp(row.logprobs[i]);
    const says = "p = " + p.toPrecision(3) + " (log " + P.number(row.logprobs[i]) + ") by the engine" + (row.trainer && row.trainer[i] !== null ? ", " + Math.exp(row.trainer[i]).toPrecision(3) + " by the trainer" : "") + ", version " + facts.versions[i] + (facts.trained[i] ? "" : ", not trained");
    turn.append(P.el("span", { style: "background:" + P.tokenColor(row, i, mode, facts), class: facts.trained[i] ? "" : "untrained", title: says }, texts[i]));
  }
  return [facts, parts];
};
P.rolloutText = function (row, mode, setMode) {
  const facts = [["step", row.step], ["environment", row.env], ["reward", P.number(row.reward)], ["advantage", row.advantage === null ? "–" : P.number(row.advantage)]];
  if (row.task !== undefined && row.task !== null) facts.push(["task", row.task]);
  if (row.num_tokens) facts.push(["tokens", row.num_tokens], ["temperature", row.temperature], ["group", row.group]);
  if (row.range) facts.push(["versions", row.range[0] === row.range[1] ? row.range[0] : row.range.join(" to ")]);
  const head = P.el("div", { class: "legend" }, facts.map(function (f) { return P.el("span", {}, f[0] + " ", P.el("b", {}, f[1])); }));
  if (row.completion !== undefined) {
    const turns = (row.prompt || "").split(/\n?(?=\[(?:user|system|assistant|tool)\] )/);
    return [head, turns.map(function (text) { return P.el("div", { class: "turn" }, P.el("pre", {}, text)); }),
      P.el("div", { class: "turn policy" }, P.el("div", { class: "who" }, "policy" + (row.truncated ? " (truncated)" : "")), P.el("pre", {}, row.completion))];
  }
  const view = P.tokenView(row, mode);
  const modes = [["engine", "probability (engine)"], ["version", "policy version"], ["none", "no colour"]];
  if (row.trainer) modes.splice(1, 0, ["trainer", "probability (trainer)"], ["gap", "difference of both"]);
  const choose = P.el("select", { "aria-label": "colour tokens by", change: function (event) { setMode(event.target.value); } }, modes.map(function (m) { return P.el("option", { value: m[0], selected: m[0] === mode }, m[1]); }));
  const key = mode === "version" ? view[0].kinds.map(function (v, i) { return P.el("span", {}, P.el("i", { style: "background:" + P.color(i) + "60" }), "version " + v); })
    : mode === "none" ? [] : [[0.02, "likely"], [0.35, ""], [0.7, ""], [1, mode === "gap" ? "far apart" : "unlikely"]].map(function (k) { return P.el("span", {}, P.el("i", { style: "background:" + P.heat(k[0]) }), k[1]); });
  return [head, P.el("div", { class: "bar" }, P.el("label", {}, "colour by ", choose), P.el("div", { class: "legend" }, key)), view[1],
    row.cut ? P.el("p", { class: "soft small" }, row.cut + " more tokens are not in this page") : null];
};
P.views.Rollouts = function (run) {
  const rows = run.rollouts, facts = run.rollout_facts;
  const wanted = { kind: "", env: "", text: "", order: "step", page: 0, at: 0, mode: "engine" };
  const list = P.el("div", { class: "card" }), text = P.el("div", { class: "card text" });
  let shown = [];
  const filter = function () {
    const word = wanted.text.toLowerCase();
    shown = rows.filter(function (row) { return (!wanted.kind || row.kind === wanted.kind) && (!wanted.env || row.env === wanted.env) && (!word || P.fullText(row).toLowerCase().indexOf(word) >= 0); });
    const by = { step: function (r) { return r.step; }, best: function (r) { return -(r.reward === null ? -1e300 : r.reward); }, worst: function (r) { return r.reward === null ? 1e300 : r.reward; }, long: function (r) { return -(r.num_tokens || P.fullText(r).length / 4); } }[wanted.order];
    shown = shown.map(function (row, i) { return [row, i]; }).sort(function (a, b) { return by(a[0]) - by(b[0]) || a[1] - b[1]; }).map(function (pair) { return pair[0]; });
    wanted.page = 0; wanted.at = 0; fill();
  };
  const fill = function () {
    const first = wanted.page * P.PAGE, pages = Math.max(1, Math.ceil(shown.length / P.PAGE));
    const body = P.el("tbody", {}, shown.slice(first, first + P.PAGE).map(function (row, i) {
      return P.el("tr", { class: "pick" + (first + i === wanted.at ? " on" : ""), click: function () { wanted.at = first + i; fill(); } },
        P.el("td", { class: "num" }, row.step), P.el("td", {}, row.kind), P.el("td", { class: "num" }, P.number(row.reward)), P.el("td", { class: "mono" }, P.firstLine(row)));
    }));
    const turn = function (by) { return function () { wanted.page = Math.max(0, Math.min(pages - 1, wanted.page + by)); wanted.at = wanted.page * P.PAGE; fill(); }; };
    P.fill(list, P.el("div", { class: "bar" }, P.el("button", { click: turn(-1), disabled: wanted.page === 0 }, "‹"), P.el("span", { class: "soft" }, shown.length + " rollouts, page " + (wanted.page + 1) + " of " + pages), P.el("button", { click: turn(1), disabled: wanted.page >= pages - 1, "data-next": true }, "›")),
      P.el("div", { class: "scroll" }, P.el("table", {}, P.el("thead", {}, P.el("tr", {}, P.el("th", { class: "num" }, "step"), P.el("th", {}, "kind"), P.el("th", { class: "num" }, "reward"), P.el("th", {}, "completion"))), body)));
    P.fill(text);
    P.put(text, shown[wanted.at] ? P.rolloutText(shown[wanted.at], wanted.mode, function (mode) { wanted.mode = mode; fill(); }) : P.el("p", { class: "soft" }, "No rollout."));
  };
  const options = function (key, values, all) { return P.el("select", { "aria-label": key, change: function (event) { wanted[key] = event.target.value; filter(); } }, P.el("option", { value: "" }, all), values.map(function (v) { return P.el("option", { value: v }, v); })); };
  const distinct = function (key) { return Array.from(new Set(rows.map(function (row) { return row[key]; }))); };
  const order = P.el("select", { "aria-label": "order", change: function (event) { wanted.order = event.target.value; filter(); } }, [["step", "by step"], ["best", "best first"], ["worst", "worst first"], ["long", "longest first"]].map(function (o) { return P.el("option", { value: o[0] }, o[1]); }));
  let later = 0;
  const search = P.el("input", { type: "search", placeholder: "find text", "aria-label": "find text", input: function (event) { window.clearTimeout(later); later = window.setTimeout(function () { wanted.text = event.target.value; filter(); }, 120); } });
  if (!rows.length) return [P.el("p", { class: "soft" }, "This run has stored no rollouts to read (batches, or metrics/samples.jsonl and tokens.jsonl).")];
  filter();
  const says = "Of " + facts.stored_steps + " stored batches some over the whole run were opened (" + facts.looked_at.toLocaleString("en") + " sequences): of each the best two, the worst two and two at random; and what the run wrote down as samples" + (rows.some(function (row) { return row.trainer; }) ? ", some with the trainer's probabilities (both sides)." : ".") + (facts.left_out ? " " + facts.left_out + " did not fit into this page." : "");
  return [P.el("div", { class: "bar" }, options("kind", distinct("kind"), "all kinds"), options("env", distinct("env"), "all environments"), order, search), P.el("p", { class: "soft small" }, says), P.el("div", { class: "reader" }, list, text)];
};
