// Puts the page together.

function drawQuestions() {
  const section = byId("questions");
  section.hidden = page.questions.length === 0;
  fill(
    section,
    el("h2", { id: "questions-title" }, "Questions asked of every damage"),
    el(
      "dl",
      { class: "questions" },
      page.questions.map((item) => [
        el("dt", {}, item.question),
        el("dd", {}, item.words, " ", el("button", { type: "button", class: "sql", "aria-haspopup": "dialog", onclick: () => openSql(item.queries, item.question) }, "SQL")),
      ]),
    ),
  );
}

function drawRows() {
  const { kinds, spread, violations, findings } = page.rows;
  const section = byId("rows");
  section.hidden = kinds.data[0].length === 0;
  if (section.hidden) return;
  const asPlain = { request_id: (value) => String(value ?? "") };
  fill(
    section,
    el("h2", { id: "rows-title" }, "Rows"),
    rowsTable(kinds, { title: "By kind", hide: ["class"] }),
    rowsTable(spread, { title: "How far it spread", show: asPlain }),
    violations.data[0].length > 0 && rowsTable(violations, { title: "Violations", total: page.numbers.violations }),
    findings.data[0].length > 0 && rowsTable(findings, { title: "Findings", total: page.numbers.findings }),
  );
}

if (page.subjects.shown.length) {
  const item = subject();
  const margin = Math.max(6, Math.round((item.last - item.first) * 0.35));
  state.from = Math.max(0, item.first - margin);
  state.to = Math.min(lastForward, item.last + margin);
} else {
  state.to = lastForward;
}
drawHead();
drawSubjects();
drawTimeline();
drawSlots();
drawChain();
drawRequests();
drawQuestions();
drawRows();
drawAbout();
drawNav();
setTheme("auto");
document.documentElement.dataset.ready = "true";
