/* The figures and details of a kgen report. Plot and d3 are embedded before this script. */
"use strict";
(() => {
  const state = { data: null, sources: null, visible: new Set(), words: [], drawing: 0, failed: [] };
  const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7a00", "#888888"];
  const KGEN = "#d55e00", FLOOR = "#888888";
  const FATES = { verified: "#009e73", rejected: "#888888", build_failed: "#e69f00", wrong: "#d55e00",
    timed_out: "#cc79a7", crashed: "#0072b2" };
  const NOISE = 0.02; // repeated searches may swap configs that are this close
  const WIDEST = 1100;

  // ---- small helpers
  const $ = (selector, from = document) => from.querySelector(selector);
  const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) node.setAttribute(name, "");
      else if (value !== false && value != null) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child != null));
    return node;
  }
  const us = (t) => t == null ? "–" : t >= 999.95 ? t.toFixed(0) : t >= 1 ? String(+t.toPrecision(4)) : String(+t.toPrecision(3));
  const percent = (share) => `${(100 * share).toFixed(share < 0.01 ? 1 : 0)} %`;
  const ratio = (r) => r == null ? "–" : Math.abs(r - 1) < 0.01 ? r.toFixed(3) : r.toFixed(2);
  const unique = (values) => [...new Set(values)];
  const widest = (texts) => 16 + 6.6 * Math.max(4, ...texts.map((text) => String(text).length));

  function table(caption, columns, rows) {
    const numeric = columns.map((_, i) => rows.length > 0 && rows.every((row) => typeof row[i] === "number" || /^[–\d]/.test(String(row[i] ?? ""))));
    const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) =>
      i === 0 ? el("th", { scope: "row" }, String(cell ?? "")) : el("td", { class: numeric[i] ? null : "text" }, String(cell ?? "–")))));
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      el("table", {}, el("caption", {}, caption),
        el("thead", {}, el("tr", {}, ...columns.map((name, i) => el("th", { scope: "col", class: numeric[i] ? null : "text" }, name)))),
        el("tbody", {}, ...body)));
  }

  /* A figure with its legend, and the table of what it shows behind it. */
  function figure(host, { title, note, legend = [], plot, columns, rows }) {
    const wasOpen = $("details.table", host)?.open ?? false;
    const width = Math.min(WIDEST, Math.max(320, host.clientWidth || 900));
    const id = `f${++figure.count}`;
    const node = el("figure", { "aria-labelledby": id }, el("h4", { id }, title));
    if (note) node.append(el("p", { class: "facts" }, note));
    if (legend.length) {
      node.append(el("div", { class: "legend" }, ...legend.map(([name, colour]) => {
        const key = el("i", { "aria-hidden": "true" });
        key.style.background = colour;
        return el("span", {}, key, name);
      })));
    }
    const drawing = plot(width);
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `${title}. The table below has the same values.`);
    node.append(drawing);
    const details = el("details", { class: "table" }, el("summary", {}, `Table: ${title}`));
    const fill = () => { if (details.childElementCount === 1) details.append(table(title, columns, rows())); };
    details.addEventListener("toggle", () => { if (details.open) fill(); });
    if (wasOpen) { details.open = true; fill(); }
    node.append(details);
    host.replaceChildren(node);
    host.dataset.drawn = "yes";
  }
  figure.count = 0;

  const plain = (options) => Plot.plot({ style: { background: "transparent", fontSize: "12px" }, ...options });

  // ---- figures of several problems
  function roofline(host, rows) {
    const points = rows.filter((r) => r.work && r.work.flops > 0 && r.work.bytes > 0).map((r) => ({
      ...r, who: `${r.op} ${r.pass}`, x: r.work.flops / r.work.bytes, y: r.work.flops / r.us / 1e6 }));
    host.hidden = points.length === 0;
    if (host.hidden) return;
    const colours = d3.scaleOrdinal(unique(state.data.rows.map((r) => r.op)), COLOURS);
    const roofs = state.data.roofs;
    const [low, high] = d3.extent(points, (p) => p.x);
    const xs = d3.range(0, 61).map((i) => (low / 2) * Math.pow((4 * high) / low, i / 60));
    const lines = roofs.flatMap((roof) => Object.entries({ ...roof.peaks }).flatMap(([unit, peak]) =>
      xs.map((x) => ({ x, y: Math.min(peak, roof.gbps * x / 1e3), z: `${roof.gpu} ${unit}` }))));
    const tops = roofs.flatMap((roof) => Object.entries(roof.peaks).map(([unit, peak]) => ({ x: xs.at(-1), y: peak, text: `${unit} ${peak} TFLOP/s` })));
    figure(host, {
      title: "Roofline: rate reached over arithmetic intensity",
      note: "Lines: the measured copy bandwidth, and the peak of each unit that could do the arithmetic at the problem's accuracy. Hollow marks: backward.",
      legend: unique(points.map((p) => p.op)).map((name) => [name, colours(name)]),
      plot: (width) => plain({
        width, height: 440, marginLeft: 60, marginRight: 20,
        x: { type: "log", label: "operations per byte of least traffic", grid: true, domain: [xs[0], xs.at(-1)], tickFormat: (d) => /^[125]/.test(d.toExponential()) ? String(+d.toPrecision(2)) : "" },
        y: { type: "log", label: "TFLOP/s", grid: true, tickFormat: (d) => /^[15]/.test(d.toExponential()) ? String(+d.toPrecision(2)) : "" },
        marks: [
          Plot.line(lines, { x: "x", y: "y", z: "z", stroke: FLOOR, strokeWidth: 1.2 }),
          Plot.text(tops, { x: "x", y: "y", text: "text", textAnchor: "end", dy: -7, fill: "currentColor" }),
          Plot.dot(points, { x: "x", y: "y", stroke: (p) => colours(p.op), fill: (p) => p.pass === "backward" ? "transparent" : colours(p.op), r: 4,
            ariaLabel: (p) => `${p.op} ${p.pass} ${p.name}: ${p.y.toPrecision(3)} TFLOP/s` }),
          Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: (p) => `${p.op} ${p.pass}\n${p.name}\n${us(p.us)} us, ${percent(p.share)} of floor\n${p.y.toPrecision(3)} TFLOP/s, ${(p.work.bytes / p.us / 1e3).toFixed(0)} GB/s` })),
        ],
      }),
      columns: ["problem", "operations/byte", "TFLOP/s", "GB/s", "unit", "us", "of floor"],
      rows: () => points.map((p) => [`${p.op} ${p.pass} ${p.name}`, +p.x.toPrecision(3), +p.y.toPrecision(3), Math.round(p.work.bytes / p.us / 1e3), p.work.unit, us(p.us), percent(p.share)]),
    });
  }

  function times(host, rows) {
    host.hidden = rows.length === 0;
    if (host.hidden) return;
    const names = unique(rows.flatMap((r) => r.peers.map((p) => p.name)));
    const colours = d3.scaleOrdinal(names, [COLOURS[0], COLOURS[2], COLOURS[3], COLOURS[1], COLOURS[4], COLOURS[6]]);
    const contestants = rows.flatMap((r) => [
      ...r.peers.map((p) => ({ row: r, who: p.name, t: p.us, low: p.low, high: p.high, colour: colours(p.name) })),
      { row: r, who: "kgen", t: r.us, low: r.low, high: r.high, colour: KGEN }]);
    const all = [...contestants.map((c) => c.t), ...rows.map((r) => r.floor).filter((t) => t > 0)];
    const domain = [d3.min(all) / 1.15, d3.max(all) * 1.15];
    figure(host, {
      title: `${rows[0].op} ${rows[0].pass}: time beside peers and floor`,
      note: "Logarithmic. The bar begins at the floor, the least possible time, and ends at kgen's.",
      legend: [["kgen", KGEN], ["floor", FLOOR], ...names.map((name) => [name, colours(name)])],
      plot: (width) => plain({
        width, height: 50 + 24 * rows.length, marginLeft: Math.min(width / 2.4, widest(rows.map((r) => r.name))), marginRight: 20,
        x: { type: "log", domain, label: "us", grid: true, tickFormat: (d) => /^[125]/.test(d.toExponential()) ? us(d) : "" },
        y: { label: null, domain: rows.map((r) => r.name) },
        marks: [
          Plot.barX(rows.filter((r) => r.floor > 0), { y: "name", x1: (r) => Math.min(r.floor, r.us), x2: "us", fill: KGEN, fillOpacity: 0.25, insetTop: 4, insetBottom: 4 }),
          Plot.tickX(rows.filter((r) => r.floor > 0), { y: "name", x: "floor", stroke: FLOOR, strokeWidth: 2 }),
          Plot.dot(contestants, { y: (c) => c.row.name, x: "t", fill: "colour", r: (c) => c.who === "kgen" ? 5 : 4,
            ariaLabel: (c) => `${c.row.name}, ${c.who}: ${us(c.t)} us` }),
          Plot.tip(contestants, Plot.pointer({ y: (c) => c.row.name, x: "t", title: (c) => `${c.row.name}\n${c.who} ${us(c.t)} us (${us(c.low)} to ${us(c.high)})\n` +
            (c.who === "kgen" ? `${percent(c.row.share)} of floor` : `${ratio(c.t / c.row.us)} x kgen`) })),
        ],
      }),
      columns: ["problem", "kgen us", ...names.map((name) => `${name} us`), "floor us", "of floor", "fastest peer / kgen"],
      rows: () => rows.map((r) => [r.name, us(r.us), ...names.map((name) => us(r.peers.find((p) => p.name === name)?.us)), us(r.floor), percent(r.share), ratio(r.ratio)]),
    });
  }

  function coverage(host, rows) {
    host.hidden = rows.length === 0;
    if (host.hidden) return;
    const withPeers = rows.some((r) => r.ratio != null);
    const value = (r) => withPeers ? r.ratio : r.share;
    const spread = withPeers ? Math.max(1.2, ...rows.filter((r) => r.ratio).flatMap((r) => [r.ratio, 1 / r.ratio])) : 1;
    const colour = withPeers
      ? d3.scaleDivergingLog([1 / spread, 1, spread], (t) => d3.interpolatePuOr(1 - t))
      : d3.scaleSequential([0, 1], d3.interpolateViridis);
    const fill = (r) => value(r) == null ? "#8888" : colour(value(r));
    const dark = (r) => d3.lab(d3.color(fill(r))).l < 55;
    const columns = unique(rows.map((r) => `${r.pass} ${r.kind}`)).sort((a, b) => (a < b ? 1 : -1));
    const shapes = unique(rows.map((r) => r.shape));
    const below = 20 + 0.68 * widest(columns); // labels at 40 degrees
    const says = (r) => value(r) == null ? "no peer" : withPeers ? ratio(r.ratio) : percent(r.share);
    figure(host, {
      title: withPeers ? `${rows[0].op}: fastest peer / kgen by shape and kind` : `${rows[0].op}: share of the floor by shape and kind`,
      note: withPeers ? "Above 1, violet: kgen is faster. Below 1, orange: the peer is." : "No peer was timed; the colour is the share of the floor.",
      plot: (width) => plain({
        width, height: 20 + below + 24 * shapes.length, marginLeft: Math.max(widest(shapes), below), marginTop: 10, marginBottom: below,
        x: { label: null, domain: columns, tickRotate: -40 }, y: { label: null, domain: shapes },
        marks: [
          Plot.cell(rows, { x: (r) => `${r.pass} ${r.kind}`, y: "shape", fill, inset: 0.5 }),
          Plot.text(rows, { x: (r) => `${r.pass} ${r.kind}`, y: "shape", text: says, fill: (r) => dark(r) ? "#fff" : "#000", fontSize: 10 }),
          Plot.tip(rows, Plot.pointer({ x: (r) => `${r.pass} ${r.kind}`, y: "shape", title: (r) => `${r.pass} ${r.name}\n${r.fastest ? `${ratio(r.ratio)} x faster than ${r.fastest}` : "no peer timed"}\n${percent(r.share)} of floor` })),
        ],
      }),
      columns: ["shape", "pass", "kind", "fastest peer", "fastest peer / kgen", "standing", "of floor"],
      rows: () => rows.map((r) => [r.shape, r.pass, r.kind, r.fastest || "–", ratio(r.ratio), r.standing, percent(r.share)]),
    });
  }

  const STEPS = { exact: COLOURS[2], learnt: COLOURS[4], nearest: COLOURS[0], family: "#7fbf7b", safe: COLOURS[1], none: COLOURS[5] };

  /* What the library does on a population: by ratio where peers were timed, else by dispatch step. */
  function population(host) {
    const map = state.data.maps[+host.dataset.map];
    const cells = map.cells.filter((c) => c.pass_name === host.dataset.pass && state.words.every((w) => saysCell(map, c).includes(w)));
    host.hidden = cells.length === 0;
    if (host.hidden) return;
    const byRatio = cells.some((c) => c.ratio != null);
    const spread = Math.max(1.2, ...cells.filter((c) => c.ratio).flatMap((c) => [c.ratio, 1 / c.ratio]));
    const colour = d3.scaleDivergingLog([1 / spread, 1, spread], (t) => d3.interpolatePuOr(1 - t));
    const fill = (c) => byRatio ? (c.ratio == null ? "#8888" : colour(c.ratio)) : STEPS[c.step];
    const dark = (c) => d3.lab(d3.color(fill(c))).l < 55;
    const text = (c) => c.failed ? "failed" : byRatio ? ratio(c.ratio) : c.step;
    const kinds = unique(cells.map((c) => c.kind)), shapes = unique(cells.map((c) => c.shape));
    const below = 20 + 0.68 * widest(kinds); // labels at 40 degrees
    const line = shapes.length > 40 ? 15 : 20;
    const there = Object.keys(STEPS).filter((step) => cells.some((c) => c.step === step));
    const title = `${map.op} ${host.dataset.pass}: ` + (byRatio ? "fastest peer / kgen" : "dispatch step") + " by shape and kind";
    figure(host, {
      title,
      note: byRatio ? "Above 1, violet: kgen is faster. Below 1, orange: the peer is. Grey: no time." : "Nothing was timed. Safe: the slow kernel that takes every problem.",
      legend: byRatio ? [] : there.map((step) => [`${step} (${cells.filter((c) => c.step === step).length})`, STEPS[step]]),
      plot: (width) => plain({
        width, height: 20 + below + line * shapes.length, marginLeft: Math.max(widest(shapes), below), marginTop: 10, marginBottom: below,
        x: { label: null, domain: kinds, tickRotate: -40 }, y: { label: null, domain: shapes },
        marks: [
          Plot.cell(cells, { x: "kind", y: "shape", fill, inset: 0.5 }),
          Plot.text(cells, { x: "kind", y: "shape", text, fill: (c) => dark(c) ? "#fff" : "#000", fontSize: line / 2 }),
          Plot.tip(cells, Plot.pointer({ x: "kind", y: "shape", lineWidth: 40, title: (c) => [c.name, `${c.step}: ${c.config || "no kernel"}`,
            c.us == null ? null : `${us(c.us)} us, ${percent(c.floor / c.us)} of floor`, c.ratio == null ? null : `${c.peer} / kgen ${ratio(c.ratio)}`, c.failed || null].filter(Boolean).join("\n") })),
        ],
      }),
      columns: ["problem", "step", "config", "us", "floor us", "fastest peer", "peer us", "fastest peer / kgen", "loss", "failed"],
      rows: () => cells.map((c) => [c.name, c.step, c.config || "–", us(c.us), us(c.floor), c.peer || "–", us(c.peer_us), ratio(c.ratio), c.loss == null ? "–" : percent(c.loss), c.failed || "–"]),
    });
  }
  const saysCell = (map, c) => [map.op, map.gpu, c.pass_name, c.name, c.step, c.config, c.peer].join(" ").toLowerCase();

  function fates(host, rows) {
    const parts = rows.flatMap((r) => Object.entries(r.fates).map(([fate, count]) => ({ name: `${r.pass} ${r.name}`, fate, count })));
    host.hidden = parts.length === 0;
    if (host.hidden) return;
    const there = Object.keys(FATES).filter((fate) => parts.some((p) => p.fate === fate));
    figure(host, {
      title: `${rows[0].op}: fates of the trials`,
      legend: there.map((fate) => [fate.replace("_", " "), FATES[fate]]),
      plot: (width) => plain({
        width, height: 50 + 18 * rows.length, marginLeft: Math.min(width / 1.8, widest(rows.map((r) => `${r.pass} ${r.name}`))),
        x: { label: "trials", grid: true }, y: { label: null, domain: rows.map((r) => `${r.pass} ${r.name}`) },
        marks: [
          Plot.barX(parts, { y: "name", x: "count", fill: (p) => FATES[p.fate], order: there, insetTop: 2, insetBottom: 2 }),
          Plot.tip(parts, Plot.pointerY(Plot.stackX({ y: "name", x: "count", title: (p) => `${p.name}\n${p.count} ${p.fate.replace("_", " ")}` }))),
        ],
      }),
      columns: ["problem", ...there.map((fate) => fate.replace("_", " ")), "search s", "compilers s"],
      rows: () => rows.map((r) => [`${r.pass} ${r.name}`, ...there.map((fate) => r.fates[fate] ?? 0), r.seconds[0].toFixed(1), r.seconds[1].toFixed(1)]),
    });
  }

  function compared(host, rows, operator) {
    const kept = new Set(rows.map((r) => `${r.pass} ${r.name}`));
    const everything = rows.length === state.data.rows.filter((r) => r.op === operator.name && r.gpu === operator.gpu).length;
    const pairs = operator.compared.pairs.map((p) => ({ ...p, full: `${p.pass} ${p.name}` })).filter((p) => everything || kept.has(p.full));
    host.hidden = pairs.length === 0;
    if (host.hidden) return;
    const colours = { faster: COLOURS[2], slower: COLOURS[5], tie: FLOOR, stale: "#bbbbbb", new: COLOURS[0], gone: COLOURS[3] };
    const drawn = pairs.filter((p) => p.ratio != null);
    figure(host, {
      title: `${operator.name}: old time / new time`,
      note: "Right of 1: faster now. Stale: not measured again. A tie: the quartiles overlap.",
      legend: unique(pairs.map((p) => p.change)).map((change) => [change, colours[change]]),
      plot: (width) => plain({
        width, height: 60 + 20 * drawn.length, marginLeft: Math.min(width / 2, widest(drawn.map((p) => p.full))),
        x: { type: "log", label: "old / new", grid: true, tickFormat: ".3~g" }, y: { label: null, domain: drawn.map((p) => p.full) },
        marks: [Plot.ruleX([1], { stroke: FLOOR }),
          Plot.dot(drawn, { y: "full", x: "ratio", fill: (p) => colours[p.change], r: 5 }),
          Plot.tip(drawn, Plot.pointerY({ y: "full", x: "ratio", title: (p) => `${p.full}\n${us(p.old.us)} -> ${us(p.new.us)} us\n${p.change}` }))],
      }),
      columns: ["problem", "change", "old us", "new us", "old / new"],
      rows: () => pairs.map((p) => [p.full, p.change, us(p.old?.us), us(p.new?.us), p.ratio == null ? "–" : p.ratio.toFixed(3)]),
    });
  }

  // ---- one problem
  function trialsOf(row) {
    const { variants, params, fates: names, trials } = row.search;
    return trials.map((t, i) => {
      const variant = variants[t[3]];
      const config = Object.fromEntries(params[variant].map((name, k) => [name, t[4 + k]]));
      return { number: i + 1, seconds: t[0], us: t[1], fate: names[t[2]], variant, config };
    });
  }
  const spelled = (config) => Object.entries(config).filter(([, v]) => v != null).map(([k, v]) => `${k}=${v}`).join(", ");

  function without(host, why) {
    delete host.dataset.figure;
    host.replaceChildren(el("p", { class: "facts" }, why));
  }

  function convergence(host, row, trials) {
    const timed = trials.filter((t) => t.us != null);
    if (!timed.length) return without(host, "The journal beside the report has no timed trials of this problem.");
    const colours = d3.scaleOrdinal(row.search.variants, COLOURS);
    let least = Infinity;
    const best = timed.map((t) => ({ number: t.number, us: (least = Math.min(least, t.us)) }));
    best.push({ number: trials.length, us: least });
    const refused = trials.filter((t) => t.fate !== "verified");
    const lines = [{ name: "final", us: row.us }, { name: "floor", us: row.floor }, ...(row.fastest ? [{ name: row.fastest, us: row.peers.find((p) => p.name === row.fastest).us }] : [])].filter((l) => l.us > 0);
    const shade = (l) => l.name === "floor" ? FLOOR : l.name === "final" ? KGEN : COLOURS[3];
    const top = d3.max(timed, (t) => t.us) * 1.1;
    figure(host, {
      title: "Convergence of the search",
      note: "Dots: trials, measured once each. Line: the best so far. Crosses at the top: trials that were refused.",
      legend: [...unique(timed.map((t) => t.variant)).map((name) => [name, colours(name)]), ...lines.map((l) => [`${l.name} ${us(l.us)} us (dashed)`, shade(l)])],
      plot: (width) => plain({
        width, height: 320, marginLeft: 60, marginRight: 20,
        x: { label: "trial", grid: true }, y: { type: "log", label: "us", grid: true, tickFormat: ".3~g" },
        marks: [
          Plot.ruleY(lines, { y: "us", stroke: shade, strokeDasharray: "4 3" }),
          Plot.line(best, { x: "number", y: "us", curve: "step-after", stroke: "currentColor" }),
          Plot.dot(timed, { x: "number", y: "us", fill: (t) => colours(t.variant), r: 2.5 }),
          Plot.dot(refused, { x: "number", y: top, symbol: "times", stroke: (t) => FATES[t.fate], r: 3 }),
          Plot.tip(timed, Plot.pointer({ x: "number", y: "us", title: (t) => `trial ${t.number}: ${us(t.us)} us\n${t.variant}\n${spelled(t.config)}`, lineWidth: 30 })),
        ],
      }),
      columns: ["trial", "seconds", "us", "fate", "variant", "config"],
      rows: () => trials.map((t) => [t.number, t.seconds, us(t.us), t.fate, t.variant, spelled(t.config)]),
    });
  }

  function effects(host, row, trials) {
    const timed = trials.filter((t) => t.us != null && t.variant === row.variant);
    const names = (row.search.params[row.variant] ?? []).filter((name) => new Set(timed.map((t) => t.config[name])).size > 1);
    if (!names.length) return without(host, `The journal beside the report has no trials of ${row.variant} that differ in a parameter.`);
    const least = d3.min(timed, (t) => t.us);
    const cut = Math.min(d3.max(timed, (t) => t.us), least * 1.6);
    const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : 1;
    const spell = (v) => v == null ? "default" : String(v);
    const groups = names.flatMap((name) => unique(timed.map((t) => t.config[name])).sort(order).map((v) => {
      const of = timed.filter((t) => t.config[name] === v).map((t) => t.us);
      return { name, value: spell(v), best: d3.min(of), median: d3.median(of), count: of.length };
    }));
    figure(host, {
      title: `Where the best configs of ${row.variant} lie`,
      note: `Each panel is a parameter. Dots: trials; bars: the best with each value. Grey: within ${100 * NOISE} % of the best, where repeated searches may swap configs. Times above ${us(cut)} us lie at the upper edge.`,
      plot: (width) => {
        const each = 220, across = Math.max(1, Math.floor(width / each));
        const wall = el("div");
        wall.style.cssText = "display:flex;flex-wrap:wrap";
        for (const name of names) {
          const mine = groups.filter((g) => g.name === name);
          wall.append(plain({
            width: Math.floor(width / Math.min(across, names.length)), height: 190, marginLeft: 48, marginBottom: 40,
            x: { domain: mine.map((g) => g.value), label: name, labelAnchor: "center" },
            y: { type: "log", domain: [least * 0.98, cut * 1.02], label: "us", grid: true, tickFormat: ".3~g" },
            marks: [
              Plot.rectY([0], { y1: least * 0.98, y2: least * (1 + NOISE), fill: FLOOR, fillOpacity: 0.25 }),
              Plot.dot(timed, { x: (t) => spell(t.config[name]), y: (t) => Math.min(t.us, cut), r: 2, fill: COLOURS[0], fillOpacity: 0.4, clip: true }),
              Plot.tickY(mine, { x: "value", y: (g) => Math.min(g.best, cut), stroke: KGEN, strokeWidth: 2.5 }),
              Plot.tip(mine, Plot.pointerX({ x: "value", y: (g) => Math.min(g.best, cut), title: (g) => `${g.name} = ${g.value}\nbest ${us(g.best)} us\nmedian ${us(g.median)} us\n${g.count} trials` })),
            ],
          }));
        }
        return wall;
      },
      columns: ["parameter", "value", "best us", "median us", "trials"],
      rows: () => groups.map((g) => [g.name, g.value, us(g.best), us(g.median), g.count]),
    });
  }

  function final(host, row) {
    const all = [{ who: "kgen", us: row.us, low: row.low, high: row.high },
      ...(row.second ? [{ who: "runner-up", us: row.second.us, low: row.second.low ?? row.second.us, high: row.second.high ?? row.second.us }] : []),
      ...row.peers.map((p) => ({ who: p.name, us: p.us, low: p.low, high: p.high }))];
    figure(host, {
      title: "The final: medians with quartiles",
      note: (row.second ? `Winner and runner-up ${row.second.tie ? "tie" : `differ by ${(100 * (row.second.ratio - 1)).toFixed(2)} %`}. The runner-up's interval has the width of its trial. ` : "") + (row.inputs ? `kgen on ${row.inputs}. ` : "") + row.protocol,
      plot: (width) => plain({
        width, height: 45 + 26 * all.length, marginLeft: widest(all.map((a) => a.who)), marginRight: 30,
        x: { type: "log", label: "us", grid: true, tickFormat: ".4~g", ticks: 5 }, y: { label: null, domain: all.map((a) => a.who) },
        marks: [
          Plot.ruleY(all, { y: "who", x1: "low", x2: "high", stroke: (a) => a.who === "kgen" ? KGEN : COLOURS[0], strokeWidth: 4 }),
          Plot.dot(all, { y: "who", x: "us", r: 4, fill: (a) => a.who === "kgen" ? KGEN : COLOURS[0] }),
          Plot.tip(all, Plot.pointerY({ y: "who", x: "us", title: (a) => `${a.who}: ${us(a.us)} us\n${us(a.low)} to ${us(a.high)}` })),
        ],
      }),
      columns: ["contestant", "median us", "low us", "high us", "over kgen"],
      rows: () => all.map((a) => [a.who, us(a.us), us(a.low), us(a.high), (a.us / row.us).toFixed(3)]),
    });
  }

  function section(title, ...children) {
    return [el("h4", {}, title), ...children];
  }

  function refusals(row) {
    const rows = row.messages.length ? row.messages.map((m) => [m.count, m.fate, m.reason, m.first])
      : Object.entries(row.reasons).map(([why, count]) => [count, "–", why, "–"]);
    return rows.length ? table("Refused trials by reason, with the first config of each", ["trials", "fate", "whole reason", "first config"], rows)
      : el("p", { class: "facts" }, "none");
  }

  function openProblem(details) {
    if (details.childElementCount > 1) return;
    const row = state.data.rows[+details.dataset.row];
    const box = (name) => el("div", { class: "figure", "data-figure": name });
    const [finalBox, convergenceBox, effectsBox] = [box("final"), box("convergence"), box("effects")];
    const environment = state.data.operators.find((o) => o.name === row.op && o.gpu === row.gpu)?.environments.find((e) => e.id === row.environment);
    const clocks = environment?.sm_clock_mhz == null ? "not recorded" : `SM ${environment.sm_clock_mhz} MHz, memory ${environment.memory_clock_mhz ?? "?"} MHz after the run`;
    details.append(el("p", { class: "facts" }, row.key), finalBox, el("p", {}, `Winner: ${row.label}`),
      row.second ? el("p", {}, `Runner-up: ${row.second.label}, ${us(row.second.us)} us, ${row.second.ratio.toFixed(3)} x${row.second.tie ? ", a tie" : ""}`) : null ?? "",
      el("p", { class: row.slowed ? "slower" : "facts" }, `GPU clocks: ${clocks}${row.slowed ? `; held down during the run: ${row.slowed}` : "; nothing held them down"}`),
      convergenceBox, effectsBox,
      ...section("Kernels", table("Kernels of the winner", ["kernel", "threads", "registers", "spilled B", "shared memory B", "occupancy"],
        row.kernels.map((k) => [k.name, k.threads, k.registers ?? "–", k.spill_bytes ?? "–", (k.smem_static_bytes ?? 0) + k.smem_dynamic_bytes, k.occupancy == null ? "–" : percent(k.occupancy)])),
        ...row.remarks.map((remark) => el("p", {}, `The compiler says: ${remark}`))),
      ...section("Error against float64", table("Largest errors over all inputs", ["output", "error", "eager PyTorch", "allowed"],
        row.accuracy.map((a) => [a.output, a.error.toExponential(2), a.eager_error.toExponential(2), a.bound.toExponential(2)]))),
      ...section("Trials that were refused", refusals(row)),
      ...section(`Configs that rules exclude: ${row.space[0]} of ${row.space[1]} are feasible`,
        table("Rules by the configs that they alone or first exclude", ["configs", "why", "rule", "where"],
          row.refused.map(([rule, count]) => [count, state.data.rules[rule][1], state.data.rules[rule][0], state.data.rules[rule][2]]))),
      ...section("Evidence", el("ul", {}, ...row.evidence.map((line) => el("li", {}, line)))),
      ...section("Repeat it", el("pre", { class: "wrap", tabindex: "0" }, row.repeat.join("\n"))),
      source(row));
    final(finalBox, row);
    const trials = trialsOf(row);
    convergence(convergenceBox, row, trials);
    effects(effectsBox, row, trials);
  }

  function source(row) {
    const details = el("details", { class: "source" }, el("summary", {}, "Source of the winning kernel"));
    if (!row.kernel) {
      details.append(el("p", {}, "The library beside the report does not hold it."));
      return details;
    }
    details.addEventListener("toggle", guarded(async () => {
      if (!details.open || details.childElementCount > 1) return;
      state.sources ??= await unpacked("sources");
      if (!row.same_text) details.append(el("p", { class: "facts" }, "The text is later than the one that was measured; it compiles to the same machine code."));
      details.append(el("p", {}, row.label), el("pre", { tabindex: "0", "aria-label": "source" }, state.sources[row.kernel]));
    }));
    return details;
  }

  // ---- the page
  const DRAW = { roofline, population, times, coverage, fates, compared };

  /* Draw what is in view, then the rest one by one, so that the page can be used at once. */
  async function drawAll() {
    const drawing = ++state.drawing;
    delete document.documentElement.dataset.complete;
    const hosts = $$("main .figure[data-figure]").filter((host) => DRAW[host.dataset.figure]);
    const inView = (host) => { const box = host.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight; };
    const [first, rest] = [hosts.filter(inView), hosts.filter((host) => !inView(host))];
    for (const host of first) draw(host);
    document.documentElement.dataset.ready = "yes";
    document.documentElement.dataset.readyMs ??= String(Math.round(performance.now()));
    for (const host of rest) {
      await new Promise((resume) => setTimeout(resume));
      if (drawing !== state.drawing) return; // a later search or width has begun to draw
      draw(host);
    }
    document.documentElement.dataset.complete = "yes";
    document.documentElement.dataset.completeMs ??= String(Math.round(performance.now()));
  }

  function draw(host) {
    const section = host.closest("section.operator");
    const mine = state.data.rows.filter((r) => state.visible.has(r.id))
      .filter((r) => !section || (r.op === section.dataset.op && r.gpu === section.dataset.gpu))
      .filter((r) => !host.dataset.pass || r.pass === host.dataset.pass);
    const operator = section && state.data.operators.find((o) => o.name === section.dataset.op && o.gpu === section.dataset.gpu);
    DRAW[host.dataset.figure](host, mine, operator);
  }

  function search(text) {
    const words = state.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    state.visible = new Set(state.data.rows.filter((r) => {
      const said = [r.op, r.pass, r.name, r.key, r.variant, r.standing, r.gpu, r.fastest].join(" ").toLowerCase();
      return words.every((word) => said.includes(word));
    }).map((r) => r.id));
    for (const node of $$("[data-row]")) node.hidden = !state.visible.has(+node.dataset.row);
    for (const node of $$("section.pass, section.operator")) {
      node.hidden = !$$("tr[data-row]", node).some((tr) => !tr.hidden);
    }
    const count = state.visible.size;
    $("#found").textContent = `${count} problem${count === 1 ? "" : "s"}`;
    return drawAll();
  }

  async function unpacked(id) {
    const bytes = Uint8Array.from(atob($(`#${id}`).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }

  function guarded(action) {
    return async (...given) => {
      try {
        await action(...given);
      } catch (error) {
        state.failed.push(String(error));
        const box = $("#trouble");
        box.hidden = false;
        box.textContent = `This page could not be drawn (${error}). The tables of results are complete. A current browser is needed.`;
        console.error(error);
      }
    };
  }

  function follow() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.matches("details")) { target.open = true; target.scrollIntoView(); }
  }

  const later = (action, ms) => { let timer; return () => { clearTimeout(timer); timer = setTimeout(action, ms); }; };

  const start = guarded(async () => {
    state.data = await unpacked("data");
    state.visible = new Set(state.data.rows.map((r) => r.id));
    for (const details of $$("details.problem")) details.addEventListener("toggle", guarded(() => { if (details.open) openProblem(details); }));
    const box = $("#search");
    box.addEventListener("input", later(guarded(() => search(box.value)), 120));
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement?.tagName)) { event.preventDefault(); box.focus(); }
    });
    const theme = $("#theme");
    theme.addEventListener("change", () => { if (theme.value) document.documentElement.dataset.theme = theme.value; else delete document.documentElement.dataset.theme; });
    window.addEventListener("hashchange", follow);
    let width = innerWidth;
    window.addEventListener("resize", later(guarded(() => { if (innerWidth !== width) { width = innerWidth; return drawAll(); } }), 200));
    follow();
    await drawAll();
  });
  window.kgenReport = { state, openProblem };
  start();
})();
