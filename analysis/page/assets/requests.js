// A request's life: forwards across, positions up; chunks, decodes, what came from the cache, and where it read damage.

const PART_COLOURS = { extend: "#3f7fd6", mixed: "#2ba3a3", decode: "#45a35a" };

function drawRequests() {
  const section = byId("requests");
  const { list, total } = page.requests;
  const rows = rowsOf(list);
  section.hidden = rows.length === 0;
  if (section.hidden) return;
  state.request = String(rows[0].request_id);
  const picture = plotBox("A request's life: positions computed in each forward, and where damage was read");
  const told = el("div", { "aria-live": "polite" });
  const { box, pick } = listbox("Requests", rows, {
    selected: 0,
    choose: (row) => choose("request", String(row.request_id)),
    render: (row) => [
      el("span", { class: "item-title" }, row.found > 0 && el("span", { class: "dot", title: "hit" }), short(row.name || `#${row.request_id}`, 26)),
      el(
        "span",
        { class: "item-facts" },
        row.found > 0 ? `${counted(row.found)} found` : row.wrote_damaged > 0 ? "wrote slots found damaged" : `${counted(row.num_tokens)} tokens`,
      ),
    ],
  });
  fill(
    section,
    el("div", { class: "head" }, el("h2", { id: "requests-title" }, "A request's life"), sqlButton(list.q, "SQL: list"), page.requests.parts && sqlButton(page.requests.parts.q, "SQL: forwards"), page.requests.damage && sqlButton(page.requests.damage.q, "SQL: damage")),
    el("div", { class: "split" }, el("div", {}, box, rows.length < total.v && el("p", { class: "soft" }, `showing ${counted(rows.length)} of `, number(total, { label: "requests" }))), el("div", { class: "detail" }, told, picture, el("div", { class: "request-legend" }))),
  );
  const update = async () => {
    const i = rows.findIndex((row) => String(row.request_id) === state.request);
    if (box.querySelectorAll("[role=option]")[i]?.getAttribute("aria-selected") !== "true") pick(i, false);
    fill(told, requestHead(rows[i]));
    const { spec, marks } = lifeSpec(rows[i]);
    const { request_parts: parts, request_damage: damage } = page.limits;
    fill(
      section.querySelector(".request-legend"),
      legend(marks),
      cutNote([[page.requests.parts, parts, "parts of all requests"], [page.requests.damage, damage, "stretches of damage"]]),
      requestEvents(rows[i]),
    );
    await draw(picture, spec);
  };
  update();
  on("request", update);
  on("theme", update);
}

const ofRequest = (table, id) => rowsOf(table).filter((row) => String(row.request_id) === String(id));

function requestHead(row) {
  const facts = [
    ["prompt", row.prompt_len >= 0 ? row.prompt_len : null],
    ["from the cache", row.prefix_hit],
    ["tokens computed", row.num_tokens],
    ["forwards", row.num_forwards],
  ].filter(([, value]) => value !== null && value !== undefined);
  return [
    el("h3", { class: "name" }, row.name || `#${row.request_id}`),
    el(
      "p",
      { class: "soft" },
      facts.map(([name, value], i) => [i ? " · " : "", el("b", {}, counted(value)), ` ${name}`]),
      row.first_forward === null ? "" : ` · forwards ${counted(row.first_forward)}–${counted(row.last_forward)}`,
      row.status ? ` · ${row.status}` : "",
      " ",
      el("button", { type: "button", class: "sql", "aria-haspopup": "dialog", onclick: () => openSql([`from request_timeline('${String(row.request_id)}')`], "its timeline") }, "SQL"),
      " ",
      row.first_forward === null ? null : el("button", { type: "button", class: "sql", onclick: () => showForwards(row.first_forward - 2, row.last_forward + 2) }, "Show its forwards"),
    ),
  ];
}

function lifeSpec(row) {
  const parts = ofRequest(page.requests.parts, row.request_id).map((part) => ({
    from: part.from_forward,
    to: part.to_forward + 1,
    first: part.first_position,
    end: Math.max(part.end_position, part.first_position + 0.5),
    part: part.part,
    tip: `${part.part === "decode" ? "decode" : `chunk, ${part.part}`}: positions ${counted(part.first_position)} to ${counted(part.end_position - 1)}\nforward ${counted(part.from_forward)}${part.to_forward > part.from_forward ? ` to ${counted(part.to_forward)}` : ""}, row ${counted(part.row)}`,
  }));
  const damage = ofRequest(page.requests.damage, row.request_id).map((bad) => ({
    from: bad.from_forward,
    to: bad.to_forward + 1,
    position: bad.position,
    class: bad.class,
    tip: `position ${counted(bad.position)}, slot ${counted(bad.slot)}: ${CLASSES.find((item) => item.name === bad.class)?.words}\nforward ${counted(bad.from_forward)}${bad.to_forward > bad.from_forward ? ` to ${counted(bad.to_forward)}` : ""}, ${counted(bad.found)} found`,
  }));
  const decodes = parts.filter((part) => part.part === "decode");
  const chunks = parts.filter((part) => part.part !== "decode");
  const cached = row.prefix_hit > 0 && row.first_forward !== null ? [{ from: row.first_forward, to: row.last_forward + 1, first: 0, end: row.prefix_hit, tip: `positions 0 to ${counted(row.prefix_hit - 1)} came from the prefix cache` }] : [];
  const top = Math.max(1, ...parts.map((part) => part.end), ...damage.map((bad) => bad.position + 1));
  const used = new Set(damage.map((bad) => bad.class));
  const x = forwardAxis("forward");
  const y = { type: "quantitative", scale: { domain: [0, top], nice: false }, axis: { title: "position", tickCount: 5, format: ",d" } };
  const box = (values, mark) => ({ data: { values }, mark: { type: "rect", clip: true, ...mark }, encoding: { x: { field: "from", ...x }, x2: { field: "to" }, y: { field: "first", ...y }, y2: { field: "end" }, tooltip: { field: "tip" } } });
  return {
    spec: {
      params: windowParams(),
      height: 240,
      layer: [
        cached.length > 0 && box(cached, { fill: colour("cache"), opacity: 0.35 }),
        chunks.length > 0 && box(chunks, { fill: PART_COLOURS.extend, stroke: colour("card"), strokeWidth: 0.6 }),
        decodes.length > 0 && { data: { values: decodes }, mark: { type: "rule", clip: true, strokeWidth: 4, strokeCap: "round", color: PART_COLOURS.decode }, encoding: { x: { field: "from", ...x }, x2: { field: "to" }, y: { field: "first", ...y }, y2: { field: "end" }, tooltip: { field: "tip" } } },
        damage.length > 0 && { data: { values: damage }, mark: { type: "rule", clip: true, strokeWidth: top <= 40 ? 5 : 3, opacity: 0.9 }, encoding: { x: { field: "from", ...x }, x2: { field: "to" }, y: { field: "position", ...y }, color: { field: "class", type: "nominal", legend: null, scale: { domain: CLASSES.map((item) => item.name), range: CLASSES.map((item) => item.colour) } }, tooltip: { field: "tip" } } },
        { data: { values: [{}] }, mark: { type: "rule", opacity: 0, clip: true }, encoding: { x: { datum: { expr: "x0" }, ...x }, y: { datum: 0, ...y } } },
      ].filter(Boolean),
    },
    marks: [
      ...(chunks.length ? [{ name: "prompt, chunk by chunk", colour: PART_COLOURS.extend }] : []),
      ...(decodes.length ? [{ name: "decode", colour: PART_COLOURS.decode }] : []),
      ...(cached.length ? [{ name: "from the prefix cache", mark: "cache" }] : []),
      ...CLASSES.filter((item) => used.has(item.name)).map((item) => ({ name: `read wrong: ${item.words}`, colour: item.colour })),
    ],
  };
}

function requestEvents(row) {
  const events = page.requests.events ? ofRequest(page.requests.events, row.request_id) : [];
  if (!events.length) return null;
  return el(
    "details",
    {},
    el("summary", {}, `${counted(events.length)} ${plural(events.length, "event")} between forwards`),
    el("ol", { class: "story" }, events.map((event) => el("li", {}, el("span", { class: "when" }, event.forward === null ? `event ${counted(event.event)}` : `forward ${counted(event.forward)}`), el("span", {}, event.what, event.detail ? el("span", { class: "soft" }, ` ${event.detail}`) : null)))),
    sqlButton(page.requests.events.q),
  );
}
