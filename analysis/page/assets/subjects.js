// Incidents, or kinds of damage where the report has no incidents: a list, and the chosen one beside it.

function drawSubjects() {
  const { shown, total, are_incidents: areIncidents } = page.subjects;
  const section = byId("subjects");
  section.hidden = shown.length === 0;
  if (section.hidden) return;
  const detail = el("div", { class: "detail", "aria-live": "polite" });
  const { box } = listbox(areIncidents ? "Incidents" : "Kinds of damage", shown, {
    selected: state.subject,
    choose: (_, i) => {
      choose("subject", i);
      showAround(subject());
    },
    render: (item) => [
      el("span", { class: "item-title" }, item.number ? el("b", {}, `#${item.number} `) : null, subjectTitle(item)),
      el(
        "span",
        { class: "item-facts" },
        item.confidence ? el("span", { class: `badge ${item.confidence}` }, `${item.confidence} confidence`) : null,
        `forwards ${counted(item.first)}–${counted(item.last)}`,
      ),
    ],
  });
  const hidden = total.v - (shown.length - (areIncidents || shown.length < 2 ? 0 : 1));
  fill(
    section,
    el("h2", { id: "subjects-title" }, areIncidents ? "Incidents" : "What was found"),
    el("div", { class: "split" }, el("div", {}, box, hidden > 0 && el("p", { class: "soft" }, `showing ${counted(shown.length)} of `, number(total, { label: "in all" }))), detail),
  );
  const update = () => fill(detail, subjectDetail(subject()));
  update();
  on("subject", update);
}

function subjectTitle(item) {
  const title = item.kind_title && item.kind !== "unknown" ? item.kind_title : item.sentence;
  return title.charAt(0).toUpperCase() + title.slice(1);
}

const TOLD_WORDS = { first_request: "Seen first by", in_slot: "In slot", expected: "Expected" };

function subjectDetail(item) {
  const { numbers } = item;
  const fact = (label, content) => el("div", {}, el("dt", {}, label), el("dd", {}, content));
  const reached = rowsOf(item.reached);
  return [
    el("h3", {}, subjectTitle(item)),
    item.kind && el("p", { class: "kind" }, el("code", {}, item.kind), item.confidence && el("span", { class: `badge ${item.confidence}` }, `${item.confidence} confidence`)),
    item.sentence !== subjectTitle(item) && el("p", {}, `${item.sentence}.`),
    item.detail && el("p", { class: "soft" }, item.detail),
    item.first_sign && Object.keys(item.first_sign).length > 0 && el("dl", { class: "told" }, Object.entries(item.first_sign).map(([name, text]) => [el("dt", {}, TOLD_WORDS[name] ?? name), el("dd", {}, text)])),
    el(
      "dl",
      { class: "facts" },
      fact("Forwards", [number(numbers.first_forward, { label: "first forward" }), " to ", number(numbers.last_forward, { label: "last forward" })]),
      fact("Violations", number(numbers.violations, { label: "violations" })),
      fact("Findings", number(numbers.findings, { label: "findings" })),
      fact("Slots", number(numbers.slots, { label: "slots" })),
      fact("Requests", [
        number(numbers.requests, { label: "requests" }),
        el(
          "span",
          { class: "chips" },
          reached.slice(0, 8).map((row) =>
            el("button", { type: "button", class: "chip", title: requestName(row), onclick: () => goToRequest(row.request_id) }, short(requestName(row))),
          ),
          reached.length > 8 ? ` and ${counted(reached.length - 8)} more` : null,
        ),
      ]),
    ),
    item.seen_by?.length > 0 && el("p", { class: "soft" }, `Seen by: ${item.seen_by.map(reasonWords).join("; ")}.`),
    item.alternatives?.length > 0 && el("p", { class: "soft" }, "It could also be: ", item.alternatives.map((kind, i) => [i ? ", " : "", el("code", {}, kind)]), "."),
    item.alike?.length > 0 && el("p", { class: "soft" }, "Public bugs that look like it: ", item.alike.join(", "), "."),
    el(
      "p",
      { class: "actions" },
      el("button", { type: "button", onclick: () => showAround(item) }, "Show its forwards"),
      item.evidence?.length > 0 && el("button", { type: "button", "aria-haspopup": "dialog", onclick: () => openSql(item.evidence, "evidence") }, "Evidence"),
    ),
  ];
}

function goToRequest(id) {
  const known = rowsOf(page.requests.list).some((row) => String(row.request_id) === String(id));
  if (!known) {
    say("This request is not among those that the page holds.");
    return;
  }
  choose("request", String(id));
  byId("requests").scrollIntoView({ behavior: "smooth" });
}
