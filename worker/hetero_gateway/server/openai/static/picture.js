// The live picture of a group: figures, ranks with their parts of the model, events, and the placements considered.

import { byId, figure, h, percent, show } from "./dom.js";
import { stateOf, word } from "./history.js";

const MB = 1e6;
const GB = 1e9;
const PARTS = [
  { name: "KV heads", key: "kv_heads" },
  { name: "MLP columns", key: "mlp_columns" },
  { name: "Experts", key: "experts", columns: "expert_columns" },
  { name: "Vocabulary", key: "head_rows" },
];
const TREND = { width: 600, height: 64, seconds: 120 };
const WORKS = new Set(["ready", "asleep", "draining"]);

/** Draw the newest look. */
export function draw(history) {
  const { topology, stats } = history.last;
  drawBanner(topology);
  show(byId("figures"), figures(history, topology, stats));
  drawTrend(history);
  drawRanks(history, topology);
  show(byId("events"), history.events.map(({ clock, text, tone }) =>
    h("li", { class: tone }, h("time", {}, clock), h("span", {}, text))));
  if (!history.events.length) show(byId("events"), h("li", { class: "none" }, "Nothing happened since this page looks."));
  show(byId("placement"), placement(topology));
}

function drawBanner(topology) {
  const state = stateOf(topology);
  const banner = byId("banner");
  banner.hidden = WORKS.has(state);
  if (banner.hidden) return;
  const paused = topology.paused_requests;
  const waits = paused === 1 ? " 1 request is paused and goes on afterwards." : ` ${paused} requests are paused and go on afterwards.`;
  const title = Number(topology.epoch) > 1 || state === "aborted" ? "Healing" : "Starting";
  const reason = topology.reason ? `: ${topology.reason}` : "";
  const text = `${title}: the group is ${state}${reason}.${paused ? waits : ""}`;
  if (banner.textContent !== text) banner.textContent = text;
}

// --- figures -----------------------------------------------------------------------------------------------

function figures(history, topology, stats) {
  const rates = history.rates();
  const asked = Number(stats.prompt_tokens) + Number(stats.cached_tokens);
  const used = stats.num_blocks ? stats.used_blocks / stats.num_blocks : 0;
  const hits = asked ? `${percent(Number(stats.cached_tokens) / asked)} prefix hits` : "no prompt yet";
  const cached = stats.num_blocks ? stats.cached_blocks / stats.num_blocks : 0;
  const more = [];
  if (topology.paused_requests) more.push(`${topology.paused_requests} paused`);
  if (stats.preemptions !== "0") more.push(`${stats.preemptions} preempted`);
  more.push(`${Number(stats.finished_requests).toLocaleString("en")} done`);
  return [
    card("Tokens/s", figure(rates.generated), 
      rates.prompt ? `${figure(rates.prompt)}/s of prompts` : `${figure(rates.steps)} steps/s`),
    card("Queue", `${stats.running_requests} running`, [`${stats.waiting_requests} waiting`, ...more].join(" · ")),
    card("KV cache used", percent(used), hits, meter(used, cached)),
    card("Exchange", word(topology.exchange, "EXCHANGE_KIND_") || "none",
      [topology.placement_mode, `epoch ${topology.epoch}`].filter(Boolean).join(" · "), null, topology.exchange_reason),
  ];
}

function card(name, value, below, extra = null, hint = "") {
  return h("div", { class: "figure", title: hint || null },
    h("h3", {}, name), h("p", { class: "value" }, value), extra, h("p", { class: "below" }, below));
}

function meter(used, cached) {
  const svg = canvas("meter", 100, 1);
  svg.append(h("rect", { class: "used", width: 100 * used, height: 1 }),
    h("rect", { class: "cached", x: 100 * used, width: 100 * cached, height: 1 }));
  return svg;
}

function canvas(name, width, height) {
  return h("svg", { class: name, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
}

// --- trend -------------------------------------------------------------------------------------------------

function drawTrend(history) {
  const { trend } = history;
  const { width, height, seconds } = TREND;
  const now = trend[trend.length - 1].at_s;
  const highest = Math.max(...trend.map((point) => point.rate));
  const top = Math.max(1, highest);
  const x = (at) => width * (1 - (now - at) / seconds);
  const y = (rate) => height - 2 - (height - 6) * (rate / top);
  const line = trend.map((point, index) => `${index ? "L" : "M"}${x(point.at_s).toFixed(1)} ${y(point.rate).toFixed(1)}`).join("");
  const parts = [];
  trend.forEach((point, index) => {
    const before = trend[index - 1];
    if (!before) return;
    if (!WORKS.has(point.state)) {
      parts.push(h("rect", { class: "down", x: x(before.at_s), width: x(point.at_s) - x(before.at_s), height }));
    }
    if (before.epoch !== point.epoch) {
      parts.push(h("line", { class: "epoch", x1: x(point.at_s), x2: x(point.at_s), y1: 0, y2: height }));
    }
  });
  const svg = byId("trend");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const area = `${line}L${x(now)} ${height}L${x(trend[0].at_s)} ${height}Z`;
  svg.replaceChildren(...parts, h("path", { class: "area", d: area }), h("path", { class: "line", d: line }));
  show(byId("trend-caption"), h("span", {}, "2 minutes ago"), h("span", {}, highest ? `highest ${figure(highest)} tokens/s` : ""), h("span", {}, "now"));
}

// --- ranks -------------------------------------------------------------------------------------------------

function drawRanks(history, topology) {
  const ranks = history.ranks();
  const parts = partsOf(ranks);
  const paces = ranks.map((_, index) => ({ decode: history.pace(index, "decode"), prefill: history.pace(index, "prefill") }));
  const longest = {
    decode: Math.max(0, ...paces.map(({ decode }) => decode?.step_s || 0)),
    prefill: Math.max(0, ...paces.map(({ prefill }) => prefill?.step_s || 0)),
  };
  show(byId("legend"), swatch("compute"), "compute", swatch("exchange"), "exchange with other ranks",
    h("span", { class: "hint" }, isDeep(ranks, parts) ? "bars: units across, layers down" : ""));
  show(byId("ranks"), ranks.map((rank, index) => rankCard(rank, parts, paces[index], longest, topology)));
}

/** Return whether a bar differs from top to bottom: by layer, or by slices of experts. */
function isDeep(ranks, parts) {
  const differs = (part, rank) => {
    const held = runsOf(rank).filter((run) => part.depths[run.end] > part.depths[run.begin]);
    return new Set(held.map((run) => `${run[part.key]?.begin}-${run[part.key]?.end}`)).size > 1;
  };
  return parts.some((part) => part.columnsTotal || ranks.some((rank) => differs(part, rank)));
}

function swatch(kind) {
  return h("span", { class: `swatch ${kind}` });
}

/** Return the parts of the model that ranks share: each with its units in all, and the layers that have any. */
function partsOf(ranks) {
  const runs = ranks.flatMap(runsOf);
  return PARTS.map(({ name, key, columns }) => {
    const total = Math.max(0, ...runs.map((run) => run[key]?.end || 0));
    const numLayers = Math.max(0, ...runs.map((run) => run.end));
    const depths = [0]; // by layer: layers before it that have units of this part
    for (let layer = 0; layer < numLayers; layer++) {
      const has = runs.some((run) => run.begin <= layer && layer < run.end && sizeOf(run[key]));
      depths.push(depths[layer] + (has ? 1 : 0));
    }
    const columnsTotal = columns ? Math.max(0, ...runs.map((run) => run[columns]?.end || 0)) : 0;
    return { name, key, columns, total, depths, depth: depths[numLayers], columnsTotal };
  }).filter((part) => part.total);
}

/** Return a rank's runs of layers with equal parts; the vocabulary's rows belong to no layer, so to each. */
function runsOf(rank) {
  return rank.runs.map((run) => ({ ...run, head_rows: rank.shard.head_rows }));
}

function sizeOf(range) {
  return range ? range.end - range.begin : 0;
}

function rankCard(rank, parts, pace, longest, topology) {
  const device = rank.place.device;
  const isGpu = device?.kind === "DEVICE_KIND_CUDA";
  const state = stateOf(topology);
  const phase = phaseOf(rank, state);
  return h("article", { class: `rank ${isGpu ? "gpu" : "cpu"}${rank.joined ? "" : " gone"}${rank.isPast ? " past" : ""}`, "aria-label": `Rank ${rank.place.rank}` },
    h("header", {},
      h("span", { class: "number" }, String(rank.place.rank)),
      h("div", { class: "who" },
        h("p", { class: "device" }, device?.name || rank.place.pool),
        h("p", { class: "where" }, whereOf(rank))),
      phase ? h("span", { class: "phase" }, phase) : null),
    h("div", { class: "parts" }, parts.map((part) => partRow(part, rank))),
    h("div", { class: "times" },
      timeRow("Decode", pace.decode, longest.decode),
      timeRow("Prefill", pace.prefill, longest.prefill),
      h("p", { class: "memory" }, memoryOf(rank))));
}

function memoryOf(rank) {
  const [weights, cache] = [Number(rank.weight_bytes), Number(rank.kv_bytes)];
  if (!weights) return "not loaded in this epoch";
  return `${bytes(weights)} weights · ${cache ? `${bytes(cache)} KV cache` : "no KV cache"}`;
}

function bytes(count) {
  return count >= 10 * GB ? `${figure(count / GB)} GB` : `${figure(count / MB)} MB`;
}

function phaseOf(rank, state) {
  if (!rank.joined) return "gone";
  if (state === "new" || state === "aborted") return "waiting";
  if (state === "forming") return "meeting";
  if (state === "loading") {
    const needsCache = rank.runs.some((run) => run.kv_heads?.end > run.kv_heads?.begin);
    if (rank.weight_bytes === "0") return "loading weights";
    return needsCache && rank.kv_bytes === "0" ? "making cache" : "warming up";
  }
  return state === "ready" ? "" : state;
}

function whereOf(rank) {
  const { device, pool, pod_name: pod } = rank.place;
  const words = [];
  if (device?.numa_nodes?.length) words.push(`NUMA ${ranges(device.numa_nodes)}`);
  if (device?.cpus?.length) words.push(`cores ${ranges(device.cpus)}${device.pinned ? "" : " (not pinned)"}`);
  else if (device?.kind === "DEVICE_KIND_CPU") words.push("cores not bound");
  words.push(pod || pool);
  return words.join(" · ");
}

/** Return ascending numbers as ranges, e.g. 0-3,8. */
function ranges(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([begin, end]) => (begin === end ? begin : `${begin}–${end}`)).join(",");
}

/** Return a row with a bar that is full where the rank's part lies: units across, layers down. */
function partRow(part, rank) {
  const svg = canvas("bar", part.total, part.depth);
  const sizes = new Set();
  for (const run of runsOf(rank)) {
    const y = part.depths[run.begin];
    const depth = part.depths[run.end] - y;
    if (!depth) continue;
    const range = run[part.key];
    sizes.add(sizeOf(range));
    if (!sizeOf(range)) continue;
    const slice = sizeOf(run[part.columns]) ? run[part.columns] : { begin: 0, end: 1 };
    const among = sizeOf(run[part.columns]) ? part.columnsTotal : 1;
    svg.append(h("rect", { x: range.begin, width: sizeOf(range), y: y + (depth * slice.begin) / among, height: (depth * sizeOf(slice)) / among }));
  }
  const held = [...sizes].sort((a, b) => a - b).map((size) => size.toLocaleString("en"));
  const count = held.length > 1 ? `${held[0]}–${held[held.length - 1]}` : held[0] || "–";
  const hint = `${count} of ${part.total.toLocaleString("en")} ${part.name}`;
  return h("div", { class: "part", title: hint }, h("span", { class: "name" }, part.name), svg, h("span", { class: "count" }, count));
}

function timeRow(name, pace, longest) {
  const svg = canvas("bar time", 100, 1);
  if (pace) {
    const compute = 100 * (pace.step_s - pace.exchange_s) / longest;
    svg.append(h("rect", { class: "compute", width: compute, height: 1 }),
      h("rect", { class: "exchange", x: compute, width: 100 * pace.exchange_s / longest, height: 1 }));
  }
  const text = pace ? `${figure(1000 * pace.step_s)} ms` : "–";
  const hint = pace ? `${percent(pace.step_s ? pace.exchange_s / pace.step_s : 0)} of the step in the exchange` : "no such step yet";
  return h("div", { class: "part", title: hint }, h("span", { class: "name" }, name), svg, h("span", { class: "count" }, text));
}

// --- placement ---------------------------------------------------------------------------------------------

function placement(topology) {
  const report = topology.placement;
  if (!report) return h("p", { class: "none" }, "Not decided yet.");
  const best = Math.max(1, ...report.options.map((option) => option.decode_tokens_per_second));
  const rows = report.options.map((option) => h("tr", { class: option.chosen ? "chosen" : "" },
    h("th", { scope: "row" }, option.name, option.chosen ? h("span", { class: "tag" }, "in force") : null,
      option.why_not ? h("span", { class: "why" }, option.why_not) : null),
    h("td", { class: "speed" }, speedBar(option.decode_tokens_per_second, best), h("span", {}, cell(option.decode_tokens_per_second))),
    h("td", {}, cell(option.prefill_tokens_per_second)),
    h("td", {}, cell(option.workload_s))));
  const head = h("tr", {}, ["Placement", "Decode tok/s", "Prefill tok/s", "Workload s"].map((name) => h("th", { scope: "col" }, name)));
  const table = report.options.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Placements" },
    h("table", {}, h("thead", {}, head), h("tbody", {}, rows))) : null;
  return [table, h("p", { class: "reason" }, verdict(report)), report.reason ? h("p", { class: "reason" }, `${capital(report.reason)}.`) : null];
}

function verdict(report) {
  const predicted = `Predicted ${figure(report.predicted_tokens_per_second)} tokens/s`;
  if (!report.step_time_ratio) return `${predicted}; nothing measured yet.`;
  return `${predicted}, measured ${figure(report.measured_tokens_per_second)}: a step takes ${report.step_time_ratio.toFixed(2)} of the predicted time.`;
}

function speedBar(speed, best) {
  const svg = canvas("bar", 100, 1);
  svg.append(h("rect", { width: (100 * speed) / best, height: 1 }));
  return svg;
}

function cell(value) {
  return value ? Number(value.toPrecision(3)).toLocaleString("en") : "–";
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1).replace(/\.$/, "");
}
