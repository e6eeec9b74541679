// The timeline: damage above, what the engine did below, and a strip to choose forwards from.

// Bars of one forward on top of one another, in the order of `names`.
function stacked(rows, key, value, names) {
  const height = new Map();
  const rank = (row) => (names.indexOf(row[key]) + names.length + 1) % (names.length + 1);
  return [...rows]
    .sort((a, b) => a.forward - b.forward || rank(a) - rank(b))
    .map((row) => {
      const low = height.get(row.forward) ?? 0;
      height.set(row.forward, low + row[value]);
      return { ...row, low, high: low + row[value] };
    });
}

const rankOf = (row) => CLASSES.findIndex((item) => item.name === row.class);

const MODES = { extend: "#5b8fd0", mixed: "#5fa5a5", decode: "#9db4c8" };

function drawTimeline() {
  const section = byId("timeline");
  const { damage, load, width, marks } = page.timeline;
  const rows = rowsOf(damage);
  const loads = rowsOf(load);
  const notes = rowsOf(marks).filter((row) => row.forward !== null);
  const gaps = rowsOf(page.unknown.places).filter((row) => row.forward !== null);
  const stackedLoads = stacked(loads, "mode", "tokens", Object.keys(MODES)).map((row) => ({ ...row, fill: MODES[row.mode] ?? OTHER_COLOUR }));
  const used = CLASSES.filter((item) => rows.some((row) => row.class === item.name));

  const above = plotBox("Damage found in each forward; the rows are in the table of the SQL beside it");
  const below = plotBox("Tokens computed in each forward");
  const strip = plotBox("All forwards; drag to choose some", "strip");
  const from = el("input", { type: "number", min: 0, max: lastForward, id: "from-forward" });
  const to = el("input", { type: "number", min: 0, max: lastForward, id: "to-forward" });
  const apply = () => showForwards(Number(from.value), Number(to.value));
  from.addEventListener("change", apply);
  to.addEventListener("change", apply);

  fill(
    section,
    el("div", { class: "head" }, el("h2", { id: "timeline-title" }, "Timeline"), rows.length > 0 && sqlButton(damage.q, "SQL: damage"), loads.length > 0 && sqlButton(load.q, "SQL: load"), notes.length > 0 && sqlButton(marks.q, "SQL: notes")),
    el(
      "form",
      { class: "window", onsubmit: (event) => event.preventDefault() },
      el("label", { for: "from-forward" }, "Forwards"),
      from,
      el("label", { for: "to-forward" }, "to"),
      to,
      el("button", { type: "button", onclick: () => showForwards(0, lastForward) }, "All"),
      page.subjects.shown.length > 0 && el("button", { type: "button", onclick: () => showAround(subject()) }, "Around the damage"),
    ),
    legend([
      ...used.map((item) => ({ name: item.words, colour: item.colour })),
      ...(notes.length ? [{ name: "note in the trace", mark: "flag" }] : []),
      ...(gaps.length ? [{ name: "lost or damaged", mark: "gap" }] : []),
    ]),
    rows.length > 0 && above,
    loads.length > 0 && below,
    strip,
    cutNote([[marks, page.limits.rows, "notes"], [page.unknown.places, page.limits.rows, "losses and gaps"]]),
    el("p", { class: "soft hint" }, "Drag over the strip to choose forwards for every picture below; with the keyboard: arrow keys move, + and − zoom, 0 shows all."),
  );

  const ruleLayers = () => [
    ...(gaps.length
      ? [{ data: { values: gaps.map((row) => ({ x: row.forward + 1, tip: `${row.kind}\nafter forward ${counted(row.forward)}: ${row.reason}` })) }, mark: { type: "rule", color: colour("warn"), strokeWidth: 4, opacity: 0.8, clip: true }, encoding: { x: { field: "x", type: "quantitative" }, tooltip: { field: "tip" } } }]
      : []),
  ];
  const damageSpec = () => ({
    params: windowParams(),
    height: 120,
    layer: [
      {
        data: { values: stacked(rows, "class", "found", CLASSES.map((item) => item.name)).map((row) => ({ ...row, end: row.forward + width, tip: `${counted(row.found)} found\n${width === 1 ? `forward ${counted(row.forward)}` : `forwards ${counted(row.forward)} to ${counted(row.forward + width - 1)}`}: ${CLASSES.find((item) => item.name === row.class)?.words ?? row.class}` })) },
        mark: { type: "rect", clip: true, stroke: colour("card"), strokeWidth: { expr: `width / (x1 - x0) * ${width} > 6 ? 0.5 : 0` } },
        encoding: {
          x: { field: "forward", ...forwardAxis(null, { labels: false, ticks: false }) },
          x2: { field: "end" },
          y: { field: "low", type: "quantitative", axis: { title: "found", tickCount: 4, format: "~s" } },
          y2: { field: "high" },
          color: { field: "class", type: "nominal", legend: null, scale: { domain: CLASSES.map((item) => item.name), range: CLASSES.map((item) => item.colour) } },
          tooltip: { field: "tip" },
        },
      },
      ...ruleLayers(),
      ...(notes.length
        ? [{ data: { values: notes.map((row) => ({ x: row.forward, tip: `${row.note}\nbefore forward ${counted(row.forward)}\n${row.labels ?? ""}` })) }, layer: [
            { mark: { type: "rule", strokeDash: [3, 3], color: colour("ink"), clip: true }, encoding: { x: { field: "x", type: "quantitative" }, tooltip: { field: "tip" } } },
            { mark: { type: "point", shape: "triangle-down", filled: true, size: 70, color: colour("ink"), clip: true }, encoding: { x: { field: "x", type: "quantitative" }, y: { value: 4 }, tooltip: { field: "tip" } } },
          ] }]
        : []),
    ],
  });
  const loadSpec = () => ({
    params: windowParams(),
    height: 54,
    data: { values: stackedLoads.map((row) => ({ ...row, end: row.forward + width, tip: `${counted(row.tokens)} tokens, ${row.mode || "forward"}\nforward ${counted(row.forward)}, ${counted(row.requests)} ${plural(row.requests, "request")}` })) },
    mark: { type: "rect", clip: true, stroke: colour("card"), strokeWidth: { expr: `width / (x1 - x0) * ${width} > 6 ? 0.5 : 0` } },
    encoding: {
      x: { field: "forward", ...forwardAxis("forward") },
      x2: { field: "end" },
      y: { field: "low", type: "quantitative", axis: { title: "tokens", tickCount: 2, format: "~s" } },
      y2: { field: "high" },
      color: { field: "fill", type: "nominal", legend: null, scale: null },
      tooltip: { field: "tip" },
    },
  });
  const stripSpec = () => ({
    height: 34,
    layer: [
      {
        data: { values: stackedLoads.map((row) => ({ ...row, end: row.forward + width })) },
        mark: { type: "rect", color: colour("line") },
        encoding: {
          x: { field: "forward", type: "quantitative", scale: { domain: [0, lastForward + 1], nice: false }, axis: { title: null } },
          x2: { field: "end" },
          y: { field: "low", type: "quantitative", axis: { title: "all", labels: false, grid: false, titleAngle: 0, titleAlign: "right", titleBaseline: "middle" } },
          y2: { field: "high" },
        },
      },
      {
        params: [{ name: "brush", value: { x: [state.from, state.to + 1] }, select: { type: "interval", encodings: ["x"], mark: { fill: colour("accent"), fillOpacity: 0.18, stroke: colour("accent"), strokeOpacity: 0.9 } } }],
        data: { values: [...[...rows].sort((a, b) => rankOf(b) - rankOf(a)).map((row) => ({ fill: CLASS_COLOURS[row.class], x: row.forward, end: row.forward + Math.max(width, lastForward / 300) })), { x: -9, end: -9 }] },
        mark: { type: "rect", clip: true },
        encoding: { color: { field: "fill", type: "nominal", legend: null, scale: null }, x: { field: "x", type: "quantitative", scale: { domain: [0, lastForward + 1], nice: false } }, x2: { field: "end" }, y: { value: 0 }, y2: { value: 34 } },
      },
      ...ruleLayers(),
    ],
  });

  let stripView = null;
  async function all() {
    if (rows.length) draw(above, damageSpec());
    if (loads.length) draw(below, loadSpec());
    stripView = await draw(strip, stripSpec(), { moves: false });
    stripView?.addSignalListener("brush", (_, value) => {
      const chosen = value.forward ?? value.x;
      if (chosen && state.windowBy !== "strip-echo") showForwards(chosen[0], chosen[1] - 1, "strip");
    });
  }
  const update = () => {
    from.value = state.from;
    to.value = state.to;
    if (!stripView || state.windowBy === "strip") return;
    const x = stripView.scale("x");
    state.windowBy = "strip-echo";
    stripView.signal("brush_x", [x(state.from), x(state.to + 1)]).run();
    state.windowBy = "";
  };
  update();
  all();
  on("window", update);
  on("theme", all);
}
