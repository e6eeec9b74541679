// The verdict, its numbers, and what the trace does not know.

function drawHead() {
  const { head, numbers, unknown } = page;
  const verdict = head.verdict;
  document.title = `${verdict.toUpperCase()} · ${head.trace} · kvcanary`;
  const hit = numbers["requests hit"];
  const sentence = {
    corrupt: [
      ...(page.subjects.are_incidents
        ? [number(page.subjects.total, { label: "incidents" }), ` ${plural(page.subjects.total.v, "incident")}, `]
        : []),
      number(numbers.violations, { label: "violations" }),
      ` ${plural(numbers.violations.v, "violation")}`,
      ...(numbers.findings.v ? [" and ", number(numbers.findings, { label: "findings" }), ` ${plural(numbers.findings.v, "finding")}`] : []),
      "; ",
      number(hit, { label: "requests hit" }),
      ...(numbers.requests ? [" of ", number(numbers.requests, { label: "requests" })] : []),
      ` ${plural(numbers.requests?.v ?? hit.v, "request")} hit`,
      ...(numbers["first bad forward"].v === null ? [] : [", first in forward ", number(numbers["first bad forward"], { label: "first bad forward" })]),
      ".",
    ],
    clean: ["Nothing was found in what was watched, and nothing was lost."],
    inconclusive: [head.cut_at_forward !== null ? `Nothing was found in what was watched up to forward ${counted(head.cut_at_forward)}; ${head.being_recorded ? "it was being recorded" : "the recording was cut there"}.` : head.doubts.length ? `Nothing was found, but: ${head.doubts.join("; ")}.` : "Nothing was found, and not everything could be judged."],
  }[verdict] ?? ["The report does not say."];
  fill(
    byId("verdict"),
    el(
      "div",
      { class: `verdict ${verdict}` },
      el("p", { class: "trace" }, [head.trace, head.engine, head.model, ...head.ranks].filter(Boolean).map((text) => el("span", {}, text))),
      el("h1", { id: "verdict-word" }, verdict.toUpperCase()),
      el("p", { class: "sentence" }, sentence),
      verdict !== "inconclusive" && head.doubts.length > 0 && el("p", { class: "doubts" }, `Doubts: ${head.doubts.join("; ")}.`),
      head.not_watched.length > 0 && el("p", { class: "soft" }, `Not watched: ${head.not_watched.join("; ")}.`),
      el("dl", { class: "tiles" }, tiles(numbers)),
      lostNote(unknown),
    ),
  );
}

function tiles(numbers) {
  const shown = [
    ["Forwards", "forwards", "forwards hit", "hit"],
    ["Requests", "requests", "requests hit", "hit"],
    ["Tokens written", "tokens"],
    ["Slots hit", "slots hit"],
    ["Recorded", "seconds", null, null, " s"],
  ];
  return shown
    .filter(([, name]) => numbers[name] && numbers[name].v !== null)
    .map(([label, name, hit, word, unit]) =>
      el(
        "div",
        {},
        el("dt", {}, label),
        el(
          "dd",
          {},
          number(numbers[name], { label, unit: unit ?? "" }),
          hit && numbers[hit]?.v > 0 && el("span", { class: "bad" }, number(numbers[hit], { label: `${label} ${word}` }), ` ${word}`),
        ),
      ),
    );
}

function lostNote(unknown) {
  if (unknown.whole) return el("p", { class: "lost whole" }, el("span", { "aria-hidden": "true" }, "✓ "), "Nothing lost: the trace is whole. ", sqlButton(unknown.places.q));
  return el(
    "div",
    { class: "lost" },
    el("p", {}, el("strong", {}, "What the trace does not know: "), unknown.words.join("; "), ". "),
    el(
      "p",
      {},
      number(unknown.losses, { label: "losses" }),
      ` ${plural(unknown.losses.v, "loss", "losses")} with `,
      number(unknown.lost_events, { label: "lost events" }),
      " events known lost, ",
      number(unknown.gaps, { label: "gaps" }),
      ` damaged or torn ${plural(unknown.gaps.v, "part")}. What lies there was not judged: below it is drawn in amber.`,
    ),
    unknown.places.data[0]?.length > 0 &&
      el("details", {}, el("summary", {}, "Where"), rowsTable(unknown.places, { title: "Losses and gaps" })),
  );
}

function drawAbout() {
  const limits = page.limits;
  fill(
    byId("about"),
    el(
      "p",
      {},
      `Made by kvcanary ${page.version} of ${page.report}. The page holds samples, not the report: at most `,
      `${counted(limits.subjects)} incidents or kinds, ${counted(limits.slots)} slots each, ${counted(limits.requests)} requests, `,
      `${counted(limits.rows)} rows a table, and time in bins of ${counted(page.timeline.width)} ${plural(page.timeline.width, "forward")}. `,
      "Everything is in the report: ",
      el("code", {}, `kvcanary sql ${shellQuoted(page.report)}`),
      ". It loads nothing and sends nothing.",
    ),
  );
}

function drawNav() {
  const names = {
    verdict: "Verdict",
    subjects: page.subjects.are_incidents ? "Incidents" : "Found",
    timeline: "Timeline",
    slots: "Slots",
    chain: "Chain",
    requests: "Requests",
    questions: "Questions",
    rows: "Rows",
  };
  fill(
    byId("nav"),
    Object.entries(names)
      .filter(([id]) => !byId(id).hidden)
      .map(([id, name]) => el("li", {}, el("a", { href: `#${id}` }, name))),
  );
}
