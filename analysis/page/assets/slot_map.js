// The slot map: slots down, forwards across. A bar says who holds a slot, a stripe inside it who was found to read it.

const END_WORDS = { free: "given back", evict: "evicted", cached: "handed to the prefix cache", write: "overwritten by another", alloc: "given out again" };

// Requests of the neighbourhood and their colours: readers of damage first, so that they differ most.
function requestColours(map) {
  const names = [];
  const add = (row) => row.holder !== "cache" && names.push(String(row.request_id));
  rowsOf(map.damage).forEach(add);
  rowsOf(map.lives).sort((a, b) => a.from_forward - b.from_forward).forEach(add);
  const distinct = [...new Set(names)].filter((id) => id !== "null" && id !== "-1");
  return new Map(distinct.map((id, i) => [id, i < REQUEST_COLOURS.length ? REQUEST_COLOURS[i] : OTHER_COLOUR]));
}

function mapRows(map) {
  const keys = [];
  map.rows.forEach(([group, slot], i) => {
    const before = map.rows[i - 1];
    const isNewGroup = page.groups.length > 1 && (!before || before[0] !== group);
    if (isNewGroup) keys.push(`gap ${i}:${page.groups[group]?.name ?? `group ${group}`}`);
    else if (before && before[1] !== slot - 1) keys.push(`gap ${i}:⋯`);
    keys.push(slotKey(group, slot));
  });
  return keys;
}

const heldBy = (row) => (row.holder === "cache" ? WHO_CACHE : requestName(row));

function drawSlots() {
  const section = byId("slots");
  const hasMap = page.subjects.shown.some((item) => item.map.rows.length);
  section.hidden = !hasMap;
  if (!hasMap) return;
  const picture = plotBox("Slot map: who held each slot, or wrote it last, and what was found in it");
  const list = el("div", { class: "slot-list" });
  const key = el("div", {});
  const detail = el("div", { class: "slot-detail", "aria-live": "polite" });
  const head = el("div", { class: "head" });
  fill(section, head, el("p", { class: "soft" }, "A row is a slot, a bar the request that holds it, or wrote it last where the trace does not tell who holds it. A stripe inside a bar is a read that went wrong, in the reader's colour: where stripe and bar differ, somebody reads what belongs to another."), key, picture, list, detail);

  let chooseInList = () => {};
  async function update() {
    const { map } = subject();
    const damaged = rowsOf(map.slots);
    const keys = damaged.map((row) => slotKey(row.pool_group, row.slot));
    state.slot = keys.includes(state.wanted) ? state.wanted : (keys[0] ?? null);
    fill(
      head,
      el("h2", { id: "slots-title" }, "Slot map"),
      map.rows.length > 0 && [sqlButton(map.lives.q, "SQL: holders"), sqlButton(map.damage.q, "SQL: damage"), sqlButton(map.writes.q, "SQL: writes"), map.changes.data[0].length > 0 && sqlButton(map.changes.q, "SQL: changes")],
    );
    picture.hidden = list.hidden = detail.hidden = !map.rows.length;
    if (!map.rows.length) {
      fill(key, el("p", { class: "soft" }, "Nothing of this names a slot."));
      return;
    }
    const inMap = new Set(map.rows.map(([group, slot]) => slotKey(group, slot)));
    const shown = damaged.filter((row) => inMap.has(slotKey(row.pool_group, row.slot)));
    const { box, pick } = listbox("Damaged slots", shown, {
      selected: Math.max(0, shown.findIndex((row) => slotKey(row.pool_group, row.slot) === state.slot)),
      horizontal: true,
      className: "chips",
      choose: (row) => choose("slot", slotKey(row.pool_group, row.slot)),
      render: (row) => `${slotName(slotKey(row.pool_group, row.slot))}`,
    });
    chooseInList = (slot) => {
      const i = shown.findIndex((row) => slotKey(row.pool_group, row.slot) === slot);
      if (i >= 0) pick(i, false);
      else choose("slot", slot);
    };
    fill(list, el("span", { class: "soft" }, shown.length < map.total.v ? [`showing ${counted(shown.length)} of `, number(map.total, { label: "damaged slots" }), " damaged slots:"] : "Damaged slots:"), box);
    await redraw();
    showDetail();
  }

  async function redraw() {
    const { map } = subject();
    if (!map.rows.length) return;
    const colours = requestColours(map);
    const { lives, damage, writes, changes } = page.limits;
    fill(
      key,
      mapLegend(map, colours),
      cutNote([[map.lives, lives, "holders (nearest to the first damage)"], [map.damage, damage, "stretches of damage"], [map.writes, writes, "writes (nearest to it)"], [map.changes, changes, "changes (nearest to it)"]]),
    );
    const view = await draw(picture, mapSpec(map, colours), { onClick: (datum) => datum?.row && !datum.row.startsWith("gap") && chooseInList(datum.row) });
    view?.signal("chosen", state.slot ?? "").run();
  }

  function showDetail() {
    const { map } = subject();
    if (!state.slot || !map.rows.length) return fill(detail);
    views.get(picture)?.view.signal("chosen", state.slot).run();
    fill(detail, slotDetail(map, state.slot));
  }

  update();
  on("subject", update);
  on("slot", showDetail);
  on("theme", redraw);
}

// Where no slot history is told, a write says who wrote, and not who held the slot from then on.
function holdWords(row) {
  return row.began === "write" ? "last written by" : "held by";
}

function mapLegend(map, colours) {
  const names = new Map();
  for (const row of [...rowsOf(map.damage), ...rowsOf(map.lives)]) names.set(String(row.request_id), requestName(row));
  const held = new Set(rowsOf(map.lives).map((row) => row.holder));
  const classes = new Set(rowsOf(map.damage).map((row) => row.class));
  const listed = [...colours].slice(0, 8);
  return legend([
    ...listed.map(([id, fillColour]) => ({ name: short(names.get(id) ?? `#${id}`), colour: fillColour })),
    ...(colours.size > listed.length ? [{ name: `${colours.size - listed.length} more`, colour: OTHER_COLOUR }] : []),
    ...(held.has("cache") ? [{ name: WHO_CACHE, mark: "cache" }] : []),
    ...CLASSES.filter((item) => classes.has(item.name)).map((item) => ({ name: `read wrong: ${item.words}`, colour: item.colour, mark: "ring" })),
    ...(map.changes.data[0].length ? [{ name: "bytes changed, nobody wrote", mark: "diamond" }] : []),
    { name: "written", mark: "dot" },
    { name: "given back", mark: "tick" },
  ]);
}

function mapSpec(map, colours) {
  const keys = mapRows(map);
  const end = lastForward + 1;
  const step = keys.length <= 14 ? 24 : keys.length <= 28 ? 18 : 14;
  const colourOf = (row) => (row.holder === "cache" ? colour("cache") : colours.get(String(row.request_id)) ?? OTHER_COLOUR);
  const until = (row) => (row.to_forward === null ? "the end" : `forward ${counted(row.to_forward)}`);
  // What requests share with the prefix cache lies over it.
  const lives = rowsOf(map.lives).sort((a, b) => (b.holder === "cache") - (a.holder === "cache") || a.from_forward - b.from_forward).map((row) => ({
    row: slotKey(row.pool_group, row.slot),
    from: row.from_forward,
    to: row.to_forward === null ? end : row.to_forward + 1,
    isCache: row.holder === "cache",
    isFreed: ["free", "evict"].includes(row.ended),
    fill: colourOf(row),
    name: short(heldBy(row), 14),
    tip: `slot ${counted(row.slot)}: ${holdWords(row)} ${heldBy(row)}\nforward ${counted(row.from_forward)} to ${until(row)}${row.ended ? `, then ${END_WORDS[row.ended] ?? row.ended}` : ""}`,
  }));
  // Stripes lie on one another: history checks at the bottom, they say the least about the bytes.
  const order = ["history", "record", "input", "KV bytes"];
  const damage = rowsOf(map.damage).sort((a, b) => order.indexOf(a.class) - order.indexOf(b.class)).map((row) => ({
    row: slotKey(row.pool_group, row.slot),
    from: row.from_forward,
    to: row.to_forward + 1,
    fill: colours.get(String(row.request_id)) ?? OTHER_COLOUR,
    ring: CLASS_COLOURS[row.class],
    tip: `${row.request_id === null ? "the prefix cache's walk" : requestName(row)} found slot ${counted(row.slot)} wrong, ${counted(row.found)} ${plural(row.found, "time")}\nforward ${counted(row.from_forward)}${row.to_forward > row.from_forward ? ` to ${counted(row.to_forward)}` : ""}\n${row.what}`,
  }));
  lives.forEach((life, i) => {
    // one name a place: that of who came first, a request's before the cache's
    life.isNamed = !lives.some((other, j) => other.row === life.row && other.from < life.to && other.to > life.from && (life.isCache !== other.isCache ? life.isCache : j < i));
    const over = damage.filter((bad) => bad.row === life.row && bad.from < life.to && bad.to > life.from);
    life.badFrom = Math.min(end, ...over.map((bad) => bad.from));
    life.badTo = Math.max(0, ...over.map((bad) => bad.to));
  });
  const writes = rowsOf(map.writes).map((row) => ({
    row: slotKey(row.pool_group, row.slot),
    from: row.forward + 0.5,
    tip: `slot ${counted(row.slot)}: written for ${requestName(row)}\nforward ${counted(row.forward)}, position ${counted(row.position)}, token ${counted(row.token)}`,
  }));
  const changes = rowsOf(map.changes).map((row) => ({
    row: slotKey(row.pool_group, row.slot),
    from: row.forward + (row.phase === "before" ? 0 : 1),
    tip: `slot ${counted(row.slot)}: bytes changed, nobody wrote them\n${row.phase} forward ${counted(row.forward)}, ${row.half}, layer ${row.layer}`,
  }));
  const y = (more = {}) => ({
    field: "row",
    type: "nominal",
    sort: null,
    scale: { domain: keys, paddingInner: 0.14, paddingOuter: 0.1 },
    axis: { title: null, grid: false, labelExpr: "split(datum.label, ':')[1]", labelFontSize: 11, labelLimit: 60 },
    ...more,
  });
  const x = forwardAxis("forward");
  return {
    params: [...windowParams(), { name: "chosen", value: "" }],
    height: step * keys.length,
    layer: [
      { data: { values: keys.map((row) => ({ row })) }, mark: { type: "rect", fill: colour("accent"), fillOpacity: { expr: "datum.row === chosen ? 0.14 : 0" }, cursor: "pointer" }, encoding: { y: y(), x: { value: 0 }, x2: { value: "width" } } },
      lives.length > 0 && { data: { values: lives }, mark: { type: "bar", clip: true, cornerRadius: 2, fillOpacity: 0.42, cursor: "pointer", height: { band: 1 }, strokeWidth: 1, strokeOpacity: 0.85 }, encoding: { y: y(), x: { field: "from", ...x }, x2: { field: "to" }, fill: { field: "fill", type: "nominal", scale: null }, stroke: { field: "fill", type: "nominal", scale: null }, tooltip: { field: "tip" } } },
      lives.some((row) => row.isFreed) && { data: { values: lives.filter((row) => row.isFreed) }, mark: { type: "tick", clip: true, orient: "vertical", thickness: 3, size: step * 0.86, color: colour("ink") }, encoding: { y: y(), x: { field: "to", ...x }, tooltip: { field: "tip" } } },
      damage.length > 0 && { data: { values: damage }, mark: { type: "bar", clip: true, height: { band: 0.5 }, strokeWidth: 2, cursor: "pointer" }, encoding: { y: y(), x: { field: "from", ...x }, x2: { field: "to" }, fill: { field: "fill", type: "nominal", scale: null }, stroke: { field: "ring", type: "nominal", scale: null }, tooltip: { field: "tip" } } },
      ...(step >= 18 ? nameLayers(lives, y, x, step) : []),
      writes.length > 0 && { data: { values: writes }, mark: { type: "circle", clip: true, size: 16, opacity: 1, fill: colour("ink"), stroke: colour("card"), strokeWidth: 0.7 }, encoding: { y: y(), x: { field: "from", ...x }, tooltip: { field: "tip" } } },
      ...(changes.length
        ? [{ data: { values: changes }, mark: { type: "point", shape: "diamond", filled: true, clip: true, size: 110, opacity: 1, fill: CLASS_COLOURS["KV bytes"], stroke: colour("card"), strokeWidth: 1.2 }, encoding: { y: y(), x: { field: "from", ...x }, tooltip: { field: "tip" } } }]
        : []),
    ].filter(Boolean),
  };
}

// Holders' names in their bars, at the left end where no stripe lies there, else at the right end.
function nameLayers(lives, y, x, step) {
  const share = (from, to) => `(${to} - ${from}) / (x1 - x0) * width`;
  const left = "max(datum.from, x0)";
  const right = "min(datum.to, x1)";
  const room = (from, to) => `${share(from, to)} > 64`;
  const fitsLeft = `(datum.badTo <= ${left} || ${room(left, "datum.badFrom")}) && ${room(left, right)}`;
  const fitsRight = `${room("max(datum.badTo, max(datum.from, x0))", right)}`;
  const text = (align, dx) => ({ type: "text", clip: true, align, dx, dy: 0.5, fontSize: step >= 24 ? 11 : 10, color: colour("ink"), opacity: 0.8, limit: 90 });
  const layer = (filter, at, align, dx) => ({
    data: { values: lives.filter((life) => life.isNamed) },
    transform: [{ filter }, { calculate: at, as: "at" }],
    mark: text(align, dx),
    encoding: { y: y(), x: { field: "at", ...x }, text: { field: "name" } },
  });
  return [layer(fitsLeft, left, "left", 5), layer(`!(${fitsLeft}) && ${fitsRight}`, right, "right", -5)];
}

// All that the map holds of one slot, in order.
function slotDetail(map, key) {
  const [group, slot] = key.split(":").map(Number);
  const mine = (table) => rowsOf(table).filter((row) => row.pool_group === group && row.slot === slot);
  const told = [
    ...mine(map.lives).map((row) => ({ at: row.from_forward, until: row.to_forward, kind: "held", words: [`${holdWords(row)} `, who(row), row.ended ? `, then ${END_WORDS[row.ended] ?? row.ended}` : row.began === "write" ? "" : ", to the end"] })),
    ...mine(map.writes).map((row) => ({ at: row.forward + 0.1, forward: row.forward, kind: "written", words: ["written for ", who(row), `: position ${counted(row.position)}, token ${counted(row.token)}`] })),
    ...mine(map.changes).map((row) => ({ at: row.forward - 0.1, forward: row.forward, kind: "wrong", words: [`bytes of ${row.half} changed, nobody wrote them (${row.phase} the forward)`] })),
    ...mine(map.damage).map((row) => ({ at: row.from_forward + 0.2, forward: row.from_forward, until: row.to_forward, kind: "wrong", words: [row.request_id === null ? "found wrong by the walk of the prefix cache" : ["found wrong by ", who(row)], `: ${reasonWords(row.what)}, ${counted(row.found)} ${plural(row.found, "time")}`].flat() })),
  ].sort((a, b) => a.at - b.at);
  const pageSize = page.groups[group]?.page_size;
  return [
    el(
      "div",
      { class: "head" },
      el("h3", {}, `Slot ${counted(slot)}`),
      el("span", { class: "soft" }, [page.groups.length > 1 && `group ${page.groups[group]?.name}`, pageSize > 1 && `page ${counted(Math.floor(slot / pageSize))}, place ${slot % pageSize} of ${pageSize}`].filter(Boolean).join(" · ")),
      el("button", { type: "button", class: "sql", "aria-haspopup": "dialog", onclick: () => openSql([`from slot_history(${slot}, in_group := ${group})`, `from neighbours(${slot}, in_group := ${group})`], `slot ${slot}`) }, "SQL: its history"),
    ),
    told.length
      ? el("ol", { class: "story" }, told.slice(0, 40).map((row) => el("li", { class: row.kind }, el("span", { class: "when" }, spanWords(row)), el("span", {}, row.words))))
      : el("p", { class: "soft" }, "Nothing happened to it in this trace."),
  ];

  function who(row) {
    if (row.holder === "cache") return `the ${WHO_CACHE}`;
    return el("button", { type: "button", class: "link", onclick: () => goToRequest(row.request_id) }, short(requestName(row), 24));
  }
}

function spanWords({ at, forward, until }) {
  const first = forward ?? at;
  if (until === undefined || until === first) return `forward ${counted(first)}`;
  return until === null ? `forward ${counted(first)} on` : `${counted(first)} – ${counted(until)}`;
}

const REASON_WORDS = {
  VERIFY_CHAIN_HASH: "broken chain",
  VERIFY_POSITION: "wrong position",
  VERIFY_KV_HASH: "changed KV bytes",
  VERIFY_TOKEN: "wrong token",
  WRITE_TOKEN: "wrong input token",
  WRITE_POSITION: "wrong input position",
};

function reasonWords(what) {
  const words = [...new Set(what.split(/\+|, /))].map((reason) => REASON_WORDS[reason] ?? reason.replaceAll("_", " "));
  return words.join(", ");
}
