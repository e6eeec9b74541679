// Puts a fleet's page together.

const KIND_COLOURS = ["#d92d3a", "#f07c12", "#8250df", "#d6409f", "#3f7fd6", "#2ba3a3", "#c99a2e", "#45a35a"];
const VERDICTS = { corrupt: "#d92d3a", inconclusive: "#c99a2e", clean: "#45a35a" };
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toLocaleString("en-US", { maximumSignificantDigits: 3 })}%`);
const NAMES = { title: null, labelExpr: "datum.value" }; // of an axis
const shares = Object.fromEntries(["share", "low", "high", "share_to_record", "judged", "inconclusive"].map((name) => [name, percent]));
const tableOf = (name, title, show = {}) => rowsTable(page.tables[name], { title, show });
const heading = (id, title, query) => el("div", { class: "head" }, el("h2", { id: `${id}-title` }, title), query !== undefined && sqlButton(query));

function drawSummary() {
  const { corrupt, inconclusive, recordings, nodes } = page.numbers;
  const verdict = corrupt.v > 0 ? "corrupt" : inconclusive.v > 0 || recordings.v === 0 ? "inconclusive" : "clean";
  document.title = `Fleet · ${page.report} · kvcanary`;
  const tiles = Object.entries(page.numbers).map(([name, item]) =>
    el("div", {}, el("dt", {}, name[0].toUpperCase() + name.slice(1)), el("dd", {}, number(item, { label: name }))),
  );
  fill(
    byId("verdict"),
    el(
      "div",
      { class: `verdict ${verdict}` },
      el("p", { class: "trace" }, el("span", {}, page.report)),
      el("h1", { id: "verdict-word" }, `${counted(corrupt.v)} of ${counted(recordings.v)} corrupt`),
      el("p", { class: "sentence" }, `Recordings of ${counted(nodes.v)} ${plural(nodes.v, "node")}; ${counted(inconclusive.v)} could not be judged to the end.`),
      el("dl", { class: "tiles" }, tiles),
      page.problems.length > 0 && el("div", { class: "lost" }, el("strong", {}, "Left out of the table: "), page.problems.join("; ")),
    ),
  );
}

// Bars of a day on top of one another.
function bars(rows, key, value, colours) {
  return {
    data: { values: rows.map((row) => ({ ...row, text: `${row.day}\n${row[key]}: ${counted(row[value])}` })) },
    height: 160,
    mark: { type: "bar", cursor: "default" },
    encoding: {
      x: { field: "day", type: "ordinal", scale: { domain: page.tables.days.data[0] }, axis: { ...NAMES, labelAngle: -40, labelOverlap: true } },
      y: { field: value, type: "quantitative", axis: { title: value } },
      color: { field: key, scale: { domain: Object.keys(colours), range: Object.values(colours) }, legend: null },
      tooltip: { field: "text" },
    },
  };
}

function drawTrends() {
  const { by_day: byDay, days } = page.tables;
  const rows = rowsOf(byDay);
  const kinds = [...new Set(rows.map((row) => row.kind))].sort();
  const colours = Object.fromEntries(kinds.map((kind, i) => [kind, KIND_COLOURS[i % KIND_COLOURS.length]]));
  const judged = rowsOf(days).flatMap((row) => Object.keys(VERDICTS).map((verdict) => ({ day: row.day, verdict, recordings: row[verdict] })));
  const above = plotBox("Incidents of each day by kind; the rows are in the SQL beside it");
  const below = plotBox("Recordings of each day by verdict");
  fill(
    byId("trends"),
    heading("trends", "Incidents per day", byDay.q),
    kinds.length ? [legend(kinds.map((kind) => ({ name: kind, colour: colours[kind] }))), above] : el("p", { class: "soft" }, "none"),
    el("h3", {}, "Recordings per day ", sqlButton(days.q)),
    legend(Object.entries(VERDICTS).map(([name, fillColour]) => ({ name, colour: fillColour }))),
    below,
  );
  if (kinds.length) draw(above, bars(rows, "kind", "incidents", colours));
  draw(below, bars(judged, "verdict", "recordings", VERDICTS));
}

function drawNodes() {
  const { nodes } = page.tables;
  const rows = rowsOf(nodes).map((row) => ({
    ...row,
    build: `${row.engine} ${row.version}`,
    text: `${row.node} · ${row.engine} ${row.version}\n${counted(row.corrupt)} of ${counted(row.reports)} recordings corrupt: ${percent(row.share)} (${percent(row.low)} to ${percent(row.high)})`,
  }));
  const map = plotBox("Share of corrupt recordings by node and version; the rows are in the SQL beside it");
  fill(
    byId("nodes"),
    heading("nodes", "Nodes and versions", nodes.q),
    el("p", { class: "soft" }, "Each field is a node and a version; the darker, the larger the share of its recordings that is corrupt. A bad GPU is one dark row, a bad build one dark column."),
    map,
    cutNote([[nodes, page.limits.cells, "fields"]]),
    tableOf("ranks", "Kinds by node and rank", shares),
  );
  draw(map, {
    data: { values: rows },
    height: 18 * new Set(rows.map((row) => row.node)).size,
    mark: { type: "rect", stroke: colour("line"), strokeWidth: 1 },
    encoding: {
      x: { field: "build", type: "ordinal", axis: { ...NAMES, orient: "top", labelAngle: 0, labelLimit: 180 } },
      y: { field: "node", type: "ordinal", sort: { field: "share", op: "max", order: "descending" }, axis: { ...NAMES, minExtent: 0, maxExtent: 220, labelLimit: 210 } },
      color: { field: "share", type: "quantitative", scale: { domain: [0, 1], range: [colour("hover"), "#d92d3a"], interpolate: "rgb" }, legend: null },
      tooltip: { field: "text" },
    },
  });
}

function drawTables() {
  fill(
    byId("coverage"),
    heading("coverage", "Coverage"),
    el("p", { class: "soft" }, "Of a fleet that samples: the share of its time that was to be recorded. Judged and inconclusive are shares of the tokens that were."),
    tableOf("recorded", "What was recorded", shares),
    tableOf("recordings_hit", "Recordings hit, with the 95% interval", shares),
    tableOf("requests_hit", "Requests hit, with the 95% interval if no two have to do with one another", shares),
  );
  fill(byId("kinds"), heading("kinds", "Kinds"), tableOf("new_kinds", "New since yesterday"), tableOf("kinds", "All, by version"));
  const rows = { ...page.recordings, columns: [...page.recordings.columns, "page"], data: [...page.recordings.data, page.links] };
  const link = (href, row) =>
    href ? el("a", { href }, "open") : row.report && copyButton("Copy", `kvcanary page ${shellQuoted(row.report)}`);
  const total = { v: page.numbers.corrupt.v + page.numbers.inconclusive.v, q: page.recordings.q };
  fill(byId("recordings"), heading("recordings", "Recordings"), rowsTable(rows, { title: "Not clean, the latest first", total, hide: ["report"], show: { page: link } }));
}

function drawFrame() {
  const names = { verdict: "Summary", trends: "Trends", nodes: "Nodes", coverage: "Coverage", kinds: "Kinds", recordings: "Recordings" };
  fill(byId("nav"), Object.entries(names).map(([id, name]) => el("li", {}, el("a", { href: `#${id}` }, name))));
  const more = el("code", {}, `kvcanary sql ${shellQuoted(page.report)}`);
  fill(byId("about"), el("p", {}, `Made by kvcanary ${page.version}. Everything is in the table: `, more, ". The page loads nothing and sends nothing."));
}

const drawPictures = () => [drawTrends(), drawNodes()];
drawSummary();
drawPictures();
drawTables();
drawFrame();
on("theme", drawPictures);
setTheme("auto");
document.documentElement.dataset.ready = "true";
