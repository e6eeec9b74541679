// Puts the page together.

function drawQuestions() {
  const section = byId("questions");
  section.hidden = page.questions.length === 0;
  const update = () => {
    const { number, questions } = subject() ?? {};
    fill(
      section,
      el("h2", { id: "questions-title" }, questions ? `Questions asked of incident #${number}` : "Questions asked of every damage"),
      el(
        "dl",
        { class: "questions" },
        (questions ?? page.questions).map((item) => [
          el("dt", {}, item.question),
          el("dd", {}, item.words, " ", el("button", { type: "button", class: "sql", "aria-haspopup": "dialog", onclick: () => openSql(item.queries, item.question) }, "SQL")),
        ]),
      ),
    );
  };
  update();
  on("subject", update);
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

readAddress();
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
for (const what of ["subject", "slot"]) on(what, writeAddress);
addEventListener("hashchange", () => location.hash.includes("=") && location.reload());
if (state.wanted) byId("slots").scrollIntoView();
document.documentElement.dataset.ready = "true";
