"use strict";
(() => {
const D = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["forward", "recompute", "backward", "update", "other"];
const MODULES = ["#4878a8", "#d99a1c", "#b5495b", "#2f8f83", "#7b5ea7", "#7d8f35", "#c06a3a", "#5f7fbf"];
const RESIDENT = "arguments and outputs";
const FIRST_ROWS = 100, MORE_ROWS = 500, CELLS = 240;

// -- small things -----------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(2)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const short = x => String(Number(x.toFixed(Math.abs(x) < 10 ? 2 : 1)));
function bytes(n) {
  if (n === null || n === undefined) return "?";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (Math.abs(n) >= size) return `${short(n / size)} ${unit}`;
  }
  return `${short(n)} B`;
}
function flops(n) {
  if (n === null || n === undefined) return "?";
  for (const [unit, size] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (n >= size) return `${Number((n / size).toPrecision(3))} ${unit}FLOP`;
  }
  return `${Number(n.toPrecision(3))} FLOP`;
}
function seconds(s) {
  if (s === null || s === undefined) return "?";
  const [n, unit] = s >= 1 ? [s, "s"] : s >= 1e-3 ? [s * 1e3, "ms"] : [s * 1e6, "µs"];
  return `${Number(n.toPrecision(3))} ${unit}`;
}
function count(n) {
  for (const [unit, size] of [["billion", 1e9], ["million", 1e6], ["thousand", 1e3]]) {
    if (n >= size) return `${Number((n / size).toPrecision(3))} ${unit}`;
  }
  return String(n);
}
const percent = x => `${Number((100 * x).toPrecision(2))} %`;
const many = n => n.toLocaleString("en-US");
const times = (n, base) => base ? `×${(n / base).toFixed(2)}` : "";
const besideNone = (n, base) => base && typeof n === "number" ? el("small", {title: `${times(n, base)} of the policy none`}, ` ${times(n, base)}`) : null;
const tail = path => path.split("/").slice(-2).join("/");
const rolled = path => path.replace(/(^|[_/])\d+(?=\/|$)/g, (_, before) => before ? before + "*" : _);
const color = phase => `var(--${phase}, var(--other))`;
const dot = background => el("span", {class: "dot", style: `background:${background}`});
const sum = (list, of = x => x) => list.reduce((total, x) => total + (of(x) || 0), 0);
function column(table, name) {
  const cells = table.columns[name];
  if (!cells) return () => null;
  return table.texts.includes(name)
    ? i => typeof cells[i] === "number" ? D.strings[cells[i]] : cells[i] ?? ""
    : i => cells[i];
}
function later(run, wait) {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(run, wait); };
}

// -- what is shown ----------------------------------------------------------------------------

const state = {policy: 0, target: D.targets[0] ?? null, by: "phase", against: null, theme: "auto", zoom: null, roll: true, resident: true};
readHash();

function readHash() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const policy = D.policies.findIndex(p => p.name === asked.get("policy"));
  if (policy >= 0) state.policy = policy;
  else if (D.policies.length > 1 && D.policies[0].name === "none") state.policy = 1;
  if (D.targets.includes(asked.get("target"))) state.target = asked.get("target");
  if (asked.get("by") === "module") state.by = "module";
  try { state.theme = localStorage.getItem("remat_kit.theme") || state.theme; } catch { /* no storage in a frame */ }
  if (["auto", "light", "dark"].includes(asked.get("theme"))) state.theme = asked.get("theme");
}
function writeHash() {
  const asked = new URLSearchParams({policy: report().name, ...(state.target ? {target: state.target} : {})});
  try { history.replaceState(null, "", "#" + asked); } catch { /* not allowed in a frame */ }
}
const report = () => D.policies[state.policy] ?? {
  name: "", memory: {}, peak: {}, timeline: {}, regions: {}, what_if: {}, collectives: {}, compiled: {}, step_seconds: {},
  hlo_recomputed_ops: {}, hlo_xla_remat: {}, lints: [], notes: [],
};
const none = () => D.policies.find(p => p.name === "none");
const base = () => none() === report() ? undefined : none();
const here = what => report()[what]?.[state.target];

function set(change) {
  Object.assign(state, {zoom: null}, change);
  writeHash();
  const top = window.scrollY;
  draw();
  window.scrollTo(0, top);
}

function showTheme() {
  document.documentElement.dataset.theme = state.theme;
  const next = {auto: "◐ system", light: "☀ light", dark: "☾ dark"};
  document.getElementById("theme").textContent = next[state.theme];
}
document.getElementById("theme").addEventListener("click", () => {
  const order = ["auto", "light", "dark"];
  state.theme = order[(order.indexOf(state.theme) + 1) % 3];
  try { localStorage.setItem("remat_kit.theme", state.theme); } catch { /* as above */ }
  showTheme();
});

function chooser(name, options, current, choose) {
  const wide = sum(options, o => o.length) > 84 || options.length > 8;
  const id = `choose-${name}`;
  return el("div", {class: "chooser"},
    el("label", {class: "name", id: `${id}-name`, for: wide ? id : null}, name),
    wide
      ? el("select", {id, onchange: event => choose(event.target.selectedIndex)},
          options.map((o, i) => el("option", {selected: i === current}, o)))
      : el("div", {class: "segments", id, role: "group", "aria-labelledby": `${id}-name`},
          options.map((o, i) => el("button",
            {type: "button", "aria-pressed": String(i === current), title: o, onclick: () => choose(i)}, o))));
}

function drawHead() {
  document.getElementById("model").textContent = D.model || "report";
  const size = report().parameters
    ? [`${count(report().parameters)} parameters, ${bytes(report().parameter_bytes)}`] : [];
  const versions = Object.entries(D.versions).map(([name, version]) => `${name} ${version}`);
  document.getElementById("versions").textContent = [...size, ...(D.date ? [D.date] : []), ...versions].join(" · ");
  document.getElementById("command").textContent = D.command;
  document.getElementById("headline").replaceChildren(...D.headline.split("`").map((text, i) => i % 2 ? el("code", {}, text) : text));
  const choosers = document.getElementById("choosers");
  const focused = document.activeElement?.closest?.("#choosers") ? document.activeElement.textContent : null;
  choosers.replaceChildren(...[
    D.policies.length ? chooser("policy", D.policies.map(p => p.name), state.policy, i => set({policy: i})) : "",
    D.targets.length
      ? chooser("target", D.targets, D.targets.indexOf(state.target), i => set({target: D.targets[i]})) : "",
  ]);
  if (focused) [...choosers.querySelectorAll("button")].find(b => b.textContent === focused)?.focus();
}

function draw() {
  const focused = document.activeElement?.dataset?.policy;
  drawHead();
  const sections = [
    ["summary", "Summary", cards],
    ["help", "What would help", whatWouldHelp],
    ["policies", "Policies", policies],
    ["lints", "Lints", lints],
    ["timeline", "Timeline", timeline],
    ["peak", "At the peak", peak],
    ["kept", "Kept", kept],
    ["recomputed", "Computed twice", recomputed],
    ["regions", "Regions", regions],
    ["collectives", "Collectives", collectives],
    ["diff", "Diff", diffs],
    ["notes", "Notes", notes],
  ];
  const main = document.getElementById("main"), nav = document.getElementById("nav");
  main.replaceChildren();
  nav.replaceChildren();
  for (const [id, name, build] of sections) {
    const built = build();
    if (!built) continue;
    const {node, count} = built;
    node.id = id;
    main.append(node);
    built.after?.();
    nav.append(el("a", {href: `#${id}`, onclick: event => {
      event.preventDefault();
      node.scrollIntoView({behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth"});
      node.tabIndex = -1;
      node.focus({preventScroll: true});
    }}, name, count ? el("span", {class: "count"}, many(count)) : null));
  }
  if (!D.policies.length && !D.diffs.length) main.append(el("p", {class: "empty"}, "There is nothing in this report."));
  if (focused) main.querySelector(`[data-policy="${CSS.escape(focused)}"]`)?.focus();
}

function section(title, about, tools, ...children) {
  return el("section", {"aria-label": title},
    el("div", {class: "head"}, el("h2", {}, title), about ? el("span", {class: "about"}, about) : null,
      tools ? el("div", {class: "tools"}, tools) : null),
    ...children);
}
const andMore = (table, what, amount = bytes, where = ", in the JSON") => table.left
  ? el("p", {class: "note"}, `… and ${many(table.left)} more ${what}` +
      (table.left_amount ? ` (${amount(table.left_amount)})` : "") + where)
  : null;

// -- the summary ------------------------------------------------------------------------------

function card(title, value, lines, extra, wide) {
  return el("div", {class: wide ? "card wide" : "card"}, el("h3", {}, title), el("div", {class: "value"}, value), extra || null,
    lines.filter(Boolean).map(line => line instanceof Node ? line : el("p", {}, line)));
}

function gauge(memory) {
  const capacity = Math.max(memory.memory_bytes || 0, memory.peak_bytes || 0, 1);
  const resident = Math.max(0, (memory.argument_bytes || 0) + (memory.output_bytes || 0) - (memory.alias_bytes || 0));
  const part = (size, background) => el("i", {style: `width:${100 * size / capacity}%;background:${background}`});
  return el("div", {class: "gauge", role: "img", "aria-label": `${bytes(memory.peak_bytes)} of ${bytes(memory.memory_bytes)}`},
    part(resident, "var(--argument)"), part(memory.temp_bytes || 0, memory.fits === false ? "var(--bad)" : "var(--accent)"));
}

function fits(memory) {
  if (memory.fits === false) {
    const over = (memory.needs_bytes ?? memory.peak_bytes) - memory.memory_bytes;
    return el("span", {class: "bad"}, "does not fit" + (over > 0 ? `: ${bytes(over)} too much` : ""));
  }
  return el("span", {class: "good"}, memory.headroom_bytes === null || memory.headroom_bytes === undefined
    ? "fits" : `fits, ${bytes(memory.headroom_bytes)} free`);
}

function cards() {
  const r = report(), b = base(), memory = here("memory"), found = [];
  if (memory) {
    const host = memory.host_bytes ? `${bytes(memory.host_bytes)} on the host` : "";
    found.push(card("Peak on the device",
      [bytes(memory.peak_bytes ?? memory.needs_bytes), el("small", {}, ` of ${bytes(memory.memory_bytes)}`)],
      [el("p", {}, fits(memory), host ? ` · ${host}` : "")], gauge(memory), true));
    const before = b?.memory[state.target];
    found.push(card("Temporaries", [bytes(memory.temp_bytes),
      besideNone(memory.temp_bytes, before?.temp_bytes)],
      [`arguments ${bytes(memory.argument_bytes)}, outputs ${bytes(memory.output_bytes)}` +
        (memory.alias_bytes ? `, ${bytes(memory.alias_bytes)} shared` : "")]));
  }
  if (r.saved_bytes !== null && r.saved_bytes !== undefined) {
    found.push(card("Kept for backward", [bytes(r.saved_bytes),
      besideNone(r.saved_bytes, b?.saved_bytes)],
      [r.saved ? `${many(r.saved.rows + r.saved.left)} values` : "",
        r.offloaded_bytes ? `${bytes(r.offloaded_bytes)} offloaded to the host` : ""]));
  }
  if (r.recomputed_flops !== null && r.recomputed_flops !== undefined) {
    const share = r.forward_flops ? r.recomputed_flops / r.forward_flops : 0;
    const compiled = here("hlo_recomputed_ops"), own = here("hlo_xla_remat");
    found.push(card("Computed twice", percent(share),
      [`of the forward, ${flops(r.recomputed_flops)}`,
        compiled === undefined || compiled === null ? "" : `${many(compiled)} operations in the compiled program` + (own ? `, ${many(own)} added by XLA` : "")]));
  }
  const step = here("step_seconds");
  if (step) {
    const known = ["measured", "compiler", "roofline"].filter(k => typeof step[k] === "number");
    const before = b?.step_seconds[state.target];
    if (known.length) {
      const best = known[0];
      found.push(card("Step time", [seconds(step[best]),
        besideNone(step[best], before?.[best])],
        [best === "measured" ? "measured" : best === "compiler" ? "the compiler's estimate" : "at least, by the roofline",
          known.slice(1).map(k => `${k} ${seconds(step[k])}`).join(", ")]));
    }
  }
  const top = here("peak");
  if (top) {
    found.push(card("The peak is in", `the ${top.phase}`, [top.module ? `of ${inPieces(top.module, top.pieces)}` : "",
      top.attributed_fraction === undefined ? "" : `${percent(Math.floor(top.attributed_fraction * 1000) / 1000)} known by module or argument`]));
  }
  if (!found.length) return null;
  return {node: el("div", {class: "cards", role: "group", "aria-label": "summary"}, found)};
}

function policies() {
  if (D.policies.length < 2) return null;
  const target = state.target, first = none();
  const at = (p, key) => p[key]?.[target];
  const best = p => { const s = at(p, "step_seconds") || {}; return s.measured ?? s.compiler ?? s.roofline; };
  const top = Math.max(...D.policies.map(p => at(p, "memory")?.peak_bytes || 0), 1);
  const compiled = D.policies.some(p => at(p, "memory")), timed = D.policies.some(p => best(p));
  const host = D.policies.some(p => p.offloaded_bytes || at(p, "memory")?.host_bytes);
  const kept = D.policies.some(p => typeof p.saved_bytes === "number"), again = D.policies.some(p => typeof p.recomputed_flops === "number");
  const heads = ["policy", ...(compiled ? ["peak", "", "temporaries"] : []), ...(kept ? ["kept"] : []), ...(host ? ["on the host"] : []),
    ...(again ? ["computed twice"] : []), ...(timed ? ["step"] : []), ...(compiled ? ["headroom"] : []), "lints"];
  const num = text => el("td", {class: "num"}, text);
  const rows = D.policies.map((p, i) => {
    const memory = at(p, "memory"), other = p !== first && first;
    const beside = (text, n, b) => num([text, el("span", {class: "ratio"}, other && typeof n === "number" && b ? times(n, b) : "")]);
    return el("tr", {"aria-current": String(i === state.policy)},
      el("td", {class: "text"}, el("button", {class: "link", type: "button", "data-policy": p.name, title: p.name, onclick: () => set({policy: i})}, p.name)),
      compiled ? [num(memory ? bytes(memory.peak_bytes ?? memory.needs_bytes) : "?"),
        el("td", {class: "fill"}, el("span", {class: "meter"}, el("i", {style: `width:${100 * (memory?.peak_bytes || 0) / top}%`}))),
        beside(memory ? bytes(memory.temp_bytes) : "?", memory?.temp_bytes, other && at(other, "memory")?.temp_bytes)] : null,
      kept ? beside(typeof p.saved_bytes === "number" ? bytes(p.saved_bytes) : "?", p.saved_bytes, other && other.saved_bytes) : null,
      host ? num(bytes(memory?.host_bytes || p.offloaded_bytes || 0)) : null,
      again ? num(typeof p.recomputed_flops === "number" ? percent(p.forward_flops ? p.recomputed_flops / p.forward_flops : 0) : "?") : null,
      timed ? beside(seconds(best(p)), best(p), other && best(other)) : null,
      compiled ? num(memory ? memory.fits === false ? el("span", {class: "bad"}, "does not fit") : bytes(memory.headroom_bytes) : "?") : null,
      num(p.lints.length ? String(p.lints.length) : "–"));
  });
  return {node: section("Policies", target ? `on ${target}, beside none` : "beside none", null,
    el("div", {class: "scroll low"}, el("table", {},
      el("thead", {}, el("tr", {}, heads.map((h, i) => el("th", {class: i ? "num" : null, scope: "col"}, el("span", {}, h))))),
      el("tbody", {}, rows))))};
}

// -- lints ------------------------------------------------------------------------------------

function copied(button, text) {
  const done = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500); };
  const byHand = () => {
    const area = el("textarea", {class: "hidden"});
    area.value = text;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    if (worked) done(); else button.textContent = "select and copy it by hand";
  };
  if (navigator.clipboard?.writeText) navigator.clipboard.writeText(text).then(done, byHand); else byHand();
}

function lints() {
  const found = report().lints;
  if (!found.length) return null;
  const shown = found.slice(0, FIRST_ROWS).map(lint => el("div", {class: "lint"},
    el("span", {class: "badge"}, lint.code || "lint"),
    lint.bytes ? el("b", {}, bytes(lint.bytes)) : null,
    el("span", {class: "muted mono"}, " " + [lint.module, lint.source && tail(lint.source)].filter(Boolean).join(" · ")),
    el("p", {}, lint.message || ""),
    lint.fix ? el("div", {class: "fix"}, el("pre", {}, lint.fix),
      el("button", {class: "plain copy", type: "button", "aria-label": `copy the fix of ${lint.code}`,
        onclick: event => copied(event.currentTarget, lint.fix)}, "copy")) : null));
  return {count: found.length, node: section("Lints", "what costs memory or time for nothing", null, shown,
    found.length > FIRST_ROWS ? el("p", {class: "note"}, `… and ${many(found.length - FIRST_ROWS)} more, in the JSON`) : null)};
}

// -- the timeline -----------------------------------------------------------------------------

// The walk over the schedule counts the buffers that are alive. The compiler's figure is the peak that
// the page shows everywhere: the difference, its packing, is constant over the schedule.
const packingOf = top => top?.packing_bytes || 0;
const peakOf = top => top.bytes + packingOf(top);

function bands(curve, packing) {
  const series = curve[state.by === "module" ? "by_module" : "by_phase"];
  const names = Object.keys(series);
  if (state.by !== "module") names.sort((a, b) => PHASES.indexOf(a) - PHASES.indexOf(b));
  const constant = size => curve.bytes.map(() => size / curve.unit);
  const resident = [
    ...(curve.resident_bytes ? [{name: RESIDENT, fill: color("argument"), values: constant(Math.max(0, curve.resident_bytes + Math.min(0, packing)))}] : []),
    ...(packing > 0 ? [{name: "the compiler's packing", fill: color("output"), values: constant(packing)}] : []),
  ];
  return [...(state.resident ? resident : []), ...names.map((name, i) => ({
    name, values: series[name],
    fill: state.by !== "module" ? color(name) : name === "(other)" ? color("other") : MODULES[i % MODULES.length],
  }))];
}

function ticks(top) {
  const unit = 1024 ** Math.floor(Math.log2(Math.max(top, 1)) / 10);
  const rough = top / unit / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(x => x * power).find(x => x >= rough) * unit;
  const found = [];
  for (let at = 0; at <= top; at += step) found.push(at);
  return found;
}

function timeline() {
  const curve = here("timeline");
  if (!curve || !curve.steps.length) return null;
  const others = D.policies.filter(p => p !== report() && p.timeline[state.target]);
  const fallback = base() && others.includes(base()) ? base().name : "";
  const against = others.find(p => p.name === (state.against ?? fallback));
  const plot = el("div", {class: "plot"}), legend = el("div", {class: "legend"});
  const live = el("div", {class: "hidden", "aria-live": "polite"});
  const by = el("div", {class: "segments", role: "group", "aria-label": "stacked by"},
    ["phase", "module"].map(name => el("button", {type: "button", "data-by": name, "aria-pressed": String(state.by === name),
      onclick: () => { state.by = name; for (const b of by.children) b.setAttribute("aria-pressed", String(b.dataset.by === name)); paint(); }}, `by ${name}`)));
  const over = others.length ? el("label", {}, el("span", {class: "muted"}, "line: "),
    el("select", {id: "against", onchange: event => set({against: event.target.value})},
      el("option", {value: ""}, "no other policy"), others.map(p => el("option", {value: p.name, selected: p === against}, p.name)))) : null;
  const resident = el("input", {type: "checkbox", id: "resident", onchange: () => { state.resident = resident.checked; paint(); }});
  resident.checked = state.resident;
  const whole = curve.resident_bytes ? el("label", {for: "resident"}, resident, ` ${RESIDENT}`) : null;
  const out = el("button", {class: "plain", id: "zoom-out", type: "button", hidden: true, onclick: () => { state.zoom = null; paint(); }}, "whole schedule");
  let width = 0;
  function paint() {
    width = plot.clientWidth || 900;
    drawPlot(plot, legend, live, curve, here("peak"), here("memory"), against, width, paint);
    out.hidden = !state.zoom;
  }
  const top = here("peak");
  const about = `${bytes(top ? peakOf(top) : Math.max(...curve.bytes) * curve.unit)} at the peak` +
    (top ? `, step ${many(top.step)} of ${many(top.steps)}, in the ${top.phase}${top.module ? ` of ${inPieces(top.module, top.pieces)}` : ""}` : "");
  const node = section("Timeline", `${about}; drag over a part to zoom in`, [out, whole, by, over], plot, legend, live);
  return {node, after: () => {
    paint();
    new ResizeObserver(() => { if (plot.clientWidth && plot.clientWidth !== width) paint(); }).observe(plot);
  }};
}

function drawPlot(plot, legend, live, curve, top, memory, against, width, repaint) {
  const height = 300, left = 66, right = 14, above = 22, below = 50, ribbon = 8;
  const packing = packingOf(top), otherPacking = packingOf(against?.peak[state.target]);
  const n = curve.steps.length, unit = curve.unit, stack = bands(curve, packing);
  const last = Math.max(curve.steps[n - 1], top ? top.steps - 1 : 0) + 1;
  const other = against?.timeline[state.target];
  const otherLast = other ? other.steps[other.steps.length - 1] + 1 : 1;
  const less = state.resident ? -packing : curve.resident_bytes, otherLess = state.resident ? -otherPacking : other?.resident_bytes;
  const sizes = curve.bytes.map(b => Math.max(0, b * unit - less)), peakSize = top && top.bytes - less;
  const otherSizes = other && other.bytes.map(b => Math.max(0, b * other.unit - otherLess));
  const highest = Math.max(...sizes, peakSize || 0, ...(otherSizes || []), 1);
  const capacity = state.resident ? memory?.memory_bytes : null;
  const limit = capacity && capacity < 1.5 * highest ? Math.max(capacity, highest) : highest;
  const ceiling = limit * 1.06, floor = height - below;
  const [from, to] = state.zoom && state.zoom[0] < last ? state.zoom : [0, last];
  const x = step => left + (width - left - right) * (step - from) / (to - from);
  const stepAt = px => from + (px - left) / (width - left - right) * (to - from);
  const y = size => floor - (floor - above) * size / ceiling;
  // Memory is held from one step to the next, so the curve has corners.
  const stairs = (steps, end, values) => values.flatMap((v, i) => {
    const py = y(v).toFixed(1), next = i + 1 < steps.length ? steps[i + 1] : end;
    return [`${x(steps[i]).toFixed(1)},${py}`, `${x(next).toFixed(1)},${py}`];
  });

  const image = svg("svg", {viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img",
    "aria-label": `device memory over the schedule, stacked by ${state.by}; arrow keys move through it`});
  for (const size of ticks(ceiling)) {
    image.append(svg("line", {x1: left, x2: width - right, y1: y(size), y2: y(size), style: "stroke:var(--line)"}),
      svg("text", {x: left - 8, y: y(size) + 4, "text-anchor": "end"}, bytes(size)));
  }
  const room = width - left - right;  // an image inside the image cuts off what is outside of the zoom
  const drawn = svg("svg", {x: left, y: 0, width: room, height, viewBox: `${left} 0 ${room} ${height}`});
  image.append(drawn);
  let under = new Array(n).fill(0);
  for (const band of stack) {
    const over = under.map((u, i) => u + band.values[i]);
    const there = stairs(curve.steps, last, over.map(o => o * unit));
    const back = stairs(curve.steps, last, under.map(u => u * unit)).reverse();
    drawn.append(svg("path", {d: `M${there.join("L")}L${back.join("L")}Z`, style: `fill:${band.fill}`}, svg("title", {}, band.name)));
    under = over;
  }
  for (let start = 0; start < n;) {
    let end = start;
    while (end < n && curve.phases[end] === curve.phases[start]) end++;
    const until = end < n ? curve.steps[end] : last;
    drawn.append(svg("rect", {x: x(curve.steps[start]), width: Math.max(0.5, x(until) - x(curve.steps[start])), y: floor + 12, height: ribbon,
      style: `fill:${color(curve.phase_names[curve.phases[start]])}`}, svg("title", {}, curve.phase_names[curve.phases[start]])));
    start = end;
  }
  image.append(svg("text", {x: left - 8, y: floor + ribbon + 12, "text-anchor": "end"}, "running"));
  for (let i = 0; i <= 6; i++) {
    const step = Math.round(from + (to - from - 1) * i / 6);
    image.append(svg("text", {x: x(step), y: height - 8, "text-anchor": i === 0 ? "start" : i === 6 ? "end" : "middle"}, (i === 0 ? "step " : "") + many(step)));
  }
  if (capacity && capacity <= ceiling) {
    image.append(svg("line", {x1: left, x2: width - right, y1: y(capacity), y2: y(capacity), style: "stroke:var(--bad);stroke-width:1.5"}),
      svg("text", {x: width - right, y: y(capacity) - 4, "text-anchor": "end", class: "limit"}, `the chip has ${bytes(capacity)}`));
  }
  if (other) {
    const line = stairs(other.steps.map(s => s / otherLast * last), last, otherSizes).join("L");
    drawn.append(svg("path", {d: `M${line}`, class: "against", style: "fill:none;stroke:var(--panel);stroke-width:3.5;opacity:.6"}),
      svg("path", {d: `M${line}`, style: "fill:none;stroke:var(--ink);stroke-width:1.5;stroke-dasharray:5 3"}));
  }
  if (top) {
    const px = x(top.step), py = y(peakSize), late = px > width * 0.7;
    drawn.append(svg("line", {x1: px, x2: px, y1: py, y2: floor + ribbon + 12, class: "peak-line", style: "stroke:var(--ink);stroke-dasharray:2 2"}),
      svg("circle", {cx: px, cy: py, r: 4, style: "fill:var(--ink);stroke:var(--panel);stroke-width:1.5"}),
      svg("text", {x: px + (late ? -8 : 8), y: Math.max(12, py - 6), class: "peak-text", "text-anchor": late ? "end" : "start"}, `peak ${bytes(peakSize)}`));
  }
  const chosen = svg("rect", {y: above, height: floor - above, style: "fill:var(--accent);opacity:.2", width: 0});
  image.append(chosen);
  const cursor = svg("line", {y1: above, y2: floor, style: "stroke:var(--ink);opacity:0"});
  image.append(cursor);
  const tip = el("div", {class: "tip", hidden: true});
  plot.replaceChildren(image, tip);

  const start = top ? nearest(curve.steps, top.step) : 0;
  legend.replaceChildren(...[...stack].reverse().map(b => el("span", {}, dot(b.fill), b.name,
    el("b", {}, bytes(b.values[start] * unit)))), el("span", {class: "muted"}, "at the peak"));
  if (other) legend.append(el("span", {}, el("span", {class: "stroke"}), `${against.name}, drawn to the same length`));

  let index = start;
  function show(i, aloud) {
    index = Math.max(0, Math.min(n - 1, i));
    const step = curve.steps[index], px = x(step);
    cursor.setAttribute("x1", px);
    cursor.setAttribute("x2", px);
    cursor.style.opacity = 0.5;
    const phase = curve.phase_names[curve.phases[index]];
    const lines = stack.map(b => [b, b.values[index] * unit]).filter(([, size]) => size > 0);
    lines.sort((a, b) => b[1] - a[1]);
    const total = sizes[index];
    const beside = other ? otherSizes[nearest(other.steps, step / last * otherLast)] : null;
    const line = (name, value, more) => el("div", {class: more}, el("span", {}, name), el("span", {}, value));
    tip.replaceChildren(line(`step ${many(step)}, ${phase}`, bytes(total), "first"),
      ...lines.map(([b, size]) => line([dot(b.fill), b.name].slice(0), bytes(size))),
      ...(beside === null ? [] : [line(`${against.name} at ${percent(step / last)}`, bytes(beside), "muted")]));
    tip.hidden = false;
    const whole = plot.clientWidth, wide = tip.offsetWidth;
    const shift = px * whole / width;
    tip.style.left = `${Math.max(0, shift + 14 + wide > whole ? shift - 14 - wide : shift + 14)}px`;
    tip.style.top = "26px";
    if (aloud) live.textContent = `step ${step}, ${phase}, ${bytes(total)}`;
  }
  function hide() { tip.hidden = true; cursor.style.opacity = 0; }
  const pointed = event => {
    const box = image.getBoundingClientRect();
    return (event.clientX - box.left) * width / box.width;
  };
  // Dragging over a part of the schedule shows that part alone.
  let begun = null;
  image.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") begun = pointed(event); });
  image.addEventListener("pointerup", event => {
    const range = begun === null ? [0, 0] : [begun, pointed(event)].map(stepAt).sort((a, b) => a - b);
    begun = null;
    chosen.setAttribute("width", 0);
    if (range[1] - range[0] > (to - from) / 100) zoomTo(Math.max(from, range[0]), Math.min(to, range[1]));
  });
  image.addEventListener("dblclick", () => zoomTo(0, last));
  function zoomTo(a, b) {
    const wide = Math.max(2, b - a), start = Math.max(0, Math.min(a, last - wide));
    state.zoom = wide >= last ? null : [start, Math.min(last, start + wide)];
    repaint();
  }
  image.addEventListener("pointermove", event => {
    const px = pointed(event), step = stepAt(px);
    if (begun !== null) {
      chosen.setAttribute("x", Math.min(begun, px));
      chosen.setAttribute("width", Math.abs(px - begun));
    }
    show(Math.max(0, nearest(curve.steps, step) - (curve.steps[nearest(curve.steps, step)] > step ? 1 : 0)));
  });
  image.addEventListener("pointerleave", hide);
  image.addEventListener("blur", hide);
  image.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20}[event.key];
    if (event.key === "Escape") { hide(); return state.zoom ? zoomTo(0, last) : undefined; }
    const middle = curve.steps[index], half = (to - from) / 4;
    if (event.key === "+") return zoomTo(middle - half, middle + half);
    if (event.key === "-") return zoomTo(middle - 4 * half, middle + 4 * half);
    if (move) show(index + move, true);
    else if (event.key === "Home") show(0, true);
    else if (event.key === "End") show(n - 1, true);
    else if (event.key === "Enter") show(start, true);
    else return;
    event.preventDefault();
  });
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

// -- tables -----------------------------------------------------------------------------------

// columns: {title, get(i), show(i, value)?, num?, wide?}; rows come a hundred at a time.
function grid(count, columns, name, sorted) {
  let shown = FIRST_ROWS, order = [], words = [], by = sorted, down = true;
  let hay = null;
  const body = el("tbody"), foot = el("div", {class: "more"});
  const search = el("input", {type: "search", placeholder: "filter …", "aria-label": `filter ${name}`,
    oninput: later(() => { words = search.value.toLowerCase().split(/\s+/).filter(Boolean); shown = FIRST_ROWS; select(); }, 80)});
  const heads = columns.map((c, k) => el("th", {class: c.num ? "num" : null, scope: "col"},
    el("button", {type: "button", onclick: () => { down = by === k ? !down : Boolean(c.num); by = k; shown = FIRST_ROWS; select(); }}, c.title)));
  function select() {
    hay ??= words.length
      ? Array.from({length: count}, (_, i) => columns.map(c => c.num ? "" : String(c.get(i) ?? "")).join("\n").toLowerCase()) : null;
    order = [];
    for (let i = 0; i < count; i++) if (words.every(w => hay[i].includes(w))) order.push(i);
    const get = columns[by].get;
    const keys = new Map(order.map(i => [i, get(i) ?? (columns[by].num ? -Infinity : "")]));
    const compare = columns[by].num ? (a, b) => keys.get(a) - keys.get(b)
      : (a, b) => keys.get(a) < keys.get(b) ? -1 : keys.get(a) > keys.get(b) ? 1 : 0;
    order.sort((a, b) => (down ? compare(b, a) : compare(a, b)) || a - b);
    heads.forEach((h, k) => { if (k === by) h.setAttribute("aria-sort", down ? "descending" : "ascending"); else h.removeAttribute("aria-sort"); });
    body.replaceChildren();
    rows(0);
  }
  function rows(from) {
    const to = Math.min(order.length, shown);
    for (let k = from; k < to; k++) {
      const i = order[k];
      body.append(el("tr", {}, columns.map(c => {
        const value = c.get(i);
        const text = value === null || value === undefined ? "" : String(value);
        return el("td", {class: c.num ? "num" : c.wide ? "wrap" : "text", title: c.num || c.wide ? null : text}, c.show ? c.show(value, i) : text);
      })));
    }
    const all = order.length === count ? many(count) : `${many(order.length)} of ${many(count)}`;
    foot.replaceChildren(el("span", {class: "tally"}, to < order.length ? `the first ${many(to)} of ${many(order.length)}` : `${all} rows`));
    if (to < order.length) {
      foot.append(el("button", {class: "plain", type: "button", onclick: () => { shown += MORE_ROWS; rows(to); }}, `show ${many(Math.min(MORE_ROWS, order.length - to))} more`));
    }
  }
  select();
  return {tools: search, node: [el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": name},
    el("table", {}, el("thead", {}, el("tr", {}, heads)), body)), foot]};
}
const known = show => n => typeof n === "number" ? show(n) : "";
const mono = text => el("span", {class: "mono"}, text);
const inPieces = (module, pieces) => pieces ? `${module}, ${pieces}` : module;
// The module of each row, and the loop over pieces that it is in.
const modules = table => {
  const module = column(table, "module"), pieces = column(table, "pieces");
  return i => inPieces(module(i), pieces(i));
};
const place = text => el("span", {class: "mono", title: text}, tail(text));

// -- at the peak ------------------------------------------------------------------------------

function buffersOf(top) {
  const t = top.buffers, get = Object.fromEntries(Object.keys(t.columns).map(name => [name, column(t, name)]));
  const phase = i => get.kind(i) === "temporary" ? get.phase(i) : get.kind(i);
  return {count: t.rows, left: t.left, left_amount: t.left_amount, ...get, owner: phase};
}

function peak() {
  const top = here("peak");
  if (!top || !top.buffers.rows) return null;
  const b = buffersOf(top);
  const table = grid(b.count, [
    {title: "bytes", num: true, get: b.bytes, show: bytes},
    {title: "array", get: b.shape, show: mono},
    {title: "module or argument", get: modules(top.buffers), show: mono},
    {title: "made in", get: b.owner, show: text => [dot(color(text)), text]},
    {title: "operation", get: b.op},
    {title: "source", get: b.source, show: place},
    {title: "kind", get: b.kind},
  ], "buffers alive at the peak", 0);
  const map = treemap(b, top);
  const phases = Object.entries(top.by_phase || {});
  const node = section("Alive at the peak", `${many(b.count + b.left)} buffers, ${bytes(peakOf(top))}` + (packingOf(top)
    ? packingOf(top) > 0 ? ` with ${bytes(packingOf(top))} of the compiler's packing` : `; the compiler lets some of them share ${bytes(-packingOf(top))}` : ""), null,
    el("div", {class: "legend", style: "margin:0 0 6px"}, phases.map(([name, size]) => el("span", {}, dot(color(name)), name, el("b", {}, bytes(size))))),
    map.node,
    el("div", {class: "head", style: "margin-top:12px"}, el("h3", {style: "margin:0"}, "Buffers"), el("div", {class: "tools"}, table.tools)),
    table.node, andMore(b, "buffers", bytes, ", each smaller than these"));
  return {node, count: b.count + b.left, after: map.paint};
}

function treemap(b, top) {
  const root = {name: "all", size: 0, owners: {}, children: new Map(), parent: null};
  function add(names, size, owner, detail) {
    let node = root;
    for (const name of [null, ...names]) {
      if (name !== null) {
        if (!node.children.has(name)) node.children.set(name, {name, size: 0, owners: {}, children: new Map(), parent: node});
        node = node.children.get(name);
      }
      node.size += size;
      node.owners[owner] = (node.owners[owner] || 0) + size;
    }
    if (detail) node.detail = detail;
  }
  for (let i = 0; i < b.count; i++) {
    const kind = b.kind(i), module = b.module(i) || "(unknown)";
    const names = kind === "temporary" ? module.split("/")
      : [kind === "output" ? "outputs" : "arguments", ...module.replace(/\[(['"]?)(.*?)\1\]/g, "/$2").split("/")];
    add([...names, `${b.shape(i)} ${b.op(i)} ·${i}`], b.bytes(i), b.owner(i), `${b.shape(i)} ${b.op(i)}\n${b.source(i)}`);
  }
  if (packingOf(top) > 0) add(["(the compiler's packing)"], packingOf(top), "output", "gaps between buffers, and scratch memory");
  if (b.left_amount) add(["(not listed)"], b.left_amount, "other", `${many(b.left)} buffers that are not listed`);
  squeeze(root);
  const shown = n => bytes(n === root ? peakOf(top) : n.size);

  const crumbs = el("nav", {class: "crumbs", "aria-label": "part of the model"}), map = el("div", {class: "map"});
  const node = el("div", {}, crumbs, map);
  let current = root, width = 0;
  const path = n => n.parent ? [...path(n.parent), n] : [n];
  function zoom(to, focus) {
    current = to;
    paint();
    if (focus) (crumbs.querySelector("button:last-of-type") ?? map.querySelector("button"))?.focus();
  }
  function paint() {
    width = map.clientWidth || 900;
    const line = path(current);
    crumbs.replaceChildren(...line.flatMap((n, i) => [i ? "/" : "",
      n === current ? el("span", {}, `${label(n)}, ${shown(n)}`)
        : el("button", {type: "button", onclick: () => zoom(n, true)}, label(n))]));
    if (current === root) crumbs.append(el("span", {class: "muted"}, "click a part to see into it"));
    map.replaceChildren();
    fillMap(map, current, 0, 0, width, map.clientHeight || 360, 0, zoom);
  }
  map.addEventListener("keydown", event => {
    if ((event.key === "Escape" || event.key === "Backspace") && current.parent) { event.preventDefault(); zoom(current.parent, true); }
  });
  return {node, paint: () => {
    paint();
    new ResizeObserver(() => { if (map.clientWidth && map.clientWidth !== width) paint(); }).observe(map);
  }};
}
const label = n => n.name.replace(/ ·\d+$/, "");

// A path without a fork is one step.
function squeeze(node) {
  for (const child of [...node.children.values()]) squeeze(child);
  if (!node.parent || node.children.size !== 1) return;
  const [only] = node.children.values();
  if (!only.children.size) { node.detail = only.detail; node.tail = label(only); node.children = new Map(); return; }
  node.name = `${node.name}/${only.name}`;
  node.children = only.children;
  for (const child of node.children.values()) child.parent = node;
}

function fillMap(map, node, x, y, w, h, depth, zoom) {
  let parts = [...node.children.values()].sort((a, b) => b.size - a.size);
  if (!parts.length) parts = [node];
  const most = depth ? 40 : CELLS;
  if (parts.length > most) {
    const rest = parts.slice(most - 1);
    const size = sum(rest, r => r.size);
    parts = [...parts.slice(0, most - 1), {name: `… ${many(rest.length)} smaller`, size, owners: {other: size}, children: new Map()}];
  }
  for (const [part, px, py, pw, ph] of squarified(parts, x, y, w, h)) {
    if (pw < 2 || ph < 2) continue;
    const text = `${part === node ? label(node) : label(part)}`;
    const title = `${text}\n${bytes(part.size)}${part.detail ? `\n${part.detail}` : ""}`;
    const box = `left:${px}px;top:${py}px;width:${pw - 1}px;height:${ph - 1}px`;
    const forks = part.children.size > 0 && part !== node;
    const aria = `${text}, ${bytes(part.size)}${forks ? ", opens" : ""}`;
    if (forks && depth < 2 && pw > 70 && ph > 46) {
      map.append(el("button", {class: "frame", type: "button", style: box, title, "aria-label": aria, onclick: () => zoom(part, true)},
        el("span", {}, `${text}  ${bytes(part.size)}`)));
      fillMap(map, part, px + 2, py + 17, pw - 5, ph - 20, depth + 1, zoom);
      continue;
    }
    const owner = Object.entries(part.owners).sort((a, b) => b[1] - a[1])[0][0];
    map.append(el("button", {class: forks ? "cell deep" : "cell", type: "button", title, "aria-label": aria,
      style: `${box};background:${color(owner)};color:var(--on-${owner}, #fff)`, onclick: forks ? () => zoom(part, true) : null},
      pw > 34 && ph > 18 ? el("span", {}, text, ph > 34 ? [el("br"), bytes(part.size)] : null) : null));
  }
}

// Bruls, Huizing, van Wijk: Squarified treemaps (2000).
function squarified(parts, x, y, w, h) {
  const total = sum(parts, p => p.size), found = [];
  if (!total || w <= 0 || h <= 0) return found;
  const scale = w * h / total;
  const worst = (row, area, side) => {
    const thick = area / side;
    return Math.max(...[row[0], row[row.length - 1]].map(p => {
      const long = p.size * scale / thick;
      return Math.max(long / thick, thick / long);
    }));
  };
  const sized = parts.filter(p => p.size > 0);
  for (let i = 0; i < sized.length;) {
    const side = Math.min(w, h);
    let row = [sized[i]], area = sized[i].size * scale, j = i + 1;
    while (j < sized.length) {
      const next = [...row, sized[j]], more = area + sized[j].size * scale;
      if (worst(next, more, side) > worst(row, area, side)) break;
      row = next; area = more; j++;
    }
    const thick = area / side;
    let at = 0;
    for (const p of row) {
      const long = p.size * scale / thick;
      found.push(w >= h ? [p, x, y + at, thick, long] : [p, x + at, y, long, thick]);
      at += long;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    i = j;
  }
  return found;
}

// -- what would help --------------------------------------------------------------------------

function whatWouldHelp() {
  const t = here("what_if");
  if (!t || !t.rows) return null;
  const get = name => column(t, name), next = [get("next_phase"), get("next_module")];
  const call = i => {
    const at = get("at")(i), quoted = text => JSON.stringify(text);
    return `remat_kit.policy(${quoted(get("policy")(i))}${at ? `, at=${quoted(at)}` : ""})`;
  };
  const table = grid(t.rows, [
    {title: "recompute", get: get("module"), show: mono},
    {title: "the peak falls by", num: true, get: get("saved_bytes"), show: known(bytes)},
    {title: "FLOPs of the forward", num: true, get: get("extra_flops_fraction"), show: known(x => `+${percent(x)}`)},
    {title: "time", num: true, get: get("extra_seconds"), show: known(s => `+${seconds(s)}`)},
    {title: "held at the peak", num: true, get: get("bytes_at_peak"), show: known(bytes)},
    {title: "next peak", num: true, get: get("next_peak_bytes"), show: known(bytes)},
    {title: "which is in the", get: i => next[0](i) + (next[1](i) ? ` of ${next[1](i)}` : "")},
    {title: "policy", get: call, show: text => [el("button", {class: "plain copy", type: "button",
      "aria-label": `copy ${text}`, onclick: event => copied(event.currentTarget, text)}, "copy"), " ", mono(text)]},
  ], "what would help", 1);
  return {count: t.rows, node: section("What would help", "a model's answer from this schedule; compile to be sure", t.rows > 8 ? table.tools : null, table.node,
    andMore(t, "modules"))};
}

// -- what is kept -----------------------------------------------------------------------------

function kept() {
  const r = report();
  if (!r.saved || !(r.saved.rows || r.inputs?.rows)) return null;
  const t = r.saved, get = Object.fromEntries(Object.keys(t.columns).map(name => [name, column(t, name)]));
  const host = t.left ? "" : r.offloaded_bytes ? `, ${bytes(r.offloaded_bytes)} on the host` : "";
  const tree = el("div", {class: "tree", role: "group", "aria-label": "kept values by module"}), foot = el("div", {class: "more"});
  const search = el("input", {type: "search", placeholder: "filter …", "aria-label": "filter kept values", oninput: later(() => paint(), 80)});
  const roll = el("input", {type: "checkbox", id: "roll", onchange: () => { state.roll = roll.checked; paint(); }});
  roll.checked = state.roll;
  const all = open => { for (const d of [...tree.querySelectorAll("details")]) d.open = open; };
  const hay = [];
  function paint() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [];
    for (let i = 0; i < t.rows; i++) {
      if (words.length) {
        hay[i] ??= [get.module(i), get.array(i), get.primitive(i), get.reason(i), get.source(i), get.names(i)].join("\n").toLowerCase();
        if (!words.every(w => hay[i].includes(w))) continue;
      }
      rows.push(i);
    }
    const root = {name: "", size: 0, count: 0, children: new Map(), rows: []};
    for (const i of rows) {
      const module = get.module(i) || "(no module)";
      let node = root;
      for (const name of [null, ...(state.roll ? rolled(module) : module).split("/")]) {
        if (name !== null) {
          if (!node.children.has(name)) node.children.set(name, {name, size: 0, count: 0, children: new Map(), rows: [], blocks: new Set()});
          node = node.children.get(name);
        }
        node.size += get.bytes(i);
        node.count += 1;
        node.blocks?.add(module);
      }
      node.rows.push(i);
    }
    tree.replaceChildren(...branches(root, root.size || 1, 0, words.length > 0 && rows.length <= 400, get));
    if (!rows.length) tree.append(el("p", {class: "empty", style: "padding:4px 12px"}, t.rows ? "nothing matches" : "no intermediate value is kept"));
    foot.replaceChildren(el("span", {class: "tally"}, words.length ? `${many(rows.length)} of ${many(t.rows)} values, ${bytes(root.size)}` : `${many(t.rows)} values`));
  }
  paint();
  const tools = [el("label", {for: "roll"}, roll, " roll up repeated blocks"),
    el("button", {class: "plain", type: "button", onclick: () => { for (let k = 0; k < 4; k++) if (tree.querySelectorAll("details").length < 800) all(true); }}, "open"),
    el("button", {class: "plain", type: "button", onclick: () => all(false)}, "close"), search];
  return {count: t.rows + t.left, node: section("Kept for the backward pass",
    `${bytes(r.saved_bytes)} on the device${host}`, tools, tree, foot, andMore(t, "values"), inputs(r.inputs))};
}

function branches(node, total, depth, open, get) {
  const found = [...node.children.values()].sort((a, b) => b.size - a.size).map(child => {
    let inner = child, name = child.name;
    while (inner.children.size === 1 && !inner.rows.length) { [inner] = inner.children.values(); name += `/${inner.name}`; }
    const details = el("details", {style: `--depth:${depth}`},
      el("summary", {}, el("span", {class: "mono"}, name),
        el("span", {class: "size"}, bytes(child.size)),
        el("span", {class: "meter", style: "width:100%"}, el("i", {style: `width:${100 * child.size / total}%;background:var(--accent)`})),
        el("span", {class: "muted"}, `${many(child.count)} value${child.count > 1 ? "s" : ""}`)));
    const grow = () => { if (details.childElementCount === 1) details.append(...branches(inner, total, depth + 1, open, get)); };
    details.addEventListener("toggle", () => { if (details.open) grow(); });
    if (open || (depth === 0 && child.size > total / 2)) { grow(); details.open = true; }
    return details;
  });
  return [...found, ...leaves(node.rows, depth, get)];
}

// The line that computes a value, and the lines of the user's code that called it.
function stackOf(stack, source) {
  const lines = stack.split("\n").filter(Boolean).map(frame => tail(frame.split(" in ")[0]));
  return lines.length && lines[0] === tail(source) ? lines.join(" ← ") : tail(source);
}

function leaves(rows, depth, get) {
  const groups = new Map();
  for (const i of rows) {
    const key = [get.array(i), get.primitive(i), rolled(get.reason(i)), get.source(i), get.memory(i)].join("\n");
    if (!groups.has(key)) groups.set(key, {first: i, size: 0, count: 0});
    const g = groups.get(key);
    g.size += get.bytes(i);
    g.count += 1;
  }
  const sorted = [...groups.values()].sort((a, b) => b.size - a.size);
  const shown = sorted.slice(0, FIRST_ROWS).map(({first: i, size, count}) => {
    const names = get.names(i), where = get.memory(i) === "device" ? "" : ` on ${get.memory(i)}`;
    const loop = get.times(i) > 1 ? `, ${get.times(i)} iterations` : "";
    const why = (count > 1 ? rolled(get.reason(i)) : get.reason(i)) + where + loop;
    return el("div", {class: "leaf", style: `--depth:${depth}`},
      el("span", {title: get.stack(i) || get.source(i)}, mono((count > 1 ? `${count} × ` : "") + get.array(i)), ` ${get.primitive(i)} `,
        names ? el("span", {class: "badge"}, names) : null, el("span", {class: "why mono"}, stackOf(get.stack(i), get.source(i)))),
      el("span", {class: "size"}, bytes(size)), el("span", {class: "why", title: why}, why));
  });
  if (sorted.length > FIRST_ROWS) shown.push(el("div", {class: "leaf", style: `--depth:${depth}`}, el("span", {class: "muted"}, `… and ${many(sorted.length - FIRST_ROWS)} more here; filter to see them`)));
  return shown;
}

function inputs(t) {
  if (!t || !t.rows) return null;
  const details = el("details", {class: "note"}, el("summary", {}, `${many(t.rows + t.left)} arguments and constants that the backward pass reads; not counted, for they live anyway`));
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const table = grid(t.rows, [
      {title: "bytes", num: true, get: column(t, "bytes"), show: bytes}, {title: "array", get: column(t, "array"), show: mono},
      {title: "what", get: column(t, "reason"), show: mono}], "inputs of the backward pass", 0);
    details.append(el("div", {style: "margin:6px 0"}, table.tools), ...table.node);
    const more = andMore(t, "arguments");
    if (more) details.append(more);
  });
  return details;
}

// -- what is computed twice -------------------------------------------------------------------

function recomputed() {
  const r = report(), t = r.recomputed, c = here("compiled");
  if (!t?.rows && !c?.rows) return null;
  const share = r.forward_flops ? `, ${percent(r.recomputed_flops / r.forward_flops)} of the forward` : "";
  const parts = [];
  if (t?.rows) {
    const table = grid(t.rows, [
      {title: "FLOPs", num: true, get: column(t, "flops"), show: n => n ? flops(n) : "free"},
      {title: "bytes", num: true, get: column(t, "bytes"), show: known(bytes)},
      {title: "count", num: true, get: column(t, "count"), show: known(many)},
      {title: "operation", get: column(t, "primitive")},
      {title: "array", get: column(t, "array"), show: mono},
      {title: "module", get: modules(t), show: mono},
      {title: "region", get: column(t, "region"), show: mono},
      {title: "source", get: column(t, "source"), show: place},
    ], "operations computed twice", 0);
    parts.push(el("div", {class: "head"}, el("h3", {style: "margin:0"}, "In the traced program"), el("div", {class: "tools"}, table.tools)),
      table.node, andMore(t, "kinds of operations", flops));
  }
  if (c?.rows) {
    const tone = state => state === "kept" ? "badge" : "badge good";
    const table = grid(c.rows, [
      {title: "FLOPs", num: true, get: column(c, "flops"), show: n => n ? flops(n) : "free"},
      {title: "time", num: true, get: column(c, "seconds"), show: known(seconds)},
      {title: "bytes", num: true, get: column(c, "bytes"), show: known(bytes)},
      {title: "count", num: true, get: column(c, "count"), show: known(many)},
      {title: "state", get: column(c, "state"), show: text => el("span", {class: tone(text), title: STATES[text]}, text)},
      {title: "operation", get: column(c, "primitive")},
      {title: "module", get: column(c, "module"), show: mono},
      {title: "source", get: column(c, "source"), show: place},
    ], "operations computed twice in the compiled program", 0);
    parts.push(el("div", {class: "head", style: "margin-top:12px"}, el("h3", {style: "margin:0"}, "In the compiled program"),
      el("span", {class: "about"}, Object.entries(STATES).map(([name, what]) => `${name}: ${what}`).join("; ")), el("div", {class: "tools"}, table.tools)),
      table.node, andMore(c, "kinds of operations", flops));
  }
  return {count: t ? t.rows + t.left : 0, node: section("Computed twice", `${flops(r.recomputed_flops)}${share}`, null, parts)};
}
const STATES = {kept: "runs again", fused: "inside an instruction that is there anyway", removed: "its forward twin is gone, so it runs once"};

function regions() {
  const t = here("regions");
  if (!t || !t.rows) return null;
  const verdicts = column(t, "verdict"), tally = {};
  for (let i = 0; i < t.rows; i++) tally[verdicts(i)] = (tally[verdicts(i)] || 0) + 1;
  const tone = text => text === "effective" ? "badge good" : /undone|dropped|nothing/.test(text) ? "badge bad" : "badge";
  const table = grid(t.rows, [
    {title: "region", get: modules(t), show: mono},
    {title: "verdict", get: verdicts, show: text => el("span", {class: tone(text)}, text)},
    {title: "saved", num: true, get: column(t, "saved_bytes"), show: known(bytes)},
    {title: "computed twice", num: true, get: column(t, "recomputed_flops"), show: known(flops)},
    {title: "still there", num: true, get: column(t, "kept_fraction"), show: known(percent)},
    {title: "time", num: true, get: column(t, "recomputed_seconds"), show: known(seconds)},
    {title: "what happened", get: column(t, "message"), wide: true},
  ], "regions", 2);
  return {count: t.rows + t.left, node: section("Regions", "did the compiler keep the rematerialization? " +
    Object.entries(tally).map(([name, n]) => `${many(n)} ${name}`).join(", "), table.tools, table.node, andMore(t, "regions"))};
}

function collectives() {
  const t = here("collectives");
  if (!t || !t.rows) return null;
  const again = column(t, "repeated"), time = column(t, "seconds");
  let all = 0, repeated = 0;
  for (let i = 0; i < t.rows; i++) { all += time(i); if (again(i)) repeated += time(i); }
  const table = grid(t.rows, [
    {title: "collective", get: column(t, "kind"), show: mono},
    {title: "bytes", num: true, get: column(t, "bytes"), show: known(bytes)},
    {title: "runs", num: true, get: column(t, "times"), show: known(many)},
    {title: "axes", get: column(t, "axes"), show: mono},
    {title: "devices", num: true, get: column(t, "group"), show: known(many)},
    {title: "module", get: column(t, "module"), show: mono},
    {title: "phase", get: column(t, "phase")},
    {title: "time", num: true, get: time, show: known(seconds)},
    {title: "why twice", get: again, show: flag => el("span", {class: flag ? "badge bad" : ""}, flag ? "only by recomputation" : "")},
    {title: "source", get: column(t, "source"), show: mono},
  ], "collectives", 7);
  const about = `${seconds(all)} on the links` + (repeated ? `, ${seconds(repeated)} only by recomputation` : "");
  return {count: t.rows + t.left, node: section("Collectives", about, table.tools, table.node, andMore(t, "collectives", seconds))};
}

// -- diffs and notes --------------------------------------------------------------------------

function diffs() {
  const found = [...(report().diff ? [report().diff] : []), ...D.diffs.filter(d => !d.policy || d.policy === report().name || !D.policies.some(p => p.name === d.policy))];
  if (!found.length) return null;
  const kind = {"+": "add", "-": "cut", "~": "moved", "⟲": "again", "#": "mark"};
  const parts = found.map(d => {
    const box = el("div", {class: "diff", tabindex: "0", role: "region", "aria-label": `diff ${d.title}`}), foot = el("div", {class: "more"});
    let shown = 0;
    const more = () => {
      for (const [sign, text] of d.lines.slice(shown, shown + MORE_ROWS)) {
        box.append(el("div", {class: text.includes("⟲") ? "again" : kind[sign] || null}, text || " "));
      }
      shown = Math.min(d.lines.length, shown + MORE_ROWS);
      foot.replaceChildren(el("span", {}, `${many(shown)} of ${many(d.lines.length + d.left)} lines${d.left && shown === d.lines.length ? "; the rest is in the JSON" : ""}`));
      if (shown < d.lines.length) foot.append(el("button", {class: "plain", type: "button", onclick: more}, "show more"));
    };
    more();
    const counts = Object.entries(d.counts).map(([name, n]) => `${many(n)} ${name}`).join(", ");
    return [d.title || counts ? el("h3", {}, d.title, counts ? el("span", {class: "muted"}, `  ${counts}`) : null) : null, box, foot];
  });
  return {node: section("Diff", "the two gradient programs, aligned", null, parts)};
}

function notes() {
  const found = report().notes;
  if (!found.length) return null;
  return {node: section("Notes", null, null, found.map(text => el("p", {class: "note"}, text)))};
}

showTheme();
draw();
window.addEventListener("hashchange", () => { readHash(); showTheme(); draw(); });
})();
