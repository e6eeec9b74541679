// The chain around bad slots: what stands in the slots that a request read, against what was expected.

const BITS = { chain: 1, position: 2, kv: 4, token: 8 | 32, writePosition: 16 };

function drawChain() {
  const section = byId("chain");
  section.hidden = !page.subjects.shown.some((item) => item.chains.length);
  if (section.hidden) return;
  const body = el("div", { class: "chains" });
  fill(section, el("h2", { id: "chain-title" }, "The chain, stored against expected"), el("p", { class: "soft" }, "Each record holds a hash of the record before it. A request reads its positions in order; where what stands in a slot is not what its chain says, the link is broken."), body);
  const update = () => {
    const { chains } = subject();
    state.chain = Math.min(state.chain, Math.max(0, chains.length - 1));
    if (!chains.length) return fill(body, el("p", { class: "soft" }, "No canary record of this was found wrong; the history checks found it."));
    const shown = el("div", { "aria-live": "polite" });
    const { box } = listbox("Reads", chains, {
      selected: state.chain,
      horizontal: true,
      className: "chips",
      choose: (_, i) => {
        state.chain = i;
        fill(shown, chainTable(chains[i]));
      },
      render: (item) => `${short(item.request || WHO_CACHE)} · forward ${counted(item.forward)}${item.is_first ? ", first" : ", most"}`,
    });
    fill(shown, chainTable(chains[state.chain]));
    fill(body, box, shown);
  };
  state.chain = fullest();
  update();
  on("subject", () => {
    state.chain = fullest();
    update();
  });
  on("slot", () => body.querySelectorAll("tr[data-slot]").forEach((row) => row.classList.toggle("chosen", row.dataset.slot === state.slot)));
}

// The read that shows the most.
function fullest() {
  const { chains } = subject();
  return Math.max(0, chains.findIndex((item) => item.bad_positions === Math.max(...chains.map((other) => other.bad_positions))));
}

function chainTable(item) {
  const rows = rowsOf(item.rows);
  const isBad = (row) => row.fail_reason_bits > 0;
  const against = (bad, stored, expected, show = counted) =>
    bad ? el("span", { class: "differs" }, el("span", { class: "stored" }, show(stored)), el("span", { class: "not", "aria-label": "instead of" }, "≠"), el("span", { class: "expected" }, show(expected))) : el("span", { class: "same" }, stored === null ? "" : show(stored));
  const hash = (text) => (text ? el("code", { title: text }, `${text.slice(0, 4)}…${text.slice(-4)}`) : "");
  const strip = el(
    "ol",
    { class: "links", "aria-hidden": "true" },
    rows.map((row) => el("li", { class: [isBad(row) ? "wrong" : "", row.fail_reason_bits & BITS.chain ? "broken" : ""].join(" ") }, el("span", { class: "position" }, counted(row.position)), el("span", { class: "slot" }, row.slot === null ? "?" : counted(row.slot)))),
  );
  const positionBits = BITS.position | BITS.writePosition;
  const lines = rows.map((row) =>
    el(
      "tr",
      { class: isBad(row) ? "wrong" : null, "data-slot": row.slot === null ? null : slotKey(item.pool_group, row.slot) },
      el("th", { scope: "row", class: "n" }, counted(row.position)),
      el("td", { class: "n" }, row.slot === null ? "" : el("button", { type: "button", class: "link", onclick: () => choose("slot", slotKey(item.pool_group, row.slot)) }, counted(row.slot))),
      el("td", { class: "n" }, against(row.fail_reason_bits & BITS.token, row.stored_token, row.expected_token)),
      el("td", { class: "n" }, against(row.fail_reason_bits & positionBits, row.stored_position, row.position)),
      el("td", {}, row.fail_reason_bits & BITS.chain ? against(true, row.stored_chain, row.expected_chain, hash) : el("span", { class: "same" }, isBad(row) ? hash(row.stored_chain) : "holds")),
      el("td", {}, row.fail_reason_bits & BITS.kv ? el("span", {}, el("span", { class: "differs" }, `${row.changed_halves} changed`), row.changed_forward === null ? "" : el("span", { class: "soft" }, `, forward ${counted(row.changed_forward)}`)) : el("span", { class: "same" }, "as written")),
      el("td", {}, row.writer_request ? [el("span", { class: row.writer_request === item.request ? null : "foreign" }, short(row.writer_request, 14)), el("span", { class: "soft" }, `, forward ${counted(row.writer_forward)}`)] : el("span", { class: "soft" }, "nobody here")),
    ),
  );
  const heads = ["position", "slot", "token", "position stored", "hash of the one before", "KV bytes", "last written by"];
  return el(
    "figure",
    { class: "table chain" },
    el("figcaption", {}, el("span", { class: "table-title" }, `${item.request ? `Request ${short(item.request, 24)}` : "The prefix cache"} as forward ${counted(item.forward)} read it`), ` ${counted(rows.filter(isBad).length)} of ${counted(item.bad_positions)} bad ${plural(item.bad_positions, "position")} `, sqlButton(item.rows.q)),
    strip,
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Chain" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((name, i) => el("th", { scope: "col", class: i < 4 ? "n" : null }, name)))), el("tbody", {}, lines))),
  );
}
